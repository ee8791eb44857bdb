"""The plan of a scan in which leaves move, with or without updates inside: its iteration in phases, between which
transfers change direction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import NamedSharding

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import DropVar, Equation, Literal, Scan, flops, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.program import Program, Var, flat
from jax_offload._program.propagate import needed_for
from jax_offload._program.rules import Dim, Partial, Rows
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._schedule.schedule import Planned, Window

LEAST_GAIN = 0.95  # three groups must take less than this share of the link's time with two
Groups = Sequence[Sequence[Var]]


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InScan:
    """A scan, the updates that move into it, and the parameters on the host that it reads; all keep their rows apart.

    Attributes:
      scan: the scan.
      moves: the updates inside, separate if they share nothing. Their operands are stacked results of the scan, leaves
        of the state, the parameters, and values known before the scan; their results are read by the rest of the step.
      kept: the scan's results that stay stacked.
      ahead: whether the updates come before the iteration's own arithmetic, which reads their results, or after it.
      eqns: the equations that are gone from where they were, by identity.
      feeds: results of the updates that are read, by rows, by the scan alone.
      fed: number of one of the scan's ``xs`` -> the result of an update whose rows it has.
      reread: number of one of the scan's ``xs`` -> how its rows are made of rows of parameters, where these are on the
        host, or where the scan overwrites them.
      nest: both scans, if the updates are in a scan inside the scan; ``scan`` is then the outer one, flattened.
    """

    scan: Scan
    moves: tuple[Planned, ...]
    kept: tuple[Var, ...]
    ahead: bool
    eqns: frozenset[int]
    feeds: frozenset[Var] = frozenset()
    fed: Mapping[int, Var] = dataclasses.field(default_factory=dict[int, Var])
    reread: Mapping[int, Planned] = dataclasses.field(default_factory=dict[int, Planned])
    nest: Nest | None = None

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"InScan({len(self.moves)} slices)"

    @property
    def operands(self) -> list[Var]:
        """The values that it needs from the rest of the step."""
        xs = [v for k, v in enumerate(self.scan.xs) if k not in self.reread and k not in self.fed]
        reads = [*self.scan.consts, *self.scan.init, *xs, *self.hosts, *self.in_place, *self.others]
        return list(dict.fromkeys(variables(reads)))

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
        only_read = [each for each in self.reread.values() if not updated.issuperset(each.slice.loads)]
        found = [*self.moves, *only_read]
        shards = {v: each.slice.shards.get(v, ()) for each in found for v in each.slice.loads}
        row = sum(nbytes(v.aval) // math.prod(parts) for v, parts in shards.items()) // self.scan.length
        window = Window(3 * row, "the rows of an iteration, of the one before and of the one after it")
        return [dataclasses.replace(each, window=window) for each in found]

    @property
    def loads_again(self) -> set[Var]:
        """The ``xs`` that the scan does not need as a whole, because it loads their rows."""
        read = {*variables([*self.scan.consts, *self.scan.init])}
        apart = {*variables(x for k, x in enumerate(self.scan.xs) if k not in self.reread)}
        return {*variables(self.scan.xs)} - read - apart

    @property
    def makes(self) -> list[Var]:
        """The values that the rest of the step may read from it."""
        updated = [v for move in self.moves for v in move.slice.outputs if v not in self.feeds]
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
        return tuple(dict.fromkeys(v for v, _ in self._reads if is_host_aval(v.aval)))

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
        """The other operands of the updates."""
        own = {*self.hosts, *self.in_place, *self.scan.ys}
        return tuple(dict.fromkeys(v for v, _ in self._reads if v not in own))

    @functools.cached_property
    def rows(self) -> dict[Var, Rows]:
        """Where the rows of leaves and other operands are."""
        writes = [(v if old is None else old, d) for v, old, d in self._writes]
        return {v: d for v, d in [*self._reads, *writes] if isinstance(d, Rows)}

    @functools.cached_property
    def pins(self) -> dict[Var, NamedSharding]:
        """The shardings of leaves and other operands."""
        return {v: s for move in self.moves for v, s in move.slice.pins.items()}

    @property
    def groups(self) -> Groups:
        """Leaves on the host that take turns: each group is stored in its phase of an iteration, and loaded in the next
        one."""
        return self._in_turn[0]

    @property
    def body(self) -> Phases:
        """The iteration's own arithmetic, divided as the link's time is."""
        return self._in_turn[1]

    @functools.cached_property
    def _in_turn(self) -> tuple[Groups, Phases]:
        """Divide the leaves into two groups, or into three if the link then waits less.

        With three equal leaves, such as masters and two moments, two groups would move two leaves in one direction
        while one leaf moves in the other. Leaves that are only loaded have the whole iteration.
        """
        body = flat((self.nest.inner if self.nest else self.scan).body, opens=lambda _: True)
        if not self.moves:
            return [self.hosts], phases(body, [1])
        groups, three = _balanced(self.hosts, 2), _balanced(self.hosts, 3)
        matmuls = sum(flops(eqn) > 0 for eqn in body.eqns)
        if matmuls >= len(three) and sum(self._times(three)) < LEAST_GAIN * sum(self._times(groups)):
            groups = three
        return groups, phases(body, self._times(groups))

    def _times(self, groups: Groups) -> list[int]:
        """Bytes that the busier direction carries in each phase."""
        out, back = (
            [sum(nbytes(v.aval) for v in group if v in moved) for group in groups]
            for moved in ({*self.stored}, {*self.loaded})
        )
        return [max(out[k], back[k - 1]) for k in range(len(groups))]

    @functools.cached_property
    def _reads(self) -> list[tuple[Var, Dim]]:
        """Each variable that an update or a reread operand is made of, with its rows."""
        both = [*self.moves, *self.reread.values()]
        return [pair for each in both for pair in zip(each.slice.inputs, each.how.dims, strict=True)]

    @functools.cached_property
    def _writes(self) -> list[tuple[Var, Var | None, Dim]]:
        """Each result that leaves the scan, with the operand whose buffer it takes, and its rows."""
        return [
            each
            for move in self.moves
            for each in zip(move.slice.outputs, move.how.buffers, move.how.out_dims, strict=True)
            if each[0] not in self.feeds
        ]


def _balanced(hosts: Sequence[Var], count: int) -> Groups:
    """Divide leaves on the host into ``count`` groups of about equal bytes."""
    groups, sizes = [list[Var]() for _ in range(count)], [0] * count
    for v in sorted(hosts, key=lambda v: -nbytes(v.aval)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(v)
        sizes[smallest] += nbytes(v.aval)
    return groups


@dataclasses.dataclass(frozen=True)
class Phases:
    """A program, run one phase after the other.

    Attributes:
      program: the program.
      slices: its phases.
      gates: for each phase but the last the matmul that ends it; ``None`` if it has no matmul.
    """

    program: Program
    slices: Sequence[Slice]
    gates: Sequence[Var | None]

    def held(self, phase: int) -> list[Var]:
        """The values that a phase makes for the next one, beside the gate."""
        made = {*self.slices[phase].outputs} - {self.gates[phase]}
        return [v for v in self.slices[phase + 1].inputs if v in made]


def phases(program: Program, times: Sequence[int]) -> Phases:
    """Cut a program behind matmuls, so that phases share its arithmetic as they share the transfers' ``times``.

    A phase holds the equations that its last matmul needs. Others above it, such as a weight's gradient, belong to the
    next phase: XLA for GPUs would run them behind the gate anyway.
    """
    work = [flops(eqn) for eqn in program.eqns]
    behind = [sum(work) - done for done in itertools.accumulate(work)]
    needed, done, rest = _work_needed(program.eqns, work), set[int](), program.eqns
    parts, outs = list[list[Equation]](), list[Sequence[Var]]()
    for k in range(len(times) - 1):
        share = times[k] / (sum(times[k:]) or 1)
        share = share if 0 < share < 1 else 0.5
        own = {at: sum(work[h] for h in needed[at] - done) for at, n in enumerate(work) if n and at not in done}
        cut = max(own, key=lambda at: (min((1 - share) * own[at], share * behind[at]), own[at]), default=None)
        outs.append(() if cut is None else program.eqns[cut].outvars)
        done |= set[int]() if cut is None else needed[cut]
        parts.append(needed_for(rest, outs[-1])[0])
        taken = {id(eqn) for eqn in parts[-1]}
        rest = [eqn for eqn in rest if id(eqn) not in taken]
    slices = consecutive([*parts, rest], program.outputs, program.debug_info, {})
    gates = [next((v for v in vs if v in s.outputs), None) for vs, s in zip(outs, slices, strict=False)]
    return Phases(program, slices, gates)


def _work_needed(eqns: Sequence[Equation], work: Sequence[float]) -> list[set[int]]:
    """Find for each equation the places of the matmuls that it needs, including its own."""
    of, found = dict[Var, set[int]](), list[set[int]]()
    for k, eqn in enumerate(eqns):
        needs = set[int]().union(*(of.get(v, ()) for v in variables(eqn.invars))) | ({k} if work[k] else set[int]())
        of.update(dict.fromkeys(eqn.outvars, needs))
        found.append(needs)
    return found
