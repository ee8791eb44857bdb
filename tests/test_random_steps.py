"""Random steps do in every mode of the package what plain optax does under ``jax.jit``."""

import pytest

from tests.support.random_steps import MODES, Refused, complete, differences, odd, recipe, reference, variants

SEEDS, VARIANTS = 60, 3
DAILY = pytest.mark.daily("a slice of the table")


def check(r, mode, want):
    try:
        found = differences(r, mode, want)
    except Refused:
        return
    assert not found, (mode, odd(r), found[:4])


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[DAILY] if seed == 5 else []) for seed in range(SEEDS)])
def test_random_steps(seed):
    """Steps of one program, each with options and in a mode of its own."""
    want = reference(recipe(seed))
    if isinstance(want, Exception):
        pytest.skip(f"plain optax raises {type(want).__name__}")
    for r, mode in variants(seed, VARIANTS):
        check(r, mode, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_difference_is_noticed(mode):
    """The comparison is not blind: a learning rate that differs by a thousandth shows in every mode."""
    r = complete({"width": 64})
    want = reference(complete({"width": 64, "lr": "float"}))
    assert any("off by" in line for line in differences(r, mode, want))


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"skip": "cond", "bad batch": True}, "disk"),  # the state is handed on as it came
        ({"second": "alternating"}, "disk"),
        ({"x64 by": "context"}, "disk"),
        ({"metrics": ("batch",)}, "cores"),
        ({"mesh": "replicated", "dtype": "float32", "width": 64}, "cores"),  # each replica is written
        ({"head": True, "metrics": ("numpy",)}, "hybrid"),
        ({"static": "bool int float"}, "cores"),
        ({"static": "numpy"}, "pipelined"),
        ({"static": "bool int float"}, "pipelined"),
        ({"width": 64, "optimizer": "adafactor"}, "pipelined, host"),  # factored rows stay on the device
        ({"oddity": "literal", "metrics": ("literal",), "oddity to": "metrics", "width": 64}, "pipelined, host"),
        ({"oddity": "literal carry", "outside": "apply_if_finite"}, "pipelined"),  # branches around the update
        ({"accumulate": "scan", "second": "plain beside", "optimizer": "lbfgs-like"}, "hybrid"),
        ({"accumulate": "fori", "skip": "select"}, "jo.jit"),  # reads an old state again
        ({"skip": "skip", "bad batch": True, "optimizer": "noisy"}, "jax.jit"),  # a key in the state
        ({"further leaf": "half", "fraction": 0.0}, "jo.jit, parameters on the host"),  # a moment made of a parameter
        ({"target": "old", "fraction": 0.0}, "jo.jit, parameters on the host"),  # a copy of the old parameters
        ({"second": "alternating", "optimizer": "lookahead-like"}, "jo.jit, parameters on the host"),  # a dict
        ({"unused leaf": True, "outside": "masked"}, "pipelined, parameters on the host"),  # no update makes the leaf
        ({"stack": "indexed", "skip": "skip", "second": "gan", "optimizer": "rprop"}, "jo.jit"),  # its rewriting failed
        ({"skip": "select", "outside": "apply_if_finite"}, "disk"),  # refused before a file is written
        ({"dtype": "float32", "inside": "mechanize", "storage": "float8_e5m2"}, "pipelined, parameters on the host"),
        ({"mesh": "explicit ZeRO-1", "optimizer": "sm3", "inside": "conditionally"}, "jax.jit"),  # refused by name
        ({"target": "average", "results": "namedtuple"}, "pipelined"),  # names tell what is alike
        ({"tree": "tuple", "optimizer": "adagrad", "inside": "flatten", "select": "w", "scalar": True}, "jo.jit"),
    ],
)
def test_what_was_found(fields, mode):
    """Recipes that differed once, shrunk."""
    r = complete(fields)
    check(r, mode, reference(r))
