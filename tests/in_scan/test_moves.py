"""``jo.jit``: which of the random steps move into the scan that makes their gradients, choice by choice.

Traced only. That their numbers are right: tests/test_random_steps.py.
"""

import tempfile
import warnings
from pathlib import Path

import pytest

import jax_offload as jo
from tests.support.random_steps import FIELDS, Step, complete, rest_of
from tests.support.steps import moved

BASE = {"dtype": "float32", "width": 16, "bias": True, "embed": "dense", "head": True, "metrics": ("loss",)}
ALL = "something that needs all gradients, such as their norm"
ALONE = "it runs in a loop of its own"
STAYS = {  # why the update of a stack stays behind the scan; of all others it moves, and nothing is said
    ("stack", "unrolled"): ALONE,
    ("stack", "dict"): ALONE,
    ("stack", "nothing"): ALONE,
    ("gradients", "clipped"): ALL,
    ("skip", "select"): ALONE,
    ("second", "alternating"): "another update runs in a cond of the step",
    ("again", "same gradients"): "moves to the host in this step",
    ("inside", "clip"): ALL,
    ("inside", "apply_if_finite"): ALL,
    ("inside", "MultiSteps that skips"): ALL,
    ("inside", "mechanize"): ALL,
    ("inside", "flatten"): "a number that the same scan carries to its end",
    ("outside", "clip"): ALL,
    ("outside", "apply_if_finite"): ALL,
    ("optimizer", "adafactor"): ALL,
    ("optimizer", "novograd"): ALL,
    ("optimizer", "lars"): ALL,
    ("optimizer", "lbfgs-like"): "",
    ("optimizer", "prodigy"): "",
    ("optimizer", "dadapt"): "",
    ("optimizer", "dog"): "",
}
ALSO = {"outside": ("by group",)}
# which have leaves of one layer or element, or no state
WITHOUT_ROWS = {("optimizer", name) for name in ("sgd", "sm3")} | {
    ("fraction", 0.0),
    ("inside", "mechanize"),
}
CHOICES = (
    *("stack", "gradients", "skip", "inside", "target", "second", "second stack", "remat", "oddity", "further leaf"),
    *("loss scale", "metrics", "results", "train state", "jitted inside", "optimizer", "outside", "storage"),
    *("fraction", "again"),
)


def shown(**choices):
    """The placement of a step of these choices."""
    r = complete({**BASE, **choices})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Step(r, "jo.jit", Path(folder))
        given = {**step.carried, **rest_of(step, 0)}
        return jo.placement(jo.jit(step.function), *[given[name] for name in step.arguments])


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
