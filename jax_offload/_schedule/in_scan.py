"""The plan of a scan in which leaves move, with or without updates inside."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import DropVar, Equation, Literal, Scan, flops, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.program import Program, Var, flat
from jax_offload._program.propagate import Mask, bits, needed_for, union
from jax_offload._program.rules import Partial, Rows
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._schedule.schedule import Planned, Window

LEAST_GAIN = 0.95  # three groups must take less than this share of the link's time with two


class CannotHoist(Exception):
    """An update does not move; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Nest:
    """A scan over groups of layers, whose iteration holds a scan over the layers of a group.

    Attributes:
      outer: the scan over groups.
      inner: the scan over layers, which makes the gradients; these are named as the flattened scan's.
      body: the iteration of the outer scan.
      before, after: the equations of the body on either side of the inner scan.
      layers: operands and results of the outer scan, whose rows are groups -> the same with one row for each layer.
      grouping, merging: the equations between the two, before the outer scan and behind it.
    """

    outer: Scan
    inner: Scan
    body: Program
    before: Slice
    after: Slice
    layers: Mapping[Var, Var]
    grouping: Sequence[Equation]
    merging: Sequence[Equation]

    @property
    def handed_on(self) -> dict[int, int]:
        """Map the numbers of the inner ``xs`` to the outer ``xs`` that hold their groups."""
        inputs = self.body.inputs[len(self.body.inputs) - len(self.outer.xs) :]
        number = {v: k for k, v in enumerate(inputs)}
        return {j: number[x] for j, x in enumerate(self.inner.xs) if not isinstance(x, Literal) and x in number}

    def hands_on(self, xs: Iterable[int]) -> bool:
        """Whether only the inner scan reads these outer ``xs``, row by row."""
        first = len(self.body.inputs) - len(self.outer.xs)
        read = {*self.before.inputs, *self.after.inputs, *variables([*self.inner.consts, *self.inner.init])}
        handed_on = {*self.handed_on.values()}
        return all(k in handed_on and self.body.inputs[first + k] not in read for k in xs)

    @property
    def flattened(self) -> Scan:
        """The outer scan, as if it ran over the layers."""
        xs = [v if isinstance(v, Literal) else self.layers.get(v, v) for v in self.outer.xs]
        ys = [self.layers.get(v, v) for v in self.outer.ys]
        return dataclasses.replace(self.outer, xs=xs, ys=ys, length=self.outer.length * self.inner.length)


class Phase(NamedTuple):
    """A part of an iteration, during which one group of leaves is stored and another one loaded.

    Attributes:
      arithmetic: the equations of the scan's body that run meanwhile.
      gate: the matmul that ends it; ``None`` if it is the last part, or has no matmul.
      stored, loaded: the leaves on the host whose rows leave and arrive.
    """

    arithmetic: Slice
    gate: Var | None
    stored: Sequence[Var]
    loaded: Sequence[Var]


@dataclasses.dataclass(eq=False, repr=False)
class InScan:
    """A scan, the updates that move into it, and the parameters on the host that it reads; all keep their rows apart.

    Attributes:
      scan: the scan.
      moves: the updates inside, separate if they share nothing. Their operands are stacked results of the scan, leaves
        of the state, the parameters, and values known before the scan; their results are read by the rest of the step.
      kept: the scan's results that stay stacked.
      ahead: whether the updates come before the iteration's own arithmetic, which reads their results, or after it.
      eqns: the identities of the equations that leave their place.
      feeds: results of the updates that only the scan reads, row by row.
      reread: number of one of the scan's ``xs`` -> how its rows are made of rows of parameters, if these are on the
        host or the scan overwrites them.
      nest: both scans, if the updates are in a scan inside the scan; ``scan`` is then the outer one, flattened.
      loaded, stored, hosts: the leaves on the host whose rows are read, those whose rows are written, and all of them.
      in_place: the operands on the device that the updates overwrite row by row.
      new, sums: the results on the device with a buffer of their own, and those that are summed up.
      others: the other operands of the updates.
      rows: where the rows of all these are, and of the stacked results that the updates read.
      fed: number of one of the scan's ``xs`` -> the result of an update that provides its rows.
    """

    scan: Scan
    moves: tuple[Planned, ...]
    kept: tuple[Var, ...]
    ahead: bool
    eqns: frozenset[int]
    feeds: frozenset[Var] = frozenset()
    reread: Mapping[int, Planned] = dataclasses.field(default_factory=dict[int, Planned])
    nest: Nest | None = None

    def __post_init__(self) -> None:
        reads = [
            pair
            for each in (*self.moves, *self.reread.values())
            for pair in zip(each.slice.inputs, each.how.dims, strict=True)
        ]
        writes = [
            (v, old, dim)
            for each in self.moves
            for v, old, dim in zip(each.slice.outputs, each.how.buffers, each.how.out_dims, strict=True)
            if v not in self.feeds
        ]
        overwritten, made = [old for _, old, _ in writes if old is not None], {*self.updated}
        self.loaded = list(dict.fromkeys(v for v, _ in reads if is_host_aval(v.aval)))
        self.stored = [v for v in overwritten if is_host_aval(v.aval)]
        self.hosts = list(dict.fromkeys([*self.loaded, *self.stored]))
        self.in_place = [v for v in overwritten if not is_host_aval(v.aval)]
        self.new = [v for v, old, dim in writes if old is None and isinstance(dim, Rows)]
        self.sums = [v for v, _, dim in writes if isinstance(dim, Partial)]
        own = {*self.hosts, *self.in_place, *self.scan.ys}
        self.others = list(dict.fromkeys(v for v, _ in reads if v not in own))
        rows = [*reads, *((v if old is None else old, dim) for v, old, dim in writes)]
        self.rows = {v: dim for v, dim in rows if isinstance(dim, Rows)}
        self.fed = {k: x for k, x in enumerate(self.scan.xs) if not isinstance(x, Literal) and x in made}

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"InScan({len(self.moves)} slices)"

    @property
    def updated(self) -> list[Var]:
        """The results of the updates."""
        return [v for move in self.moves for v in move.slice.outputs]

    @property
    def operands(self) -> list[Var]:
        """The values that it needs from the rest of the step."""
        xs = [v for k, v in enumerate(self.scan.xs) if k not in self.reread and k not in self.fed]
        reads = [*self.scan.consts, *self.scan.init, *xs, *self.hosts, *self.in_place, *self.others]
        return list(dict.fromkeys(variables(reads)))

    @property
    def makes(self) -> list[Var]:
        """The values that the rest of the step may read from it."""
        found = [*self.scan.carry, *self.kept, *(v for v in self.updated if v not in self.feeds)]
        return [v for v in found if not isinstance(v, DropVar)]

    @property
    def as_written(self) -> Slice:
        """The original scan, with the updates of whole leaves before or after it."""
        again = [eqn for each in self.reread.values() for eqn in each.slice.jaxpr.eqns]
        moved = [*{tuple(eqn.outvars): eqn for move in self.moves for eqn in move.slice.jaxpr.eqns}.values()]
        scan = [*self.nest.grouping, self.scan.eqn, *self.nest.merging] if self.nest else [self.scan.eqn]
        eqns = [*again, *moved, *scan] if self.ahead else [*again, *scan, *moved]
        return slice_of(eqns, self.makes, self.scan.body.jaxpr.debug_info, {})

    @property
    def planned(self) -> list[Planned]:
        """The updates inside, and loads of parameters that are only read; their window is three rows of each leaf."""
        updated = {v for move in self.moves for v in move.slice.loads}
        found = [*self.moves, *(each for each in self.reread.values() if not updated.issuperset(each.slice.loads))]
        shards = {v: each.slice.shards.get(v, ()) for each in found for v in each.slice.loads}
        row = sum(nbytes(v.aval) // math.prod(parts) for v, parts in shards.items()) // self.scan.length
        window = Window(3 * row, "the rows of an iteration, of the one before and of the one after it")
        return [dataclasses.replace(each, window=window) for each in found]

    @property
    def loads_again(self) -> set[Var]:
        """The ``xs`` that the scan does not need as a whole, because it loads their rows."""
        apart = [x for k, x in enumerate(self.scan.xs) if k not in self.reread]
        return {*variables(self.scan.xs)} - {*variables([*self.scan.consts, *self.scan.init, *apart])}

    @functools.cached_property
    def body(self) -> Program:
        """The iteration's own arithmetic."""
        return flat((self.nest.inner if self.nest else self.scan).body, opens=lambda _: True)

    @functools.cached_property
    def phases(self) -> list[Phase]:
        """The iteration, divided as the link's time is. A group of leaves is loaded in the phase after its own.

        There are two groups, or three if the link then waits less. With three equal leaves, such as masters and two
        moments, two groups would move two leaves in one direction while one leaf moves in the other. Leaves that are
        only loaded have the whole iteration.
        """
        groups, reads = _balanced(self.hosts, 2) if self.moves else [self.hosts], {*self.loaded}
        if self.moves and sum(flops(eqn) > 0 for eqn in self.body.eqns) >= 3:
            three = _balanced(self.hosts, 3)
            groups = three if sum(self._times(three)) < LEAST_GAIN * sum(self._times(groups)) else groups
        cuts = _cut(self.body, self._times(groups))
        return [Phase(s, gate, groups[k], [v for v in groups[k - 1] if v in reads]) for k, (s, gate) in enumerate(cuts)]

    def _times(self, groups: Sequence[Sequence[Var]]) -> list[int]:
        """Bytes that the busier direction carries in each phase."""
        out, back = (
            [sum(nbytes(v.aval) for v in group if v in moved) for group in groups]
            for moved in ({*self.stored}, {*self.loaded})
        )
        return [max(out[k], back[k - 1]) for k in range(len(groups))]


def _balanced(hosts: Sequence[Var], count: int) -> list[Sequence[Var]]:
    """Divide leaves on the host into ``count`` groups of about equal bytes."""
    groups = [list[Var]() for _ in range(count)]
    for v in sorted(hosts, key=lambda v: -nbytes(v.aval)):
        min(groups, key=lambda group: sum(nbytes(x.aval) for x in group)).append(v)
    return [*groups]


def _cut(program: Program, times: Sequence[int]) -> list[tuple[Slice, Var | None]]:
    """Cut a program behind matmuls, so that its parts share the arithmetic as phases share the transfers' ``times``.

    A part holds the equations that its last matmul needs. Others above it, such as a weight's gradient, belong to the
    next part: XLA for GPUs would run them behind the gate anyway.
    """
    eqns, work = program.eqns, [flops(eqn) for eqn in program.eqns]
    needs, made = list[Mask](), dict[Var, Mask]()  # which matmuls an equation needs, with itself
    for k, eqn in enumerate(eqns):
        needs.append(union(made.get(v, 0) for v in variables(eqn.invars)) | (work[k] > 0) << k)
        made.update(dict.fromkeys(eqn.outvars, needs[k]))
    behind = [sum(work) - done for done in itertools.accumulate(work)]
    done, rest, parts, ends = 0, eqns, list[list[Equation]](), list[Sequence[Var]]()
    for k in range(len(times) - 1):
        share = times[k] / (sum(times[k:]) or 1)
        share = share if 0 < share < 1 else 0.5
        left = [at for at, n in enumerate(work) if n and not done >> at & 1]
        own = {at: sum(work[h] for h in bits(needs[at] & ~done)) for at in left}
        cut = max(left, key=lambda at: (min((1 - share) * own[at], share * behind[at]), own[at]), default=None)
        ends.append([] if cut is None else eqns[cut].outvars)
        done |= 0 if cut is None else needs[cut]
        parts.append(needed_for(rest, ends[-1])[0])
        taken = {*map(id, parts[-1])}
        rest = [eqn for eqn in rest if id(eqn) not in taken]
    slices = consecutive([*parts, rest], program.outputs, program.debug_info, {})
    return [(s, next((v for v in vs if v in s.outputs), None)) for s, vs in zip(slices, [*ends, []], strict=True)]
