"""Peaks of whole models by tokens, fraction, clipping, storage, form and way of compiling: ours beside resident.

``python -m tests.aot.table matrix`` compiles all of them, in days; ``matrix model=gpt,vit tokens=16384 fraction=0.5``
a part, ``matrix way=jo.jit sample=40`` as many of one, drawn with a fixed seed. An axis that is not named is whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import optax

import jax_offload as jo
from tests.aot.cases import device_sharding, in_float32, measure_update
from tests.aot.harness import H200
from tests.aot.model import ADAMW, CLIPPED
from tests.aot.zoo import MODELS

# name -> the moments' dtype, and how they are stored
MOMENTS: dict[str, tuple[bool, Any]] = {
    "parameters'": (False, None),  # bfloat16
    "float32": (True, None),
    "bfloat16": (True, "bfloat16"),
    "int8": (True, {"mu": "int8", "nu": "uint8"}),
}
OPTIONS = jo.compiler_options("cuda")
AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "tokens": (4096, 16384, 65536),
    "fraction": (1.0, 0.75, 0.5, 0.25, 0.1),
    "clip": ("none", "inside", "outside"),
    "storage": tuple(MOMENTS),
    "form": ("update", "update_params"),
    "way": ("jit", "jit+options", "jo.jit+options", "jo.jit"),
}
SLACK = 1.01


@dataclasses.dataclass(frozen=True)
class Cell:
    """A point of the matrix."""

    model: str
    tokens: int
    fraction: float
    clip: str
    storage: str
    form: str
    way: str

    def __str__(self) -> str:
        return " | ".join(str(x) for x in dataclasses.astuple(self))

    def peaks(self) -> tuple[float, float]:
        """Resident's, and ours, MiB."""
        wide, storage = MOMENTS[self.storage]
        has_options = self.way.endswith("+options")
        inner = CLIPPED if self.clip == "inside" else ADAMW
        tx = jo.offload(in_float32(inner) if wide else inner, fraction=self.fraction, storage=storage)
        if self.clip == "outside":
            tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        ours = _peak(self.model, self.tokens, tx, self.form, has_options, "jo.jit" in self.way)
        return _resident(self.model, self.tokens, wide, self.clip != "none", self.form, has_options), ours


@functools.cache
def _resident(model: str, tokens: int, wide: bool, clip: bool, form: str, options: bool) -> float:
    inner = CLIPPED if clip else ADAMW
    return _peak(model, tokens, in_float32(inner) if wide else inner, form, options, False)


def _peak(model: str, tokens: int, tx: Any, form: str, options: bool, whole: bool) -> float:
    built = MODELS[model]()
    params, batch = built.abstract(tokens, device_sharding(H200))
    return measure_update(
        H200, tx, params, built.loss, batch, update_params=form == "update_params", whole=whole,
        options=OPTIONS if options else None,
    ).peak  # fmt: skip


def cells(arguments: Sequence[str]) -> list[Cell]:
    """The part of the matrix that is asked for: ``axis=value,value``, and ``sample=number``.

    Raises:
      ValueError: an argument is neither, or names a value that the axis has not.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    number = given.pop("sample", "")
    found = [Cell(*values) for values in itertools.product(*chosen(given).values())]
    return random.Random(0).sample(found, min(int(number), len(found))) if number else found


def chosen(given: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    """The values of each axis, all where none are given.

    Raises:
      ValueError: there is no such axis, or it has no such value.
    """
    found = dict(AXES)
    for axis, values in given.items():
        if axis not in AXES:
            raise ValueError(f"matrix: {axis!r} is no axis; it has {', '.join(AXES)}, and sample=.")
        known = {str(value): value for value in AXES[axis]}
        wanted = values.split(",")
        if unknown := [value for value in wanted if value not in known]:
            raise ValueError(f"matrix: {axis} has {', '.join(known)}; got {', '.join(unknown)}.")
        found[axis] = tuple(known[value] for value in wanted)
    return found


def matrix(arguments: Sequence[str]) -> None:
    """Prints the rows, those above resident by more than 1 % first; on stderr as they come."""
    rows: list[tuple[float, str]] = []
    for cell in cells(arguments):
        resident, ours = cell.peaks()
        rows.append((ours / resident, f"| {cell} | {resident:.0f} | {ours:.0f} | {ours / resident - 1:+.0%} |"))
        print(rows[-1][1], file=sys.stderr, flush=True)
    losses = sorted((row for row in rows if row[0] > SLACK), reverse=True)
    print(f"| {' | '.join(AXES)} | resident | ours | |\n|---|---:|---:|---|---|---|---|---:|---:|---:|")
    for _, row in [*losses, *sorted((row for row in rows if row[0] <= SLACK), reverse=True)]:
        print(row)
    print(f"\n{len(losses)} of {len(rows)} above resident by more than 1 %. Compiled for an H200, not run; MiB.")
