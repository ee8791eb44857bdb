"""Which values of a scheduled program share a buffer: what a loop carries, what is written over its operand."""

from __future__ import annotations

import re

from jax_offload._analysis.costs import Costs, Scope
from jax_offload._analysis.hlo import Op, aliases

Key = tuple[str, str, tuple[int, ...]]  # computation, operation, place in its type
_FORWARD = ("bitcast", "opt-barrier", "add-dependency")
# What only names values that are there.
NAMES = ("tuple", "get-tuple-element", *_FORWARD)


class Sharing:
    """Of a module's text: the values of one buffer have one ``find``.

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
        """The argument of the program in whose buffer a value is."""
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
                # on the device XLA does so only where the operand ends there
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
