"""The passes through an unrolled network, as the parts of a step show them, with an update in pieces among them: which
values a pass goes on with, and what is made by when."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence, Set

import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Var, flops
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import CHEAP, ELEMENTWISE, REDUCE
from jax_offload._ir.propagate import Node
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Planned
from jax_offload._plan.rules import changes_only_shapes

LEAST_FRONT = 2**12  # elements: what a pass goes on with is at least as large


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A part of an update.

    Attributes:
      slice: it.
      how: its leaves move, where some do.
      token: results that are there once it is through.
    """

    slice: Slice
    how: Planned | None
    token: tuple[Var, ...]

    @property
    def loads(self) -> list[Var]:
        """The host leaves that it needs."""
        return self.slice.loads

    @property
    def planned(self) -> list[Planned]:
        """As its equation is printed."""
        return [] if self.how is None else [self.how]

    @property
    def operands(self) -> list[Var]:
        """Those of its equation."""
        return self.slice.inputs


def is_heavy(node: Node) -> bool:
    """Whether a node is part of a pass through the network: a matmul, a loop, a call."""
    if isinstance(node.payload, Equation):
        return is_heavy_equation(node.payload)
    return node.kept  # a scan with updates inside; an update is none


def is_heavy_equation(eqn: Equation) -> bool:
    """The same of an equation. A norm's scale that is taken out of a leaf is no part of it: a gate that holds that
    instead of an activation holds nothing (8 layers of 4096, clipped, 65536 tokens: 0.71 exposed, now 0.12)."""
    name = eqn.primitive.name
    return not (name in ELEMENTWISE or name in REDUCE or name in CHEAP or changes_only_shapes(name))


def is_large(v: Var) -> bool:
    return math.prod(v.aval.shape) >= LEAST_FRONT and jnp.issubdtype(v.aval.dtype, jnp.floating)


class Network:
    """Which values a pass goes on with."""

    def __init__(self, order: Sequence[Node], outputs: Sequence[Var]) -> None:
        self.order, self.outputs = order, outputs
        self.read = {*outputs}.union(*(node.reads for node in order))
        self.reach: dict[Var, int] = {}  # the last heavy node that needs a value, through cheap ones
        self.first: dict[Var, int] = {}
        self.readers = collections.defaultdict[Var, set[int]](set)
        for k in reversed(range(len(order))):
            node = order[k]
            if isinstance(node.payload, Piece):
                continue
            here = is_heavy(node)
            last = k if here else max((self.reach.get(v, -1) for v in node.makes), default=-1)
            first = k if here else min((self.first[v] for v in node.makes if v in self.first), default=None)
            for v in node.reads:
                self.readers[v].add(k)
                if last >= 0:
                    self.reach[v] = max(self.reach.get(v, -1), last)
                if first is not None:
                    self.first[v] = min(self.first.get(v, first), first)
        self.after: dict[Var, int] = {}  # the last heavy node of whose result a value is made
        for k, node in enumerate(order):
            last = k if is_heavy(node) else max((self.after.get(v, -1) for v in node.reads), default=-1)
            self.after.update(dict.fromkeys(node.makes, last))

    def produced_after(self, node: Node) -> int:
        """The last heavy node before which a piece cannot run; -1 where it can run first."""
        return max((self.after.get(v, -1) for v in node.reads), default=-1)

    def next_reader(self, node: Node) -> int | None:
        """The first heavy node that needs a result of a piece."""
        return min((self.first[v] for v in node.makes if v in self.first), default=None)

    def overwritten(self, node: Node, at: int) -> list[Var]:
        """Operands of the step that node ``at`` reads, and a piece too, or a cheap node that reads the piece's results,
        the sum of a parameter and its update."""
        sums = (self.order[k] for v in node.makes for k in self.readers[v] if not is_heavy(self.order[k]))
        read = dict.fromkeys(v for each in (node, *sums) for v in each.reads if is_large(v) and v not in self.after)
        return [v for v in read if at in self.readers[v]]

    def flops(self, begin: int, end: int) -> float:
        """Of the equations from ``begin`` to ``end``, without the latter."""
        eqns = (node.payload for node in self.order[begin:end])
        return sum(flops(eqn) for eqn in eqns if isinstance(eqn, Equation) and is_heavy_equation(eqn))

    def heavy_before(self, k: int) -> int | None:
        return next((m for m in reversed(range(k)) if is_heavy(self.order[m])), None)

    def heavy_after(self, k: int) -> int | None:
        return next((m for m in range(k + 1, len(self.order)) if is_heavy(self.order[m])), None)

    def put_off(self) -> Iterator[tuple[int, Var]]:
        """What XLA would put off, with its place: large results of heavy nodes that no heavy node needs (gradients that
        are returned, or reduced to a norm), and what else the step returns (a loss keeps what it is a mean of, a bias's
        gradient the cotangent that it is a sum of), but for what the former or an update make."""
        own = {v for node in self.order if not isinstance(node.payload, Equation | Piece) for v in node.reads}
        late = set[Var]()
        for k, node in enumerate(self.order):
            if is_heavy(node):  # what an update in one piece reads it takes in turn
                found = [v for v in node.makes if v in self.read and v not in self.reach and v not in own]
                late.update(v for v in found if is_large(v))
                yield from ((k, v) for v in found if v in late)
            elif not isinstance(node.payload, Equation) or not late.isdisjoint(node.reads):
                late.update(v for v in node.makes if is_large(v) and v not in self.reach)
        for v in self.outputs:
            if v not in late and v not in self.reach and (k := self.after.get(v, -1)) >= 0:
                yield k, v

    def stores(self) -> Iterator[tuple[int, Var]]:
        """What the passes send to the host, gradients that wait there, with its place."""
        defined = [v for node in self.order if isinstance(node.payload, Equation) for v in node.makes]
        return ((self.after[v], v) for v in defined if is_host_aval(v.aval) and self.after[v] >= 0)

    def produced_until(self, k: int) -> list[Var]:
        """What the heavy nodes up to ``k`` make."""
        return [v for node in self.order[: k + 1] if is_heavy(node) for v in node.makes]

    def front(self, k: int, done: Set[int]) -> Var | None:
        """What a pass goes on with after node ``k``: the last large value of it that is needed later, and by a node
        that is not ``done`` in front of the gate; else it would live until there for nothing (the last activation, of
        which a returned loss is made: jax 0.10 kept it through the backward pass, 9984 MiB instead of 9728). Of several
        made of the same heavy node the smallest: a gate keeps XLA from fusing what makes a value with what reads it (an
        MLP in bfloat16 with norms in float32, 65,536 tokens: 19651 MiB, now 19142, resident 19267)."""
        produced_after = None
        same: list[tuple[bool, Var]] = []
        end = self.heavy_after(k)
        for m in reversed(range(len(self.order) if end is None else end)):
            if produced_after is not None and m < produced_after:
                break
            for v in self.order[m].makes:
                if is_large(v) and self.after.get(v, -1) >= 0 and self.reach.get(v, -1) > k and self.readers[v] - done:
                    produced_after = self.after[v] if produced_after is None else produced_after
                    same += [(m > k, v)] if self.after[v] == produced_after else []
        return min(same, key=lambda it: (it[0], nbytes(it[1].aval)), default=(False, None))[1]


class Done:
    """The nodes that are in front of a gate; those in front of one are in front of the next."""

    def __init__(self, order: Sequence[Node]) -> None:
        self.order = order
        self.maker = {v: k for k, node in enumerate(order) for v in node.makes}
        self.nodes = set[int]()

    def through(self, values: Iterable[Var]) -> Set[int]:
        """Those that are once these values are made too."""
        todo = [*values]
        while todo:
            k = self.maker.get(todo.pop())
            if k is not None and k not in self.nodes:
                self.nodes.add(k)
                todo += self.order[k].reads
        return self.nodes
