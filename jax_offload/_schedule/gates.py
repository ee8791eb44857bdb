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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A piece at a heavy node, or a value there that XLA would put off.

    Attributes:
      tokens: the results that exist once the piece has run, or the value.
      piece: the number of the piece.
      loads, stores: the leaves that it loads; the values that it only stores, for the next step.
      held: its operands on the device: ahead of a pass XLA would update as soon as it can, and the loads of the piece
        would hide behind nothing.
      gradients: its operands from the node after which it runs.
    """

    tokens: Sequence[Var]
    piece: int | None = None
    loads: Sequence[Var] = ()
    stores: Sequence[Var] = ()
    held: Sequence[Var] = ()
    gradients: Sequence[Var] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that move in one direction."""
        return sum(nbytes(v.aval) for v in (*self.loads, *self.stores))


Spots = Mapping[int, list[_Spot]]  # keyed by the place of the heavy node that they run before or after


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
    order = topological(nodes, [*(k for k in outer if is_heavy(nodes[k])), *outer, *pieces])
    passes, number, nodes = Network(order, outputs), {id(node): k for k, node in enumerate(nodes)}, list(nodes)
    ahead, behind = defaultdict[int, list[_Spot]](list), defaultdict[int, list[_Spot]](list)
    made = {k: max((passes.after.get(v, -1) for v in nodes[k].reads), default=-1) for k in pieces}
    readers = {k: [passes.readers[v][0] for v in nodes[k].makes if v in passes.readers] for k in pieces}
    read = {k: min(at) for k, at in readers.items() if at}
    many, few = Counter(made.values()), Counter(read.values())
    for k in pieces:
        piece, at = nodes[k].payload, made[k]
        if k not in read or (at >= 0 and many[at] <= few[read[k]]):
            gradients = [v for v in piece.slice.inputs if passes.after.get(v) == at]
            behind[at].append(_Spot(piece.token, k, piece.slice.loads, gradients=gradients))
        else:  # its gradient is from the step before, or it needs a number made of many gradients
            held = [v for v in piece.slice.inputs if is_large(v) and not is_host_aval(v.aval)]
            ahead[read[k]].append(_Spot(piece.token, k, piece.slice.loads, held=held))
    # at each node, the pieces that have something large to update
    updates = [sum(bool(s.loads) or any(map(is_large, s.tokens)) for s in spots) for spots in behind.values()]
    if 2 * max(updates, default=0) > sum(updates):
        raise CannotHoist(AT_ONCE if sum(updates) >= LEAST_GATES else FEW_PLACES)
    for place, v in passes.put_off():
        behind[place].append(_Spot([v]))
    for place, v in passes.stores():
        behind[place].append(_Spot([v], stores=[v]))

    heavy = passes.heavy
    last = [k for k in pieces if heavy and made[k] == heavy[-1] and k not in read]
    sizes = sorted(n for k in pieces if (n := nodes[k].payload.slice.loaded_bytes))
    # a usual step leaves one piece behind the last part of a pass
    usual = max(LEAST_LATE * sum(sizes), sizes[len(sizes) // 2] if sizes else 0)
    if sum(nodes[k].payload.slice.loaded_bytes for k in last) > usual:
        why = _why_exposed(order[heavy[-1]].payload)
        for k in last:
            nodes[k] = dataclasses.replace(nodes[k], payload=dataclasses.replace(nodes[k].payload, exposed=why))
    gates: dict[tuple[bool, int], int] = {}
    for spots, is_ahead in (ahead, True), (behind, False):
        for at, gate in _gates(spots, passes, is_ahead):
            gates[is_ahead, at] = len(nodes)
            nodes.append(Node(gate, [*gate.held, *gate.waits_for], []))
    if len(gates) < LEAST_GATES:
        raise CannotHoist(FEW_PLACES)

    def behind_gate(spots: Spots, is_ahead: bool, place: int) -> list[int]:
        """The numbers of a gate and of the pieces behind it: ahead of it XLA would put off their gradients."""
        gate = [gates[is_ahead, place]] if (is_ahead, place) in gates else []
        return gate + [spot.piece for spot in spots.get(place, ()) if spot.piece is not None]

    sequence = behind_gate(behind, False, -1)
    for place in heavy:
        sequence += behind_gate(ahead, True, place)
        sequence += [number[id(order[place])], *behind_gate(behind, False, place)]
    return topological(nodes, [*sequence, *outer, *pieces])


def _why_exposed(last: Any) -> str:
    """Why nothing hides the state of the gradients that the last part of a pass makes."""
    if not isinstance(last, Equation):
        return OF_LARGE_LEAVES
    return located(OF_A_CHECKPOINT if last.primitive.name in CHECKPOINT else OF_LARGE_LEAVES, last)


def _gates(spots: Spots, passes: Network, ahead: bool) -> Iterator[tuple[int, Gate]]:
    """The gate at every place: the next group's leaves wait for the value with which the pass continues, and both wait
    for the previous group.

    Only spots that move something count, in groups: biases that stay are updated between the matrices of their layers,
    and would leave a store only the time before its next load.
    """
    places = sorted(at for at in spots if at >= 0)
    groups = _groups({at: n for at in places if (n := sum(spot.nbytes for spot in spots[at]))})
    members = [[spot for at in group for spot in spots[at]] for group in groups]
    number = {group[0]: g for g, group in enumerate(groups)}
    for at in places:
        g, here = number.get(at, len(groups)), spots[at]
        before, own, after = (members[g + k : g + k + 1] if at in number and g + k >= 0 else [] for k in (-1, 0, 1))
        loads = [v for group in after for spot in group for v in spot.loads]
        # spots that move nothing finish at once; a store has until the next group
        done = [spot for group in before for spot in group if spot.nbytes]
        done += [spot for spot in here if not (ahead or spot.nbytes)]
        tokens = [v for spot in done for v in spot.tokens]
        held = [v for spot in (own[0] if own and ahead else here) for v in spot.held]
        if (front := passes.front(at - 1 if ahead else at)) is not None:
            held.append(front)
        elif sum(spot.nbytes for spot in here) <= sum(spot.nbytes for group in before for spot in group):
            held = [v for spot in here for v in spot.gradients]
        if held and (loads or tokens):
            both = dict.fromkeys([*loads, *held])
            yield at, Gate(tuple(both), tuple(v for v in dict.fromkeys(tokens) if v not in both))


def _groups(sizes: Mapping[int, int]) -> list[list[int]]:
    """Group the places whose leaves move together: small ones, up to the size of a large one.

    One by one they would leave the link idle during attention.
    """
    limit = min(sorted(sizes.values())[-LEAST_GATES:], default=0) * 5 // 4
    groups, room = list[list[int]](), 0
    for at, size in sizes.items():
        if groups and size <= room:
            groups[-1].append(at)
            room -= size
        else:
            groups.append([at])
            room = limit - size
    return groups


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
        if isinstance(node.payload, InScan) or (isinstance(node.payload, Equation) and is_loop(node.payload)):
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
        made = [v for v in node.makes if v in passes.read and v not in passes.readers and is_large(v)]
        held = [v for v in node.reads if passes.readers[v][1] > place and is_large(v)] if is_heavy(node) else []
        if made and held:
            found.append(Node(Gate((*held,), (*made,)), [*held, *made], []))
    return found


def _smallest(of: Sequence[Var]) -> list[Var]:
    return sorted((v for v in of if not is_host_aval(v.aval)), key=lambda v: nbytes(v.aval))[:1]


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
    """The passes through the network, in the order of a step's parts, but without pieces.

    Attributes:
      readers: value -> the first and the last heavy node that need it, through cheap ones.
      after: value -> the last heavy node of whose result it is made; -1 if there is none.
      fronts: the values with which a pass could continue, and the places of the nodes that make them.
    """

    def __init__(self, order: Sequence[Node], outputs: Sequence[Var]) -> None:
        self.order, self.outputs = order, outputs
        self.read = {*outputs}.union(*(node.reads for node in order))
        self.heavy = [k for k, node in enumerate(order) if is_heavy(node)]
        self.readers: dict[Var, tuple[int, int]] = {}
        self.after: dict[Var, int] = {}
        heavy = {*self.heavy}
        for k in reversed(range(len(order))):
            if not isinstance(order[k].payload, Planned):
                ends = [k] if k in heavy else [end for v in order[k].makes for end in self.readers.get(v, ())]
                for v in order[k].reads if ends else ():
                    both = (*ends, *self.readers.get(v, ()))
                    self.readers[v] = min(both), max(both)
        for k, node in enumerate(order):
            last = k if k in heavy else max((self.after.get(v, -1) for v in node.reads), default=-1)
            self.after.update(dict.fromkeys(node.makes, last))
        self.fronts = [
            (k, v)
            for k, node in enumerate(order)
            for v in (() if isinstance(node.payload, Planned) else reversed(node.makes))
            if is_large(v) and self.after[v] >= 0 and v in self.readers
        ]

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
                found = [v for v in node.makes if v in self.read and v not in self.readers and v not in own]
                late.update(v for v in found if is_large(v))
                yield from ((k, v) for v in found if v in late)
            elif not isinstance(node.payload, Equation) or not late.isdisjoint(node.reads):
                late.update(v for v in node.makes if is_large(v) and v not in self.readers)
        for v in self.outputs:
            if v not in late and v not in self.readers and (k := self.after.get(v, -1)) >= 0:
                yield k, v

    def stores(self) -> Iterator[tuple[int, Var]]:
        """The values that the passes send to the host, gradients that wait there, with their places."""
        defined = [v for node in self.order if isinstance(node.payload, Equation) for v in node.makes]
        return ((self.after[v], v) for v in defined if is_host_aval(v.aval) and v in self.read and self.after[v] >= 0)

    def front(self, k: int) -> Var | None:
        """The value with which a pass continues after node ``k``: its last large value that a later node needs."""
        end = next(iter(self.heavy[bisect.bisect_right(self.heavy, k) :]), len(self.order))
        n = bisect.bisect_left(self.fronts, end, key=lambda it: it[0])
        return next((v for _, v in reversed(self.fronts[:n]) if self.readers[v][1] > k), None)
