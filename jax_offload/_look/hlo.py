"""Read a scheduled HLO module, as XLA prints it: its operations, what they cost, and which values share a buffer.

Multiplications, bytes of memory, bytes between devices; nothing here knows a chip's speed or the order of a schedule.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

Place = tuple[int, ...]  # of an array in the tuples of a type

SCOPE = re.compile(r"jax_offload/(prefetch|update|write-back)/")  # in the names of an offloaded update's operations

_HOST = "S(5)"  # XLA's number for the host's memory space
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(")
_OP = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (\(?.*?) ([\w\-]+)\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r", metadata=\{([^}]*)\}")
_SCOPE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TOKEN = re.compile(rf"\(|\)|{_ARRAY.pattern}")
# HLO writes these dimensions in braces, and a backend's config writes them in brackets.
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s(?:=\{|":\[)([\d,"]*)')
_RUN_BY = re.compile(r"\b(?:condition|body|to_apply|true_computation|false_computation)=%([\w.\-]+)")

# Operations that touch no values. The operations inside loops and branches are counted one by one.
RUNS = ("while", "call", "conditional")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id", *RUNS}
FREE |= {"replica-id", "opt-barrier", "add-dependency"}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "SliceBitcast"}  # a TPU's
_COLLECTIVE = re.compile("all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast")


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


def arrays_in(hlo_type: str) -> dict[Place, Array]:
    """The arrays in a type, by their place in its tuples."""
    found: dict[Place, Array] = {}
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


@dataclasses.dataclass(eq=False)
class Op:
    """A line of scheduled HLO.

    Attributes:
      at: the computation that it is in.
      rest: the text after the opcode: operands, then attributes.
      scope: the names in jax under which it was traced; of an argument its path.
    """

    at: Computation
    name: str
    type: str = ""
    opcode: str = ""
    rest: str = ""
    scope: str = ""
    root: bool = False

    @cached_property
    def base(self) -> str:
        return self.opcode.removesuffix("-start")

    @property
    def starts(self) -> bool:
        return self.base != self.opcode

    @cached_property
    def operands(self) -> list[Op]:
        return [self.at.named.get(name) or Op(self.at, name) for name in _NAME.findall(self.rest.partition(")")[0])]

    @cached_property
    def leaves(self) -> dict[Place, Array]:
        return arrays_in(self.type)

    @cached_property
    def result(self) -> Place:
        """Return the place of the result: first in a copy's start, otherwise after the operands."""
        if not self.starts or not any(place[:1] == (1,) for place in self.leaves):
            return ()
        return (0,) if self.base == "copy" else (1,)

    @property
    def begun(self) -> Op:
        """Return the start that this done operation ends."""
        op = self.operands[0]
        while op.opcode.endswith("-update"):
            op = op.operands[0]
        return op

    @cached_property
    def made(self) -> dict[Place, Array]:
        """Return the arrays that the operation makes; the type of a start also lists its operands."""
        return {place: x for place, x in self.leaves.items() if place[: len(self.result)] == self.result}

    @property
    def array(self) -> Array | None:
        """The first array of its type."""
        return next(iter(self.leaves.values()), None)

    @property
    def source(self) -> Op:
        """Return the operation that makes the value, looking through bitcasts."""
        return self.operands[0].source if self.opcode == "bitcast" else self

    @property
    def number(self) -> int:
        """The number of a parameter."""
        return int(self.rest.partition(")")[0])

    @property
    def target(self) -> str:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @cached_property
    def callees(self) -> list[Computation]:
        """The computations that a loop (its condition, then its body), a call or a conditional runs."""
        if self.opcode not in RUNS:
            return []
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names = _NAME.findall(branches[1]) if branches else _RUN_BY.findall(self.rest)
        return [self.at.module.computations[name] for name in names]

    @cached_property
    def body(self) -> Computation | None:
        """The computation that a fusion or an asynchronous start wraps."""
        calls = re.search(r"\bcalls=%([\w.\-]+)", self.rest)
        return self.at.module.computations.get(calls[1]) if calls else None

    @property
    def inside(self) -> list[Op]:
        """Return the operation and all operations inside it."""
        return [self, *(x for op in (self.body.ops if self.body else ()) for x in op.inside)]

    @property
    def copy(self) -> tuple[bool, int] | None:
        """Return whether the copy between host and device loads, and its bytes; ``None`` if no copy starts here."""
        if not self.starts or not self.made:
            return None
        read, made = [x for place, x in self.leaves.items() if place not in self.made], next(iter(self.made.values()))
        if made.host:
            nbytes = max((x.nbytes for x in read if not x.host), default=0)
            return (False, nbytes) if nbytes else None
        return (True, made.nbytes) if any(x.host for x in read) else None

    @property
    def trips(self) -> int:
        """Return the trip count of a loop: XLA's number or, on a TPU, the bound of its counter."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', self.rest):
            return int(known[1])
        limits = [x for x in self.callees[0].ops if x.opcode == "constant" and x.type.startswith("s32[]")]
        return max((x.number for x in limits), default=1)

    @cached_property
    def written(self) -> dict[Place, tuple[int | None, int]]:
        """Map each array that it makes to the operand whose buffer it takes, if any, and to the bytes written."""
        found: dict[Place, tuple[int | None, int]] = {place: (None, x.nbytes) for place, x in self.made.items()}
        if self.base == "dynamic-update-slice":
            rows = self.operands[1].array
            found[self.result] = 0, rows.nbytes if rows else 0
        elif self.body and self.opcode not in RUNS:
            root = self.body.root
            several = root.opcode == "tuple"
            for k, op in enumerate(root.operands if several else [root]):
                place, maker = (*self.result, k) if several else self.result, op.source
                if maker.opcode == "parameter":
                    found[place] = maker.number, 0  # returned as it came
                elif (by := maker.written.get(())) and by[0] is not None:
                    target = maker.operands[by[0]].source
                    found[place] = (target.number, by[1]) if target.opcode == "parameter" else found[place]
        return found

    @property
    def moved(self) -> list[tuple[Array, int, bool]]:
        """Return the bytes of each array that it touches (only the rows that it touches), and whether it writes them.

        Values inside a fusion do not count.
        """
        if self.opcode in FREE or self.target in _FREE_CALLS:
            return []
        read = [(x.array, self.read(k), False) for k, x in enumerate(self.operands) if x.array]
        wrote = [(x, self.written[place][1], True) for place, x in self.made.items()]
        return [each for each in (*read, *wrote) if each[1]]

    def read(self, k: int) -> int:
        """Return the bytes that it reads from its operand ``k``."""
        array = self.operands[k].array
        nbytes = array.nbytes if array else 0
        if self.body:
            return min(nbytes, self.body.read(self.body.parameters[k]))
        if k == 0 and self.base == "dynamic-update-slice":
            return 0  # in place: the other rows are there already
        if k == 0 and self.base in ("dynamic-slice", "slice", "gather"):
            return min(nbytes, next(iter(self.made.values())).nbytes)
        return nbytes

    @property
    def operations(self) -> list[tuple[float, bool]]:
        """Return the operations of the matmuls inside it, and whether an operand has 16 bits."""
        return [found for op in self.inside if (found := _matmul(op))]

    @property
    def collective(self) -> float | None:
        """Return the bytes that each device sends in the collective of this operation.

        It is ``None`` if there is no collective, or if it is beside a matmul: on a TPU the fusions around matmuls
        repeat the collective that they carry on.
        """
        found = next((op for op in self.inside if _COLLECTIVE.fullmatch(op.base)), None)
        if found is None or (found is not self and self.operations):
            return None
        scattered = self.body is not None and found.at.name.startswith("all-reduce-scatter")
        opcode = "reduce-scatter" if scattered else found.base
        n, nbytes = group_size(found), sum(x.array.nbytes for x in found.operands if x.array)
        times = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "collective-broadcast": 1}
        return nbytes * times.get(opcode, (n - 1) / n)  # over a ring


class Computation:
    """A computation of a module: its operations, in the order of the schedule."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.ops: list[Op] = []

    @cached_property
    def named(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def parameters(self) -> dict[int, Op]:
        return {op.number: op for op in self.ops if op.opcode == "parameter"}

    @cached_property
    def root(self) -> Op:
        return next((op for op in self.ops if op.root), self.ops[-1])

    def read(self, value: Op) -> int:
        """Return how many bytes of a value its users read."""
        used = ((op, k) for op in self.ops for k, operand in enumerate(op.operands) if operand is value)
        return sum(self.read(op) if op.opcode == "bitcast" else op.read(k) for op, k in used)


class Module:
    """A scheduled module: its computations, and the facts in its head.

    Attributes:
      computations: by name; the entry is ``ENTRY``.
      arguments: the program's arguments, by number.
      taken: types of the arguments by number, from the head: the only place where a CPU's module names host memory.
      given_back: types of the results, from the head; the root may differ where a donated buffer is used.
      aliases: place of a result -> the argument whose buffer it takes.
      devices: how many the program runs on.
      uses_host: whether an array in it is in host memory.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        at = Computation(self, "")
        for line in text.splitlines():
            if header := _HEADER.match(line):
                name = "ENTRY" if header[1] else header[2]
                at = self.computations[name] = Computation(self, name)
            elif op := _OP.match(_METADATA.sub("", line)):
                scope = _SCOPE.search(line) if "op_name=" in line else None
                root, name, hlo_type, opcode, rest = op.groups()
                said = scope[1].replace("\\'", "'") if scope else ""
                at.ops.append(Op(at, name, hlo_type, opcode, rest, said, bool(root)))
        self.entry = self.computations["ENTRY"]
        self.arguments = self.entry.parameters
        head = text.partition("\n")[0]
        aliases, _, layout = head.partition("entry_computation_layout={")
        takes, _, gives = layout.partition("->")
        self.taken = {number: array for (number, *_), array in arrays_in(takes).items() if number in self.arguments}
        self.given_back = arrays_in(gives)
        self.aliases = {
            tuple(map(int, re.findall(r"\d+", place))): int(number)
            for place, number in re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", aliases)
        }
        self.uses_host = _HOST in text
        partitions = re.search(r"num_partitions=(\d+)", head)
        self.devices = int(partitions[1]) if partitions else 1

    @cached_property
    def run(self) -> list[Computation]:
        """The computations that run: the entry, then those that it calls, in the order of the text."""
        found = [self.entry]
        for at in found:
            found += dict.fromkeys(x for op in at.ops for x in op.callees if x not in found)
        return found


def group_size(op: Op) -> int:
    """Return how many devices take part in a collective, from any of the three forms in which XLA writes it."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", op.rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        # 'x' is an axis; 'x':(2)4 a part of one, of 4
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", op.rest):
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{([\d,]*)\}", op.rest)
    return len(groups[1].split(",")) if groups else op.at.module.devices


def _matmul(op: Op) -> tuple[float, bool] | None:
    """Return the operations of a matmul, and whether an operand has 16 bits."""
    lhs, rhs = (x.array for x in (op.operands + [Op(op.at, "")] * 2)[:2])
    out, target = op.array, op.target
    if lhs is None or rhs is None or out is None:
        return None
    if op.opcode == "dot" or target.startswith("__cublas"):
        contracted = _CONTRACTED.search(op.rest)
        dims = re.findall(r"\d+", contracted[1]) if contracted else ()
        operations = 2 * out.size * math.prod(lhs.shape[int(d)] for d in dims)
    elif op.opcode == "convolution" or target.startswith("__cudnn$conv"):
        operations = _convolution(op, lhs, rhs, out)
    elif target.startswith("__cudnn$fmha"):
        # batch, tokens, heads, width; multiplied five times backward, twice forward; masks save nothing
        operations = 2 * lhs.size * rhs.shape[1] * (5 if "Backward" in target else 2)
    else:
        return None
    return operations, bool({lhs.dtype, rhs.dtype} & {"bf16", "f16"})


def _convolution(op: Op, lhs: Array, rhs: Array, out: Array) -> float:
    """Count the operations of a convolution, with those on its padding.

    cuDNN names the dimensions of the forward pass, whichever of the three arrays a backward pass makes. Holes in the
    image are not counted, because a TPU writes batches of matmuls as convolutions with such holes.
    """
    kernel, result = rhs, out
    if "BackwardInput" in op.target:
        result = lhs
    elif "BackwardFilter" in op.target:
        kernel, result = out, rhs
    labels = re.search(r"dim_labels=\w+_(\w+)->", op.rest)
    features = kernel.shape[labels[1].index("o")] if labels else 1
    holes = re.search(r"window=\{[^}]*\blhs_dilate=([\dx]+)", op.rest)
    return 2 * result.size * kernel.size / features / math.prod(map(int, holes[1].split("x") if holes else ()))


# -- which values share a buffer

Key = tuple[Op, Place]

_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
_NAMES = ("tuple", "get-tuple-element", *_FORWARD)  # operations that only name existing values


class Buffers:
    """The buffers of a module, each one key: the values that share it.

    Attributes:
      arguments: the arguments of the program, by their buffers.
      loaded: the bytes of each buffer into which a copy from the host goes.
      gradients: the buffers in host memory into which a backward pass stores.
    """

    def __init__(self, module: Module) -> None:
        self._parent: dict[Key, Key] = {}
        ops = [op for at in module.run for op in at.ops]
        for op in ops:
            for a, b in _shared(op):
                self._join(a, b)
        for place, number in module.aliases.items():
            if number in module.arguments:
                self._join((module.entry.root, place), (module.arguments[number], ()))
        self.arguments = {self.find(op): op for op in module.arguments.values()}
        self.loaded, self.gradients = defaultdict[Key, int](int), set[Key]()
        for op in ops:
            if (copy := op.copy) and copy[0] and (key := self.find(op, op.result)) not in self.arguments:
                self.loaded[key] = max(self.loaded[key], copy[1])
            scopes = " ".join(x.scope for x in (op, *op.operands)) if copy and not copy[0] else ""
            if "transpose(" in scopes and not SCOPE.search(scopes):
                self.gradients.add(self.find(op, op.result))

    def argument(self, op: Op, place: Place = ()) -> Op | None:
        """The argument of the program whose buffer holds a value."""
        return self.arguments.get(self.find(op, place))

    def find(self, op: Op, place: Place = ()) -> Key:
        key = op, place
        while (up := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(up, up)  # halving the path keeps later searches short
            key = up
        return key

    def _join(self, a: Key, b: Key) -> None:
        if (a := self.find(*a)) != (b := self.find(*b)):
            self._parent[a] = b

    def held(self, at: Computation) -> list[tuple[int, int]]:
        """For each operation of a computation, the loaded bytes that it begins to hold, and those that end with it."""
        entry = at is at.module.entry
        # The caller holds the arguments and the results of a called computation.
        theirs = [] if entry else [*at.parameters.values(), at.root]
        outside = {self.find(op, place) for op in theirs for place in op.leaves}
        begins, ends = dict[Key, int](), dict[Key, int]()
        for i, op in enumerate(at.ops):
            read = [] if op.opcode in _NAMES else op.operands
            for key in (self.find(x, place) for x in (op, *read) for place in x.leaves):
                if key in self.loaded and key not in outside:
                    begins.setdefault(key, i)
                    ends[key] = i
        changes = [[0, 0] for _ in at.ops]
        for key, i in begins.items():
            changes[i][0] += self.loaded[key]
            changes[ends[key]][1] += self.loaded[key]
        return [(begin, end) for begin, end in changes]


def _shared(op: Op) -> Iterator[tuple[Key, Key]]:
    """Yield pairs of values that share a buffer: a result or an inner value of an operation, and an operand."""
    first = op.operands[0] if op.operands else op
    if op.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", op.rest)
        yield from (((op, place), (first, (int(index[1]) if index else 0, *place))) for place in op.leaves)
    elif op.opcode == "tuple":
        yield from (((op, place), (op.operands[place[0]], place[1:])) for place in op.leaves)
    elif op.opcode in (*_FORWARD, "while") or op.opcode.endswith("-update"):
        yield from (((op, place), (first, place)) for place in op.leaves)
    elif op.opcode.endswith("-done"):
        yield from (((op, place), (op.begun, (*op.begun.result, *place))) for place in op.leaves)
    elif op.opcode not in RUNS:
        for place, (operand, _) in op.written.items():
            if operand is not None and place in op.leaves and op.leaves[place].host:
                yield (op, place), (op.operands[operand], ())
    for k, callee in enumerate(op.callees):
        given = {"while": [op], "call": op.operands}.get(op.opcode, op.operands[k + 1 : k + 2])
        for parameter in callee.parameters.values():
            if parameter.number < len(given):
                yield from (((parameter, place), (given[parameter.number], place)) for place in parameter.leaves)
        if op.opcode != "while" or k:  # a condition's result is not the loop's
            yield from (((callee.root, place), (op, place)) for place in op.leaves)
