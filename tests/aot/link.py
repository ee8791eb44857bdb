"""What a scheduled program does to the link between host and device, read from its HLO and simulated.

Each direction moves one copy after the other, at the same speed; arithmetic takes no time. So ``duplex`` is about the
schedule alone: of the bytes that are moved, the share that moves while the other direction is moving too.
"""

from __future__ import annotations

import dataclasses
import re

import jax_offload as jo
from jax_offload._analysis.hlo import Copy, Op, computations, started, trips


def on_a_fixed_link(target: str) -> jo.types.Chip:
    """The chip of a target, with a link that does not change when one is measured: shares exposed compare schedules."""
    one_way = {"h200": 50e9, "v5e": 12e9}[target.partition(":")[0]]
    return dataclasses.replace(jo.chip(target.partition(":")[0]), host_link=one_way, host_link_both=2 * one_way)


@dataclasses.dataclass
class Link:
    """Both directions of the link, and when each has been busy."""

    now: int = 0
    free: dict[bool, int] = dataclasses.field(default_factory=lambda: {True: 0, False: 0})
    busy: dict[bool, list[tuple[int, int]]] = dataclasses.field(default_factory=lambda: {True: [], False: []})

    def start(self, copy: Copy) -> int:
        begin = max(self.now, self.free[copy.loads])
        self.free[copy.loads] = end = begin + copy.nbytes
        self.busy[copy.loads].append((begin, end))
        return end

    def run(self, ops: list[Op], found: dict[str, list[Op]]) -> None:
        ends: dict[str, int] = {}
        for op in ops:
            if copy := started(op):
                ends[op.name] = self.start(copy)
            elif op.opcode.endswith("-done") and op.operand in ends:
                self.now = max(self.now, ends.pop(op.operand))
            elif op.opcode == "while":
                for _ in range(trips(op, found[op.called("condition")])):
                    self.run(found[op.called("body")], found)
            elif op.opcode == "call":
                self.run(found[op.called("to_apply")], found)
        self.now = max([self.now, *ends.values()])


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes each way in one run of the program, and the share of both that moves in both directions at once."""

    loaded: int
    stored: int
    duplex: float


def traffic(text: str) -> Traffic:
    found = computations(text)
    link = Link()
    link.run(found["ENTRY"], found)
    loaded, stored = (sum(end - begin for begin, end in link.busy[way]) for way in (True, False))
    both = 2 * _overlap(link.busy[True], link.busy[False])
    return Traffic(loaded, stored, both / (loaded + stored) if loaded + stored else 0.0)


def _overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    """Of two lists of intervals, each in order, the time in both."""
    i = j = total = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _multiplies(op: Op, found: dict[str, list[Op]]) -> bool:
    """Whether ``op`` is a matmul, or a loop or a call in which there is one."""
    if op.opcode in ("dot", "convolution") or re.search(r"dot|gemm|conv|cublas", op.name):
        return True
    called = (op.called(attribute) for attribute in ("body", "to_apply") if op.opcode in ("while", "call"))
    return any(_multiplies(inner, found) for name in called for inner in found.get(name, []))


def hidden(text: str) -> int:
    """Bytes that the entry computation copies with a matmul between the copy's start and its end."""
    found = computations(text)
    in_flight: dict[str, tuple[int, int]] = {}
    total = matmuls = 0
    for op in found["ENTRY"]:
        if copy := started(op):
            in_flight[op.name] = copy.nbytes, matmuls
        elif op.opcode.endswith("-done") and op.operand in in_flight:
            nbytes, before = in_flight.pop(op.operand)
            total += nbytes if matmuls > before else 0
        elif _multiplies(op, found):
            matmuls += 1
    return total
