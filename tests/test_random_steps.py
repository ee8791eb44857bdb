"""Random steps do in every mode of the package what plain optax does under ``jax.jit``."""

import pytest

from tests.support.random_steps import (
    FIELDS,
    MODES,
    check,
    complete,
    differences,
    placement_of,
    recipe,
    reference,
    variants,
)
from tests.support.steps import moved

SEEDS, VARIANTS = 60, 3
DAILY = pytest.mark.daily("a slice of the table")


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
        ({"skip": "cond", "bad batch": True, "count": True, "again": "new gradients"}, "cores"),  # by two branches
        ({"skip": "skip", "bad batch": True, "metrics": ("change",)}, "cores"),  # a result of old and new parameters
        ({"skip": "skip", "optimizer": "optimistic"}, "jo.jit"),  # a new state that is a constant
        (  # an average of integers becomes a weak float
            {"skip": "skip", "further leaf": "integers", "outside": "ema", "form": "update_params"},
            "jax.jit",
        ),
        # a leaf that an update widens
        ({"skip": "skip", "bad batch": True, "further leaf": "half", "optimizer": "dadapt"}, "jax.jit"),
        ({"accumulate": "scan and literal"}, "jo.jit"),
        ({"optimizer": "by rates"}, "cores"),
        ({"second": "alternating"}, "disk"),
        ({"x64 by": "context"}, "disk"),
        ({"metrics": ("batch",)}, "cores"),
        ({"metrics": ("old",)}, "cores"),  # which are donated
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
        (  # gradients that the loss makes of parameters
            {"oddity": "unchanged", "metrics": ("gradients",), "jitted inside": "update", "fraction": 0.0},
            "jo.jit, parameters on the host",
        ),
        (  # old parameters among the results, and a new one that no update makes
            {"unused leaf": True, "metrics": ("old",), "outside": "partition"},
            "jo.jit, parameters on the host",
        ),
        (  # and that depends on a number too
            {"unused leaf": True, "metrics": ("old",), "outside": "masked", "lr": "weak"},
            "jo.jit, parameters on the host",
        ),
        ({"second": "alternating", "optimizer": "lookahead-like"}, "jo.jit, parameters on the host"),  # a dict
        ({"unused leaf": True, "outside": "masked"}, "pipelined, parameters on the host"),  # no update makes the leaf
        ({"stack": "indexed", "skip": "skip", "second": "gan", "optimizer": "rprop"}, "jo.jit"),  # its rewriting failed
        ({"skip": "select", "outside": "apply_if_finite"}, "disk"),  # refused before a file is written
        ({"skip": "select", "mesh": "explicit ZeRO-1", "again": "same gradients"}, "cores"),  # types tell divisions
        ({"dtype": "float32", "inside": "mechanize", "storage": "float8_e5m2"}, "pipelined, parameters on the host"),
        ({"mesh": "explicit ZeRO-1", "optimizer": "sm3", "inside": "conditionally"}, "jax.jit"),  # refused by name
        # XLA divided the choice between the old state and the new one in its own way
        (
            {"skip": "select", "mesh": "ZeRO-1", "fraction": 0.0, "again": "new gradients"},
            "jo.jit, parameters on the host",
        ),
        # rows that their type divides between devices
        ({"layers": 2, "bias": True, "mesh": "explicit ZeRO-1", "select": "tree"}, "pipelined, parameters on the host"),
        ({"target": "average", "results": "namedtuple"}, "pipelined"),  # names tell what is alike
        ({"tree": "tuple", "optimizer": "adagrad", "inside": "flatten", "select": "w", "scalar": True}, "jo.jit"),
    ],
)
def test_what_was_found(fields, mode):
    """Recipes that differed once, shrunk."""
    r = complete(fields)
    check(r, mode, reference(r))


# ---- jo.jit: which of these steps move into the scan that makes their gradients, choice by choice; traced only


BASE = {"dtype": "float32", "width": 16, "bias": True, "embed": "dense", "head": True, "metrics": ("loss",)}
ALL = "something that needs all gradients, such as their norm"
ALONE = "it runs in a loop of its own"
STAYS = {  # why the update of a stack stays behind the scan; of all others it moves, and nothing is said
    ("stack", "unrolled"): ALONE,
    ("stack", "dict"): ALONE,
    ("stack", "nothing"): ALONE,
    ("gradients", "clipped"): ALL,
    ("second", "alternating"): "another update runs in a cond of the step",
    ("again", "same gradients"): "moves to the host in this step",
    ("inside", "clip"): ALL,
    ("inside", "apply_if_finite"): ALL,
    ("inside", "MultiSteps that skips"): ALL,
    ("inside", "mechanize"): ALL,
    ("inside", "flatten"): "a number that the same scan carries to its end",
    ("outside", "clip"): ALL,
    ("outside", "apply_if_finite"): ALL,
    ("optimizer", "adafactor"): "a number made of the updates or the state of all layers",
    ("optimizer", "novograd"): ALL,
    ("optimizer", "lars"): ALL,
    ("optimizer", "lbfgs-like"): "",
    ("optimizer", "prodigy"): "",
    ("optimizer", "dadapt"): "",
    ("optimizer", "dog"): "",
}
ALSO = {"outside": ("by group",)}
# which have leaves of one layer or element, or no state
WITHOUT_ROWS = {("optimizer", name) for name in ("sgd", "sm3")} | {("fraction", 0.0), ("inside", "mechanize")}
CHOICES = (
    *("stack", "gradients", "skip", "inside", "target", "second", "second stack", "remat", "oddity", "further leaf"),
    *("loss scale", "metrics", "results", "train state", "jitted inside", "optimizer", "outside", "storage"),
    *("fraction", "again"),
)


def shown(**choices):
    """The placement of a step of these choices."""
    return placement_of(complete({**BASE, **choices}), "jo.jit")


@pytest.mark.oldest("the whole step")
@pytest.mark.parametrize("field", CHOICES)
def test_what_moves(field):
    wrong = []
    for value in dict.fromkeys((*FIELDS[field], *ALSO.get(field, ()))):
        table, why = shown(**{field: value}), STAYS.get((field, value))
        stack = {path: inside for path, inside in moved(table).items() if "['w1']" in path or "['b1']" in path}
        if why is not None:
            right = why in " ".join(table.stays) and bool(table.stays)
        else:
            right = table.stays == () and ((field, value) in WITHOUT_ROWS or (bool(stack) and all(stack.values())))
        wrong += [] if right else [(value, stack, table.stays)]
    assert not wrong, wrong
