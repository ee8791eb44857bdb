"""The pieces of an update between the parts of an unrolled step: each where its gradient is made or its result is read.

Left to itself, XLA's scheduler puts updates off, and with them the matmuls that make their gradients; the activations
that these need then live for all layers at once. Nothing in an update can hold back the backward pass, but in a whole
step a gate can: the value with which the pass continues waits for the updates of two layers earlier, and the state of
the next layer is loaded once that value exists.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Equation, Var, located
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import CHECKPOINT, is_cheap, is_loop
from jax_offload._program.propagate import Node, topological
from jax_offload._schedule.in_scan import CannotHoist, InScan
from jax_offload._schedule.schedule import Gate, Planned

LEAST_GATES = 4  # with fewer there is nothing to hold back
AT_ONCE = (
    "most of its gradients are there only at once: a number needs all, such as their norm, or one call makes them; "
    "jax_offload.pipelined hides it"
)
FEW_PLACES = (
    f"its passes, forward and backward, have fewer than {LEAST_GATES} places where parts of an update could wait; "
    "scan over the layers"
)
OF_A_CHECKPOINT = (
    "a jax.checkpoint around several arrays makes the last gradients at once; scan over the layers, or checkpoint each"
)
OF_LARGE_LEAVES = "the last gradients have a large state; keep it on the device with select="
LEAST_LATE = 1 / 10  # the share of what moves for which it is worth saying that it runs behind the passes
LEAST_FRONT = 2**12  # elements: a value with which a pass continues has at least as many


def interleaved(nodes: Sequence[Node], outputs: Sequence[Var]) -> list[Node]:
    """Return the nodes with pieces in their places and gates between them.

    Args:
      nodes: parts of a step; the payloads of some are pieces.
      outputs: of the step.

    Raises:
      CannotHoist: there are not enough places.
    """
    pieces = [k for k, node in enumerate(nodes) if isinstance(node.payload, Planned)]
    outer = [k for k, node in enumerate(nodes) if not isinstance(node.payload, Planned)]
    heavy = [k for k in outer if is_heavy(nodes[k])]
    order = topological(nodes, [*heavy, *outer, *pieces])
    passes, number = Network(order, outputs), {id(node): k for k, node in enumerate(nodes)}
    ahead, behind = _Spots(), _Spots()
    made = {k: passes.produced_after(nodes[k]) for k in pieces}
    read = {k: passes.next_reader(nodes[k]) for k in pieces}
    many, few = Counter(made.values()), Counter(read.values())
    for k in pieces:
        piece, at, reader = nodes[k].payload, made[k], read[k]
        if reader is None or (at >= 0 and many[at] <= few[reader]):
            gradients = [v for v in piece.slice.inputs if passes.after.get(v) == at]
            behind.add(at, _Spot(k, piece.slice.loads, piece.token, gradients=gradients))
        else:  # its gradient is from the step before, or it needs a number made of many gradients
            held = [v for v in piece.slice.inputs if is_large(v) and not is_host_aval(v.aval)]
            ahead.add(reader, _Spot(k, piece.slice.loads, piece.token, held))
    updates = behind.updates
    if 2 * max(updates, default=0) > sum(updates):
        raise CannotHoist(AT_ONCE if sum(updates) >= LEAST_GATES else FEW_PLACES)
    for place, v in passes.put_off():
        behind.add(place, _Spot(None, [], [v]))
    for place, v in passes.stores():
        behind.add(place, _Spot(None, [], [v], stored=True))

    all_nodes = list(nodes)
    last = max((place for place, node in enumerate(order) if is_heavy(node)), default=-1)
    for k in _late(nodes, pieces, [k for k in pieces if 0 <= made[k] == last and read[k] is None]):
        why = _why_exposed(order[last].payload)
        all_nodes[k] = dataclasses.replace(nodes[k], payload=dataclasses.replace(nodes[k].payload, exposed=why))
    gates: dict[tuple[bool, int], int] = {}
    for spots, is_ahead in (ahead, True), (behind, False):
        for at, gate in spots.gates(passes, is_ahead).items():
            gates[is_ahead, at] = len(all_nodes)
            all_nodes.append(Node(gate, [*gate.held, *gate.waits_for], []))
    if len(gates) < LEAST_GATES:
        raise CannotHoist(FEW_PLACES)
    sequence = behind.pieces(-1)
    for place, node in enumerate(order):
        if is_heavy(node):
            # a piece reads its gradient behind the gate: ahead of it XLA would put off the gradient and its operands
            before, after = ([gates[key] for key in [(side, place)] if key in gates] for side in (True, False))
            sequence += [*before, *ahead.pieces(place), number[id(node)], *after, *behind.pieces(place)]
    return topological(all_nodes, [*sequence, *outer, *pieces])


def _late(nodes: Sequence[Node], pieces: Sequence[int], last: Sequence[int]) -> Sequence[int]:
    """The pieces behind the last part of a pass, if they are more than what a usual step leaves there, one piece."""
    sizes = {k: nodes[k].payload.slice.loaded_bytes for k in pieces if nodes[k].payload.slice.loads}
    of_last = sum(sizes.get(k, 0) for k in last)
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0
    return last if of_last > max(LEAST_LATE * sum(sizes.values()), usual) else ()


def _why_exposed(last: Any) -> str:
    """Why nothing hides the state of the gradients that the last part of a pass makes."""
    if not isinstance(last, Equation):
        return OF_LARGE_LEAVES
    return located(OF_A_CHECKPOINT if last.primitive.name in CHECKPOINT else OF_LARGE_LEAVES, last)


def in_turn(order: Sequence[Node]) -> list[Node]:
    """Return ``order`` with a gate before every loop that does not need the loop before it.

    XLA's scheduler is free to run first the loop that was traced last, and the operands of both loops are then alive at
    once.
    """
    found, before = list[Node](), None
    read = {v for node in order for v in node.reads}
    needs: dict[Var, set[int]] = {}  # the loops, by identity, that a value is made of
    for node in order:
        loops = set[int]().union(*(needs.get(v, ()) for v in node.reads))
        if _is_loop(node):
            if before is not None and id(before) not in loops:
                # it begins when all of its operands exist: its smallest operand waits for the smallest result
                held, done = _smallest(node.reads), _smallest([v for v in before.makes if v in read])
                found += [Node(Gate((*held,), (*done,)), [*held, *done], [])] if held and done else []
            before = node
            loops.add(id(node))
        needs.update(dict.fromkeys(node.makes, loops))
        found.append(node)
    return found


def gradients_in_turn(order: Sequence[Node], outputs: Sequence[Var]) -> list[Node]:
    """``order`` with a gate behind each gradient: the cotangent that made it goes on once the gradient exists."""
    found, passes = list[Node](), Network(order, outputs)
    for place, node in enumerate(order):
        found.append(node)
        made = [v for v in node.makes if v in passes.read and v not in passes.reach and is_large(v)]
        held = [v for v in node.reads if passes.reach[v] > place and is_large(v)] if is_heavy(node) else []
        if made and held:
            found.append(Node(Gate((*held,), (*made,)), [*held, *made], []))
    return found


def _smallest(of: Sequence[Var]) -> list[Var]:
    return sorted((v for v in of if not is_host_aval(v.aval)), key=lambda v: nbytes(v.aval))[:1]


def _is_loop(node: Node) -> bool:
    return isinstance(node.payload, InScan) or (isinstance(node.payload, Equation) and is_loop(node.payload))


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A piece, or a gradient that is put off.

    Attributes:
      piece: its number.
      loads: its host leaves.
      tokens: the results that exist once the piece has run.
      stored: whether it is only stored, for the next step.
      held: its operands on the device: ahead of a pass XLA would update as soon as it can, and the loads of the piece
        would hide behind nothing.
      gradients: its operands from the node after which it runs.
    """

    piece: int | None
    loads: Sequence[Var]
    tokens: Sequence[Var]
    held: Sequence[Var] = ()
    gradients: Sequence[Var] = ()
    stored: bool = False

    @property
    def moves(self) -> bool:
        return self.stored or bool(self.loads)

    @property
    def nbytes(self) -> int:
        """The bytes that move in one direction."""
        return sum(nbytes(v.aval) for v in (self.tokens if self.stored else self.loads))


class _Spots:
    """The pieces at each heavy node, the leaves that they load, and the tokens that show that they have run."""

    def __init__(self) -> None:
        self.at: dict[int, list[_Spot]] = {}

    def add(self, at: int, spot: _Spot) -> None:
        self.at.setdefault(at, []).append(spot)

    def pieces(self, at: int) -> list[int]:
        return [spot.piece for spot in self.at.get(at, []) if spot.piece is not None]

    def _spots(self, groups: Sequence[Sequence[int]]) -> list[_Spot]:
        return [spot for group in groups for at in group for spot in self.at[at]]

    @property
    def updates(self) -> list[int]:
        """The number of pieces at each node that have something large to update."""
        return [
            sum(bool(spot.loads) or any(map(is_large, spot.tokens)) for spot in spots) for spots in self.at.values()
        ]

    def gates(self, passes: Network, ahead: bool) -> dict[int, Gate]:
        """The gate at every spot: the next spot's leaves wait for the value with which the pass continues, and both
        wait for the previous spot.

        Only spots that move something count, in groups: biases that stay are updated between the matrices of
        their layers, and would leave a store only the time before its next load.
        """
        places = sorted(at for at in self.at if at >= 0)
        groups = self._groups([at for at in places if any(spot.moves for spot in self.at[at])])
        number, found = {group[0]: g for g, group in enumerate(groups)}, dict[int, Gate]()
        for at in places:
            g, here = number.get(at), self.at[at]
            before, after = ([], []) if g is None else map(self._spots, (groups[g - 1 : g], groups[g + 1 : g + 2]))
            loads = [v for spot in after for v in spot.loads]
            # spots that move nothing finish at once; a store has until the next group
            done = [spot for spot in before if spot.moves] + [spot for spot in here if not (ahead or spot.moves)]
            tokens = [v for spot in done for v in spot.tokens]
            held = [v for spot in (self._spots([groups[g]]) if g is not None and ahead else here) for v in spot.held]
            if (front := passes.front(at - 1 if ahead else at)) is not None:
                held.append(front)
            elif sum(spot.nbytes for spot in here) <= sum(spot.nbytes for spot in before):
                held = [v for spot in here for v in spot.gradients]
            if held and (loads or tokens):
                both = dict.fromkeys([*loads, *held])
                found[at] = Gate(tuple(both), tuple(v for v in dict.fromkeys(tokens) if v not in both))
        return found

    def _groups(self, moving: Sequence[int]) -> list[list[int]]:
        """Group the spots whose leaves move together: small ones, up to the size of a large one.

        One by one they would leave the link idle during attention.
        """
        sizes = [sum(spot.nbytes for spot in self.at[at]) for at in moving]
        limit = min(sorted(sizes)[-LEAST_GATES:], default=0) * 5 // 4
        groups, room = list[list[int]](), 0
        for at, size in zip(moving, sizes, strict=True):
            if groups and size <= room:
                groups[-1].append(at)
                room -= size
            else:
                groups.append([at])
                room = limit - size
        return groups


# ---- the passes through the network: the values with which they continue, and the values made by a node


def is_heavy(node: Node) -> bool:
    """Whether a node is part of a pass through the network, as a matmul, a loop or a call is."""
    if isinstance(node.payload, Equation):
        return is_heavy_equation(node.payload)
    return node.kept  # a scan with updates inside; an update is none


def is_heavy_equation(eqn: Equation) -> bool:
    """Whether an equation is part of a pass through the network.

    A norm's scale that is taken out of a leaf is not: a gate that held it instead of an activation would hold nothing.
    """
    return not is_cheap(eqn)


def is_large(v: Var) -> bool:
    return math.prod(v.aval.shape) >= LEAST_FRONT and jnp.issubdtype(v.aval.dtype, jnp.floating)


class Network:
    """The passes through the network: which parts need a value, and with which value a pass continues."""

    def __init__(self, order: Sequence[Node], outputs: Sequence[Var]) -> None:
        self.order, self.outputs = order, outputs
        self.read = {*outputs}.union(*(node.reads for node in order))
        self.reach: dict[Var, int] = {}  # the last heavy node that needs a value, through cheap ones
        self.first: dict[Var, int] = {}
        for k in reversed(range(len(order))):
            node = order[k]
            if isinstance(node.payload, Planned):
                continue
            here = is_heavy(node)
            last = k if here else max((self.reach.get(v, -1) for v in node.makes), default=-1)
            first = k if here else min((self.first[v] for v in node.makes if v in self.first), default=None)
            for v in node.reads:
                if last >= 0:
                    self.reach[v] = max(self.reach.get(v, -1), last)
                if first is not None:
                    self.first[v] = min(self.first.get(v, first), first)
        self.after: dict[Var, int] = {}  # the last heavy node of whose result a value is made
        for k, node in enumerate(order):
            last = k if is_heavy(node) else max((self.after.get(v, -1) for v in node.reads), default=-1)
            self.after.update(dict.fromkeys(node.makes, last))
        self.fronts = [  # the values with which a pass could continue, and the nodes that make them
            (k, v)
            for k, node in enumerate(order)
            for v in (() if isinstance(node.payload, Planned) else reversed(node.makes))
            if is_large(v) and self.after[v] >= 0 and v in self.reach
        ]

    def produced_after(self, node: Node) -> int:
        """The last heavy node that must run before a piece; -1 if the piece can run first."""
        return max((self.after.get(v, -1) for v in node.reads), default=-1)

    def next_reader(self, node: Node) -> int | None:
        """The first heavy node that needs a result of a piece; ``None`` if no heavy node does."""
        return min((self.first[v] for v in node.makes if v in self.first), default=None)

    def put_off(self) -> Iterator[tuple[int, Var]]:
        """Yield the values that XLA would put off, with their places.

        These are large results of heavy nodes that no heavy node needs, such as gradients that are returned or reduced
        to a norm, and the step's other results, unless they are made of the former or by an update. A loss keeps the
        values alive that it averages, and a bias's gradient the cotangent that it sums.
        """
        own = {v for node in self.order if not isinstance(node.payload, Equation | Planned) for v in node.reads}
        late = set[Var]()
        for k, node in enumerate(self.order):
            if is_heavy(node):  # an update in one piece takes the gradients that it reads in turn
                found = [v for v in node.makes if v in self.read and v not in self.reach and v not in own]
                late.update(v for v in found if is_large(v))
                yield from ((k, v) for v in found if v in late)
            elif not isinstance(node.payload, Equation) or not late.isdisjoint(node.reads):
                late.update(v for v in node.makes if is_large(v) and v not in self.reach)
        for v in self.outputs:
            if v not in late and v not in self.reach and (k := self.after.get(v, -1)) >= 0:
                yield k, v

    def stores(self) -> Iterator[tuple[int, Var]]:
        """The values that the passes send to the host, gradients that wait there, with their places."""
        defined = [v for node in self.order if isinstance(node.payload, Equation) for v in node.makes]
        return ((self.after[v], v) for v in defined if is_host_aval(v.aval) and v in self.read and self.after[v] >= 0)

    def front(self, k: int) -> Var | None:
        """The value with which a pass continues after node ``k``: its last large value that a later node needs."""
        end = next((m for m in range(k + 1, len(self.order)) if is_heavy(self.order[m])), len(self.order))
        n = bisect.bisect_left(self.fronts, end, key=lambda it: it[0])
        return next((v for _, v in reversed(self.fronts[:n]) if self.reach[v] > k), None)
