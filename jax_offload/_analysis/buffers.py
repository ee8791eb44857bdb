"""What is in the buffers of a scheduled program, and from when to when each is held.

XLA's own assignment of buffers is not to be had from a program compiled for a chip that is not there, so it is worked
out from the text: what a loop carries, and what takes an argument's buffer, shares one; a value is held from the
operation that makes it to the last that uses it. XLA packs these into one allocation, whose size it does tell.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jax_offload._analysis.costs import Costs, Scope
from jax_offload._analysis.hlo import Op, started
from jax_offload._analysis.sharing import NAMES, Key, Sharing, in_place, result_place

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
    """Of a module's text. ``roles`` has the kind of an argument by its number; the others are ``BATCH``."""

    def __init__(self, text: str, costs: Costs, roles: Mapping[int, str], cache: str = "") -> None:
        self.costs, self.cache, self.roles = costs, cache, roles
        self.sharing = Sharing(text, costs)
        self._of, self.ops = self.sharing.find, self.sharing.ops
        self._describe()

    # -- what is in them

    def _describe(self) -> None:
        """Size, kind and whether it is in host memory, of each buffer."""
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
        """Of each operation of a computation, in the order of the schedule, what it begins and ends to hold."""
        ops, scope = self.ops(name), self.costs.scopes[name]
        # what is called neither begins nor ends what it is handed and what it returns
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
                # what is written over an operand begins where that ends
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
        """What an operation reads; one that only names values does not."""
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
