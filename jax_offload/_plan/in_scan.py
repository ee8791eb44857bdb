"""The plan of a scan with updates inside: its iteration in two halves, between which transfers change direction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.flops import flops
from jax_offload._base.jaxprs import Atom, DropVar, Equation, Literal, Scan, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.program import Program, Var, flat
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.hoist import CannotHoist, Move, Moves, closure, pulled
from jax_offload._plan.plan import InIterations, Planned, RowWise, Window
from jax_offload._plan.rules import Dim, Partial, Rows


@dataclasses.dataclass(frozen=True)
class Reread:
    """An operand of the scan that is made of parameters which the scan overwrites: made of their rows, row by row."""

    slice: Slice
    how: RowWise


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InScan:
    """A scan, and what moves into it.

    Attributes:
      scan: the scan.
      moves: the updates inside.
      kept: results that stay stacked.
      ahead: whether the updates come before the iteration's own arithmetic, which reads what they make, or after it.
      fed: number of one of the scan's ``xs`` -> the result of an update whose rows it has.
      reread: number of one of the scan's ``xs`` -> how its rows are made.
    """

    scan: Scan
    moves: tuple[Move, ...]
    kept: tuple[Var, ...]
    ahead: bool
    fed: Mapping[int, Var]
    reread: Mapping[int, Reread]

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"InScan({len(self.moves)} slices)"

    @property
    def operands(self) -> list[Var]:
        """What it needs of the rest of the step."""
        xs = [v for k, v in enumerate(self.scan.xs) if k not in self.reread and k not in self.fed]
        reads = [*self.scan.consts, *self.scan.init, *xs, *self.hosts, *self.in_place, *self.others]
        return list(dict.fromkeys(variables(reads)))

    @property
    def planned(self) -> list[Planned]:
        """The updates inside, and what of their state is on the device at a time: three rows of each leaf."""
        row = sum(move.slice.loaded_bytes for move in self.moves) // self.scan.length
        window = Window(3 * row, "the rows of an iteration, of the one before and of the one after it")
        return [Planned(move.slice, InIterations(self.scan.length, self.ahead), window) for move in self.moves]

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

    @functools.cached_property
    def loaded(self) -> tuple[Var, ...]:
        """Leaves on the host whose rows are read."""
        return tuple(v for v in self._reads if is_host_aval(v.aval))

    @functools.cached_property
    def stored(self) -> tuple[Var, ...]:
        """Leaves on the host whose rows are written."""
        return tuple(old for v, old, _ in self._writes if old is not None and is_host_aval(v.aval))

    @functools.cached_property
    def hosts(self) -> tuple[Var, ...]:
        return tuple(dict.fromkeys([*self.loaded, *self.stored]))

    @functools.cached_property
    def in_place(self) -> tuple[Var, ...]:
        """Operands on the device that are overwritten by rows."""
        return tuple(old for v, old, _ in self._writes if old is not None and not is_host_aval(v.aval))

    @functools.cached_property
    def new(self) -> tuple[Var, ...]:
        """Results on the device with a buffer of their own."""
        return tuple(v for v, old, d in self._writes if old is None and isinstance(d, Rows))

    @functools.cached_property
    def sums(self) -> tuple[Var, ...]:
        """Results that are summed up."""
        return tuple(v for v, _, d in self._writes if isinstance(d, Partial))

    @functools.cached_property
    def others(self) -> tuple[Var, ...]:
        """What else the updates read."""
        own = {*self.hosts, *self.in_place, *self.scan.ys}
        return tuple(v for v in self._reads if v not in own)

    @functools.cached_property
    def rows(self) -> dict[Var, Rows]:
        """Where the rows of leaves and other operands are."""
        writes = [(v if old is None else old, d) for v, old, d in self._writes]
        return {v: d for v, d in [*self._reads.items(), *writes] if isinstance(d, Rows)}

    @functools.cached_property
    def pins(self) -> dict[Var, NamedSharding]:
        """The shardings of leaves and other operands."""
        return {v: s for move in self.moves for v, s in move.slice.pins.items()}

    @functools.cached_property
    def groups(self) -> tuple[Sequence[Var], Sequence[Var]]:
        """Leaves on the host in two groups of about as many bytes: each is stored in one half of an iteration and
        loaded in the other."""
        groups = list[Var](), list[Var]()
        for v in sorted(self.hosts, key=lambda v: -nbytes(v.aval)):
            min(groups, key=lambda group: sum(nbytes(u.aval) for u in group)).append(v)
        return groups

    @functools.cached_property
    def body(self) -> Halves:
        """The iteration's own arithmetic, divided as the link's time is."""
        out, back = (
            [sum(nbytes(v.aval) for v in group if v in moved) for group in self.groups]
            for moved in (self.stored, self.loaded)
        )
        first, second = max(out[0], back[1]), max(out[1], back[0])
        return halves(flat(self.scan.body, opens=lambda _: True), first / ((first + second) or 1))

    @functools.cached_property
    def _reads(self) -> dict[Var, Dim]:
        """What the updates read, and what is made again of it, with its rows."""
        both = [(move.slice, move.how) for move in self.moves] + [(r.slice, r.how) for r in self.reread.values()]
        return dict(pair for s, how in both for pair in zip(s.inputs, how.dims, strict=True))

    @functools.cached_property
    def _writes(self) -> list[tuple[Var, Var | None, Dim]]:
        """What the updates make for others than the scan: the result, the operand in whose buffer it is, its rows."""
        return [
            each
            for move in self.moves
            for each in zip(move.slice.outputs, move.how.buffers, move.how.out_dims, strict=True)
            if each[0] not in move.feeds
        ]


def in_scan(program: Program, scan: Scan, moves: Moves, *, ahead: bool) -> InScan:
    """The plan of the moves into a scan of a step."""
    updated = {v for move in moves.moves for v in move.slice.outputs} if ahead else set[Var]()
    fed = {k: x for k, x in enumerate(scan.xs) if not isinstance(x, Literal) and x in updated}
    plan = InScan(scan, moves.moves, tuple(y for y in scan.ys if y in moves.kept), ahead, fed, {})
    if ahead:
        return plan
    again = {k: r for k, x in enumerate(scan.xs) if (r := _reread(program, x, scan, {*plan.in_place}))}
    return dataclasses.replace(plan, reread=again)


def _reread(program: Program, x: Atom, scan: Scan, in_place: set[Var]) -> Reread | None:
    if isinstance(x, Literal):
        return None

    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        return None if any(v in in_place for v in eqn.outvars) else pulled(eqn, needed, scan.length)

    try:
        taken, needed = closure(program.eqns, {x: Rows(0)}, dims_of)
    except CannotHoist:
        return None
    s = slice_of(taken, [x], program.debug_info, {})
    if not any(v in in_place for v in s.inputs) or any(is_host_aval(v.aval) for v in s.inputs):
        return None
    lead = next(v for v in s.inputs if v in in_place)
    rows = needed[lead]
    if rows is None:
        return None
    dims = tuple(needed[v] for v in s.inputs)
    return Reread(s, RowWise(lead.aval.shape, rows.dim, dims, (Rows(0),), (None,)))


@dataclasses.dataclass(frozen=True)
class Halves:
    """A program, run one half after the other.

    Attributes:
      program: the program.
      slices: its halves.
      gate: the matmul that the first half is there for; ``None`` where the program has no matmul.
    """

    program: Program
    slices: tuple[Slice, Slice]
    gate: Var | None

    @property
    def held(self) -> list[Var]:
        """What the first half makes for the second, beside the gate."""
        made = {*self.slices[0].outputs} - {self.gate}
        return [v for v in self.slices[1].inputs if v in made]


def halves(program: Program, share: float) -> Halves:
    """Cuts behind a matmul, so that the first half has ``share`` of the arithmetic.

    The first half is what that matmul needs. What stands above it without being needed, a weight's gradient say, is in
    the second: XLA for GPUs would run it behind the gate anyway.
    """
    work = [flops(eqn) for eqn in program.eqns]
    left = [sum(work) - done for done in itertools.accumulate(work)]
    needed = _work_needed(program.eqns, work)
    share = share if 0 < share < 1 else 0.5
    weight = {at: (min((1 - share) * sum(work[k] for k in needed[at]), share * left[at]), len(needed[at]))
              for at, n in enumerate(work) if n}  # fmt: skip
    cut = max(weight, key=weight.__getitem__, default=None)
    first = set[int]() if cut is None else needed[cut]
    is_late, parts = dict[Var, bool](), (list[Equation](), list[Equation]())
    for at, eqn in reversed([*enumerate(program.eqns)]):
        # what has no matmul stands where it is first read
        late = at not in first if work[at] else all(is_late.get(v, True) for v in eqn.outvars)
        is_late.update((v, late and is_late.get(v, True)) for v in variables(eqn.invars))
        parts[late].append(eqn)
    before, after = (eqns[::-1] for eqns in parts)
    results = {*variables(program.outputs)}
    read_after = results.union(*(variables(eqn.invars) for eqn in after))
    slices = [
        slice_of(eqns, [v for eqn in eqns for v in eqn.outvars if v in wanted], program.debug_info, {})
        for eqns, wanted in ((before, read_after), (after, results))
    ]
    gate = None if cut is None else next((v for v in program.eqns[cut].outvars if v in slices[0].outputs), None)
    return Halves(program, (slices[0], slices[1]), gate)


def _work_needed(eqns: Sequence[Equation], work: Sequence[float]) -> list[set[int]]:
    """For each equation the places of those with matmuls that it needs, its own too."""
    of, found = dict[Var, set[int]](), list[set[int]]()
    for k, eqn in enumerate(eqns):
        needs = set[int]().union(*(of.get(v, ()) for v in variables(eqn.invars))) | ({k} if work[k] else set[int]())
        of.update(dict.fromkeys(eqn.outvars, needs))
        found.append(needs)
    return found
