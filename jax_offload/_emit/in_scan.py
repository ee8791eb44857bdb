"""A scan with the update of the leaves whose gradients it makes inside, row by row.

Iteration i makes the gradient of layer i and updates it at its end, with state that the iteration before it has loaded;
the new state is stored by the iteration after it. So both directions of the link have a whole iteration. A host buffer
that is read and written at the same time would be copied, so the leaves are in two groups: while the first is stored
the second is loaded, through the first half of the iteration's arithmetic; and the other way round through the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.jaxprs import Aval, Literal, jax_fun
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.rows import read_rows, write_rows
from jax_offload._emit.run import as_array
from jax_offload._emit.transfers import Names, prefetch, update_of, write_back
from jax_offload._ir.core import core
from jax_offload._ir.program import Var
from jax_offload._plan.chunk_rules import Partial, Rows, run_chunk
from jax_offload._plan.in_scan import InScan

Env = Mapping[Var, Any]


def scanned(plan: InScan, env: Env, names: Names) -> dict[Var, Any]:
    """What the scan and the moved equations make, of the values of their operands.

    The first iteration has nothing to store yet. It stores what was loaded for it, where that came from.
    """
    scan, body = plan.scan, plan.body
    last = scan.length - 1
    first_row, last_row = (last, 0) if scan.reverse else (0, last)

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else env[v]

    def load(host: Env, v: Var, i: Any) -> Any:
        with prefetch(v, names):
            return to_device(read_rows(host[v], plan.rows[v].dim, i, 1, 1, plan.pins.get(v)))

    def store(host: Env, v: Var, x: Any, i: Any) -> Any:
        with write_back(v, names):
            return write_rows(host[v], to_host(x), plan.rows[v].dim, i, 1, plan.pins.get(v))

    keys = plan.hosts, (*plan.in_place, *plan.new), plan.stored, plan.hosts  # of what an iteration hands to the next
    consts = [value(v) for v in scan.consts]
    rest = {v: value(v) for v in plan.others}
    xs = {k: value(v) for k, v in enumerate(scan.xs) if k not in plan.reread}

    def iteration(carry: Any, rows: Any) -> Any:
        k, carried, sums, *kept = carry
        host, device, new, loaded = (dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, kept, strict=True))
        sums = list(sums)
        i = last - k if scan.reverse else k
        before = jnp.minimum(i + 1, last) if scan.reverse else jnp.maximum(i - 1, 0)
        after = jnp.maximum(i - 1, 0) if scan.reverse else jnp.minimum(i + 1, last)
        # read once, before the rows are overwritten: XLA copies a buffer that two of its fusions still read
        own = {v: read_rows(x, plan.rows[v].dim, i, 1, 1, plan.pins.get(v)) for v, x in device.items()}
        own = dict(zip(own, jax.lax.optimization_barrier(list(own.values())), strict=True))
        own |= {v: read_rows(x, plan.rows[v].dim, i, 1, 1, None) for v, x in rest.items() if v in plan.rows}
        own |= {v: x for v, x in rest.items() if v not in plan.rows}

        def exchange(stored: Sequence[Var], fetched: Sequence[Var]) -> dict[Var, Any]:
            for v in stored:
                if v in new:
                    host[v] = store(host, v, new[v], before)
            return {v: load(host, v, after) for v in fetched}

        for place, each in plan.reread.items():
            where = each.shape[each.axis], each.shape, each.axis
            (x,) = run_chunk(each.slice.jaxpr, each.dims, where, i[None], *(own[v] for v in each.slice.inputs))
            rows[place] = jax.lax.squeeze(x, (0,))
        program = body.program
        operands = [*program.consts, *consts, *carried, *(rows[j] for j in range(len(scan.xs)))]
        inner = dict(zip(program.inputs, operands, strict=True))

        one, other = plan.groups
        then = exchange(one, other)
        inner.update(zip(body.first.outputs, body.first.run(*(inner[v] for v in body.first.inputs)), strict=True))
        held = [v for v in other if v in new]
        gates = [] if body.gate is None else [body.gate]
        values = [*(inner[v] for v in gates), *(new[v] for v in held), *(then[v] for v in other)]
        values = iter(jax.lax.optimization_barrier(values))
        inner |= {v: next(values) for v in gates}
        new = new | {v: next(values) for v in held}
        then = {v: next(values) for v in other}
        then |= exchange(other, one)
        inner.update(zip(body.second.outputs, body.second.run(*(inner[v] for v in body.second.inputs)), strict=True))
        results = [as_array(v) if isinstance(v, Literal) else inner[v] for v in program.outputs]
        # the update waits for all of the arithmetic: it overwrites what is still being stored through the last of it
        results = jax.lax.optimization_barrier(results)
        carried, made = results[: len(carried)], dict(zip(scan.ys, results[len(carried) :], strict=True))

        fresh: dict[Var, Any] = {}
        at = 0
        for move in plan.moves:
            where = move.shape[move.axis], move.shape, move.axis
            given = own | loaded | {y: made[y][None] for y in move.slice.inputs if y in made}
            with update_of(move.slice.loads, names):
                out = run_chunk(
                    core(move.slice).jaxpr, move.dims, where, i[None], *(given[v] for v in move.slice.inputs)
                )
            for v, old, dim, x in zip(move.slice.outputs, move.buffers, move.out_dims, out, strict=True):
                if isinstance(dim, Partial):
                    sums[at] = jnp.where(k == 0, x, dim.combine(sums[at], x))
                    at += 1
                elif is_host_aval(v.aval):
                    fresh[old] = x
                else:
                    into = v if old is None else old
                    device[into] = write_rows(device[into], x, dim.dim, i, 1, plan.pins.get(into))
        kept = [[x[v] for v in vs] for vs, x in zip(keys, (host, device, fresh, then), strict=True)]
        return (k + 1, carried, sums, *kept), [made[y] for y in plan.kept]

    host = {v: env[v] for v in plan.hosts}
    loaded = [load(host, v, first_row) for v in plan.hosts]
    new = [x for v, x in zip(plan.hosts, loaded, strict=True) if v in plan.stored]
    device = [*(env[v] for v in plan.in_place), *(_zeros(v.aval) for v in plan.new)]
    sums = [_zeros(v.aval) for v in plan.sums]
    init = jnp.int32(0), [value(v) for v in scan.init], sums, list(host.values()), device, new, loaded
    (_, carried, sums, *kept), ys = jax.lax.scan(
        iteration, init, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    host, device, new, _ = (dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, kept, strict=True))
    host = host | {v: store(host, v, x, last_row) for v, x in new.items()}
    made = dict(zip(scan.carry, carried, strict=True)) | dict(zip(plan.kept, ys, strict=True))
    made |= dict(zip(plan.sums, sums, strict=True))
    for move in plan.moves:
        for v, old, dim in zip(move.slice.outputs, move.buffers, move.out_dims, strict=True):
            if isinstance(dim, Rows):
                made[v] = host[old] if is_host_aval(v.aval) else device[v if old is None else old]
    return made


def one_after_the_other(plan: InScan, env: Env) -> dict[Var, Any]:
    """The same as in the step: the scan, and then the updates of whole leaves."""
    scan = plan.scan
    xs = {k: each.slice.run(*(env[v] for v in each.slice.inputs))[0] for k, each in plan.reread.items()}

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else env[v]

    consts, init = [value(v) for v in scan.consts], [value(v) for v in scan.init]
    rows = [xs[k] if k in xs else value(v) for k, v in enumerate(scan.xs)]

    def iteration(carry: Any, rows: Any) -> Any:
        results = jax_fun(scan.body)(*consts, *carry, *rows)
        return results[: len(carry)], results[len(carry) :]

    carry, ys = jax.lax.scan(iteration, init, rows, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
    values = {**env, **dict(zip([*scan.carry, *scan.ys], [*carry, *ys], strict=True))}
    for move in plan.moves:
        made = move.slice.run(*(values[v] for v in move.slice.inputs))
        values.update(zip(move.slice.outputs, made, strict=True))
    return values


def _zeros(aval: Aval) -> jax.Array:
    return constrained(jnp.zeros(aval.shape, aval.dtype), typed_sharding(aval))
