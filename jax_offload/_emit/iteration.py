"""An iteration of a scan with updates inside: its arithmetic, its updates, and the transfers beside both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jax_offload._base.barriers import read_once, together, written_after
from jax_offload._base.jaxprs import Literal, Var, as_array
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, shards_of, typed_sharding, zeros
from jax_offload._emit.rows import read_rows, write_rows
from jax_offload._emit.transfers import Names, prefetch, update_of, write_back
from jax_offload._ir.slices import core
from jax_offload._plan.in_scan import InScan
from jax_offload._plan.rules import Partial, Rows, run_chunk

Values = dict[Var, Any]


@dataclasses.dataclass
class Iteration:
    """What an iteration has in hand: whole buffers, by the leaf that they are the values of, and rows.

    Attributes:
      host, device: buffers.
      loaded: rows of host leaves, on the device, for this iteration.
      new: rows of host leaves that are not stored yet.
      sums: what is summed up over the iterations.
    """

    host: Values
    device: Values
    loaded: Values
    new: Values
    sums: Values


@dataclasses.dataclass(frozen=True)
class Emitter:
    """What an iteration does, and what there is before the first and after the last.

    Attributes:
      consts: of the scan.
      others: what else the updates read, by the plan.
    """

    plan: InScan
    names: Names
    consts: Sequence[Any]
    others: Values

    @property
    def keys(self) -> tuple[Sequence[Var], ...]:
        """What a loop carries of each of the parts of an ``Iteration``."""
        plan = self.plan
        stored = () if plan.ahead else plan.stored
        return plan.hosts, (*plan.in_place, *plan.new), plan.loaded, stored, plan.sums

    def packed(self, at: Iteration) -> list[list[Any]]:
        parts = at.host, at.device, at.loaded, at.new, at.sums
        return [[x[v] for v in vs] for vs, x in zip(self.keys, parts, strict=True)]

    def unpacked(self, kept: Sequence[Sequence[Any]]) -> Iteration:
        return Iteration(*(dict(zip(vs, xs, strict=True)) for vs, xs in zip(self.keys, kept, strict=True)))

    def row(self, x: Any, v: Var, i: Any) -> Any:
        return read_rows(x, self.plan.rows[v].dim, i, 1, 1, self.plan.pins.get(v))

    def load(self, host: Values, v: Var, i: Any) -> Any:
        with prefetch(v, self.names):
            return to_device(self.row(host[v], v, i))

    def store(self, host: Values, v: Var, x: Any, i: Any) -> None:
        with write_back(v, self.names):
            host[v] = write_rows(host[v], to_host(x), self.plan.rows[v].dim, i, 1, self.plan.pins.get(v))

    def exchange(self, at: Iteration, stored: Sequence[Var], i: Any, fetched: Sequence[Var], then: Any) -> Values:
        """Stores the rows ``i`` of some leaves while it loads the rows ``then`` of others."""
        for v in stored:
            if v in at.new:
                self.store(at.host, v, at.new[v], i)
        return {v: self.load(at.host, v, then) for v in fetched if v in self.plan.loaded}

    def early(self, at: Iteration, stored: Sequence[Var], then: Any) -> Values:
        """The rows ``then`` of the leaves that are about to be stored, for a CPU, where the stores wait for them."""
        rows = {v: self.load(at.host, v, then) for v in stored if v in at.new and v in self.plan.loaded}
        at.new = at.new | {v: _on_a_cpu(_behind, at.new[v], x) for v, x in rows.items()}
        return rows

    def own_rows(self, at: Iteration, i: Any) -> Values:
        """What iteration ``i`` reads of operands on the device."""
        own = {v: self.row(x, v, i) for v, x in at.device.items()}
        own = dict(zip(own, read_once([*own.values()]), strict=True))
        own = {v: constrained(x, self.plan.pins.get(v)) for v, x in own.items()}
        own |= {v: self.row(x, v, i) if v in self.plan.rows else x for v, x in self.others.items()}
        return own

    def update(self, at: Iteration, own: Values, i: Any, first: Any) -> Values:
        """Runs the updates on the rows ``i``; returns those that the scan itself reads."""
        fed: Values = {}
        wanted = {*self.plan.fed.values()}
        at.new = {}
        for move in self.plan.moves:
            where, s = (move.shape[move.axis], move.shape, move.axis), move.slice
            given = own | at.loaded
            with update_of(s.loads, self.names):
                out = run_chunk(core(s).jaxpr, move.dims, where, i[None], *(given[v] for v in s.inputs))
            for v, old, dim, x in zip(s.outputs, move.buffers, move.out_dims, out, strict=True):
                if v in wanted:
                    fed[v] = x
                if isinstance(dim, Partial):
                    at.sums[v] = jnp.where(first, x, dim.combine(at.sums[v], x))
                elif old is not None and is_host_aval(v.aval):
                    at.new[old] = x
                elif v not in move.feeds:
                    into = v if old is None else old
                    pin = self.plan.pins.get(into)
                    x = _gathered(x) if _is_whole(pin or typed_sharding(v.aval), v.aval.shape) else x
                    at.device[into] = write_rows(at.device[into], x, self.plan.rows[into].dim, i, 1, pin)
        return fed

    def before_it(self, at: Iteration, own: Values, i: Any, k: Any, carried: Any) -> tuple[dict[int, Any], Any]:
        """Ahead: the updates, and then all of the arithmetic. Returns the rows that this reads, and its carry."""
        fed, new = self.update(at, own, i, k == 0), at.new
        values = together(([*fed.values()], [*new.values()], carried))
        fed, at.new = dict(zip(fed, values[0], strict=True)), dict(zip(new, values[1], strict=True))
        return {k: jax.lax.squeeze(fed[v], (0,)) for k, v in self.plan.fed.items()}, values[2]

    def reread(self, own: Values, i: Any) -> dict[int, Any]:
        """Rows that are made of those of operands, by their place among the scan's ``xs``."""
        rows: dict[int, Any] = {}
        for place, each in self.plan.reread.items():
            where = each.shape[each.axis], each.shape, each.axis
            (x,) = run_chunk(each.slice.jaxpr, each.dims, where, i[None], *(own[v] for v in each.slice.inputs))
            rows[place] = jax.lax.squeeze(x, (0,))
        return rows

    def phases(self, at: Iteration, inner: Values, stored: Any, after: Any) -> Values:
        """The iteration's own arithmetic, beside transfers: stores rows ``stored``, and returns the rows ``after``."""
        groups, body = self.plan.groups, self.plan.body
        end = len(groups) - 1
        early: Values = {}
        then: Values = {}
        for p, phase in enumerate(body.slices):
            early |= {} if p == end else self.early(at, groups[p], after)
            fetched = self.exchange(at, groups[p], stored, groups[p - 1], after)
            fetched |= {v: _on_a_cpu(_instead, x, early[v]) for v, x in fetched.items() if v in early}
            inner.update(zip(phase.outputs, phase.run(*(inner[v] for v in phase.inputs)), strict=True))
            if p < end:
                gate = body.gates[p]
                gates = [] if gate is None else [gate, *(self.plan.passed_through if p == 0 else ())]
                held = [v for v in body.held[p] if v not in gates]
                passed = self.gated(at, p, fetched, [inner[v] for v in gates])
                passed = _on_a_tpu(together, [*passed, *(inner[v] for v in held)]) if held else passed
                inner.update(zip([*gates, *held], passed, strict=True))
            then |= fetched
        return then

    def gated(self, at: Iteration, phase: int, then: Values, gates: Sequence[Any]) -> list[Any]:
        """What follows waits for this phase of the iteration, and for its transfers."""
        groups = self.plan.groups
        held = [v for v in groups[phase + 1] if v in at.new]
        # else XLA stores and loads in the next
        back = [] if then else [v for v in groups[phase] if v in at.new]
        values = iter(together([*gates, *(at.new[v] for v in held), *(at.host[v] for v in back), *then.values()]))
        passed = [next(values) for _ in gates]
        at.new = at.new | {v: next(values) for v in held}
        at.host |= {v: next(values) for v in back}
        then.update({v: next(values) for v in then})
        return passed

    def all_of(self, results: list[Any], then: Values) -> list[Any]:
        """Behind: the update waits for all of the arithmetic: it overwrites what is being stored through the last of
        it; and for the last loads: a TPU would start them after it, into what it has read."""
        last_loads = [v for v in self.plan.groups[len(self.plan.groups) - 2] if v in then]
        results, ready = together((results, [then[v] for v in last_loads]))
        then |= dict(zip(last_loads, ready, strict=True))
        return results

    def iteration(self, carry: Any, rows: Any) -> Any:
        """One, as the body of a scan."""
        plan, scan = self.plan, self.plan.scan
        k, carried, *kept = carry
        at, last = self.unpacked(kept), scan.length - 1
        i = last - k if scan.reverse else k
        before = jnp.minimum(i + 1, last) if scan.reverse else jnp.maximum(i - 1, 0)
        after = jnp.maximum(i - 1, 0) if scan.reverse else jnp.minimum(i + 1, last)
        own = self.own_rows(at, i)
        if plan.ahead:
            fed, carried = self.before_it(at, own, i, k, carried)
            rows |= fed
        rows |= self.reread(own, i)
        program = plan.body.program
        operands = [*program.consts, *self.consts, *carried, *(rows[j] for j in range(len(scan.xs)))]
        inner: Values = dict(zip(program.inputs, operands, strict=True))
        then = self.phases(at, inner, i if plan.ahead else before, after)
        results = [as_array(v) if isinstance(v, Literal) else inner[v] for v in program.outputs]
        if not plan.ahead:
            results = self.all_of(results, then)
        carried, produced = results[: len(carried)], dict(zip(scan.ys, results[len(carried) :], strict=True))
        if not plan.ahead:
            self.update(at, own | {y: _row_major(x[None]) for y, x in produced.items()}, i, k == 0)
        at.loaded = then
        return (k + 1, carried, *self.packed(at)), [produced[y] for y in plan.kept]

    def first(self, env: Mapping[Var, Any], row: int) -> Iteration:
        """What the first iteration, of this row, has in hand.

        Behind, it has nothing to store yet. It stores what was loaded for it, where that came from; or zeros, which the
        second one overwrites.
        """
        plan = self.plan
        host = {v: env[v] for v in plan.hosts}
        loaded = {v: self.load(host, v, row) for v in plan.loaded}
        blank = {v: zeros(jax.eval_shape(lambda v=v: self.load(host, v, 0))) for v in plan.stored if v not in loaded}
        device = {v: env[v] for v in plan.in_place} | {v: zeros(v.aval) for v in plan.new}
        return Iteration(host, device, loaded, loaded | blank, {v: zeros(v.aval) for v in plan.sums})

    def updated(self, done: Iteration) -> Values:
        """What the moved equations have made, once the last iteration is through."""
        produced = dict(done.sums)
        for move in self.plan.moves:
            for v, old, dim in zip(move.slice.outputs, move.buffers, move.out_dims, strict=True):
                if isinstance(dim, Rows) and v not in move.feeds:
                    into = v if old is None else old
                    if is_host_aval(v.aval):
                        produced[v] = done.host[into]
                    else:  # pinned, or XLA divides the carry like what is made of it, and gathers all in each iteration
                        produced[v] = constrained(done.device[into], self.plan.pins.get(into))
        return produced


def _on_a_cpu(run: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, other: jax.Array) -> jax.Array:
    """``run(x, other)`` there, elsewhere ``x``.

    XLA's CPU copies a buffer of which one row is written and another read, if nothing says that it is read first.
    """
    return jax.lax.platform_dependent(x, other, cpu=run, default=lambda x, _: x)


def _on_a_tpu(run: Callable[[list[jax.Array]], list[jax.Array]], xs: list[jax.Array]) -> list[jax.Array]:
    """``run(xs)`` there, elsewhere ``xs``.

    XLA for TPUs runs what needs no gate before it, and gates on a weight's gradient late (a ViT-H/14, a v5e: 12.4 of an
    iteration's 16.4 ms before it, and 3.5 exposed; now 7.2 and 0.6).
    """
    return jax.lax.platform_dependent(*xs, tpu=lambda *xs: run([*xs]), default=lambda *xs: [*xs])


def _behind(x: jax.Array, other: jax.Array) -> jax.Array:
    return written_after(x, other)[0]


def _instead(_: jax.Array, other: jax.Array) -> jax.Array:
    return other


def _row_major(x: jax.Array) -> jax.Array:
    """``x``, laid out like the stack: a TPU would make the layout of a matmul's result that of the whole stack.

    Only there: a GPU does not, and jax 0.10 gathers what is divided between devices to lay it out.
    """
    return jax.lax.platform_dependent(x, tpu=_in_order, default=lambda x: x)


def _is_whole(sharding: NamedSharding | None, shape: tuple[int, ...]) -> bool:
    """Whether an array is whole on each of several devices."""
    return sharding is not None and sharding.mesh.size > 1 and math.prod(shards_of(sharding, shape)) == 1


def _gathered(x: jax.Array) -> jax.Array:
    """Rows that are whole on every device, laid out like the stack: XLA lays out what it gathers by the axis that is
    divided, and would make that the layout of the whole stack, in a copy of it."""
    return jax.lax.platform_dependent(x, tpu=_in_order, cuda=_in_order, default=lambda x: x)


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
