"""The buffers of a scheduled program: which values share one, and from when to when those of loads are held."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from jax_offload._analysis.hlo import RUNS, Computation, Module, Op, Place

Key = tuple[Op, Place]

_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
_NAMES = ("tuple", "get-tuple-element", *_FORWARD)  # operations that only name existing values


class Buffers:
    """The buffers of a module, each one key: the values that share it.

    Attributes:
      arguments: the arguments of the program, by their buffers.
      loaded: the bytes of each buffer into which a copy from the host goes.
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
        self.loaded = defaultdict[Key, int](int)
        for op in ops:
            if (copy := op.copy) and copy[0] and (key := self.find(op, op.result)) not in self.arguments:
                self.loaded[key] = max(self.loaded[key], copy[1])

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
        if op.opcode != "while" or k:  # a condition has a result of its own
            yield from (((callee.root, place), (op, place)) for place in op.leaves)
