"""Reads a scheduled HLO module, as XLA prints it, into lists of operations; nothing here interprets them."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cached_property

_HOST = "S(5)"  # XLA's number for the host's memory space
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(")
_OP = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (\(?.*?) ([\w\-]+)\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r", metadata=\{([^}]*)\}")
_SCOPE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TOKEN = re.compile(rf"\(|\)|{_ARRAY.pattern}")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a type: ``layout`` says in which memory space it is."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def host(self) -> bool:
        return _HOST in self.layout

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn, u32; a token has none
        return -(-self.size * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) // 8)


@dataclasses.dataclass(frozen=True)
class Op:
    """A line of scheduled HLO. ``scope``: the names in jax under which it was traced; of an argument its path."""

    name: str
    type: str
    opcode: str
    rest: str
    root: bool = False
    scope: str = ""

    @cached_property
    def operands(self) -> list[str]:
        return _NAME.findall(self.rest.partition(")")[0])

    @property
    def operand(self) -> str:
        return self.operands[0] if self.operands else ""

    @property
    def arrays(self) -> list[Array]:
        return arrays(self.type)

    @cached_property
    def leaves(self) -> dict[tuple[int, ...], Array]:
        """The arrays of its type, by their place in its tuples."""
        return leaves(self.type)

    def called(self, attribute: str) -> str:
        found = re.search(attribute + r"=%([\w.\-]+)", self.rest)
        return found[1] if found else ""

    def integers(self, attribute: str) -> list[int]:
        """Of ``attribute={1,2}``, or of ``"attribute":["1","2"]`` in what a backend says about itself."""
        found = re.search(rf'\b{attribute}(?:=\{{|":\[)([\d,"]*)[\]}}]', self.rest)
        return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


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
        if header := _HEADER.match(line):
            ops = found["ENTRY" if header[1] else header[2]] = []
        elif op := _OP.match(_METADATA.sub("", line)):
            scope = _SCOPE.search(line) if "op_name=" in line else None
            ops.append(Op(*op.groups()[1:], root=bool(op[1]), scope=scope[1].replace("\\'", "'") if scope else ""))
    return found


def leaves(hlo_type: str) -> dict[tuple[int, ...], Array]:
    """The arrays in a type, by their place in its tuples."""
    found: dict[tuple[int, ...], Array] = {}
    place: list[int] = []
    for token in _TOKEN.finditer(hlo_type):
        if token[0] == "(":
            place.append(0)
            continue
        if token[0] == ")":
            place.pop()
        else:
            dims = tuple(int(d) for d in token[2].split(",") if d)
            found[tuple(place)] = Array(token[1], dims, token[3] or "")
        if place:
            place[-1] += 1
    return found


def handed(text: str) -> dict[tuple[int, ...], Array]:
    """What a module is given, by number, as its head has it: a CPU's says nowhere else what is in host memory."""
    return leaves(text.partition("\n")[0].partition("entry_computation_layout={")[2].partition("->")[0])


def results(text: str) -> dict[tuple[int, ...], Array]:
    """What a module returns, as its head has it: where a donated buffer is taken in spite of it, the root differs."""
    return leaves(text.partition("\n")[0].partition("entry_computation_layout={")[2].partition("->")[2])


def aliases(text: str) -> dict[tuple[int, ...], int]:
    """Place of a result -> the argument whose buffer it takes, from the head of a module."""
    head = text.partition("\n")[0].partition("entry_computation_layout")[0]
    found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", head)
    return {tuple(int(d) for d in place.split(",") if d.strip()): int(number) for place, number in found}


def arrays(hlo_type: str) -> list[Array]:
    return [
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _ARRAY.findall(hlo_type)
    ]


def started(op: Op) -> Copy | None:
    """The copy between host and device that ``op`` starts."""
    if not op.opcode.endswith("-start"):
        return None
    if op.opcode == "copy-start":  # (to, from, context)
        to, source, *_ = op.arrays
        return Copy(source.host, to.nbytes) if to.host != source.host else None
    operands, _, results = op.type.rpartition("), ")  # ((operands), result, context)
    if not any(array.host for array in op.arrays):
        return None
    result, *_ = arrays(results)
    if not result.host:
        return Copy(True, result.nbytes)
    return Copy(False, max((array.nbytes for array in arrays(operands) if not array.host), default=0))


def trips(loop: Op, condition: list[Op]) -> int:
    """How often a loop runs: as XLA says or, on a TPU, the number that its counter, from 0 on, is compared with."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    bounds = [int(op.rest.split(")")[0]) for op in condition if op.opcode == "constant" and op.type.startswith("s32[]")]
    return max(bounds, default=1)
