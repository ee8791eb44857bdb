"""Which values of a scheduled program share a buffer."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jax_offload._analysis.hlo import Costs, Op, Scope, aliases, started

Key = tuple[str, str, tuple[int, ...]]  # computation, operation, place in its type
_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
# Operations that only name existing values.
NAMES = ("tuple", "get-tuple-element", *_FORWARD)


class Sharing:
    """Groups the values of a module that share a buffer: ``find`` returns the same key for all of them.

    Attributes:
      reached: the computations that run, in the order of the text.
      arguments: of the program, by their number; ``argument_of`` has the number by the buffer.
    """

    def __init__(self, text: str, costs: Costs) -> None:
        self.costs = costs
        self.parent: dict[Key, Key] = {}
        self.reached: list[str] = []
        self.arguments = {int(op.rest.partition(")")[0]): op for op in self.ops("ENTRY") if op.opcode == "parameter"}
        self._reach("ENTRY")
        root = costs.scopes["ENTRY"].root
        for place, number in aliases(text).items():
            if root is not None and number in self.arguments:
                self._join(("ENTRY", root.name, place), ("ENTRY", self.arguments[number].name, ()))
        self.argument_of = {self.find(("ENTRY", op.name, ())): number for number, op in self.arguments.items()}

    def ops(self, name: str) -> list[Op]:
        return self.costs.scopes[name].ops

    def argument(self, name: str, value: str, place: tuple[int, ...] = ()) -> Op | None:
        """The argument of the program whose buffer holds a value."""
        number = self.argument_of.get(self.find((name, value, place)))
        return None if number is None else self.arguments[number]

    def find(self, key: Key) -> Key:
        way = []
        while (up := self.parent.get(key, key)) != key:
            way.append(key)
            key = up
        for each in way:
            self.parent[each] = key
        return key

    def _join(self, a: Key, b: Key) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[a] = b

    def _reach(self, name: str) -> None:
        if name in self.reached or name not in self.costs.scopes:
            return
        self.reached.append(name)
        scope = self.costs.scopes[name]
        for op in scope.ops:
            self._share(name, scope, op)
        for op in scope.ops:
            for called in _called(op):
                self._reach(called)

    def _share(self, name: str, scope: Scope, op: Op) -> None:
        own = {place: (name, op.name, place) for place in op.leaves}
        source = scope.named.get(op.operand)
        if op.opcode == "get-tuple-element":
            found = re.search(r"index=(\d+)", op.rest)
            for place in own:
                self._join(own[place], (name, op.operand, (int(found[1]) if found else 0, *place)))
        elif op.opcode == "tuple":
            for place in own:
                self._join(own[place], (name, op.operands[place[0]], place[1:]))
        elif op.opcode in _FORWARD or op.opcode.endswith("-update"):
            for place in own:
                self._join(own[place], (name, op.operand, place))
        elif op.opcode.endswith("-done") and source is not None:
            for place in own:
                self._join(own[place], (name, op.operand, result_place(source, place)))
        elif op.opcode == "while":
            body = self.costs.scopes.get(op.called("body"))
            for place in own:
                self._join(own[place], (name, op.operand, place))
                for called in (op.called("body"), op.called("condition")):
                    for parameter in self.costs.scopes[called].parameters.values():
                        self._join((called, parameter.name, place), own[place])
                if body is not None and body.root is not None:
                    self._join((op.called("body"), body.root.name, place), own[place])
        elif op.opcode in ("call", "conditional"):
            for k, called in enumerate(_called(op)):
                inner = self.costs.scopes[called]
                for place in own:
                    if inner.root is not None:
                        self._join((called, inner.root.name, place), own[place])
                given = op.operands if op.opcode == "call" else op.operands[k + 1 : k + 2]
                for number, operand in enumerate(given):
                    if number in inner.parameters:
                        parameter = inner.parameters[number]
                        for place in parameter.leaves:
                            self._join((called, parameter.name, place), (name, operand, place))
        else:
            for place, operand in in_place(self.costs, op):
                # On the device XLA writes over an operand only if nothing reads it later.
                if operand < len(op.operands) and place in op.leaves:
                    of = op.operands[operand]
                    read_once = len(scope.uses[of]) == 1 and scope.named[of].opcode == "get-tuple-element"
                    if op.leaves[place].host or read_once:
                        self._join((name, op.name, place), (name, of, ()))


def _called(op: Op) -> list[str]:
    if op.opcode == "while":
        return [op.called("condition"), op.called("body")]
    if op.opcode == "call":
        return [op.called("to_apply")]
    if op.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
        if branches:
            return re.findall(r"%([\w.\-]+)", branches[1])
        return [op.called("true_computation"), op.called("false_computation")]
    return []


def result_place(start: Op, place: tuple[int, ...]) -> tuple[int, ...]:
    """Where in the type of a start its result is: (result, operand, ...) of a copy, else (operands, result, ...)."""
    if start.opcode == "copy-start":
        return (0, *place)
    return (1, *place) if (1, *place) in start.leaves or any(p[:1] == (1,) for p in start.leaves) else place


def in_place(costs: Costs, op: Op) -> list[tuple[tuple[int, ...], int]]:
    """(place of a result, number of the operand in whose buffer it is written)."""
    if op.opcode == "custom-call":
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", op.rest)
        pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}\)", found[1]) if found else []
        return [(tuple(int(d) for d in place.split(",") if d.strip()), int(n)) for place, n in pairs]
    first = (1,) if op.opcode.endswith("-start") else ()
    if op.opcode.removesuffix("-start") == "dynamic-update-slice":
        return [(first, 0)]
    body = costs.body(op)
    if body is None or body.root is None or "fusion" not in op.opcode:
        return []
    names = body.root.operands if body.root.opcode == "tuple" else [body.root.name]
    found = [(k, _updated(costs, body, body.source(name))) for k, name in enumerate(names)]
    places = [((*first, k) if body.root.opcode == "tuple" else first, number) for k, number in found]
    return [(place, number) for place, number in places if number is not None]


def _updated(costs: Costs, body: Scope, op: Op | None) -> int | None:
    """The number of the parameter of a fusion that ``op`` updates in place."""
    if op is None:
        return None
    if op.opcode == "parameter":
        return int(op.rest.partition(")")[0])
    if op.opcode == "dynamic-update-slice":
        target: Op | None = body.source(op.operand)
    else:
        inner = in_place(costs, op) if op.opcode == "fusion" else []
        target = body.source(op.operands[inner[0][1]]) if inner and inner[0][0] == () else None
    return int(target.rest.partition(")")[0]) if target is not None and target.opcode == "parameter" else None


PARAMETERS, STATE, BATCH = "parameters", "state on the device", "other arguments"
GRADIENTS, ACTIVATIONS, WINDOW, GATHERED = "gradients", "activations", "window", "gathered from devices"
KINDS = (PARAMETERS, STATE, BATCH, GRADIENTS, ACTIVATIONS, WINDOW, GATHERED)
SCOPE = re.compile(r"jax_offload/(prefetch|update|write-back)/")

_CALLS = ("while", "call", "conditional")
_NOTHING = ("parameter", "constant", "after-all", "partition-id", "replica-id")


@dataclasses.dataclass(frozen=True)
class Held:
    """Around one operation, bytes by kind: what begins before it runs, and below zero what ends with it."""

    begin: tuple[tuple[str, int], ...]
    end: tuple[tuple[str, int], ...]


class Buffers:
    """The buffers of a module. ``roles`` maps an argument's number to its kind; other arguments are ``BATCH``."""

    def __init__(self, text: str, costs: Costs, roles: Mapping[int, str], cache: str = "") -> None:
        self.costs, self.cache, self.roles = costs, cache, roles
        self.sharing = Sharing(text, costs)
        self._of, self.ops = self.sharing.find, self.sharing.ops
        self._describe()

    # -- what is in them

    def _describe(self) -> None:
        """Find the size, the kind and the memory of each buffer."""
        self.nbytes: defaultdict[Key, int] = defaultdict(int)
        self.host: set[Key] = set()
        shapes = {leaf.shape for n, op in self.sharing.arguments.items() if self.roles.get(n) == PARAMETERS
                  for leaf in op.arrays}  # fmt: skip
        shapes |= {shape[1:] for shape in shapes if len(shape) > 2} | {(1, *s[1:]) for s in shapes if len(s) > 2}
        backward: set[Key] = set()
        window: set[Key] = set()
        gathered = {
            self._of((name, op.name, place)): op.leaves[place].shape
            for name in self.sharing.reached
            for op in self.ops(name)
            if _gathers(self.costs, op)
            for place in op.leaves  # of several arrays at once, a tuple; a start names its operands first
            if not op.opcode.endswith("-start") or place[0] == 1
        }
        shapes |= {*gathered.values()}  # and such gradients are to be scattered
        for name in self.sharing.reached:
            for op in self.ops(name):
                for place, array in op.leaves.items():
                    key = self._of((name, op.name, place))
                    if array.host:
                        self.host.add(key)
                    elif not (self.cache and self.cache in array.layout):
                        self.nbytes[key] = max(self.nbytes[key], array.nbytes)
                        if op.opcode not in (*_NOTHING, *_CALLS, "tuple", "get-tuple-element"):
                            if SCOPE.search(op.scope):
                                window.add(key)
                            elif "transpose(" in op.scope and array.shape in shapes and op.opcode != "copy":
                                backward.add(key)
                if copy := started(op):
                    window |= {self._of((name, op.name, result_place(op, ())))} if copy.loads else {
                        self._of((name, operand, ())) for operand in op.operands[:2]}  # fmt: skip
        self.kind = dict.fromkeys(self.nbytes, ACTIVATIONS)
        self.kind |= dict.fromkeys(window & self.nbytes.keys(), WINDOW)
        self.kind |= dict.fromkeys(gathered.keys() & self.nbytes.keys(), GATHERED)
        self.kind |= dict.fromkeys(backward & self.nbytes.keys(), GRADIENTS)
        for key, number in self.sharing.argument_of.items():
            self.kind[key] = self.roles.get(number, BATCH)
        for name in self.sharing.reached:  # a copy is what it is a copy of; rows of it are new, what it is stays
            for op in self.ops(name):
                for place, operand in [((), 0)] if op.opcode == "copy" else in_place(self.costs, op):
                    result, of = self._of((name, op.name, place)), self._of((name, op.operands[operand], ()))
                    if self.kind.get(result) == ACTIVATIONS and of in self.kind:
                        self.kind[result] = self.kind[of]

    def standing(self) -> dict[str, int]:
        """Bytes of the arguments in device memory, by kind: held throughout."""
        total: dict[str, int] = {}
        for key in self.sharing.argument_of:
            if key not in self.host:
                total[self.kind[key]] = total.get(self.kind[key], 0) + self.nbytes[key]
        return total

    # -- from when to when

    def held(self, name: str) -> list[Held]:
        """For each operation of a computation, in schedule order, the buffers that it begins and ends to hold."""
        ops, scope = self.ops(name), self.costs.scopes[name]
        # A called computation neither allocates nor frees its arguments and results.
        theirs = [*scope.parameters.values(), *([scope.root] if scope.root is not None and name != "ENTRY" else [])]
        outside = {self._of((name, op.name, place)) for op in theirs for place in op.leaves}
        begins: dict[Key, int] = {}
        ends: dict[Key, int] = {}
        for i, op in enumerate(ops):
            for key in self._defined(name, op):
                begins.setdefault(key, i)
                ends[key] = i
            for key in self._used(name, scope, op):
                if key in begins:
                    ends[key] = i
        if scope.root is not None:
            for place in scope.root.leaves:
                key = self._of((name, scope.root.name, place))
                if key in begins:  # what the program returns stays
                    ends[key] = len(ops) - (name != "ENTRY")
        self._moved_aside(name, begins, outside)
        begin: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        end: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        reused = self._reused(ops, name, begins, ends)
        for key, i in begins.items():
            nbytes = self.nbytes.get(key, 0)
            if (
                nbytes
                and i <= ends[key]
                and key not in outside
                and key not in self.host
                and key not in self.sharing.argument_of
            ):
                begin[i].append((self.kind[key], nbytes))
                # A result that overwrites an operand begins where the operand ends.
                (begin if key in reused else end)[ends[key]].append((self.kind[key], -nbytes))
        return [Held(tuple(begin[i]), tuple(end[i])) for i in range(len(ops))]

    def _moved_aside(self, name: str, begins: dict[Key, int], outside: set[Key]) -> None:
        """A copy of what a loop carries, or of a donated argument, that nothing else reads any more stays in its
        buffer, until that is written."""
        scope, written, read = self.costs.scopes[name], dict[Key, int](), dict[Key, int]()
        theirs = outside if name != "ENTRY" else self.sharing.argument_of
        for i, op in enumerate(scope.ops):
            for key in self._defined(name, op):
                if key in theirs:
                    written.setdefault(key, i)
            for key in self._used(name, scope, op):
                if key in theirs and key not in written:
                    read[key] = i
        for key, i in read.items():
            op = scope.ops[i]
            if key in written and op.opcode == "copy":
                copied = self._of((name, op.name, ()))
                begins[copied] = max(begins.get(copied, 0), written[key])

    def _defined(self, name: str, op: Op) -> Iterator[Key]:
        if op.opcode in ("parameter", "while", *NAMES) or op.opcode.endswith("-done"):
            return
        result = result_place(op, ())
        for place in op.leaves:
            if not op.opcode.endswith("-start") or place[: len(result)] == result:  # a start names its operands too
                yield self._of((name, op.name, place))

    def _used(self, name: str, scope: Scope, op: Op) -> Iterator[Key]:
        """The buffers that an operation reads; one that only names values reads none."""
        if op.opcode in NAMES:
            return
        operands = [op.operand] if op.opcode.endswith("-done") else op.operands
        for operand in operands:
            if operand in scope.named:
                for place in scope.named[operand].leaves:
                    yield self._of((name, operand, place))

    def _reused(self, ops: list[Op], name: str, begins: Mapping[Key, int], ends: Mapping[Key, int]) -> set[Key]:
        """Buffers that end where their rows are updated, or an elementwise operation makes something of their size."""
        found: set[Key] = set()
        for i, op in enumerate(ops):
            over = range(len(op.operands)) if op.opcode == "fusion" and "kind=kLoop" in op.rest else ()
            sizes = [self.nbytes[key] for key in self._defined(name, op) if begins.get(key) == i]
            for operand in {*over, *(number for _, number in in_place(self.costs, op))}:
                key = self._of((name, op.operands[operand], ()))
                if ends.get(key) == i and begins.get(key, i) < i and self.nbytes.get(key) in sizes:
                    sizes.remove(self.nbytes[key])
                    found.add(key)
        return found


def _gathers(costs: Costs, op: Op) -> bool:
    inside = [o.opcode for _, o in costs.inside(op)] if op.opcode == "async-start" else []
    return "all-gather" in (op.opcode.removesuffix("-start"), *inside)
