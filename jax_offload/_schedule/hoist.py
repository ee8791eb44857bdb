"""Find the parts of an update that can run inside a scan of the step, on one row in each iteration.

The results of a scan are stacked: row i is from iteration i. An update that keeps rows apart needs no more of a stacked
gradient than the row of the layer that it updates, so it can run where that row is made (``into_backward``); then the
stack never exists. Where a step begins with the update for the gradients of the batch before, it can run where the
forward pass first reads the new row (``into_forward``), while the state of the neighboring layers moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Atom, DropVar, Equation, Literal, Scan, located, scan_of, variables
from jax_offload._program.memory import Space, is_host_aval, shards_of, typed_sharding
from jax_offload._program.primitives import ELEMENTWISE, SHAPES
from jax_offload._program.program import Program, Var, flat, is_store
from jax_offload._program.propagate import NEEDS, Mask, forward, groups, made_of, needed_for, union
from jax_offload._program.rules import Dependent, Dim, Rows, Where, chunked_dims, rows_after, rows_like
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._schedule.in_scan import CannotHoist, InScan, Nest
from jax_offload._schedule.schedule import Planned, RowWise, Window, same_type

PIPELINED = "; jax_offload.pipelined hides it"
NEEDS_ALL = f"something that needs all gradients, such as their norm, comes before their update{PIPELINED}"
OF_THE_STATE = (
    "a number made of the updates or the state of all layers (LAMB, Adafactor's clipping_threshold) comes before "
    "their update; jax.vmap the init and update of the layers' optimizer, if each layer may have its own number"
)
OF_THE_NEW = (
    "a number made of the new parameters or state of all layers chooses between new and old ones; choose by a number "
    "of the gradients"
)
OF_THE_SCAN = f"a number that the same scan carries to its end comes before their update{PIPELINED}"
AT_ITS_END = (
    "a scan, forward or backward, ends with its gradient, so nothing is left to hide its update; keep it on the device "
    "with select="
)
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

T = TypeVar("T")
Places = dict[Var, Rows | None]  # where the rows of a variable are
Makers = Mapping[Var, tuple[int, Equation]]
Dims = list[Rows | None]  # the same of an equation's operands
DimsOf = Callable[[Equation, Places], Dims | None]


@dataclasses.dataclass(frozen=True)
class Hoist:
    """A scan of a step, into which updates could move.

    Attributes:
      program: the step, with its updates inlined.
      at: the place of the scan among its equations.
      next_of: result -> the leaf of state or parameters whose next value it is.
      waiting: gradient that goes to the host for the next step -> an array there that nothing reads any longer.
      updates: the equations of the updates, by identity, each with the number of its update.
      claimed: the equations that move elsewhere, by identity.
      read: the variables that scans with other moves read, beyond those in the program's equations.
      reread: place of another scan -> the operands whose rows that scan loads again from host memory.
    """

    program: Program
    at: int
    next_of: Mapping[Var, Var]
    waiting: Mapping[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    updates: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    claimed: Set[int] = frozenset()
    read: Set[Var] = frozenset()
    reread: Mapping[int, Set[Var]] = dataclasses.field(default_factory=dict[int, Set[Var]])

    def into_backward(self) -> tuple[InScan | None, list[str]]:
        """Plan the moves into the scan that makes the gradients; also return why other updates do not move."""
        eqns, scan = self.program.eqns, self.scan
        flow = self._flow()
        inside = self.claimed | {id(eqn) for group in flow.groups for eqn in group}
        outside = [v for eqn in eqns if id(eqn) not in inside for v in variables(eqn.invars)]
        stacked = {*self._results, *self.read, *outside}
        makers, moves, why, moved = made_by(eqns), list[Planned](), list[str](), set[int]()
        read, written = set[Var](), set[Var]()
        for group in flow.groups:
            own, made = {id(eqn) for eqn in group}, [v for eqn in group for v in eqn.outvars]
            targets = [v for v in made if v in stacked]
            if not any((v in self.next_of or v in self.waiting) and self._is_worth_it(v) for v in targets):
                continue
            try:
                taken, needed = closure(makers, {v: flow.rows(v) for v in targets}, self._dims_in(flow, own))
                move = self._move(taken, needed, targets)
                reads, writes = {*move.slice.inputs}, {old for old in move.how.buffers if old is not None}
                if not reads.isdisjoint(written) or not writes.isdisjoint(read):
                    raise CannotHoist("two gradients change the same leaf; update it with their sum")
            except (CannotHoist, Dependent) as reason:
                why.append(self._why(reason))
                continue
            moves.append(move)
            moved |= own
            read |= reads
            written |= writes
        why += dict.fromkeys(flow.blocked[v] for v in self._missed(flow.blocked, moved))
        if not moves:
            return None, why
        moved |= {id(eqn) for eqn in self.nest.merging} if self.nest else set()
        kept = [y for y in scan.ys if not isinstance(y, DropVar) and (y in stacked or y not in read)]
        plan = InScan(scan, tuple(moves), tuple(kept), False, frozenset(moved), nest=self.nest)
        return dataclasses.replace(plan, reread=self._reread({*plan.in_place, *plan.hosts})), why

    def into_forward(self) -> tuple[InScan | None, list[str]]:
        """Plan the moves into the scan that reads the new parameters; also return why other updates do not move."""
        scan, nexts = self.scan, dict[Var, list[Var]]()
        makers = made_by([eqn for eqn in self.program.eqns[: self.at] if id(eqn) not in self.claimed])
        for v, old in self.next_of.items():
            nexts.setdefault(old, []).append(v)

        def dims_of(eqn: Equation, needed: Places) -> Dims | None:
            return pulled(eqn, needed, scan.length, self.updates.keys())

        number, masks = dict[Var, int](), dict[Var, Mask]()  # of the scan's xs, the host leaves that they are made of
        for x in dict.fromkeys(variables(scan.xs)):
            with contextlib.suppress(CannotHoist):
                taken, rows = closure(makers, {x: Rows(0)}, dims_of)
                hosts = {v for v in rows if is_host_aval(v.aval)}.difference(*(eqn.outvars for eqn in taken))
                if hosts and any(id(eqn) in self.updates for eqn in taken):
                    masks[x] = union(1 << number.setdefault(v, len(number)) for v in hosts)
        moves, why, moved, feeds = list[Planned](), list[str](), set[int](), set[Var]()
        for xs in alike([*masks], [*masks.values()]):
            wanted = Places.fromkeys(xs, Rows(0))
            try:
                taken, rows = closure(makers, wanted, dims_of)
                # with every leaf of the state its next value
                while more := {v: d for old, d in rows.items() if d for v in nexts.get(old, ()) if v not in wanted}:
                    wanted |= more
                    taken, rows = closure(makers, wanted, dims_of)
                inside = {id(eqn) for eqn in taken} - self._also_before(taken)
                made = [v for eqn in taken if id(eqn) in inside for v in eqn.outvars]
                if not {*variables([*scan.consts, *scan.init])}.isdisjoint(made):
                    raise CannotHoist(NEEDED_BEFORE)
                stacked = {v for v in made if v in self._results or v in self.read or self._read_outside(v, inside)}
                moves.append(self._move(taken, rows, [v for v in made if v in stacked or v in wanted], ahead=True))
            except (CannotHoist, Dependent) as reason:
                why.append(self._why(reason))
                continue
            moved |= inside
            feeds.update(x for x in xs if x not in stacked)
        if not moves:
            return None, why
        plan = InScan(scan, tuple(moves), tuple(scan.ys), True, frozenset(moved), frozenset(feeds), nest=self.nest)
        if self.nest and not self.nest.hands_on(plan.fed):
            return None, [*why, self._why(CannotHoist(IN_GROUPS))]
        return plan, why

    def streaming(self) -> InScan | None:
        """Plan to load by rows the host leaves that the scan reads, if no update moves into it."""
        again = self._reread(set())
        kept = tuple(y for y in self.scan.ys if not isinstance(y, DropVar))
        gone = frozenset(map(id, self.nest.merging)) if self.nest else frozenset[int]()
        return InScan(self.scan, (), kept, True, gone, reread=again, nest=self.nest) if again else None

    # ---- what the policies ask

    @functools.cached_property
    def scan(self) -> Scan:
        """The scan, flattened if it is a nest."""
        return self._outer if self.nest is None else self.nest.flattened

    @property
    def _outer(self) -> Scan:
        scan = scan_of(self.program.eqns[self.at])
        assert scan is not None
        return scan

    @functools.cached_property
    def nest(self) -> Nest | None:
        """The scan over groups of layers and the one inside it, where the step has reshaped stacks to groups."""
        outer, made, eqns = self._outer, made_by(self.program.eqns), self.program.eqns
        makers = {x: made[x][1] for x in variables(outer.xs) if x in made}
        grouping = {x: eqn for x, eqn in makers.items() if _groups(eqn, x, eqn.invars)}
        if not grouping:
            return None
        body = flat(outer.body, opens=lambda _: True)
        row_of = dict(zip(outer.ys, body.outputs[len(outer.init) :], strict=True))
        places = {y: self._readers.get(y, []) for y in outer.ys if y not in self._results}
        readers = {y: eqns[ks[0]] for y, ks in places.items() if len(ks) == 1}
        merging = {y: eqn for y, eqn in readers.items() if _groups(eqn, y, eqn.outvars)}
        input_of = dict(zip(outer.xs[::-1], body.inputs[::-1], strict=False))
        wanted = variables(row_of[y] for y in merging) if merging else [input_of[x] for x in grouping if self.updates]
        for at, eqn in enumerate(body.eqns):
            inner = scan_of(eqn)
            if inner is None or {*wanted}.isdisjoint(inner.ys if merging else variables(inner.xs)):
                continue
            if inner.reverse != outer.reverse or body.effects:
                return None
            merging = {y: eqn for y, eqn in merging.items() if row_of[y] in inner.ys}
            parts = [body.eqns[:at], [eqn], body.eqns[at + 1 :]]
            before, _, after = consecutive(parts, body.outputs, body.debug_info, {})
            layers = {y: eqn.outvars[0] for y, eqn in merging.items()}
            names = {row_of[y]: layer for y, layer in layers.items()}
            layers |= {x: v for x, eqn in grouping.items() if isinstance(v := eqn.invars[0], Var)}
            inner = dataclasses.replace(inner, ys=[names.get(v, v) for v in inner.ys])
            return Nest(outer, inner, body, before, after, layers, [*grouping.values()], [*merging.values()])
        return None

    @functools.cached_property
    def _results(self) -> frozenset[Var]:
        return frozenset(variables(self.program.outputs))

    @functools.cached_property
    def _readers(self) -> Mapping[Var, list[int]]:
        """Map each variable to the places of the equations that read it."""
        found = dict[Var, list[int]]()
        for k, eqn in enumerate(self.program.eqns):
            for v in variables(eqn.invars):
                found.setdefault(v, []).append(k)
        return found

    def _read_outside(self, v: Var, inside: Set[int]) -> bool:
        """Whether an equation other than the scan and those ``inside`` reads a variable, as a whole."""
        others = (k for k in self._readers.get(v, ()) if k != self.at and v not in self.reread.get(k, ()))
        return any(id(self.program.eqns[k]) not in inside for k in others)

    def _is_worth_it(self, v: Var) -> bool:
        """Whether it is worth moving a leaf's update: always for a leaf on the host, else if its rows are large."""
        return is_host_aval(v.aval) or nbytes(v.aval) >= self.scan.length * LEAST_ROW

    def _is_divided(self, v: Var, d: Rows | None) -> bool:
        """Whether the rows of a variable are divided between devices."""
        shards = self.program.shards.get(v) or shards_of(typed_sharding(v.aval), v.aval.shape)
        return d is not None and shards[d.dim] > 1

    def _why(self, why: CannotHoist | Dependent | str, *eqns: Equation) -> str:
        """A reason, with the line of one of these equations, or else of the scan."""
        if isinstance(why, Dependent):
            why = f"its update does not keep layers apart: {why}; keep it on the device with select="
        return located(str(why), *eqns, self.program.eqns[self.at])

    # ---- behind the scan that makes the gradients

    def _flow(self) -> _Flow:
        """Follow the rows of the scan's stacked results."""
        scan, eqns = self.scan, list[Equation]()
        ys = [y for y in scan.ys if not isinstance(y, DropVar) and y.aval.shape[0] == scan.length]
        flow, bits = _Flow(dict.fromkeys(ys, Rows(0))), {y: 1 << i for i, y in enumerate(ys)}
        later, of_rows, merging = {*scan.carry, *scan.ys}, {*scan.ys}, dict[Var, Equation]()
        causes = dict[Var, str]()  # a value of blocked equations alone -> why the first is blocked
        for eqn in self.program.eqns[self.at + 1 :]:
            ins = variables(eqn.invars)
            late = [v for v in ins if v in later]
            if not late:
                continue
            later.update(eqn.outvars)
            of_rows.update(() if of_rows.isdisjoint(ins) else eqn.outvars)
            rows = [v for v in ins if isinstance(flow.dims.get(v), Rows)]
            others = [v for v in late if v not in rows]
            held = [causes[v] for v in others if v in causes]
            cause = held[0] if held and len(held) == len(others) else ""
            if not rows or id(eqn) in self.claimed:
                causes.update(dict.fromkeys(eqn.outvars, cause) if cause else {})
                continue
            try:
                if others:
                    raise CannotHoist(OF_THE_SCAN if of_rows.isdisjoint(others) else self._why_late(others, flow))
                found = flow.after(eqn, scan.length, later)
            except (CannotHoist, Dependent) as why:
                if eqn.primitive.name not in _HEAVY:
                    reshapes = [merging[v] for v in rows if v in merging] if str(why) == MERGED else []
                    cause = cause or self._why(why, *reshapes, eqn)
                    flow.blocked.update(dict.fromkeys(rows, cause))
                    causes.update(dict.fromkeys(eqn.outvars, cause))
                continue
            if None not in found:
                eqns.append(eqn)
                flow.dims.update(zip(eqn.outvars, found, strict=True))
                if any(isinstance(d, Rows) and d.per_row > 1 for d in found):
                    merging.update(dict.fromkeys(eqn.outvars, next((merging[v] for v in rows if v in merging), eqn)))
                bits.update(dict.fromkeys(eqn.outvars, union(bits[v] for v in rows)))
        flow.groups.extend(alike(eqns, [bits[eqn.outvars[0]] for eqn in eqns]))
        return flow

    def _why_late(self, numbers: Sequence[Var], flow: _Flow) -> str:
        """Say why rows wait for numbers that need all rows.

        ``into_forward`` can wait for a norm of the gradients. For other numbers it may have to load rows twice or to
        repeat costly equations, and then refuses the rows too.
        """
        after, ours = {*map(id, self.program.eqns[self.at + 1 :])}, self.updates.keys()

        def late(eqn: Equation) -> bool:
            return (id(eqn) in after or id(eqn) in ours) and eqn.primitive.name not in _HEAVY

        made, _ = needed_for(self.program.eqns, numbers, late)
        own, others = ([eqn for eqn in made if (id(eqn) in ours) == is_own] for is_own in (True, False))
        loads = any(is_host_aval(v.aval) and self.scan.length in v.aval.shape for eqn in own for v in eqn.invars)
        if not loads and all(_may_run_twice(eqn) or not any(map(flow.rows, eqn.outvars)) for eqn in own):
            return NEEDS_ALL
        new = {v for eqn in own for v in eqn.outvars}
        return OF_THE_STATE if all(new.isdisjoint(variables(eqn.invars)) for eqn in others) else OF_THE_NEW

    def _dims_in(self, flow: _Flow, own: Set[int]) -> DimsOf:
        """Return a function that finds the rows of equations: of the flow's ``own`` ones, and of cheap ones for other
        operands. The results of another update are read, and not made again."""
        numbers = {self.updates[k] for k in own if k in self.updates}
        others = set[Var]()
        if not numbers.issuperset(self.updates.values()):
            others = made_of(self.program.eqns, lambda eqn: self.updates.get(id(eqn)) not in {None, *numbers})

        def dims_of(eqn: Equation, needed: Places) -> Dims | None:
            if id(eqn) in own:
                return [flow.rows(v) for v in eqn.invars]
            theirs = self.updates.get(id(eqn)) not in numbers and not others.isdisjoint(eqn.outvars)
            return None if theirs else pulled(eqn, needed, self.scan.length)

        return dims_of

    def _missed(self, blocked: Iterable[Var], moved: Set[int]) -> list[Var]:
        """Return the blocked variables that hold back a leaf worth moving; a value only logged holds back none."""
        bits = {v: 1 << k for k, v in enumerate(blocked)}
        needs, found = dict(bits), 0
        for eqn in self.program.eqns[self.at + 1 :]:
            if id(eqn) not in moved and id(eqn) not in self.claimed:
                needs.update((v, needs.get(v, 0) | m) for v, m in zip(eqn.outvars, forward(eqn, needs), strict=True))
                found |= union(needs[v] for v in eqn.outvars if v in self.next_of and self._is_worth_it(v))
        return [v for v, bit in bits.items() if bit & found]

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
        outs = {k: v for k in sums if isinstance(v := body.outvars[k], Var)}
        made = [v for k, v in outs.items() if needs.get(v, 0) & ~(1 << k)]
        if not made:
            heavy = [eqn for eqn in needed_for(body.eqns, outs.values())[0] if eqn.primitive.name in _HEAVY]
            into = functools.reduce(int.__or__, (needs.get(v, 0) for eqn in heavy for v in variables(eqn.invars)), 0)
            return self._why(AT_ITS_END if any(into >> k & 1 for k in outs) else MICROBATCHES)
        added = [maker[x] for v in made for x in variables(maker[v].invars) if x in maker]
        return self._why(BY_INDEX if any(eqn.primitive.name in _PLACED for eqn in added) else SHARED)

    # ---- ahead of the scan that reads the parameters

    def _also_before(self, taken: list[Equation]) -> set[int]:
        """Return which of the moving equations also stay in place, because a norm that the others wait for needs them.

        Raises:
          CannotHoist: they are expensive, or load a leaf from the host.
        """
        inside, scan, eqns = {id(eqn) for eqn in taken}, self.scan, self.program.eqns
        read_at = {k for eqn in taken for v in eqn.outvars for k in self._readers.get(v, ()) if k < self.at}
        if all(id(eqns[k]) in inside for k in read_at):
            return set()
        others = [eqn for eqn in eqns[: self.at] if id(eqn) not in inside]
        before, _ = needed_for(others, variables([*scan.consts, *scan.init, *scan.xs]))
        ahead, _ = needed_for(others, {v for eqn in taken for v in variables(eqn.invars)})
        own = [eqn for eqn in ahead if id(eqn) in self.updates]
        for readers, why in (own, OF_THE_STATE), (ahead, OF_THE_NEW), (ahead + before, NEEDED_BEFORE):
            twice, _ = needed_for(taken, {v for eqn in readers for v in variables(eqn.invars)})
            if not all(map(_is_free_to_repeat, twice)):
                raise CannotHoist(why)
        return {id(eqn) for eqn in twice}

    def _reread(self, moving: Set[Var]) -> dict[int, Planned]:
        """Map the number of one of the scan's ``xs`` to how its rows are made of rows of leaves that move in the scan:
        of operands that it overwrites, and of leaves on the host. It loads again what the step has stored there."""
        found, scan, eqns = dict[int, Planned](), self.scan, self.program.eqns[: self.at]
        load = {"devices": (Space.Device,), "srcs": (Space.Host,)}
        stores = [(k, eqn, v) for k, eqn in enumerate(eqns) if is_store(eqn) for v in variables(eqn.invars)]
        loads = {v: (k, s.replace(invars=[*s.outvars], outvars=[v], params=s.params | load)) for k, s, v in stores}
        makers = {**made_by(eqns), **loads}

        def dims_of(eqn: Equation, needed: Places) -> Dims | None:
            at_hand = any(v in moving or is_host_aval(v.aval) or v in self._results for v in eqn.outvars)
            return None if at_hand else pulled(eqn, needed, scan.length)

        for k, x in enumerate(scan.xs):
            if isinstance(x, Literal) or is_host_aval(x.aval):
                continue
            with contextlib.suppress(CannotHoist, Dependent):
                taken, needed = closure(makers, {x: Rows(0)}, dims_of)
                leads = {v for v in needed if v in moving or is_host_aval(v.aval)}
                large = any(v in moving or nbytes(v.aval) >= scan.length * LEAST_ROW for v in leads)
                if not large or not all(needed[v] for v in leads):
                    continue
                move = self._move(taken, needed, [x], ahead=True)
                loads, rows = move.slice.loads, {v for v in move.slice.inputs if needed[v]}
                few = sum(nbytes(v.aval) for v in loads) <= 2 * nbytes(x.aval)
                # with rows on the device beside loads it is new parameters, which are on the device too
                if few and leads <= rows and (leads == rows or not loads):
                    found[k] = move
        return found

    # ---- a move

    def _move(self, eqns: list[Equation], needed: Places, targets: list[Var], *, ahead: bool = False) -> Planned:
        """Make the move of some equations.

        Raises:
          CannotHoist, Dependent: the equations do not keep rows apart.
        """
        program, scan = self.program, self.scan
        s = slice_of(eqns, targets, program.debug_info, program.shards)
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
        which = "that reads the parameters" if ahead else "that makes their gradients"
        how = RowWise(shape, axis, dims, out_dims, self._buffers(s, dims, out_dims), scan=which)
        return Planned(s, how, ROWS)

    def _buffers(self, s: Slice, dims: Sequence[Dim], out_dims: Sequence[Dim]) -> tuple[Var | None, ...]:
        """Choose where each result is written: over its old value, or over the array that waited in its place."""
        rows_of, read_whole = dict(zip(s.inputs, dims, strict=True)), {*self.scan.ys, *variables(self.scan.consts)}
        made = dict(zip(s.outputs, out_dims, strict=True))
        nexts = {v: self.next_of[v] for v in made if v in self.next_of}
        nexts = {v: old for v, old in nexts.items() if rows_of.get(old) == made[v]}
        reuse = {v: old for v, old in {**nexts, **self.waiting}.items() if old not in read_whole}
        found, taken = list[Var | None](), set[Var]()
        # arrays that the scan reads as a whole are needed until its end
        free = [v for v in s.inputs if v not in read_whole and v not in {*self.next_of.values()}]
        for v, d in made.items():
            old = reuse.get(v)
            if old is not None and (old in taken or not same_type(old.aval, v.aval)):
                old = None
            if old is None and isinstance(d, Rows) and v in self._results and not is_host_aval(v.aval):
                # new parameters that are made of an update after it: in place of the operand that is like them, and of
                # a gradient that is divided further (ZeRO-1) rather the parameter
                like_it = [x for x in free if x not in taken and rows_of[x] == d and same_type(x.aval, v.aval)]
                old = min(like_it, key=lambda x: math.prod(s.shards.get(x, ())), default=None)
            if old is None and is_host_aval(v.aval):
                raise CannotHoist(
                    "it moves to the host in this step, or its next value is of another type; give it as tx.init does"
                )
            found.append(old)
            taken |= {old} if old is not None else set()
        return tuple(found)


# ---- where rows are


@dataclasses.dataclass(frozen=True)
class _Flow:
    """Where the rows of a scan's stacked results go.

    Attributes:
      dims: where the rows of the values made of them are, or that these are reductions over all rows.
      known: the same of the arrays made elsewhere that enter the same equations.
      groups: the equations that keep the rows apart. Different groups share no stacked result.
      blocked: variable -> why its rows go no further; only variables that lead to no other loop or matmul.
    """

    dims: dict[Var, Dim]
    known: Places = dataclasses.field(default_factory=Places)
    groups: list[list[Equation]] = dataclasses.field(default_factory=list[list[Equation]])
    blocked: dict[Var, str] = dataclasses.field(default_factory=dict[Var, str])

    def rows(self, v: Atom) -> Rows | None:
        """Where a variable has its rows."""
        found = None if isinstance(v, Literal) else self.dims.get(v, self.known.get(v))
        return found if isinstance(found, Rows) else None

    def after(self, eqn: Equation, size: int, later: Set[Var]) -> Sequence[Dim]:
        """Where the results of an equation have their rows. ``later``: what cannot be known before the scan has run.

        Raises:
          CannotHoist, Dependent: it does not keep the rows apart.
        """
        first = next(v for v in variables(eqn.invars) if isinstance(self.dims.get(v), Rows))
        rows, shape = self.rows(first), first.aval.shape
        assert rows is not None
        others = [v for v in variables(eqn.invars) if v not in later]
        known = {v: d for v in others if (d := rows_like(v.aval, shape, rows.dim)) is not None}
        if any(self.known.get(v, d) != d for v, d in known.items()) or (known and rows.per_row > 1):
            raise CannotHoist(MERGED)
        dims = [None if isinstance(v, Literal) else known.get(v, self.rows(v)) for v in eqn.invars]
        found = rows_after(eqn, dims, Where(size, shape, rows.dim))
        self.known.update(known if None not in found else {})
        return found


def alike(items: Sequence[T], masks: Sequence[Mask]) -> list[list[T]]:
    """Group the items whose masks share a bit, directly or through others."""
    found = dict[int, list[T]]()
    for item, number in zip(items, groups(masks), strict=True):
        found.setdefault(number, []).append(item)
    return [*found.values()]


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


def _is_free_to_repeat(eqn: Equation) -> bool:
    """Whether an equation is cheap and loads no leaf from the host."""
    return _may_run_twice(eqn) and not any(is_host_aval(v.aval) for v in eqn.invars)


def _may_run_twice(eqn: Equation) -> bool:
    name = eqn.primitive.name
    return name in ELEMENTWISE or name == "cond" or name in SHAPES
