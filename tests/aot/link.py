"""What a scheduled program does to the link between host and device, read from its HLO and simulated.

Each direction moves one copy after the other, at the same speed; arithmetic takes no time. So ``duplex`` is about the
schedule alone: of the bytes that are moved, the share that moves while the other direction is moving too.
"""

from __future__ import annotations

import dataclasses
import re

_ITEMSIZE = dict(f64=8, s64=8, f32=4, s32=4, u32=4, bf16=2, f16=2, s16=2, u16=2, s8=1, u8=1, pred=1)
_ITEMSIZE |= dict(f8e4m3fn=1, f8e5m2=1)
_HOST = "S(5)"  # XLA's number for the host's memory space
_OP = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(?.*?) ([\w\-]+)\((.*)")


@dataclasses.dataclass(frozen=True)
class Op:
    """A line of scheduled HLO."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operand(self) -> str:
        found = re.match(r"%([\w.\-]+)", self.rest)
        return found[1] if found else ""

    def called(self, attribute: str) -> str:
        found = re.search(attribute + r"=%([\w.\-]+)", self.rest)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy between host and device: which way, and bytes."""

    loads: bool
    nbytes: int


def computations(text: str) -> dict[str, list[Op]]:
    """The computations of a module as lists of operations; the entry is called ``ENTRY``."""
    found: dict[str, list[Op]] = {}
    ops: list[Op] = []
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%[\w.\-]+ \(", line):
            name = "ENTRY" if line.startswith("ENTRY") else line[1 : line.index(" ")]
            ops = found[name] = []
        elif op := _OP.match(re.sub(r", metadata=\{[^}]*\}", "", line)):
            ops.append(Op(*op.groups()))
    return found


def arrays(hlo_type: str) -> list[tuple[int, bool]]:
    """Bytes of the arrays in a type, and whether they are on the host."""
    found = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", hlo_type)
    sizes = [_ITEMSIZE.get(dtype, 4) for dtype, _, _ in found]
    for k, (_, dims, _) in enumerate(found):
        for d in filter(None, dims.split(",")):
            sizes[k] *= int(d)
    return [(size, _HOST in layout) for size, (_, _, layout) in zip(sizes, found, strict=True)]


def started(op: Op) -> Copy | None:
    """The copy between host and device that ``op`` starts."""
    if not op.opcode.endswith("-start"):
        return None
    if op.opcode == "copy-start":  # (to, from, context)
        (size, to_host), (_, from_host), *_ = arrays(op.type)
        return Copy(from_host, size) if to_host != from_host else None
    operands, _, results = op.type.rpartition("), ")  # ((operands), result, context)
    if not any(host for _, host in arrays(op.type)):
        return None
    (size, to_host), *_ = arrays(results)
    if not to_host:
        return Copy(True, size)
    return Copy(False, max((size for size, host in arrays(operands) if not host), default=0))


def _trips(loop: Op, condition: list[Op]) -> int:
    """How often a loop runs: as XLA says or, on a TPU, the number that its counter, from 0 on, is compared with."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    bounds = [int(op.rest.split(")")[0]) for op in condition if op.opcode == "constant" and op.type.startswith("s32[]")]
    return max(bounds, default=1)


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
                for _ in range(_trips(op, found[op.called("condition")])):
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
