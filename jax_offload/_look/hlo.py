"""Read a scheduled HLO module, as XLA prints it: its operations, what they cost, and which values share a buffer.

Multiplications, bytes of memory, bytes between devices; nothing here knows a chip's speed or the order of a schedule.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property

Place = tuple[int, ...]  # of an array in the tuples of a type
Key = tuple["Op", Place]  # an array among the results of an operation

SCOPE = re.compile(r"jax_offload/(prefetch|update|write-back)/(?:(.*)/)?")  # in the names of an update's operations
CACHE, HOST = 1, 5  # XLA's numbers for memory spaces: on a TPU's chip, and in the host

_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(")
_OP = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)(.*)")
_SCOPE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r"%([\w.\-]+)")
_TOKEN = re.compile(r"\(|\)|(\w+)\[([\d,]*)\](?:\{(?:[^}]*?S\((\d+)\))?[^}]*\})?")
_CALLED = re.compile(r"\b(calls|condition|body|to_apply|\w+_computations?)=\{?(%[^ ,}]+(?:, %[^ ,}]+)*)")
# HLO writes these dimensions in braces, and a backend's config writes them in brackets.
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:ension)?s(?:=\{|":\[)([\d,"]*)')
_COLLECTIVE = re.compile("all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast")

RUNS = ("while", "call", "conditional")  # the operations inside are counted one by one
_FORWARDS = ("bitcast", "opt-barrier", "add-dependency")
NAMES = ("tuple", "get-tuple-element", *_FORWARDS)  # operations that only name existing values
_FREE = {*RUNS, *NAMES, "parameter", "constant", "iota", "after-all", "partition-id", "replica-id"}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "SliceBitcast"}  # a TPU's


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a type, and the number of its memory space. Arrays in different spaces compare equal."""

    dtype: str
    shape: tuple[int, ...]
    space: int = dataclasses.field(default=0, compare=False)

    @property
    def host(self) -> bool:
        return self.space == HOST

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn, u32; a token has none
        return -(-self.size * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) // 8)


EMPTY = Array("token", ())


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
            found[tuple(place)] = Array(token[1], dims, int(token[3] or 0))
        if place:
            place[-1] += 1
    return found


@dataclasses.dataclass(eq=False)
class Op:
    """A line of scheduled HLO.

    Attributes:
      at: the computation that it is in.
      opcode: what it does, or what it starts, if that is asynchronous: then ``starts`` is true.
      arrays: its results, by their places; where something starts, the results of that.
      operands: the operations whose results it takes.
      given: the text in its parentheses: the number of a parameter, the value of a constant.
      attributes: the text behind the parentheses.
      scope: the names in jax under which it was traced; of an argument its path.
      called: the computations that each attribute names.
    """

    at: Computation
    name: str
    opcode: str = ""
    starts: bool = False
    arrays: dict[Place, Array] = dataclasses.field(default_factory=dict)
    operands: list[Op] = dataclasses.field(default_factory=list)
    given: str = ""
    attributes: str = ""
    scope: str = ""
    called: dict[str, list[Computation]] = dataclasses.field(default_factory=dict)

    def attribute(self, pattern: str | re.Pattern[str]) -> str:
        """Return the first group of a pattern in the attributes; empty if it is not there."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def array(self) -> Array:
        """Its first array, if it has one."""
        return next(iter(self.arrays.values()), EMPTY)

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def callees(self) -> list[Computation]:
        """The computations that a loop (without its condition), a call or a conditional runs."""
        if self.opcode not in RUNS:
            return []
        return [x for attribute, each in self.called.items() if attribute != "condition" for x in each]

    @property
    def body(self) -> Computation | None:
        """The computation that a fusion or an asynchronous start wraps."""
        return self.called.get("calls", [None])[0]

    @cached_property
    def inside(self) -> list[Op]:
        """The operation and all operations inside it."""
        return [self, *(x for op in (self.body.ops if self.body else ()) for x in op.inside)]

    @property
    def trips(self) -> int:
        """How often a loop runs its body: XLA's number or, on a TPU, the bound of its counter."""
        if known := self.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        constants = (x for at in self.called.get("condition", ()) for x in at.ops if x.opcode == "constant")
        return max((int(x.given) for x in constants if x.array == Array("s32", ())), default=1)

    def takes(self, place: Place) -> tuple[Op, Place, int] | None:
        """Return the operand's array whose buffer a result takes, if any, and the bytes that it writes there."""
        if self.opcode == "get-tuple-element":
            return self.operands[0], (int(self.attribute(r"index=(\d+)")), *place), 0
        if self.opcode == "tuple":
            return self.operands[place[0]], place[1:], 0
        if self.opcode in (*_FORWARDS, "while") or self.opcode.endswith("-done"):
            return self.operands[0], place, 0
        if self.opcode == "dynamic-update-slice":
            return self.operands[0], (), self.operands[1].array.nbytes
        if self.body is None:
            return None
        value, nbytes = self.body.root, 0
        while found := value.takes(place):
            value, place, nbytes = found[0], found[1], nbytes + found[2]
        return (self.operands[int(value.given)], place, nbytes) if value.opcode == "parameter" else None

    @cached_property
    def reads(self) -> list[int]:
        """The bytes that it reads of each operand, without the rows that it skips."""
        if self.body:
            return [self.body.read(parameter) for parameter in self.body.parameters[: len(self.operands)]]
        found = [x.array.nbytes for x in self.operands]
        if self.opcode == "dynamic-update-slice":
            found[0] = 0  # the update is in place, so the other rows exist already
        elif self.opcode in ("dynamic-slice", "slice", "gather"):
            found[0] = min(found[0], self.array.nbytes)
        return found

    @cached_property
    def traffic(self) -> list[tuple[Array, int, bool]]:
        """The bytes of the rows that it touches in each outer array, and whether it writes them."""
        if self.opcode in _FREE or self.target in _FREE_CALLS:
            return []
        read = [(x.array, nbytes, False) for x, nbytes in zip(self.operands, self.reads, strict=True)]
        wrote = [(x, found[2] if (found := self.takes(k)) else x.nbytes, True) for k, x in self.arrays.items()]
        return [each for each in (*read, *wrote) if each[1]]

    def crossing(self, loads: bool) -> int:
        """The bytes that it copies from host memory, or to it."""
        host = [nbytes for x, nbytes, written in self.traffic if x.host and written is not loads]
        if not self.starts:
            return sum(host)
        # Copies and the host's cores use the link only for what they touch on the device.
        device = [nbytes for x, nbytes, written in self.traffic if not x.host and written is loads]
        return max(device, default=0) if host else 0

    @property
    def matmuls(self) -> list[tuple[float, bool]]:
        """The operations of each matmul inside it, and whether an operand has 16 bits."""
        each = ((op, _multiplied(op)) for op in self.inside)
        return [(n, any(x.array.dtype in ("bf16", "f16") for x in op.operands[:2])) for op, n in each if n]

    @property
    def collective(self) -> float | None:
        """The bytes that each device sends in the collective of this operation.

        It is ``None`` if there is no collective, or if it is beside a matmul: on a TPU the fusions around matmuls
        repeat the collective that they carry on.
        """
        found = next((op for op in self.inside if _COLLECTIVE.fullmatch(op.opcode)), None)
        if found is None or (found is not self and self.matmuls):
            return None
        scattered = self.body is not None and found.at.name.startswith("all-reduce-scatter")
        opcode = "reduce-scatter" if scattered else found.opcode
        n, nbytes = group_size(found), sum(x.array.nbytes for x in found.operands)
        times = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "collective-broadcast": 1}
        return nbytes * times.get(opcode, (n - 1) / n)  # over a ring


class Computation:
    """A computation of a module: its operations, in the order of the schedule."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.ops: list[Op] = []
        self.named: dict[str, Op] = {}
        self.root = Op(self, "")

    @cached_property
    def parameters(self) -> list[Op]:
        return sorted((op for op in self.ops if op.opcode == "parameter"), key=lambda op: int(op.given))

    def read(self, value: Op) -> int:
        """Return how many bytes of a value its users read."""
        used = ((op, k) for op in self.ops for k, operand in enumerate(op.operands) if operand is value)
        nbytes = sum(self.read(op) if op.opcode == "bitcast" else op.reads[k] for op, k in used)
        return min(nbytes, value.array.nbytes)


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
            elif found := _OP.match(line):
                self._add(at, found)
        self.entry = self.computations["ENTRY"]
        self.arguments = dict(enumerate(self.entry.parameters))
        head = text.partition("\n")[0]
        aliases, _, layout = head.partition("entry_computation_layout={")
        takes, _, gives = layout.partition("->")
        self.taken = {number: array for (number, *_), array in arrays_in(takes).items() if number in self.arguments}
        self.given_back = arrays_in(gives)
        self.aliases = {
            tuple(map(int, re.findall(r"\d+", place))): int(number)
            for place, number in re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", aliases)
        }
        self.uses_host = f"S({HOST})" in text
        self.devices = int((re.search(r"num_partitions=(\d+)", head) or (0, 1))[1])

    def _add(self, at: Computation, line: re.Match[str]) -> None:
        """Add a line to a computation. The operands and the computations that it names are above it."""
        root, name, hlo_type, opcode, given, attributes = line.groups()
        operands = [at.named.get(x) or Op(at, x) for x in _NAME.findall(given)]
        if opcode.endswith("-update"):  # it continues what its operand has started
            at.named[name] = operands[0]
            return
        arrays, scope = arrays_in(hlo_type), _SCOPE.search(attributes)
        starts, opcode = opcode.endswith("-start"), opcode.removesuffix("-start")
        if starts and any(place[:1] == (1,) for place in arrays):  # otherwise the type lists the results only
            first = 0 if opcode == "copy" else 1  # the place of the results; other starts list their operands before
            arrays = {place[1:]: x for place, x in arrays.items() if place[0] == first}
        said = scope[1].replace("\\'", "'") if scope else ""
        op = at.named[name] = Op(at, name, opcode, starts, arrays, operands, given, attributes, said)
        for attribute, names in _CALLED.findall(attributes):
            op.called[attribute] = [self.computations[x] for x in _NAME.findall(names)]
        at.ops.append(op)
        at.root = op if root else at.root

    @cached_property
    def run(self) -> list[Computation]:
        """The computations that run: the entry, then those that it calls, in the order of the text."""
        found = [self.entry]
        for at in found:
            found += dict.fromkeys(x for op in at.ops for x in op.callees if x not in found)
        return found


def group_size(op: Op) -> int:
    """Return how many devices take part in a collective, from any of the three forms in which XLA writes it."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", op.attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        # 'x' is an axis; 'x':(2)4 a part of one, of 4
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    if size := op.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(size)
    group = op.attribute(r"replica_groups=\{\{([\d,]*)\}")
    return len(group.split(",")) if group else op.at.module.devices


def _multiplied(op: Op) -> float:
    """Return the operations of a matmul; 0 if it is none."""
    if len(op.operands) < 2:
        return 0
    lhs, rhs, target = op.operands[0].array, op.operands[1].array, op.target
    if op.opcode == "dot" or target.startswith("__cublas"):
        dims = re.findall(r"\d+", op.attribute(_CONTRACTED))
        return 2 * op.array.size * math.prod(lhs.shape[int(d)] for d in dims)
    if target.startswith("__cudnn$fmha"):
        # batch, tokens, heads, width; multiplied five times backward, twice forward; masks save nothing
        return 2 * lhs.size * rhs.shape[1] * (5 if "Backward" in target else 2)
    if op.opcode != "convolution" and not target.startswith("__cudnn$conv"):
        return 0
    # cuDNN names the dimensions of the forward pass, whichever of the three arrays a backward pass makes.
    backward = {"Input": (rhs, lhs), "Filter": (op.array, rhs)}
    kernel, result = backward.get(op.attribute("convBackward(Input|Filter)"), (rhs, op.array))
    labels = op.attribute(r"dim_labels=\w+_(\w+)->")
    features = kernel.shape[labels.index("o")] if labels else 1
    # Operations on padding count, holes do not: a TPU writes batches of matmuls as convolutions with holes.
    holes = op.attribute(r"window=\{[^}]*\blhs_dilate=([\dx]+)")
    return 2 * result.size * kernel.size / features / math.prod(map(int, holes.split("x") if holes else ()))


class Buffers:
    """The buffers of a module, each one key: the values that share it.

    Attributes:
      names: of buffers in host memory: the path of the argument there, or "gradients" if a backward pass stores there.
      loaded: the bytes of each buffer into which a copy from the host goes.
    """

    def __init__(self, module: Module) -> None:
        self._parent: dict[Key, Key] = {}
        ops = [op for at in module.run for op in at.ops]
        shared = [pair for op in ops for pair in _shared(op)]
        shared += [((module.entry.root, place), (module.arguments[k], ())) for place, k in module.aliases.items()]
        for a, b in shared:
            self._parent[self.find(*a)] = self.find(*b)
        arguments = {self.find(op): op for op in module.arguments.values()}
        self.names = {key: op.scope or op.name for key, op in arguments.items() if op.array.host}
        self.loaded = defaultdict[Key, int](int)
        for op in (op for op in ops if op.starts):
            key, scopes = self.find(op), " ".join(x.scope for x in (op, *op.operands))
            if op.array.host and "transpose(" in scopes and not SCOPE.search(scopes):
                self.names.setdefault(key, "gradients")
            elif (nbytes := op.crossing(loads=True)) and key not in arguments:
                self.loaded[key] = max(self.loaded[key], nbytes)

    def find(self, op: Op, place: Place = ()) -> Key:
        key = op, place
        while (up := self._parent.get(key, key)) != key:
            self._parent[key] = self._parent.get(up, up)  # halving the path keeps later searches short
            key = up
        return key

    def name(self, op: Op) -> str:
        """The name of the buffer in host memory that holds the value of an operation; empty if it has none."""
        return self.names.get(self.find(op), "")

    def held(self, at: Computation) -> list[tuple[int, int]]:
        """For each operation of a computation, the loaded bytes that it begins to hold, and those that end with it."""
        # The caller holds the arguments and the results of a called computation.
        theirs = [] if at is at.module.entry else [*at.parameters, at.root]
        outside = {self.find(op, place) for op in theirs for place in op.arrays}
        lives = defaultdict[Key, list[int]](list)
        for k, op in enumerate(at.ops):
            read = () if op.opcode in NAMES else op.operands
            for key in {self.find(x, place) for x in (op, *read) for place in x.arrays} & self.loaded.keys() - outside:
                lives[key].append(k)
        begins, ends = Counter[int](), Counter[int]()
        for key, used in lives.items():
            begins[used[0]] += self.loaded[key]
            ends[used[-1]] += self.loaded[key]
        return [(begins[k], ends[k]) for k in range(len(at.ops))]


def _shared(op: Op) -> Iterator[tuple[Key, Key]]:
    """Yield pairs of values that share a buffer: a result or an inner value of an operation, and an operand."""
    yield from (((op, place), found[:2]) for place in op.arrays if (found := op.takes(place)))
    for k, callee in enumerate(op.callees):
        given = op.operands[k + 1 : k + 2] if op.opcode == "conditional" else op.operands
        for parameter, value in zip(callee.parameters, given, strict=False):
            yield from (((parameter, place), (value, place)) for place in parameter.arrays)
        yield from (((callee.root, place), (op, place)) for place in op.arrays)
