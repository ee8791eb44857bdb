"""Random steps do in every mode of the package what plain optax does under ``jax.jit``."""

import pytest

from tests.support.random_steps import MODES, Refused, allowed, complete, differences, odd, recipe, reference
from tests.support.rows import rows

DAILY, LONG = 60, 180


def check(r, mode):
    want = reference(r)
    if isinstance(want, Exception):
        pytest.skip(f"plain optax raises {type(want).__name__}")
    try:
        found = differences(r, mode, want)
    except Refused:
        return
    assert not found, (mode, odd(r), found[:4])


@pytest.mark.parametrize("seed", rows(range(LONG), "random steps", daily=lambda seed: seed < DAILY))
def test_random_step(seed):
    """Each seed in one of the modes that its options allow, in turn."""
    r = recipe(seed)
    modes = [mode for mode in MODES if allowed(r, mode)]
    check(r, modes[seed % len(modes)])


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
        ({"head": True, "metrics": ("numpy",)}, "hybrid"),
        ({"static": "bool int float"}, "cores"),
        ({"static": "numpy"}, "pipelined"),
        ({"accumulate": "scan", "second": "plain beside", "optimizer": "lbfgs-like"}, "hybrid"),
        ({"accumulate": "fori", "skip": "select"}, "jo.jit"),  # reads an old state again
        ({"stack": "indexed", "skip": "skip", "second": "gan", "optimizer": "rprop"}, "jo.jit"),  # its rewriting failed
        ({"tree": "tuple", "optimizer": "adagrad", "inside": "flatten", "select": "w", "scalar": True}, "jo.jit"),
    ],
)
def test_what_was_found(fields, mode):
    """Recipes that differed once, shrunk."""
    check(complete(fields), mode)
