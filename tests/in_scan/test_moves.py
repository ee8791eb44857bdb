"""``jo.jit``: which of the random steps move into the scan that makes their gradients, choice by choice.

Traced only. That their numbers are right: tests/test_random_steps.py.
"""

import tempfile
import warnings
from pathlib import Path

import jax
import pytest

import jax_offload as jo
from tests.support.random_steps import FIELDS, Step, complete, rest_of
from tests.support.steps import IN_BACKWARD, moved, offloaded, parameters, step_of

BASE = {"dtype": "float32", "width": 16, "bias": True, "embed": "dense", "head": True, "metrics": ("loss",)}


def shown(**choices):
    """The placement of a step of these choices."""
    r = complete({**BASE, **choices})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Step(r, "jo.jit", Path(folder))
        given = {**step.carried, **rest_of(step, 0)}
        return jo.placement(jo.jit(step.function), *[given[name] for name in step.arguments])
