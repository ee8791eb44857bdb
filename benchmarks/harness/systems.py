"""Every system that is compared: its name, the worker that runs it, and what the worker is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.cases import SHAPES, Case, Shape

MIB = 2**20
INT8 = {"mu": "int8", "nu": "uint8"}


@dataclasses.dataclass(frozen=True)
class System:
    """
    Attributes:
      stands_for: what it shows, for the notes under the table.
      options: for ``Case.options``.
    """

    name: str
    stands_for: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def ours(name: str, stands_for: str, **options: Any) -> System:
    return System(f"jax_offload{name}", stands_for, {"offload": True, **options})


RESIDENT = System("optax", "plain optax, the state on the device")
RECIPE = System("usual recipe", "the JAX guide, MaxText, AXLearn: state in, update, state out", {"recipe": True})
OURS = ours("", "float32 moments on the host")
BFLOAT16 = ours(", bfloat16 state", "4 bytes of state per parameter", storage="bfloat16")
INT8_STATE = ours(", int8 state", "2.06 bytes of state per parameter", storage=INT8)
JITTED = ours(", jo.jit", "the whole step is seen: updates in the backward pass", whole="jit")
TURNED = ours(", jo.pipelined", "updates in the forward pass of the next batch", whole="pipelined")
TURNED_BFLOAT16 = ours(", jo.pipelined, bfloat16 state", "the same", whole="pipelined", storage="bfloat16")
WAITING = ours(", jo.pipelined, gradients on the host", "they wait there", whole="pipelined", gradients="host")
WHOLE = [JITTED, TURNED, TURNED_BFLOAT16, WAITING]
MASTERS = ours(", bfloat16 parameters", "float32 masters and moments on the host", masters=True)
MASTERS_INT8 = ours(", bfloat16 parameters, int8 state", "float32 masters, 8-bit moments", masters=True, storage=INT8)
FRACTIONS = [ours(f", fraction {f}", "what stays is what could not be hidden", fraction=f) for f in (0.25, 0.5, 0.75)]
WINDOWS = [ours(f", window {w} MiB", "instead of the default window", window=w * MIB) for w in (64, 256, 1024, 3200)]

MAIN = [RESIDENT, RECIPE, OURS, BFLOAT16, INT8_STATE]
VARIANTS = [MASTERS, MASTERS_INT8, *FRACTIONS, *WINDOWS]
SYSTEMS = {system.name: system for system in (*MAIN, *WHOLE, *VARIANTS)}

TOKENS = [2**k for k in range(11, 17)]  # 2K to 64K
# name, scans (0: unrolled)
MODELS = [("1.3b", 1), ("1.3b", 0), ("1.3b", 6), ("2.7b", 1), ("6.7b", 1)]


def case(system: System, shape: Shape, tokens: int, *, scans: int, clip: bool, **steps: int) -> Case:
    return Case(system.name, shape, max(1, tokens // shape.context), scans, clip, options=system.options, **steps)


def plan() -> Iterator[Case]:
    """The whole matrix, what says most first: a run that is cut short leaves the best part of the table."""

    def cases(systems: list[System], models: list[tuple[str, int]], tokens: list[int]) -> Iterator[Case]:
        for clip in (False, True):
            for name, scans in models:
                for count in tokens:
                    for system in systems:
                        yield case(system, SHAPES[name], count, scans=scans, clip=clip)

    stacked, unrolled, grouped, *larger = MODELS
    everyone = [*MAIN, *WHOLE, *VARIANTS]
    stages = [
        cases([*MAIN, *WHOLE], [stacked, unrolled], [16384]),
        cases([*MAIN, *WINDOWS], [grouped], [16384]),
        cases([RESIDENT, OURS, JITTED, TURNED, INT8_STATE], [stacked, unrolled], [2048, 8192, 32768]),
        cases(MAIN, larger, [16384]),
        cases(VARIANTS, [stacked, unrolled], [16384]),
        cases(everyone, MODELS, TOKENS),
    ]
    seen = set()
    for stage in stages:
        for each in stage:
            if each.to_json() not in seen:
                seen.add(each.to_json())
                yield each


def toy() -> Iterator[Case]:
    """Every system, with and without clipping, on a model that any machine trains in no time."""
    for clip in (False, True):
        for scans in (1, 0):
            for system in SYSTEMS.values():
                yield case(system, SHAPES["toy"], 64, scans=scans, clip=clip, warmup=1, steps=4)
