"""Random steps of ``tests/support/random_steps.py`` on the device, each in one mode beside plain optax.

The driver says in which memory each leaf is, because jax records only where it meant to put the leaf.
"""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.parts import where
from tests.support import random_steps
from tests.support.random_steps import Refused, differences, odd, reference, variants

ALONE, TIMED = False, False
SEEDS, TOY = range(400), range(2)
ONE_DEVICE = {"mesh": None}


def cases(toy: bool) -> list[str]:
    return [f"seed {seed}" for seed in (TOY if toy else SEEDS)]


def run(name: str, toy: bool) -> dict[str, Any]:
    seed = int(name.split()[1])
    [(r, mode)] = variants(seed, 1)
    r |= ONE_DEVICE
    random_steps.memory_of = where.kind_of
    with jax.default_matmul_precision("highest"):
        want = reference(r)
        if isinstance(want, Exception):
            return {"mode": mode, "left_out": f"plain optax raises {type(want).__name__}: {want}"[:200]}
        try:
            found = differences(r, mode, want)
        except Refused as refused:
            return {"mode": mode, "left_out": f"refused: {refused}"[:200]}
    wrong = [f"{mode}: {line}" for line in found[:4]]
    return {"mode": mode, "wrong": wrong, **({"odd": odd(r)} if wrong else {})}
