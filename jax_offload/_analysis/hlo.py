"""Read a scheduled HLO module, as XLA prints it, and count what its operations cost.

Multiplications, bytes of memory, bytes between devices; nothing here knows a chip's speed or the order of a schedule.
"""

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
_RUN_BY = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "conditional": ("true_computation", "false_computation"),
}
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

    @cached_property
    def leaves(self) -> dict[tuple[int, ...], Array]:
        """The arrays of its type, by their place in its tuples."""
        return leaves(self.type)

    @cached_property
    def arrays(self) -> list[Array]:
        return list(self.leaves.values())

    @property
    def number(self) -> int:
        """The number of a parameter."""
        return int(self.rest.partition(")")[0])

    @cached_property
    def read_and_made(self) -> tuple[list[Array], list[Array]]:
        """The arrays that an asynchronous start reads, and those that it makes."""
        first, second = ([x for place, x in self.leaves.items() if place[:1] == (n,)] for n in (0, 1))
        # (to, from, context) of a copy; ((operands), result, context); or the results alone.
        return (second, first) if self.opcode == "copy-start" else (first, second or self.arrays)

    def called(self, attribute: str) -> str:
        found = re.search(attribute + r"=%([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def callees(self) -> list[str]:
        """The computations that a loop, a call or a conditional runs."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        found = _NAME.findall(branches[1]) if branches else []
        attributes = _RUN_BY.get(self.opcode, ())
        return found or [name for each in attributes if (name := self.called(each))]

    def integers(self, attribute: str) -> list[int]:
        """The numbers in ``attribute={1,2}``, or in ``"attribute":["1","2"]`` of a backend's config."""
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


def started(op: Op) -> Copy | None:
    """Return the copy between host and device that ``op`` starts; ``None`` if it starts none."""
    if not op.opcode.endswith("-start"):
        return None
    read, (made, *_) = op.read_and_made
    if made.host:
        nbytes = max((x.nbytes for x in read if not x.host), default=0)
        return Copy(False, nbytes) if nbytes else None
    return Copy(True, made.nbytes) if any(x.host for x in read) else None


def trips(loop: Op, condition: list[Op]) -> int:
    """Return how often a loop runs: XLA's number or, on a TPU, the number with which its counter is compared."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    bounds = [int(op.rest.split(")")[0]) for op in condition if op.opcode == "constant" and op.type.startswith("s32[]")]
    return max(bounds, default=1)


# Operations that touch no values. The operations inside loops and branches are counted one by one.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id"}
FREE |= {"replica-id", "while", "conditional", "call", "opt-barrier", "add-dependency"}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "SliceBitcast"}  # a TPU's
_COLLECTIVE = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


class Scope:
    """A computation, with its operations by name, and who uses what."""

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops
        self.named = {op.name: op for op in ops}
        self.uses: dict[str, list[tuple[Op, int]]] = {}
        for op in ops:
            for k, operand in enumerate(op.operands):
                self.uses.setdefault(operand, []).append((op, k))
        self.parameters = {op.number: op for op in ops if op.opcode == "parameter"}
        self.root = next((op for op in ops if op.root), ops[-1] if ops else None)

    def array(self, name: str) -> Array | None:
        found = self.named[name].arrays if name in self.named else []
        return found[0] if found else None

    def source(self, name: str) -> Op | None:
        """Return the operation that makes a value, without the bitcasts around it."""
        op = self.named.get(name)
        while op is not None and op.opcode == "bitcast":
            op = self.named.get(op.operand)
        return op


@dataclasses.dataclass(frozen=True)
class Matmul:
    dtypes: tuple[str, ...]
    flops: float


@dataclasses.dataclass(frozen=True)
class Moved:
    """An array, or the rows of it, that an operation reads or writes."""

    array: Array
    nbytes: int
    written: bool


class Module:
    """A scheduled module, parsed once: its computations, what its head says, and what its operations cost.

    Attributes:
      scopes: the computations by name; the entry is ``ENTRY``.
      arguments: the program's arguments, by number.
      taken: types of the arguments by number, from the head: the only place where a CPU's module names host memory.
      given_back: types of the results, from the head; the root may differ where a donated buffer is used.
      aliases: place of a result -> the argument whose buffer it takes.
      devices: how many the program runs on.
      uses_host: whether an array in it is in host memory.
    """

    def __init__(self, text: str) -> None:
        self.scopes = {name: Scope(ops) for name, ops in computations(text).items()}
        self.arguments = self.scopes["ENTRY"].parameters
        head = text.partition("\n")[0]
        aliases, _, layout = head.partition("entry_computation_layout={")
        takes, _, gives = layout.partition("->")
        self.taken = {number: array for (number, *_), array in leaves(takes).items() if number in self.arguments}
        self.given_back = leaves(gives)
        self.aliases = {
            tuple(map(int, re.findall(r"\d+", place))): int(number)
            for place, number in re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", aliases)
        }
        self.uses_host = _HOST in text
        partitions = re.search(r"num_partitions=(\d+)", head)
        self.devices = int(partitions[1]) if partitions else 1

    def body(self, op: Op) -> Scope | None:
        """The computation that a fusion or an asynchronous start wraps."""
        return self.scopes.get(op.called("calls") or (op.called("to_apply") if op.opcode == "call" else ""))

    def inside(self, op: Op) -> list[tuple[Scope, Op]]:
        """All operations within ``op``, with where they stand."""
        body = self.body(op)
        return [] if body is None else [pair for o in body.ops for pair in ((body, o), *self.inside(o))]

    def targets(self, op: Op) -> list[str]:
        """The targets of the custom calls that ``op`` is or wraps."""
        return [t for o in (op, *(o for _, o in self.inside(op))) if (t := _target(o))]

    def matmuls(self, scope: Scope, op: Op) -> list[Matmul]:
        return [m for at, o in ((scope, op), *self.inside(op)) if (m := _matmul(at, o))]

    def moved(self, scope: Scope, op: Op) -> list[Moved]:
        """The bytes that ``op`` reads and writes; rows, if it touches no more. Values inside a fusion do not count."""
        if op.opcode in FREE or _target(op) in _FREE_CALLS:
            return []
        read = [
            Moved(array, self._read(op, k, array.nbytes), False)
            for k, name in enumerate(op.operands)
            if (array := scope.array(name))
        ]
        return [m for m in (*read, *self._written(scope, op)) if m.nbytes]

    def _read(self, op: Op, k: int, nbytes: int) -> int:
        """The bytes that ``op`` reads of its operand ``k``, which has ``nbytes``."""
        body = self.body(op)
        if body is not None and op.opcode not in FREE:
            parameter = body.parameters.get(k)
            return self._read_of(body, parameter.name, nbytes) if parameter else nbytes
        opcode = op.opcode.removesuffix("-start")
        if k == 0 and opcode == "dynamic-update-slice":
            return 0  # in place: the other rows are there already
        if k == 0 and opcode in ("dynamic-slice", "slice", "gather"):
            return min(nbytes, _results(op)[0].nbytes)
        return nbytes

    def _read_of(self, scope: Scope, name: str, nbytes: int) -> int:
        total = 0
        for op, k in scope.uses.get(name, []):
            if op.opcode == "bitcast":
                total += self._read_of(scope, op.name, nbytes)
            elif op.opcode != "tuple":  # a result that is an operand is not read
                total += self._read(op, k, nbytes)
        return min(nbytes, total)

    def _written(self, scope: Scope, op: Op) -> list[Moved]:
        body, results = self.body(op), _results(op)
        if body is not None and body.root is not None and body.root.opcode == "tuple":
            makers = [body.source(name) for name in body.root.operands]
            rows = [self._rows(body, o, a, fused=True) for o, a in zip(makers, results, strict=False)]
        else:
            rows = [self._rows(scope, op, a, fused=False) if a is results[0] else a.nbytes for a in results]
        return [Moved(array, nbytes, True) for array, nbytes in zip(results, rows, strict=False)]

    def _rows(self, scope: Scope, op: Op | None, array: Array, *, fused: bool) -> int:
        """The bytes that ``op`` writes of ``array``, which it makes."""
        if op is None:
            return array.nbytes
        if fused and op.opcode == "parameter":  # returned as it came
            return 0
        if op.opcode.removesuffix("-start") == "dynamic-update-slice":
            target, rows = scope.source(op.operand), scope.array(op.operands[1])
            in_place = not fused or (target is not None and target.opcode == "parameter")
            return rows.nbytes if rows and in_place else array.nbytes
        body = self.body(op)
        if body is not None and body.root is not None and body.root.opcode != "tuple":
            return self._rows(body, body.source(body.root.name), array, fused=True)
        return array.nbytes

    def collective(self, scope: Scope, op: Op) -> float | None:
        """Return the bytes that each device sends in the collective that ``op`` is, starts or wraps.

        It returns ``None`` if there is no collective, or if it is beside a matmul: on a TPU the fusions around matmuls
        repeat the collective that they carry on.
        """
        opcode = op.opcode.removesuffix("-start")
        if re.fullmatch(_COLLECTIVE, opcode):
            return _ring(scope, op, opcode, self.devices)
        inside = [(at, o) for at, o in self.inside(op) if re.fullmatch(_COLLECTIVE, o.opcode)]
        if not inside or self.matmuls(scope, op):
            return None
        at, o = inside[0]
        scattered = o.opcode == "all-reduce" and op.called("calls").startswith("all-reduce-scatter")
        return _ring(at, o, "reduce-scatter" if scattered else o.opcode, self.devices)


def _target(op: Op) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', op.rest)
    return found[1] if found else ""


def _results(op: Op) -> list[Array]:
    """Return the arrays that an operation, or the one that it starts, makes."""
    return op.read_and_made[1][:1] if op.opcode.endswith("-start") else op.arrays


def _ring(scope: Scope, op: Op, opcode: str, devices: int) -> float:
    """Return the bytes that each device sends in a collective over a ring."""
    n = group_size(op, devices)
    nbytes = sum(array.nbytes for name in op.operands if (array := scope.array(name)))
    factor = {
        "all-gather": n - 1,  # times the part of one device
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n,
    }
    return nbytes * factor.get(opcode, 1)


def group_size(op: Op, devices: int) -> int:
    """Return how many devices take part in a collective, from any of the three forms in which XLA writes it."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", op.rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        # 'x' is an axis; 'x':(2)4 a part of one, of 4
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", op.rest):
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{([\d,]*)\}", op.rest)
    return len(groups[1].split(",")) if groups else devices


def _matmul(scope: Scope, op: Op) -> Matmul | None:
    target = _target(op)
    lhs, rhs = (scope.array(name) for name in (op.operands + ["", ""])[:2])
    if lhs is None or rhs is None or not op.arrays:
        return None
    out = op.arrays[0]
    if op.opcode == "dot":
        flops = 2 * out.size * math.prod(lhs.shape[d] for d in op.integers("lhs_contracting_dims"))
    elif target.startswith("__cublas"):
        flops = 2 * out.size * math.prod(lhs.shape[d] for d in op.integers("lhs_contracting_dimensions"))
    elif op.opcode == "convolution" or target.startswith("__cudnn$conv"):
        flops = _convolution(op, target, lhs, rhs, out)
    elif target.startswith("__cudnn$fmha"):
        # batch, tokens, heads, width; multiplied five times backward, twice forward; masks save nothing
        flops = 2 * lhs.size * rhs.shape[1] * (5 if "Backward" in target else 2)
    else:
        return None
    return Matmul((lhs.dtype, rhs.dtype), flops)


def _convolution(op: Op, target: str, lhs: Array, rhs: Array, out: Array) -> float:
    """Count the operations of a convolution, with those on its padding.

    cuDNN names the dimensions of the forward pass, whichever of the three arrays a backward pass makes. Holes in the
    image are not counted, because a TPU writes batches of matmuls as convolutions with such holes.
    """
    kernel, result = rhs, out
    if "BackwardInput" in target:
        result = lhs
    elif "BackwardFilter" in target:
        kernel, result = out, rhs
    labels = re.search(r"dim_labels=\w+_(\w+)->", op.rest)
    features = kernel.shape[labels[1].index("o")] if labels else 1
    holes = re.search(r"window=\{[^}]*\blhs_dilate=([\dx]+)", op.rest)
    return 2 * result.size * kernel.size / features / math.prod(map(int, holes[1].split("x") if holes else ()))
