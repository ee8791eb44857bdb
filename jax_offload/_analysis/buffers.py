"""The buffers of a scheduled program: the values that share each one, their kind, and the time for which it is held."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from jax_offload._analysis.hlo import FREE, RUNS, Computation, Module, Op, Place

Key = tuple[Op, Place]
Held = tuple[tuple[str, int], ...]  # bytes by kind, below zero where they are no longer held

_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
_NAMES = ("tuple", "get-tuple-element", *_FORWARD)  # operations that only name existing values

PARAMETERS, STATE, BATCH = "parameters", "state on the device", "other arguments"
GRADIENTS, ACTIVATIONS, WINDOW, GATHERED = "gradients", "activations", "window", "gathered from devices"
SCOPE = re.compile(r"jax_offload/(prefetch|update|write-back)/")


class Buffers:
    """The buffers of a module, each one key: the values that share it, their kind, and the time for which it is held.

    Args:
      module: the module.
      roles: argument's number -> its kind; other arguments are ``BATCH``.
      cache: how the layout of an array in a TPU's memory on the chip is marked.
    """

    def __init__(self, module: Module, roles: Mapping[int, str], cache: str = "") -> None:
        self._parent: dict[Key, Key] = {}
        for op in (op for at in module.run for op in at.ops):
            for a, b in _shared(op):
                self._join(a, b)
        for place, number in module.aliases.items():
            if number in module.arguments:
                self._join((module.entry.root, place), (module.arguments[number], ()))
        self.arguments = {self.find(op): op for op in module.arguments.values()}
        self.nbytes, self.host = defaultdict[Key, int](int), set[Key]()
        self._describe(module, roles, cache)

    # -- which values share a buffer

    def argument(self, op: Op, place: Place = ()) -> Op | None:
        """The argument of the program whose buffer holds a value."""
        return self.arguments.get(self.find(op, place))

    def find(self, op: Op, place: Place = ()) -> Key:
        key, way = (op, place), list[Key]()
        while (up := self._parent.get(key, key)) != key:
            way.append(key)
            key = up
        self._parent.update(dict.fromkeys(way, key))
        return key

    def _join(self, a: Key, b: Key) -> None:
        if (a := self.find(*a)) != (b := self.find(*b)):
            self._parent[a] = b

    # -- their contents

    def _describe(self, module: Module, roles: Mapping[int, str], cache: str) -> None:
        """Find the size, the kind and the memory of each buffer."""
        arrays = [op.array for n, op in module.arguments.items() if roles.get(n) == PARAMETERS]
        shapes = {array.shape for array in arrays if array}
        shapes |= {row for shape in shapes if len(shape) > 2 for row in (shape[1:], (1, *shape[1:]))}
        ops = [op for at in module.run for op in at.ops]
        gathers = {op for op in ops if any(x.base == "all-gather" for x in (op.inside if op.starts else (op,)))}
        shapes |= {array.shape for op in gathers for array in op.made.values()}  # such gradients will be scattered
        found = defaultdict[Key, set[str]](set)
        for op in ops:
            ours, backward = SCOPE.search(op.scope), "transpose(" in op.scope and op.opcode != "copy"
            for place, array in op.leaves.items():
                key = self.find(op, place)
                if array.host:
                    self.host.add(key)
                elif not (cache and cache in array.layout):
                    self.nbytes[key] = max(self.nbytes[key], array.nbytes)
                    if op in gathers and place in op.made:
                        found[key].add(GATHERED)
                    computes = op.opcode not in FREE or op.opcode == "bitcast"  # which gives a gradient its shape
                    if computes and (ours or (backward and array.shape in shapes)):
                        found[key].add(WINDOW if ours else GRADIENTS)
            if copy := op.copy:
                for key in [self.find(op, op.result)] if copy[0] else map(self.find, op.operands[:2]):
                    found[key].add(WINDOW)
        by_rank = (GRADIENTS, GATHERED, WINDOW)
        self.kind = {key: next((kind for kind in by_rank if kind in found[key]), ACTIVATIONS) for key in self.nbytes}
        self.kind |= {key: roles.get(op.number, BATCH) for key, op in self.arguments.items()}
        for op in ops:  # a copy has the kind of the original, and updated rows have the kind of the others
            for place, (operand, _) in op.written.items() if op.opcode != "copy" else [((), (0, 0))]:
                if operand is not None:
                    result, of = self.find(op, place), self.find(op.operands[operand])
                    if self.kind.get(result) == ACTIVATIONS and of in self.kind:
                        self.kind[result] = self.kind[of]

    def standing(self) -> dict[str, int]:
        """Bytes of the arguments in device memory, by kind: held throughout."""
        total = defaultdict[str, int](int)
        for key in self.arguments.keys() - self.host:
            total[self.kind[key]] += self.nbytes[key]
        return total

    # -- from when to when

    def held(self, at: Computation) -> list[tuple[Held, Held]]:
        """For each operation of a computation, in schedule order, what begins before it runs, and what ends with it."""
        entry = at is at.module.entry
        # A called computation neither allocates nor frees its arguments and results.
        theirs = [*at.parameters.values(), *([] if entry else [at.root])]
        outside = {self.find(op, place) for op in theirs for place in op.leaves}
        begins, ends = dict[Key, int](), dict[Key, int]()
        for i, op in enumerate(at.ops):
            for key in self._defined(op):
                begins.setdefault(key, i)
                ends[key] = i
            ends |= {key: i for key in self._used(op) if key in begins}
        for place in at.root.leaves:
            if (key := self.find(at.root, place)) in begins:  # a result of the program stays
                ends[key] = len(at.ops) - (not entry)
        self._moved_aside(at, begins, self.arguments.keys() if entry else outside)
        reused = self._reused(at, begins, ends)
        begin, end = (defaultdict[int, list[tuple[str, int]]](list) for _ in range(2))
        for key, i in begins.items():
            nbytes = self.nbytes.get(key, 0)
            if nbytes and i <= ends[key] and not (key in outside or key in self.host or key in self.arguments):
                begin[i].append((self.kind[key], nbytes))
                # A result that overwrites an operand begins where the operand ends.
                (begin if key in reused else end)[ends[key]].append((self.kind[key], -nbytes))
        return [(tuple(begin[i]), tuple(end[i])) for i in range(len(at.ops))]

    def _moved_aside(self, at: Computation, begins: dict[Key, int], theirs: Collection[Key]) -> None:
        """Keep the copy of a loop's carried value, or of a donated argument, in its buffer if nothing else reads it any
        more, until the buffer is written."""
        written, read = dict[Key, int](), dict[Key, Op]()
        for i, op in enumerate(at.ops):
            for key in self._defined(op):
                if key in theirs:
                    written.setdefault(key, i)
            read |= {key: op for key in self._used(op) if key in theirs and key not in written}
        for key, op in read.items():
            if key in written and op.opcode == "copy":
                copied = self.find(op)
                begins[copied] = max(begins.get(copied, 0), written[key])

    def _defined(self, op: Op) -> Iterator[Key]:
        if op.opcode not in ("parameter", "while", *_NAMES) and not op.opcode.endswith("-done"):
            yield from (self.find(op, place) for place in op.made)

    def _used(self, op: Op) -> Iterator[Key]:
        """The buffers that an operation reads; one that only names values reads none."""
        if op.opcode not in _NAMES:
            operands = op.operands[:1] if op.opcode.endswith("-done") else op.operands
            yield from (self.find(operand, place) for operand in operands for place in operand.leaves)

    def _reused(self, at: Computation, begins: Mapping[Key, int], ends: Mapping[Key, int]) -> set[Key]:
        """Buffers that end where their rows are updated, or an elementwise operation makes something of their size."""
        found: set[Key] = set()
        for i, op in enumerate(at.ops):
            over = range(len(op.operands)) if op.opcode == "fusion" and "kind=kLoop" in op.rest else ()
            sizes = [self.nbytes[key] for key in self._defined(op) if begins.get(key) == i]
            for operand in {*over, *(number for number, _ in op.written.values() if number is not None)}:
                key = self.find(op.operands[operand])
                if ends.get(key) == i and begins.get(key, i) < i and self.nbytes.get(key) in sizes:
                    sizes.remove(self.nbytes[key])
                    found.add(key)
        return found


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
        if op.opcode != "while" or k:  # a condition has a result of its own
            yield from (((callee.root, place), (op, place)) for place in op.leaves)
