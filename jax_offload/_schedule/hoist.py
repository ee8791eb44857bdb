"""Find the parts of an update that can run inside a scan of the step, on one row in each iteration.

The results of a scan are stacked: row i is from iteration i. An update that keeps rows apart needs no more of a stacked
gradient than the row of the layer that it updates, so it can run where that row is made (``into_backward``); then the
stack never exists. Where a step begins with the update for the gradients of the batch before, it can run where the
forward pass first reads the new row (``into_forward``), while the state of the neighboring layers moves.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Atom, DropVar, Equation, Literal, Scan, located, scan_of, variables
from jax_offload._program.memory import is_host_aval, shards_of, typed_sharding
from jax_offload._program.primitives import ELEMENTWISE, SHAPES
from jax_offload._program.program import Program, Var, flat, is_store, load_of
from jax_offload._program.propagate import NEEDS, Mask, forward, groups, made_of, needed_for, union
from jax_offload._program.rules import Dependent, Partial, Rows, Where, chunked_dims, rows_after, rows_like
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._schedule.in_scan import CannotHoist, InScan, Nest
from jax_offload._schedule.schedule import InIterations, Planned, RowWise, Window, same_type

PIPELINED = "; jax_offload.pipelined hides it"
NEEDS_ALL = f"something that needs all gradients, such as their norm, comes before their update{PIPELINED}"
OF_THE_SCAN = f"a number that the same scan carries to its end comes before their update{PIPELINED}"
BY_INDEX = "a scan takes its layers by their index, and sums their gradients up; scan over stacked parameters instead"
SHARED = (
    "every iteration of a scan uses it, and its gradient is the sum over all of them (tied layers, a recurrent net); "
    "keep it on the device with select="
)
MICROBATCHES = "its gradient is summed over microbatches in a scan, and the last of them cannot host the update"
NEEDED_BEFORE = (
    "new parameters are needed as a whole before the scan that reads them by layers; use them whole after that scan"
)
MERGED = "a reshape merges its layers with other dimensions; scan over the stack's own first dimension"
IN_GROUPS = "a scan over groups of layers reads them outside of the scan inside it, too; read them only in that scan"
ROWS = Window(0, "rows of the scan's iterations")  # `InScan.planned` counts their bytes
LEAST_ROW = 2**16  # bytes: smaller rows are updated faster together, after the scan
_PLACED = frozenset(("dynamic_update_slice", "scatter", "scatter-add", "pad"))  # a row among zeros
_HEAVY = frozenset(("scan", "while", "dot_general", "conv_general_dilated"))

Places = dict[Var, Rows | None]  # where the rows of a variable are
Makers = Mapping[Var, tuple[int, Equation]]
Dims = list[Rows | None]  # the same of an equation's operands
DimsOf = Callable[[Equation, Mapping[Var, Rows | None]], Dims | None]


@dataclasses.dataclass(frozen=True)
class Hoist:
    """A scan of a step, into which updates could move.

    Attributes:
      program: the step, with its updates inlined.
      at: the place of the scan among its equations.
      next_of: result -> the leaf of state or parameters whose next value it is.
      waiting: gradient that goes to the host for the next step -> an array there that nothing reads any longer.
      claimed: the equations that move elsewhere, by identity.
      own: the equations of the updates, by identity.
      updates: the same equations, each with the number of its update.
      read: the variables that scans with other moves read, beyond those in the program's equations.
      reread: place of another scan -> the operands whose rows that scan loads again from host memory.
    """

    program: Program
    at: int
    next_of: Mapping[Var, Var]
    waiting: Mapping[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    claimed: Set[int] = frozenset()
    own: Set[int] = frozenset()
    updates: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    read: Set[Var] = frozenset()
    reread: Mapping[int, Set[Var]] = dataclasses.field(default_factory=dict[int, Set[Var]])

    @functools.cached_property
    def scan(self) -> Scan:
        """The scan, flattened if it is a nest."""
        return self._outer if self.nest is None else self.nest.flattened

    @functools.cached_property
    def _outer(self) -> Scan:
        scan = scan_of(self.program.eqns[self.at])
        assert scan is not None
        return scan

    @functools.cached_property
    def nest(self) -> Nest | None:
        """The scan over groups of layers and the one inside it, where the step has reshaped stacks to groups."""
        outer, made, eqns = self._outer, made_by(self.program.eqns), self.program.eqns
        makers = [(x, made[x][1]) for x in variables(outer.xs) if x in made]
        grouping = {x: eqn for x, eqn in makers if _groups(eqn, x, eqn.invars)}
        if not grouping:
            return None
        body, places = flat(outer.body, opens=lambda _: True), {y: self._readers.get(y, []) for y in outer.ys}
        readers = [(y, eqns[places[y][0]]) for y in outer.ys if len(places[y]) == 1 and y not in self._results]
        merging = {y: eqn for y, eqn in readers if _groups(eqn, y, eqn.outvars)}
        row_of = dict(zip(outer.ys, body.outputs[len(outer.init) :], strict=True))
        input_of = dict(zip(outer.xs[::-1], body.inputs[::-1], strict=False))
        wanted = {*variables(row_of[y] for y in merging)} if merging else {input_of[x] for x in grouping if self.own}
        for at, eqn in enumerate(body.eqns):
            inner = scan_of(eqn)
            if inner is None or wanted.isdisjoint(inner.ys if merging else variables(inner.xs)):
                continue
            if inner.reverse != outer.reverse or body.effects:
                return None
            merging = {y: eqn for y, eqn in merging.items() if row_of[y] in inner.ys}
            before, _, after = consecutive(
                [body.eqns[:at], [eqn], body.eqns[at + 1 :]], body.outputs, body.debug_info, {}
            )
            layers = {y: eqn.outvars[0] for y, eqn in merging.items()}
            names = {row_of[y]: layer for y, layer in layers.items()}
            layers |= {x: v for x, eqn in grouping.items() if isinstance(v := eqn.invars[0], Var)}
            inner = dataclasses.replace(inner, ys=[names.get(v, v) for v in inner.ys])
            return Nest(outer, inner, body, before, after, layers, [*grouping.values()], [*merging.values()])
        return None

    def into_backward(self) -> tuple[InScan | None, list[str]]:
        """Plan the moves into the scan that makes the gradients; also return why other updates do not move."""
        eqns, scan, ys = self.program.eqns, self.scan, {*self.scan.ys}
        flow = _flow(eqns, scan, self.at, self.claimed)
        stay = [eqn for eqn in eqns if id(eqn) not in self.claimed]
        stacked = {*self._results, *self.read}
        stacked.update(v for eqn in stay if id(eqn) not in flow.eqns for v in variables(eqn.invars))
        used = stacked | {v for eqn in stay for v in variables(eqn.invars)}
        makers, together = made_by(eqns), dict[int, list[Equation]]()
        kept_apart = [eqn for eqn in eqns if id(eqn) in flow.eqns]
        for eqn, number in zip(kept_apart, groups([flow.eqns[id(eqn)] for eqn in kept_apart]), strict=True):
            together.setdefault(number, []).append(eqn)
        moves, why, moved, inside = list[Planned](), list[str](), set[int](), set[Var]()
        read, written = set[Var](), set[Var]()

        @functools.cache
        def others(numbers: frozenset[int]) -> Set[Var]:
            return made_of(eqns, lambda eqn: self.updates.get(id(eqn)) not in (None, *numbers))

        for group in together.values():
            own = {id(eqn) for eqn in group}
            made = [v for eqn in group for v in eqn.outvars]
            targets = [v for v in made if (v in flow.dims and v in stacked) or (v in flow.partial and v in used)]
            if not any((v in self.next_of or v in self.waiting) and self._is_worth_it(v) for v in targets):
                continue

            numbers = frozenset(self.updates[k] for k in own if k in self.updates)

            def dims_of(
                eqn: Equation, needed: Mapping[Var, Rows | None], own: Set[int] = own, numbers: frozenset[int] = numbers
            ) -> Dims | None:
                if id(eqn) in own:
                    return flow.of(eqn)
                if self.updates.get(id(eqn)) not in numbers and not others(numbers).isdisjoint(eqn.outvars):
                    return None  # the results of another update are read, and not made again
                return pulled(eqn, needed, scan.length)

            try:
                taken, needed = closure(makers, {v: flow.dims.get(v) for v in targets}, dims_of)
                move = self._move(taken, targets, needed)
            except (CannotHoist, Dependent) as reason:
                why.append(located(_words(reason), self.program.eqns[self.at]))
                continue
            reads, writes = {*move.slice.inputs}, {old for old in move.how.buffers if old is not None}
            if not reads.isdisjoint(written) or not writes.isdisjoint(read):
                why.append(
                    located("two gradients change the same leaf; update it with their sum", self.program.eqns[self.at])
                )
                continue
            moves.append(move)
            moved |= own
            inside |= reads & ys
            read |= reads
            written |= writes
        why += dict.fromkeys(flow.blocked[v] for v in self._missed(flow.blocked, moved))
        dropped = {v for v in scan.ys if isinstance(v, DropVar)}
        kept = frozenset(y for y in scan.ys if y in stacked or y not in inside) - dropped
        if not moves:
            return None, why
        moved |= {id(eqn) for eqn in self.nest.merging} if self.nest else set()
        kept_ys = tuple(y for y in scan.ys if y in kept)
        plan = InScan(scan, tuple(moves), kept_ys, False, frozenset(moved), nest=self.nest)
        again = self._reread({*plan.in_place, *plan.hosts})
        return dataclasses.replace(plan, reread=again), why

    def into_forward(self) -> tuple[InScan | None, list[str]]:
        """Plan the moves into the scan that reads the new parameters; also return why other updates do not move."""
        scan, eqns = self.scan, [eqn for eqn in self.program.eqns[: self.at] if id(eqn) not in self.claimed]

        def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> Dims | None:
            return pulled(eqn, needed, scan.length, self.own)

        makers, nexts = made_by(eqns), dict[Var, list[Var]]()
        for v, old in self.next_of.items():
            nexts.setdefault(old, []).append(v)
        hosts_of = dict[Var, set[Var]]()  # of the scan's xs -> the host leaves that it is made of
        for x in dict.fromkeys(variables(scan.xs)):
            try:
                taken, rows = closure(makers, {x: Rows(0)}, dims_of)
            except CannotHoist:
                continue
            made = {v for eqn in taken for v in eqn.outvars}
            hosts = {v for v in rows if is_host_aval(v.aval) and v not in made}
            if hosts and any(id(eqn) in self.own for eqn in taken):
                hosts_of[x] = hosts
        number = {v: k for k, v in enumerate({v for hosts in hosts_of.values() for v in hosts})}
        group = groups([sum(1 << number[v] for v in hosts) for hosts in hosts_of.values()])
        moves, why, moved, feeds = list[Planned](), list[str](), set[int](), set[Var]()
        for which in sorted({*group}):
            xs = [x for x, g in zip(hosts_of, group, strict=True) if g == which]
            wanted: Places = dict.fromkeys(xs, Rows(0))
            try:
                while True:  # with every leaf of the state its next value
                    taken, rows = closure(makers, wanted, dims_of)
                    more = {v: d for old, d in rows.items() if d for v in nexts.get(old, ()) if v not in wanted}
                    if not more:
                        break
                    wanted |= more
                move, inside, fed = self._feeding(taken, rows, xs, wanted)
            except (CannotHoist, Dependent) as reason:
                why.append(located(_words(reason), self.program.eqns[self.at]))
                continue
            moves.append(move)
            moved |= inside
            feeds |= fed
        if not moves:
            return None, why
        updated = {v for move in moves for v in move.slice.outputs}
        fed = {k: x for k, x in enumerate(scan.xs) if not isinstance(x, Literal) and x in updated}
        if self.nest and not self.nest.hands_on(fed):
            return None, [*why, located(IN_GROUPS, self.program.eqns[self.at])]
        kept = tuple(scan.ys)
        return InScan(scan, tuple(moves), kept, True, frozenset(moved), frozenset(feeds), fed, nest=self.nest), why

    def streaming(self) -> InScan | None:
        """Plan to load by rows the host leaves that the scan reads, if no update moves into it."""
        again = self._reread(set())
        kept = tuple(y for y in self.scan.ys if not isinstance(y, DropVar))
        gone = frozenset(map(id, self.nest.merging)) if self.nest else frozenset[int]()
        return InScan(self.scan, (), kept, True, gone, reread=again, nest=self.nest) if again else None

    def _reread(self, moving: Set[Var]) -> dict[int, Planned]:
        """Map the number of one of the scan's ``xs`` to how its rows are made of rows of leaves that move in the scan:
        of operands that it overwrites, and of leaves on the host. It loads again what the step has stored there."""
        found, scan, eqns = dict[int, Planned](), self.scan, self.program.eqns[: self.at]
        copies = {v: (k, load_of(eqn)) for k, eqn in enumerate(eqns) if is_store(eqn) for v in variables(eqn.invars)}
        makers = {**made_by(eqns), **copies}
        for k, x in enumerate(scan.xs):
            if isinstance(x, Literal) or is_host_aval(x.aval):
                continue
            try:
                taken, needed = closure(makers, {x: Rows(0)}, lambda eqn, needed: self._remade(eqn, needed, moving))
            except CannotHoist:
                continue
            s = slice_of(taken, [x], self.program.debug_info, self.program.shards)
            leads = [v for v in s.inputs if v in moving or is_host_aval(v.aval)]
            large = any(v in moving or nbytes(v.aval) >= scan.length * LEAST_ROW for v in leads)
            few = sum(nbytes(v.aval) for v in s.loads) <= 2 * nbytes(x.aval)
            if not large or not few or not all(map(needed.get, leads)) or not s.core.loads.issuperset(s.loads):
                continue
            if s.loads and any(needed[v] and v not in moving and not is_host_aval(v.aval) for v in s.inputs):
                continue  # with rows on the device beside them it is new parameters, which are on the device too
            rows = needed[leads[0]]
            if rows is None or any(self._is_divided(v, needed[v]) for v in s.loads):
                continue
            dims = tuple(needed[v] for v in s.inputs)
            how = InIterations(leads[0].aval.shape, rows.dim, dims, (Rows(0),), (None,), ahead=True)
            found[k] = Planned(s, how, ROWS)
        return found

    def _remade(self, eqn: Equation, needed: Mapping[Var, Rows | None], moving: Set[Var]) -> Dims | None:
        """Return where an equation's operands have their rows, if the rows of its results can be made again."""
        dims = pulled(eqn, needed, self.scan.length)
        if dims is None or any(v in moving or is_host_aval(v.aval) or v in self._results for v in eqn.outvars):
            return None
        return dims

    def _is_divided(self, v: Var, d: Rows | None) -> bool:
        """Whether the rows of a variable are divided between devices."""
        shards = self.program.shards.get(v) or shards_of(typed_sharding(v.aval), v.aval.shape)
        return d is not None and shards[d.dim] > 1

    def sums_up(self, gradients: Sequence[Var]) -> str:
        """Say why gradients are sums that the scan carries out of its last iteration; empty where they are not.

        The sums may be scaled or cast. A microbatch adds its share without the microbatch before it; a layer needs the
        cotangent of its neighbor.
        """
        scan, after = self.scan, self.program.eqns[self.at + 1 :]
        _, wanted = needed_for(after, gradients, lambda eqn: eqn.primitive.name in ELEMENTWISE)
        sums = [k for k, v in enumerate(scan.carry) if v in wanted and v.aval.ndim]
        if not sums:
            return ""
        body, n = scan.body.jaxpr, len(scan.consts)
        carried = {v: 1 << k for k, v in enumerate(body.invars[n : n + len(scan.carry)]) if v.aval.ndim}
        needs, maker = NEEDS.spread(body.eqns, carried), {v: eqn for eqn in body.eqns for v in eqn.outvars}
        made = [v for k in sums if not isinstance(v := body.outvars[k], Literal) and needs.get(v, 0) & ~(1 << k)]
        if not made:
            return located(MICROBATCHES, self.program.eqns[self.at])
        added = [maker[x] for v in made for x in variables(maker[v].invars) if x in maker]
        by_index = any(eqn.primitive.name in _PLACED for eqn in added)
        return located(BY_INDEX if by_index else SHARED, self.program.eqns[self.at])

    @functools.cached_property
    def _results(self) -> frozenset[Var]:
        return frozenset(variables(self.program.outputs))

    @functools.cached_property
    def _old(self) -> Set[Var]:
        return {*self.next_of.values()}

    @functools.cached_property
    def _before_rows(self) -> Set[Var]:
        """What the scan needs before its first iteration."""
        return {*variables([*self.scan.consts, *self.scan.init])}

    @functools.cached_property
    def _readers(self) -> Mapping[Var, list[int]]:
        """Map each variable to the places of the equations that read it."""
        found = dict[Var, list[int]]()
        for k, eqn in enumerate(self.program.eqns):
            for v in variables(eqn.invars):
                found.setdefault(v, []).append(k)
        return found

    @functools.cached_property
    def _read_whole(self) -> Set[Var]:
        return {*self.scan.ys, *variables(self.scan.consts)}

    def _is_worth_it(self, v: Var) -> bool:
        """Whether it is worth moving a leaf's update: always for a leaf on the host, else if its rows are large."""
        return is_host_aval(v.aval) or nbytes(v.aval) >= self.scan.length * LEAST_ROW

    def _missed(self, blocked: Iterable[Var], moved: Set[int]) -> list[Var]:
        """Return the blocked variables that hold back a leaf worth moving; a value only logged holds back none."""
        bits = {v: 1 << k for k, v in enumerate(blocked)}
        needs, found = dict(bits), 0
        for eqn in self.program.eqns[self.at + 1 :]:
            if id(eqn) not in moved and id(eqn) not in self.claimed:
                needs.update((v, needs.get(v, 0) | m) for v, m in zip(eqn.outvars, forward(eqn, needs), strict=True))
                found |= union(needs[v] for v in eqn.outvars if v in self.next_of and self._is_worth_it(v))
        return [v for v, bit in bits.items() if bit & found]

    def _feeding(
        self, taken: list[Equation], rows: Places, xs: Sequence[Var], wanted: Places
    ) -> tuple[Planned, frozenset[int], frozenset[Var]]:
        """Return the move of equations that make rows for the scan, the equations that leave their place, and the
        results that only the scan reads."""
        inside = {id(eqn) for eqn in taken} - self._also_before(taken)
        made = [v for eqn in taken if id(eqn) in inside for v in eqn.outvars]
        if not self._before_rows.isdisjoint(made):
            raise CannotHoist(NEEDED_BEFORE)
        stacked = {v for v in made if v in self._results or v in self.read or self._read_outside(v, inside)}
        move = self._move(taken, [v for v in made if v in stacked or v in wanted], rows, ahead=True)
        return move, frozenset(inside), frozenset(v for v in xs if v not in stacked)

    def _read_outside(self, v: Var, inside: Set[int]) -> list[int]:
        """The places of the equations that read a variable, other than the scan and those that are ``inside``."""
        eqns, reread = self.program.eqns, self.reread
        others = [k for k in self._readers.get(v, ()) if v not in reread.get(k, ())]
        return [k for k in others if k != self.at and id(eqns[k]) not in inside]

    def _also_before(self, taken: list[Equation]) -> set[int]:
        """Return which of the moving equations also stay in place, because a norm that the others wait for needs them.

        Raises:
          CannotHoist: they are expensive, or load a leaf from the host.
        """
        twice, eqns, scan = set[int](), self.program.eqns, self.scan
        while True:
            inside = {id(eqn) for eqn in taken} - twice
            made = [v for eqn in taken if id(eqn) in inside for v in eqn.outvars]
            if not any(k < self.at for v in made for k in self._read_outside(v, inside)):
                return twice
            moving = [eqn for eqn in taken if id(eqn) in inside]
            reads = variables([*scan.consts, *scan.init, *scan.xs, *(v for eqn in moving for v in eqn.invars)])
            before, _ = needed_for(eqns[: self.at], reads, lambda eqn, inside=inside: id(eqn) not in inside)
            found, _ = needed_for(moving, {v for eqn in before for v in variables(eqn.invars)})
            if not found:
                return twice
            if not all(_may_run_twice(eqn) for eqn in found) or any(
                is_host_aval(v.aval) for e in found for v in e.invars
            ):
                raise CannotHoist(NEEDED_BEFORE)
            twice |= {id(eqn) for eqn in found}

    def _move(
        self, eqns: list[Equation], targets: Sequence[Var], needed: Mapping[Var, Rows | None], *, ahead: bool = False
    ) -> Planned:
        """Make the move of some equations.

        Raises:
          CannotHoist, Dependent: the equations do not keep rows apart.
        """
        program, scan = self.program, self.scan
        s = slice_of(eqns, list(targets), program.debug_info, program.shards)
        dims = tuple(needed[v] for v in s.inputs)
        if any(needed[v] is None for v in s.loads):
            raise CannotHoist(
                "a leaf on the host that has no such rows is needed; stack all that its update reads by layers"
            )
        if not s.core.loads.issuperset(s.loads):
            raise CannotHoist(
                "a branch of its update loads or stores it, and the other does not; choose with jnp.where"
            )
        if any(self._is_divided(v, d) for v, d in needed.items()):
            raise CannotHoist("its layers are divided between devices; divide another dimension")
        rows = {v: d for v, d in zip(s.inputs, dims, strict=True) if d is not None}
        lead = max([v for v in rows if v not in scan.ys] or rows, key=lambda v: nbytes(v.aval))
        shape, axis = lead.aval.shape, rows[lead].dim
        out_dims = tuple(chunked_dims(s.core.jaxpr, list(dims), Where(scan.length, shape, axis)))
        if any(d is None or (isinstance(d, Rows) and d.per_row > 1) for d in out_dims):
            raise CannotHoist(MERGED)
        how = InIterations(shape, axis, dims, out_dims, (None,) * len(out_dims), ahead=ahead)
        return Planned(s, dataclasses.replace(how, buffers=self._buffers(s, how)), ROWS)

    def _buffers(self, s: Slice, how: RowWise) -> tuple[Var | None, ...]:
        """Choose where each result is written: over its old value, or over the array that waited in its place."""
        dims, taken = dict(zip(s.inputs, how.dims, strict=True)), set[Var]()
        # arrays that the scan reads as a whole are needed until its end
        free = [v for v in s.inputs if v not in self._read_whole and v not in self._old]
        found: list[Var | None] = []
        for v, d in zip(s.outputs, how.out_dims, strict=True):
            old = self.next_of.get(v, self.waiting.get(v))
            if old is not None and v not in self.waiting and (old not in dims or dims[old] != d):
                old = None
            if old is not None and (old in taken or old in self._read_whole or not same_type(old.aval, v.aval)):
                old = None
            if old is None and isinstance(d, Rows) and v in self._results and not is_host_aval(v.aval):
                # new parameters that are made of an update after it: in place of the operand that is like them, and of
                # a gradient that is divided further (ZeRO-1) rather the parameter
                like_it = [x for x in free if x not in taken and dims[x] == d and same_type(x.aval, v.aval)]
                old = min(like_it, key=lambda x: math.prod(s.shards.get(x, ())), default=None)
            if old is None and is_host_aval(v.aval):
                raise CannotHoist(
                    "it moves to the host in this step, or its next value is of another type; give it as tx.init does"
                )
            found.append(old)
            taken |= {old} if old is not None else set()
        return tuple(found)


@dataclasses.dataclass
class _Flow:
    """Where the rows of a scan's stacked results go.

    Attributes:
      dims: the values made of them that still have rows, and the arrays made elsewhere that enter the same equations.
      partial: reductions over all rows.
      known: the arrays made elsewhere: known before the scan, or at least without it.
      eqns: by identity, the equations that keep the rows apart, with the bits of the stacked results they come from.
      bits: for each variable the stacked results that it is made of.
      blocked: variable -> why its rows go no further; only variables that lead to no other loop or matmul.
    """

    dims: dict[Var, Rows]
    bits: dict[Var, Mask]
    partial: dict[Var, Partial] = dataclasses.field(default_factory=dict[Var, Partial])
    known: dict[Var, Rows] = dataclasses.field(default_factory=dict[Var, Rows])
    eqns: dict[int, Mask] = dataclasses.field(default_factory=dict[int, Mask])
    blocked: dict[Var, str] = dataclasses.field(default_factory=dict[Var, str])

    def of(self, eqn: Equation) -> Dims:
        """Where the rows of an equation's operands are."""
        return [None if isinstance(v, Literal) else self.dims.get(v, self.known.get(v)) for v in eqn.invars]


def _flow(eqns: Sequence[Equation], scan: Scan, at: int, claimed: Set[int]) -> _Flow:
    ys = [y for y in scan.ys if not isinstance(y, DropVar) and y.aval.shape[0] == scan.length]
    flow = _Flow({y: Rows(0) for y in ys}, {y: 1 << i for i, y in enumerate(ys)})
    later = {*scan.carry, *scan.ys}  # the values that cannot be known before the scan has run
    of_rows = {*scan.ys}
    for eqn in eqns[at + 1 :]:
        ins = variables(eqn.invars)
        if not any(v in later for v in ins):
            continue
        later.update(eqn.outvars)
        of_rows.update(eqn.outvars if any(v in of_rows for v in ins) else ())
        rows = [v for v in ins if v in flow.bits and v in flow.dims]
        if not rows or id(eqn) in claimed:
            continue
        if others := [v for v in ins if v in later and v not in rows]:
            if eqn.primitive.name not in _HEAVY:
                why = NEEDS_ALL if any(v in of_rows for v in others) else OF_THE_SCAN
                flow.blocked.update(dict.fromkeys(rows, located(why, eqn, eqns[at])))
            continue
        shape, dim = rows[0].aval.shape, flow.dims[rows[0]]
        known = {v: d for v in ins if v not in later and (d := rows_like(v.aval, shape, dim.dim)) is not None}
        if any(flow.known.get(v, d) != d for v, d in known.items()) or (known and dim.per_row > 1):
            flow.blocked.update(dict.fromkeys(rows, located(MERGED, eqn, eqns[at])))
            continue
        dims = [None if isinstance(v, Literal) else flow.dims.get(v, known.get(v)) for v in eqn.invars]
        try:
            out = rows_after(eqn, dims, Where(scan.length, shape, dim.dim))
        except Dependent as why:
            if eqn.primitive.name not in _HEAVY:
                flow.blocked.update(dict.fromkeys(rows, located(_words(why), eqn, eqns[at])))
            continue
        if any(d is None for d in out):
            continue
        flow.known.update(known)
        flow.eqns[id(eqn)] = bits = union(flow.bits[v] for v in rows)
        for v, d in zip(eqn.outvars, out, strict=True):
            flow.bits[v] = bits
            if isinstance(d, Partial):
                flow.partial[v] = d
            elif d is not None:
                flow.dims[v] = d
    return flow


def _words(why: CannotHoist | Dependent) -> str:
    if isinstance(why, CannotHoist):
        return str(why)
    return f"its update does not keep layers apart: {why}; keep it on the device with select="


def _groups(eqn: Equation, groups: Var, layers: Sequence[Atom]) -> bool:
    """Whether an equation only divides or merges the first dimension of stacked layers."""
    shape = groups.aval.shape
    if eqn.primitive.name != "reshape" or len(shape) < 2:
        return False
    return layers[0].aval.shape == (shape[0] * shape[1], *shape[2:])


def made_by(eqns: Sequence[Equation]) -> Makers:
    """Map each variable to the place of the equation that makes it, and to the equation."""
    return {v: (k, eqn) for k, eqn in enumerate(eqns) for v in eqn.outvars}


def closure(makers: Makers, wanted: Mapping[Var, Rows | None], dims_of: DimsOf) -> tuple[list[Equation], Places]:
    """Find the equations that make the rows of some variables, and the places of the rows that these equations need.

    Args:
      makers: the equations of the program, by what they make.
      wanted: variables, and where their rows are.
      dims_of: maps an equation and the needed values to the rows of its operands; ``None``: it is not taken.
    """
    needed, taken = dict(wanted), list[Equation]()
    todo = {makers[v][0]: makers[v][1] for v in wanted if v in makers}
    places = [-k for k in todo]  # the last equation first: by then all readers of its results are known
    heapq.heapify(places)
    while places:
        eqn = todo[-heapq.heappop(places)]
        if (dims := dims_of(eqn, needed)) is None:
            continue
        taken.append(eqn)
        for v, d in zip(eqn.invars, dims, strict=True):
            if isinstance(v, Literal):
                continue
            if needed.setdefault(v, d) != d:
                raise CannotHoist("an array is used with its layers in two dimensions; take them from one")
            if v in makers and makers[v][0] not in todo:
                k, maker = makers[v]
                todo[k] = maker
                heapq.heappush(places, -k)
    return taken[::-1], needed


def pulled(eqn: Equation, needed: Mapping[Var, Rows | None], size: int, own: Set[int] = frozenset()) -> Dims | None:
    """Return where an equation's operands have their rows, if it makes the needed rows of its results cheaply.

    Equations of ``own`` run only once, so they may be expensive.
    """
    if eqn.effects or not (_may_run_twice(eqn) or id(eqn) in own):
        return None
    wanted = {v: needed[v] for v in eqn.outvars if v in needed}
    dims = {*wanted.values()}
    if len(dims) != 1 or None in dims:
        return None
    (dim,) = dims
    assert dim is not None
    shape = next(iter(wanted)).aval.shape
    if eqn.primitive.name == "transpose":
        guess: Dims = [Rows(eqn.params["permutation"][dim.dim])]
    else:
        guess = [None if isinstance(v, Literal) else rows_like(v.aval, shape, dim.dim) for v in eqn.invars]
    try:
        out = rows_after(eqn, guess, Where(size, shape, dim.dim))
    except Dependent:
        return None
    return guess if all(d == dim for v, d in zip(eqn.outvars, out, strict=True) if v in wanted) else None


def _may_run_twice(eqn: Equation) -> bool:
    name = eqn.primitive.name
    return name in ELEMENTWISE or name == "cond" or name in SHAPES
