"""A scan with the update of stacked leaves inside, row by row.

*Behind*: iteration i makes the gradient of layer i and updates it at its end, with state that the iteration before has
loaded; the new state is stored by the iteration after it.

*Ahead*: iteration i begins with the update of layer i, with state that the iteration before has loaded, and stores the
new state. Were it stored one iteration later, it would share a buffer of the loop with what is being stored, and the
update would wait for that (12x2x4096x4096, 16384 tokens: 0.79 of the transfers exposed, so 0.39).

So both directions of the link have a whole iteration. A host buffer that is read and written at the same time would be
copied, so the leaves are in groups that take turns, two or three: while one is stored the one before it is loaded,
through as many phases of the iteration's arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jax_offload._base.barriers import read_once, together, written_after
from jax_offload._base.jaxprs import Literal, Var, as_array, jax_fun
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, zeros
from jax_offload._emit.rows import read_rows, write_rows
from jax_offload._emit.transfers import Names, prefetch, update_of, write_back
from jax_offload._ir.core import core
from jax_offload._plan.chunk_rules import Partial, Rows, run_chunk
from jax_offload._plan.in_scan import InScan

Values = dict[Var, Any]


@dataclasses.dataclass
class _Iteration:
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
class _Emitter:
    plan: InScan
    names: Names

    def row(self, x: Any, v: Var, i: Any) -> Any:
        return read_rows(x, self.plan.rows[v].dim, i, 1, 1, self.plan.pins.get(v))

    def load(self, host: Values, v: Var, i: Any) -> Any:
        with prefetch(v, self.names):
            return to_device(self.row(host[v], v, i))

    def store(self, host: Values, v: Var, x: Any, i: Any) -> None:
        with write_back(v, self.names):
            host[v] = write_rows(host[v], to_host(x), self.plan.rows[v].dim, i, 1, self.plan.pins.get(v))

    def exchange(self, at: _Iteration, stored: Sequence[Var], i: Any, fetched: Sequence[Var], then: Any) -> Values:
        """Stores the rows ``i`` of some leaves while it loads the rows ``then`` of others."""
        for v in stored:
            if v in at.new:
                self.store(at.host, v, at.new[v], i)
        return {v: self.load(at.host, v, then) for v in fetched if v in self.plan.loaded}

    def early(self, at: _Iteration, stored: Sequence[Var], then: Any) -> Values:
        """The rows ``then`` of the leaves that are about to be stored, for a CPU, where the stores wait for them."""
        rows = {v: self.load(at.host, v, then) for v in stored if v in at.new and v in self.plan.loaded}
        at.new = at.new | {v: _on_a_cpu(_behind, at.new[v], x) for v, x in rows.items()}
        return rows

    def own_rows(self, at: _Iteration, others: Values, i: Any) -> Values:
        """What iteration ``i`` reads of operands on the device."""
        own = {v: self.row(x, v, i) for v, x in at.device.items()}
        own = dict(zip(own, read_once([*own.values()]), strict=True))
        own = {v: constrained(x, self.plan.pins.get(v)) for v, x in own.items()}
        own |= {v: self.row(x, v, i) if v in self.plan.rows else x for v, x in others.items()}
        return own

    def update(self, at: _Iteration, own: Values, i: Any, first: Any) -> Values:
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
                    at.device[into] = write_rows(at.device[into], x, self.plan.rows[into].dim, i, 1, pin)
        return fed


def scanned(plan: InScan, env: Mapping[Var, Any], names: Names) -> Values:
    """What the scan and the moved equations make, of the values of their operands.

    Behind, the first iteration has nothing to store yet. It stores what was loaded for it, where that came from; or
    zeros, which the second one overwrites.
    """
    scan, body, emitter = plan.scan, plan.body, _Emitter(plan, names)
    last = scan.length - 1
    end = len(plan.groups) - 1
    first_row, last_row = (last, 0) if scan.reverse else (0, last)
    keys = plan.hosts, (*plan.in_place, *plan.new), plan.loaded, () if plan.ahead else plan.stored, plan.sums

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else env[v]

    consts = [value(v) for v in scan.consts]
    others = {v: value(v) for v in plan.others}
    xs = {k: value(v) for k, v in enumerate(scan.xs) if k not in plan.reread and k not in plan.fed}

    def gated(at: _Iteration, phase: int, then: Values, gates: Sequence[Any]) -> list[Any]:
        """What follows waits for this phase of the iteration, and for its transfers."""
        held = [v for v in plan.groups[phase + 1] if v in at.new]
        # else XLA stores and loads in the next
        back = [] if then else [v for v in plan.groups[phase] if v in at.new]
        operands = [*gates, *(at.new[v] for v in held), *(at.host[v] for v in back), *then.values()]
        values = iter(together(operands))
        passed = [next(values) for _ in gates]
        at.new = at.new | {v: next(values) for v in held}
        at.host |= {v: next(values) for v in back}
        then.update({v: next(values) for v in then})
        return passed

    def iteration(carry: Any, rows: Any) -> Any:
        k, carried, *kept = carry
        at = _Iteration(*(dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, kept, strict=True)))
        i = last - k if scan.reverse else k
        before = jnp.minimum(i + 1, last) if scan.reverse else jnp.maximum(i - 1, 0)
        after = jnp.maximum(i - 1, 0) if scan.reverse else jnp.minimum(i + 1, last)
        own = emitter.own_rows(at, others, i)
        if plan.ahead:
            fed, new = emitter.update(at, own, i, k == 0), at.new
            values = together(([*fed.values()], [*new.values()], carried))
            fed, at.new = dict(zip(fed, values[0], strict=True)), dict(zip(new, values[1], strict=True))
            carried = values[2]
            rows |= {k: jax.lax.squeeze(fed[v], (0,)) for k, v in plan.fed.items()}
        for place, each in plan.reread.items():
            where = each.shape[each.axis], each.shape, each.axis
            (x,) = run_chunk(each.slice.jaxpr, each.dims, where, i[None], *(own[v] for v in each.slice.inputs))
            rows[place] = jax.lax.squeeze(x, (0,))

        program = body.program
        operands = [*program.consts, *consts, *carried, *(rows[j] for j in range(len(scan.xs)))]
        inner: Values = dict(zip(program.inputs, operands, strict=True))
        stored = i if plan.ahead else before
        early: Values = {}
        then: Values = {}
        for p, (phase, gate) in enumerate(zip(body.slices, [*body.gates, None], strict=True)):
            early |= {} if p == end else emitter.early(at, plan.groups[p], after)
            fetched = emitter.exchange(at, plan.groups[p], stored, plan.groups[p - 1], after)
            fetched |= {v: _on_a_cpu(_instead, x, early[v]) for v, x in fetched.items() if v in early}
            inner.update(zip(phase.outputs, phase.run(*(inner[v] for v in phase.inputs)), strict=True))
            if p < end:
                gates = [] if gate is None else [gate]
                inner.update(zip(gates, gated(at, p, fetched, [inner[v] for v in gates]), strict=True))
            then |= fetched
        results = [as_array(v) if isinstance(v, Literal) else inner[v] for v in program.outputs]
        if not plan.ahead:
            # the update waits for all of the arithmetic: it overwrites what is being stored through the last of it;
            # and for the last loads: a TPU would start them after it, into what it has read
            last_loads = [v for v in plan.groups[end - 1] if v in then]
            results, ready = together((results, [then[v] for v in last_loads]))
            then |= dict(zip(last_loads, ready, strict=True))
        carried, produced = results[: len(carried)], dict(zip(scan.ys, results[len(carried) :], strict=True))
        if not plan.ahead:
            emitter.update(at, own | {y: _row_major(x[None]) for y, x in produced.items()}, i, k == 0)
        at.loaded = then
        parts = at.host, at.device, at.loaded, at.new, at.sums
        kept = [[x[v] for v in vs] for vs, x in zip(keys, parts, strict=True)]
        return (k + 1, carried, *kept), [produced[y] for y in plan.kept]

    host = {v: env[v] for v in plan.hosts}
    loaded = {v: emitter.load(host, v, first_row) for v in plan.loaded}
    blank = {v: zeros(jax.eval_shape(lambda v=v: emitter.load(host, v, 0))) for v in plan.stored if v not in loaded}
    device = {v: env[v] for v in plan.in_place} | {v: zeros(v.aval) for v in plan.new}
    sums = {v: zeros(v.aval) for v in plan.sums}
    parts = host, device, loaded, loaded | blank, sums
    kept = [[x[v] for v in vs] for vs, x in zip(keys, parts, strict=True)]
    init = jnp.int32(0), [value(v) for v in scan.init], *kept
    (_, carried, *kept), ys = jax.lax.scan(
        iteration, init, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    done = _Iteration(*(dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, kept, strict=True)))
    for v, x in done.new.items():
        emitter.store(done.host, v, x, last_row)
    produced = dict(zip(scan.carry, carried, strict=True)) | dict(zip(plan.kept, ys, strict=True)) | done.sums
    for move in plan.moves:
        for v, old, dim in zip(move.slice.outputs, move.buffers, move.out_dims, strict=True):
            if isinstance(dim, Rows) and v not in move.feeds:
                into = v if old is None else old
                if is_host_aval(v.aval):
                    produced[v] = done.host[into]
                else:  # pinned, or XLA divides the carry like what is made of it, and gathers all in each iteration
                    produced[v] = constrained(done.device[into], plan.pins.get(into))
    return produced


def _on_a_cpu(run: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, other: jax.Array) -> jax.Array:
    """``run(x, other)`` there, elsewhere ``x``.

    XLA's CPU copies a buffer of which one row is written and another read, if nothing says that it is read first.
    """
    return jax.lax.platform_dependent(x, other, cpu=run, default=lambda x, _: x)


def _behind(x: jax.Array, other: jax.Array) -> jax.Array:
    return written_after(x, other)[0]


def _instead(_: jax.Array, other: jax.Array) -> jax.Array:
    return other


def _row_major(x: jax.Array) -> jax.Array:
    """``x``, laid out like the stack: a TPU would make the layout of a matmul's result that of the whole stack.

    Only there: a GPU does not, and jax 0.10 gathers what is divided between devices to lay it out.
    """
    in_order = Layout(tuple(range(x.ndim)))
    return jax.lax.platform_dependent(x, tpu=lambda x: with_layout_constraint(x, in_order), default=lambda x: x)


def one_after_the_other(plan: InScan, env: Mapping[Var, Any]) -> Values:
    """The same as in the step: the scan, and before it or after it the updates of whole leaves."""
    scan, values = plan.scan, dict(env)

    def update() -> None:
        for move in plan.moves:
            produced = move.slice.run(*(values[v] for v in move.slice.inputs))
            values.update(zip(move.slice.outputs, produced, strict=True))

    if plan.ahead:
        update()
    xs = {k: each.slice.run(*(env[v] for v in each.slice.inputs))[0] for k, each in plan.reread.items()}
    xs |= {k: values[v] for k, v in plan.fed.items()}

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else values[v]

    consts, init = [value(v) for v in scan.consts], [value(v) for v in scan.init]
    rows = [xs[k] if k in xs else value(v) for k, v in enumerate(scan.xs)]

    def iteration(carry: Any, rows: Any) -> Any:
        results = jax_fun(scan.body)(*consts, *carry, *rows)
        return results[: len(carry)], results[len(carry) :]

    carry, ys = jax.lax.scan(iteration, init, rows, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
    values.update(zip([*scan.carry, *scan.ys], [*carry, *ys], strict=True))
    if not plan.ahead:
        update()
    return values
