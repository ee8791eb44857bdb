"""The plan of a scan with updates inside."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set

from jax.sharding import NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Atom, DropVar, Equation, Literal, Scan
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.program import Program, Var, flat
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.moves import Move, Moves, Stays, closure, pulled
from jax_offload._plan.phases import Phases, phases
from jax_offload._plan.plan import InIterations, Planned, Window
from jax_offload._plan.rules import Dim, Partial, Rows

LEAST_GAIN = 0.95  # of the link's time in two groups, for which it is worth to have three
Groups = tuple[tuple[Var, ...], ...]


@dataclasses.dataclass(frozen=True)
class Reread:
    """An operand of the scan that is made of parameters which the scan overwrites: made of their rows, row by row."""

    slice: Slice
    shape: tuple[int, ...]
    axis: int
    dims: tuple[Dim, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InScan:
    """A scan, and what moves into it.

    Attributes:
      scan, body: it, and its iteration, a phase for each group of leaves.
      moves: the updates inside.
      kept: results that stay stacked.
      ahead: whether the updates come before the iteration's own arithmetic, which reads what they make, or after it.
      reread: number of one of the scan's ``xs`` -> how its rows are made.
      fed: number of one of the scan's ``xs`` -> the result of an update whose rows it has.
      rows: of leaves and other operands, along which axis their rows lie.
      hosts: leaves that move: ``loaded``, those that are read, and ``stored``, those that are written back;
        ``groups``: those that take turns, each stored in the phase of its place, and loaded in the next.
      in_place, new: on the device: operands that are overwritten by rows, and results with a buffer of their own.
      sums: results that are summed up.
      others: what else the updates read.
      pins: shardings.
    """

    scan: Scan
    body: Phases
    moves: tuple[Move, ...]
    kept: tuple[Var, ...]
    ahead: bool
    fed: Mapping[int, Var]
    reread: Mapping[int, Reread]
    rows: Mapping[Var, Rows]
    hosts: tuple[Var, ...]
    loaded: tuple[Var, ...]
    stored: tuple[Var, ...]
    groups: Groups
    in_place: tuple[Var, ...]
    new: tuple[Var, ...]
    sums: tuple[Var, ...]
    others: tuple[Var, ...]
    pins: Mapping[Var, NamedSharding]

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"InScan({len(self.moves)} slices)"

    @property
    def operands(self) -> list[Var]:
        """What it needs of the rest of the step."""
        return list(dict.fromkeys(v for v in self._reads if not isinstance(v, Literal)))

    @property
    def planned(self) -> list[Planned]:
        """The updates inside, and what of their state is on the device at a time: three rows of each leaf."""
        row = sum(move.slice.loaded_bytes for move in self.moves) // self.scan.length
        window = Window(3 * row, "the rows of an iteration, of the one before and of the one after it")
        return [Planned(move.slice, InIterations(self.scan.length, self.ahead), window) for move in self.moves]

    @property
    def _reads(self) -> list[Atom]:
        xs = [v for k, v in enumerate(self.scan.xs) if k not in self.reread and k not in self.fed]
        return [*self.scan.consts, *self.scan.init, *xs, *self.hosts, *self.in_place, *self.others]

    @property
    def makes(self) -> list[Var]:
        """What the rest of the step may read of it."""
        updated = [v for move in self.moves for v in move.slice.outputs if v not in move.feeds]
        return [v for v in [*self.scan.carry, *self.kept, *updated] if not isinstance(v, DropVar)]

    @property
    def first_row(self) -> int:
        return self.scan.length - 1 if self.scan.reverse else 0

    @property
    def last_row(self) -> int:
        return self.scan.length - 1 - self.first_row

    @property
    def passed_through(self) -> list[Var]:
        """Ahead, what comes into an iteration and is kept for the backward pass as it came: after the first phase.

        Kept at once, it holds up the first load: XLA writes the next number of the iteration over the one by which it
        is put into its stack, together with the row that is loaded (12x2x4096x4096, 16384 tokens: 204.1 ms, so 202.5).
        Not where the first phase loads nothing (Lion: 703 ms, 697 at once), or gradients wait on the host, which are
        loaded and not stored (65536 tokens: 771 ms, 714 at once).
        """
        program, n = self.body.program, len(self.scan.carry)
        at_once = not self.ahead or {*self.loaded} != {*self.stored} or not self.groups[-1]
        kept = [] if at_once else [v for v in program.outputs[n:] if not isinstance(v, Literal)]
        return [v for v in dict.fromkeys(kept) if v in {*program.inputs}]


def in_scan(program: Program, scan: Scan, moves: Moves, *, ahead: bool) -> InScan:
    """The plan of the moves into a scan of a step."""
    reads = [pair for move in moves.moves for pair in zip(move.slice.inputs, move.dims, strict=True)]
    writes = [write for move in moves.moves for write in _writes(move)]
    in_place = [old for v, old, _ in writes if old is not None and not is_host_aval(v.aval)]
    new = [(v, d) for v, old, d in writes if old is None and isinstance(d, Rows)]
    loaded = list(dict.fromkeys(v for v, _ in reads if is_host_aval(v.aval)))
    overwritten = [(old, d) for v, old, d in writes if old is not None and is_host_aval(v.aval) and isinstance(d, Rows)]
    hosts = list(dict.fromkeys([*loaded, *(old for old, _ in overwritten)]))
    stored = [v for v in hosts if v in dict(overwritten)]
    updated = {v for move in moves.moves for v in move.slice.outputs} if ahead else set[Var]()
    reread = {} if ahead else {k: r for k, x in enumerate(scan.xs) if (r := _reread(program, x, scan, {*in_place}))}
    again = [pair for each in reread.values() for pair in zip(each.slice.inputs, each.dims, strict=True)]
    own = {*hosts, *in_place, *scan.ys}
    groups, body = _in_turn(hosts, loaded, stored, flat(scan.body, opens=lambda _: True))
    return InScan(
        scan=scan,
        body=body,
        moves=moves.moves,
        kept=tuple(y for y in scan.ys if y in moves.kept),
        ahead=ahead,
        fed={k: x for k, x in enumerate(scan.xs) if not isinstance(x, Literal) and x in updated},
        reread=reread,
        rows={v: d for v, d in [*reads, *overwritten, *new, *again] if isinstance(d, Rows)},
        hosts=tuple(hosts),
        loaded=tuple(loaded),
        stored=tuple(stored),
        groups=groups,
        in_place=tuple(in_place),
        new=tuple(v for v, _ in new),
        sums=tuple(v for v, _, d in writes if isinstance(d, Partial)),
        others=tuple(dict.fromkeys(v for v, _ in [*reads, *again] if v not in own)),
        pins={v: s for move in moves.moves for v, s in move.slice.pins.items()},
    )


def _writes(move: Move) -> Iterator[tuple[Var, Var | None, Dim]]:
    """What an update makes for others than the scan: the result, the operand in whose buffer it is, and its rows."""
    for v, old, d in zip(move.slice.outputs, move.buffers, move.out_dims, strict=True):
        if v not in move.feeds:
            yield v, old, d


def _reread(program: Program, x: Atom, scan: Scan, in_place: set[Var]) -> Reread | None:
    if isinstance(x, Literal):
        return None

    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        return None if any(v in in_place for v in eqn.outvars) else pulled(eqn, needed, scan.length)

    try:
        taken, needed = closure(program.eqns, {x: Rows(0)}, dims_of)
    except Stays:
        return None
    s = slice_of(taken, [x], program.debug_info, {})
    if not any(v in in_place for v in s.inputs) or any(is_host_aval(v.aval) for v in s.inputs):
        return None
    lead = next(v for v in s.inputs if v in in_place)
    rows = needed[lead]
    return None if rows is None else Reread(s, lead.aval.shape, rows.dim, tuple(needed[v] for v in s.inputs))


def times_of(groups: Groups, loaded: Set[Var], stored: Set[Var]) -> list[int]:
    """Bytes that the busier direction carries in each phase."""
    out = [sum(nbytes(v.aval) for v in group if v in stored) for group in groups]
    back = [sum(nbytes(v.aval) for v in group if v in loaded) for group in groups]
    return [max(out[k], back[k - 1]) for k in range(len(groups))]


def _in_turn(
    hosts: Sequence[Var], loaded: Sequence[Var], stored: Sequence[Var], body: Program
) -> tuple[Groups, Phases]:
    """Leaves in two groups, or in three where the link has less to wait for, and the phases of an iteration.

    Three equal leaves, masters and two moments, in two groups: while two go one way, one goes the other.
    """
    found = [_balanced(hosts, 2), *itertools.permutations(_balanced(hosts, 3))]
    times = [times_of(groups, {*loaded}, {*stored}) for groups in found]
    best = min(range(len(found)), key=lambda k: sum(times[k]))
    cut = phases(body, times[best]) if sum(times[best]) < LEAST_GAIN * sum(times[0]) else None
    if cut is None:
        best, cut = 0, phases(body, times[0])
    assert cut is not None  # of two there are always
    return found[best], cut


def _balanced(hosts: Sequence[Var], count: int) -> Groups:
    """Groups of about as many bytes."""
    groups: list[list[Var]] = [[] for _ in range(count)]
    for v in sorted(hosts, key=lambda v: -nbytes(v.aval)):
        min(groups, key=lambda group: sum(nbytes(u.aval) for u in group)).append(v)
    return tuple(map(tuple, groups))
