"""The pieces of an update between the parts of an unrolled step: each where its gradient is made, or its result read.

Left to itself, XLA's scheduler puts updates off, and with them the matmuls that make their gradients; the activations
that these need then live for all layers at once. Nothing in an update can hold back the backward pass, but in a whole
step a gate can: the value that the pass goes on with waits for the updates of two layers before, and the state of the
next layer is loaded once that value is there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.propagate import Node, topological
from jax_offload._plan.decide import FLOPS_PER_BYTE
from jax_offload._plan.moves import Stays
from jax_offload._plan.network import Done, Network, Piece, is_heavy, is_large

LEAST_GATES = 4  # with fewer there is nothing to hold back
AT_ONCE = "most of its gradients are there only at once: a number needs all, their norm say, or one call makes them"
FEW_PLACES = (
    f"its passes, forward and backward, have fewer than {LEAST_GATES} places where parts of an update could wait"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Gate:
    """From here on, ``held`` (host leaves, and the value that the pass goes on with) waits for ``waits_for``."""

    held: tuple[Var, ...]
    waits_for: tuple[Var, ...]


def interleaved(nodes: Sequence[Node], which: Sequence[int], outputs: Sequence[Var]) -> list[Node]:
    """The nodes, pieces where they belong, and gates between them.

    Args:
      nodes: parts of a step; the payloads of some are pieces.
      which: the numbers of those that are needed.
      outputs: of the step.

    Raises:
      Stays: there are not enough places.
    """
    pieces = [k for k in which if isinstance(nodes[k].payload, Piece)]
    outer = [k for k in which if not isinstance(nodes[k].payload, Piece)]
    heavy = [k for k in outer if is_heavy(nodes[k])]
    order = topological(nodes, [*heavy, *outer, *pieces])
    passes, number = Network(order, outputs), {id(node): k for k, node in enumerate(nodes)}
    ahead, behind = _Spots(), _Spots()
    for k in pieces:
        piece, reader = nodes[k].payload, passes.next_reader(nodes[k])
        spots, at = (behind, passes.produced_after(nodes[k])) if reader is None else (ahead, reader)
        gradients = [v for v in nodes[k].reads if reader is None and passes.after.get(v) == at and is_large(v)]
        held = [] if reader is None else [v for v in piece.operands if is_large(v) and not is_host_aval(v.aval)]
        overwrites = [] if reader is not None or piece.loads else passes.overwritten(nodes[k], at)
        spots.add(at, _Spot(k, piece.loads, piece.token, held, gradients, overwrites))
    updates = behind.updates
    if 2 * max(updates, default=0) > sum(updates):
        raise Stays(AT_ONCE if sum(updates) >= LEAST_GATES else FEW_PLACES)
    for place, v in passes.put_off():
        behind.add(place, _Spot(None, [], [v]))
    for place, v in passes.stores():
        behind.add(place, _Spot(None, [], [v], stored=True))

    all_nodes = list(nodes)
    first = dict[int, int]()
    for at, held in behind.overwritten():
        goes_on = tuple(v for v in order[at].makes if passes.reach.get(v, -1) > at)
        if goes_on:
            first[at] = len(all_nodes)
            all_nodes.append(Node(Gate(held, goes_on), [*held, *goes_on], []))
    gates: dict[tuple[bool, int], int] = {}
    for spots, is_ahead in (ahead, True), (behind, False):
        for at, gate in spots.gates(passes, is_ahead).items():
            gates[is_ahead, at] = len(all_nodes)
            all_nodes.append(Node(gate, [*gate.held, *gate.waits_for], []))
    if len(gates) < LEAST_GATES:
        raise Stays(FEW_PLACES)
    sequence = behind.pieces(-1)
    for place, node in enumerate(order):
        if is_heavy(node):
            # a piece reads its gradient behind the gate: ahead of it XLA would put that off, and what it needs
            before, after = ([gates[key] for key in [(side, place)] if key in gates] for side in (True, False))
            after = [first[place], *after] if place in first else after
            sequence += [*before, *ahead.pieces(place), number[id(node)], *after, *behind.pieces(place)]
    return topological(all_nodes, [*sequence, *outer, *pieces])


@dataclasses.dataclass(frozen=True)
class _Spot:
    """A piece, or a gradient that is put off.

    Attributes:
      piece: its number.
      loads: its host leaves.
      tokens: what is there once it is through.
      gradients: what it needs of them.
      overwrites: parameters that the node reads which makes its gradient. Between gates XLA may put the update ahead of
        the rest of that node, which would read a copy, made when the step begins (6x4096x4096, a tenth of the state,
        16384 tokens: 3268 MiB, so 3204; resident 3200).
      stored: whether it only is stored, for the next step.
      held: its operands on the device: ahead of a pass XLA would update as soon as it can, and the loads of the piece
        would hide behind nothing (24x4096x4096, clipping, 16384 tokens: 0.65 of the transfers exposed).
    """

    piece: int | None
    loads: Sequence[Var]
    tokens: Sequence[Var]
    held: Sequence[Var] = ()
    gradients: Sequence[Var] = ()
    overwrites: Sequence[Var] = ()
    stored: bool = False

    @property
    def moves(self) -> bool:
        return self.stored or bool(self.loads)

    @property
    def nbytes(self) -> int:
        """What moves in one direction."""
        return sum(nbytes(v.aval) for v in (self.tokens if self.stored else self.loads))


class _Spots:
    """What is at which heavy node: pieces, the leaves that they load, and what says that they are through."""

    def __init__(self) -> None:
        self.at: dict[int, list[_Spot]] = {}

    def add(self, at: int, spot: _Spot) -> None:
        self.at.setdefault(at, []).append(spot)

    def pieces(self, at: int) -> list[int]:
        return [spot.piece for spot in self.at.get(at, []) if spot.piece is not None]

    def loads(self, at: int) -> list[Var]:
        return [v for spot in self.at.get(at, []) for v in spot.loads]

    def overwritten(self) -> Iterator[tuple[int, tuple[Var, ...]]]:
        """What is overwritten at a spot once the node there has read it."""
        found = {
            at: tuple(dict.fromkeys(v for spot in spots for v in spot.overwrites)) for at, spots in self.at.items()
        }
        return ((at, held) for at, held in found.items() if held)

    @property
    def updates(self) -> list[int]:
        """How many pieces with something large to update there are at each."""
        return [
            sum(bool(spot.loads) or any(map(is_large, spot.tokens)) for spot in spots) for spots in self.at.values()
        ]

    def gates(self, passes: Network, ahead: bool) -> dict[int, Gate]:
        """At every spot: the leaves of the next wait for what the pass goes on with, and both for the spot before.

        Next and before are those that move something, in groups: biases that stay are updated between the matrices of
        their layers, and would leave a store no time but that before its next load (8 layers of 4096 with biases, 16384
        tokens, an H200: 27.1 ms exposed, now 6.8 of a step of 33.8).
        """
        places = sorted(at for at in self.at if at >= 0)
        groups = self._groups([at for at in places if any(spot.moves for spot in self.at[at])])
        if groups and not ahead and (first := passes.heavy_before(groups[0][0])) is not None:
            groups.insert(0, [first])
        if groups and ahead and (last := passes.heavy_after(places[-1])) is not None:
            groups.append([last])  # the last stores are through before the backward pass begins, where the peak is
        number = {group[0]: g for g, group in enumerate(groups)}
        spots = sorted({*places, *number})
        loaded = {self._released(passes, spots, *pair): self._loads(pair[1]) for pair in itertools.pairwise(groups)}
        found: dict[int, Gate] = {}
        done = Done(passes.order)
        for at in spots:
            g, here = number.get(at), self.at.get(at, [])
            before = [spot for k in groups[g - 1] for spot in self.at.get(k, [])] if g else []
            # what moves nothing is through at once, and within a group the gradients; a store has until the next group
            tokens = [v for spot in before if spot.moves for v in spot.tokens]
            if not ahead:
                tokens += [v for spot in here if not spot.moves for v in spot.tokens]
                tokens += [v for spot in here if spot.moves and g is None for v in spot.gradients]
            whose = groups[g] if g is not None and ahead else [at]
            held = [v for k in whose for spot in self.at.get(k, []) for v in spot.held]
            last = at - 1 if ahead else at
            front = passes.front(last, done.through([*tokens, *passes.produced_until(last)]))
            loads = loaded.get(at, [])
            if front is not None and (loads or tokens):
                both = dict.fromkeys([*loads, front, *held])
                found[at] = Gate(tuple(both), tuple(v for v in dict.fromkeys(tokens) if v not in both))
        return found

    def _groups(self, moving: Sequence[int]) -> list[list[int]]:
        """Spots whose leaves move together: small ones, up to what several of the large have each.

        One by one they leave the link idle beside attention (a GPT of 12 blocks, moments in bfloat16, 16384 tokens, an
        H200: 276.1 ms, so 271.8; a ViT of 8, float32 moments, 37.8 and 34.3).
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

    def _loads(self, group: Sequence[int]) -> list[Var]:
        return [v for at in group for v in self.loads(at)]

    def _released(self, passes: Network, spots: Sequence[int], before: Sequence[int], group: Sequence[int]) -> int:
        """The last spot from which the passes hide a group's loads, several times over, or else the one ``before``.

        Where little moves, an embedding at the end say, they would else be there long before (a GPT of 12 blocks of
        width 2048, a quarter of the state, 16384 tokens, an H200: 6026 MiB, so 5550, and 5621 with a tenth).
        """
        needed = 4 * FLOPS_PER_BYTE * sum(nbytes(v.aval) for v in self._loads(group))
        between = (k for k in reversed(spots) if before[0] < k < group[0])
        return next((k for k in between if passes.flops(k, group[0]) >= needed), before[0])
