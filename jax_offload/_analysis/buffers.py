"""The buffers of a scheduled program: the values that share each one, their kind, and the time for which it is held."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jax_offload._analysis.hlo import Module, Op, Scope, started

Key = tuple[str, str, tuple[int, ...]]  # computation, operation, place in its type
_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
# Operations that only name existing values.
NAMES = ("tuple", "get-tuple-element", *_FORWARD)

PARAMETERS, STATE, BATCH = "parameters", "state on the device", "other arguments"
GRADIENTS, ACTIVATIONS, WINDOW, GATHERED = "gradients", "activations", "window", "gathered from devices"
KINDS = (PARAMETERS, STATE, BATCH, GRADIENTS, ACTIVATIONS, WINDOW, GATHERED)
SCOPE = re.compile(r"jax_offload/(prefetch|update|write-back)/")

_CALLS = ("while", "call", "conditional")
_NOTHING = ("parameter", "constant", "after-all", "partition-id", "replica-id")


Held = tuple[tuple[str, int], ...]  # bytes by kind, below zero where they are no longer held


class Buffers:
    """The buffers of a module, each one key: the values that share it, their kind, and the time for which it is held.

    Args:
      module: the module.
      roles: argument's number -> its kind; other arguments are ``BATCH``.
      cache: how the layout of an array in a TPU's memory on the chip is marked.

    Attributes:
      reached: the computations that run, in the order of the text.
      argument_of: the numbers of the program's arguments, by buffer.
    """

    def __init__(self, module: Module, roles: Mapping[int, str], cache: str = "") -> None:
        self.module, self.roles, self.cache = module, roles, cache
        self._parent: dict[Key, Key] = {}
        self.reached: list[str] = []
        self._reach("ENTRY")
        root = module.scopes["ENTRY"].root
        for place, number in module.aliases.items():
            if root is not None and number in module.arguments:
                self._join(("ENTRY", root.name, place), ("ENTRY", module.arguments[number].name, ()))
        self.argument_of = {self.find(("ENTRY", op.name, ())): number for number, op in module.arguments.items()}
        self._describe()

    # -- which values share a buffer

    def ops(self, name: str) -> list[Op]:
        return self.module.scopes[name].ops

    def argument(self, name: str, value: str, place: tuple[int, ...] = ()) -> Op | None:
        """The argument of the program whose buffer holds a value."""
        number = self.argument_of.get(self.find((name, value, place)))
        return None if number is None else self.module.arguments[number]

    def find(self, key: Key) -> Key:
        way = []
        while (up := self._parent.get(key, key)) != key:
            way.append(key)
            key = up
        for each in way:
            self._parent[each] = key
        return key

    def _join(self, a: Key, b: Key) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[a] = b

    def _reach(self, name: str) -> None:
        if name in self.reached or name not in self.module.scopes:
            return
        self.reached.append(name)
        scope = self.module.scopes[name]
        for op in scope.ops:
            self._share(name, scope, op)
        for op in scope.ops:
            for callee in op.callees:
                self._reach(callee)

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
            for place in own:
                self._join(own[place], (name, op.operand, place))
                for callee in op.callees:
                    for parameter in self.module.scopes[callee].parameters.values():
                        self._join((callee, parameter.name, place), own[place])
                    root = self.module.scopes[callee].root
                    if root is not None and callee == op.called("body"):
                        self._join((callee, root.name, place), own[place])
        elif op.opcode in ("call", "conditional"):
            for k, callee in enumerate(op.callees):
                inner = self.module.scopes[callee]
                for place in own:
                    if inner.root is not None:
                        self._join((callee, inner.root.name, place), own[place])
                given = op.operands if op.opcode == "call" else op.operands[k + 1 : k + 2]
                for number, operand in enumerate(given):
                    if number in inner.parameters:
                        parameter = inner.parameters[number]
                        for place in parameter.leaves:
                            self._join((callee, parameter.name, place), (name, operand, place))
        else:
            for place, operand in in_place(self.module, op):
                # On the device XLA writes over an operand only if nothing reads it later.
                if operand < len(op.operands) and place in op.leaves:
                    of = op.operands[operand]
                    read_once = len(scope.uses[of]) == 1 and scope.named[of].opcode == "get-tuple-element"
                    if op.leaves[place].host or read_once:
                        self._join((name, op.name, place), (name, of, ()))

    # -- their contents

    def _describe(self) -> None:
        """Find the size, the kind and the memory of each buffer."""
        self.nbytes: defaultdict[Key, int] = defaultdict(int)
        self.host: set[Key] = set()
        shapes = {leaf.shape for n, op in self.module.arguments.items() if self.roles.get(n) == PARAMETERS
                  for leaf in op.arrays}  # fmt: skip
        shapes |= {shape[1:] for shape in shapes if len(shape) > 2} | {(1, *s[1:]) for s in shapes if len(s) > 2}
        backward: set[Key] = set()
        window: set[Key] = set()
        gathered = {
            self.find((name, op.name, place)): op.leaves[place].shape
            for name in self.reached
            for op in self.ops(name)
            if _gathers(self.module, op)
            for place in op.leaves  # of several arrays at once, a tuple; a start names its operands first
            if not op.opcode.endswith("-start") or place[0] == 1
        }
        shapes |= {*gathered.values()}  # and such gradients are to be scattered
        for name in self.reached:
            for op in self.ops(name):
                for place, array in op.leaves.items():
                    key = self.find((name, op.name, place))
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
                    window |= {self.find((name, op.name, result_place(op, ())))} if copy.loads else {
                        self.find((name, operand, ())) for operand in op.operands[:2]}  # fmt: skip
        self.kind = dict.fromkeys(self.nbytes, ACTIVATIONS)
        self.kind |= dict.fromkeys(window & self.nbytes.keys(), WINDOW)
        self.kind |= dict.fromkeys(gathered.keys() & self.nbytes.keys(), GATHERED)
        self.kind |= dict.fromkeys(backward & self.nbytes.keys(), GRADIENTS)
        for key, number in self.argument_of.items():
            self.kind[key] = self.roles.get(number, BATCH)
        for name in self.reached:  # a copy is what it is a copy of; rows of it are new, what it is stays
            for op in self.ops(name):
                for place, operand in [((), 0)] if op.opcode == "copy" else in_place(self.module, op):
                    result, of = self.find((name, op.name, place)), self.find((name, op.operands[operand], ()))
                    if self.kind.get(result) == ACTIVATIONS and of in self.kind:
                        self.kind[result] = self.kind[of]

    def standing(self) -> dict[str, int]:
        """Bytes of the arguments in device memory, by kind: held throughout."""
        total: dict[str, int] = {}
        for key in self.argument_of:
            if key not in self.host:
                total[self.kind[key]] = total.get(self.kind[key], 0) + self.nbytes[key]
        return total

    # -- from when to when

    def held(self, name: str) -> list[tuple[Held, Held]]:
        """For each operation of a computation, in schedule order, what begins before it runs, and what ends with it."""
        ops, scope = self.ops(name), self.module.scopes[name]
        # A called computation neither allocates nor frees its arguments and results.
        theirs = [*scope.parameters.values(), *([scope.root] if scope.root is not None and name != "ENTRY" else [])]
        outside = {self.find((name, op.name, place)) for op in theirs for place in op.leaves}
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
                key = self.find((name, scope.root.name, place))
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
                and key not in self.argument_of
            ):
                begin[i].append((self.kind[key], nbytes))
                # A result that overwrites an operand begins where the operand ends.
                (begin if key in reused else end)[ends[key]].append((self.kind[key], -nbytes))
        return [(tuple(begin[i]), tuple(end[i])) for i in range(len(ops))]

    def _moved_aside(self, name: str, begins: dict[Key, int], outside: set[Key]) -> None:
        """Keep the copy of a loop's carried value, or of a donated argument, in its buffer if nothing else reads it any
        more, until the buffer is written."""
        scope, written, read = self.module.scopes[name], dict[Key, int](), dict[Key, int]()
        theirs = outside if name != "ENTRY" else self.argument_of
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
                copied = self.find((name, op.name, ()))
                begins[copied] = max(begins.get(copied, 0), written[key])

    def _defined(self, name: str, op: Op) -> Iterator[Key]:
        if op.opcode in ("parameter", "while", *NAMES) or op.opcode.endswith("-done"):
            return
        result = result_place(op, ())
        for place in op.leaves:
            if not op.opcode.endswith("-start") or place[: len(result)] == result:  # a start names its operands too
                yield self.find((name, op.name, place))

    def _used(self, name: str, scope: Scope, op: Op) -> Iterator[Key]:
        """The buffers that an operation reads; one that only names values reads none."""
        if op.opcode in NAMES:
            return
        operands = [op.operand] if op.opcode.endswith("-done") else op.operands
        for operand in operands:
            if operand in scope.named:
                for place in scope.named[operand].leaves:
                    yield self.find((name, operand, place))

    def _reused(self, ops: list[Op], name: str, begins: Mapping[Key, int], ends: Mapping[Key, int]) -> set[Key]:
        """Buffers that end where their rows are updated, or an elementwise operation makes something of their size."""
        found: set[Key] = set()
        for i, op in enumerate(ops):
            over = range(len(op.operands)) if op.opcode == "fusion" and "kind=kLoop" in op.rest else ()
            sizes = [self.nbytes[key] for key in self._defined(name, op) if begins.get(key) == i]
            for operand in {*over, *(number for _, number in in_place(self.module, op))}:
                key = self.find((name, op.operands[operand], ()))
                if ends.get(key) == i and begins.get(key, i) < i and self.nbytes.get(key) in sizes:
                    sizes.remove(self.nbytes[key])
                    found.add(key)
        return found


def _gathers(module: Module, op: Op) -> bool:
    inside = [o.opcode for _, o in module.inside(op)] if op.opcode == "async-start" else []
    return "all-gather" in (op.opcode.removesuffix("-start"), *inside)


def result_place(start: Op, place: tuple[int, ...]) -> tuple[int, ...]:
    """Where in the type of a start its result is: (result, operand, ...) of a copy, else (operands, result, ...)."""
    if start.opcode == "copy-start":
        return (0, *place)
    return (1, *place) if (1, *place) in start.leaves or any(p[:1] == (1,) for p in start.leaves) else place


def in_place(module: Module, op: Op) -> list[tuple[tuple[int, ...], int]]:
    """(place of a result, number of the operand in whose buffer it is written)."""
    if op.opcode == "custom-call":
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", op.rest)
        pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}\)", found[1]) if found else []
        return [(tuple(int(d) for d in place.split(",") if d.strip()), int(n)) for place, n in pairs]
    first = (1,) if op.opcode.endswith("-start") else ()
    if op.opcode.removesuffix("-start") == "dynamic-update-slice":
        return [(first, 0)]
    body = module.body(op)
    if body is None or body.root is None or "fusion" not in op.opcode:
        return []
    names = body.root.operands if body.root.opcode == "tuple" else [body.root.name]
    found = [(k, _updated(module, body, body.source(name))) for k, name in enumerate(names)]
    places = [((*first, k) if body.root.opcode == "tuple" else first, number) for k, number in found]
    return [(place, number) for place, number in places if number is not None]


def _updated(module: Module, body: Scope, op: Op | None) -> int | None:
    """The number of the parameter of a fusion that ``op`` updates in place."""
    if op is None:
        return None
    if op.opcode == "parameter":
        return op.number
    if op.opcode == "dynamic-update-slice":
        target: Op | None = body.source(op.operand)
    else:
        inner = in_place(module, op) if op.opcode == "fusion" else []
        target = body.source(op.operands[inner[0][1]]) if inner and inner[0][0] == () else None
    return target.number if target is not None and target.opcode == "parameter" else None
