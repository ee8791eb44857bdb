"""Which of a step's arguments are handed on: those that a result is like, which a training step donates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax_offload._base.jaxprs import Jaxpr
from jax_offload._peak.flattened import Flattened, flattened


def donations(jaxpr: Jaxpr, count: int) -> list[bool]:
    """Which of the last ``count`` inputs a result is like: what a training step donates."""
    taken = {*successors(jaxpr, count).values()}
    return [k in taken for k in range(count)]


def successors(jaxpr: Jaxpr, count: int) -> dict[int, int]:
    """Number of a result -> that among the last ``count`` inputs of the one that it is like, its next value."""
    program = flattened(jaxpr)
    first = len(program.inputs) - count
    place = {k: at - first for at, k in enumerate(program.inputs)}
    pairs = paired_with(program, [False] * first + [True] * count)
    first_of = {k: at for at, k in reversed([*enumerate(program.outputs)])}
    return {first_of[result]: place[k] for result, k in pairs.items()}


def paired_with(program: Flattened, donated: Sequence[bool]) -> dict[int, int]:
    """Result -> the donated argument of its type whose buffer it takes."""
    free: defaultdict[Any, list[int]] = defaultdict(list)
    for k, d in zip(program.inputs, donated, strict=True):
        if d:
            free[program.types[k]].append(k)
    inputs, found = {*program.inputs}, dict[int, int]()
    for k, returned in zip(program.outputs, program.results, strict=True):
        if k >= 0 and k not in inputs and k not in found and free[returned]:
            found[k] = free[returned].pop(0)
    return found
