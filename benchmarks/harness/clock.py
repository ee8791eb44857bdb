"""The clock of the JAX workers."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np


def clocked(step: Callable[[int], jax.Array], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each timed step, and the numbers that all of them return, given theirs.

    One step ahead of what is waited for: the time to start a step is no part of it, as in training.
    """
    clock, found = [], []
    pending = None
    for i in range(warmup + steps):
        result = step(i)
        if pending is not None:
            found.append(float(pending))
            clock.append(time.perf_counter())
        pending = result
    found.append(float(pending))
    clock.append(time.perf_counter())
    return np.diff(clock)[warmup - 1 :].tolist(), found
