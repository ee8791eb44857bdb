"""A slice on some rows of its leaves, which are arrays of their own; on the device it has all rows, in the old buffers.

The number of the first row is an operand: so one program serves all parts that have as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.jaxprs import Jaxpr, Literal, Var, jaxpr_of, nameless, values_of, variables
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.rows import read_rows, row_indices, write_rows
from jax_offload._emit.transfers import Names
from jax_offload._ir.core import core
from jax_offload._ir.slices import Slice
from jax_offload._plan.chunk_rules import Partial, run_chunk
from jax_offload._plan.plan import Chunked, Planned, Whole
from jax_offload._plan.transfers import transfer_of


def part(p: Planned, how: Chunked, n: int, names: Names) -> Callable[..., list[Any]]:
    """``run(start, operands, before)``: the slice's results, for ``n`` rows of each shard from ``start`` on.

    Of host leaves operands and results are these rows; of arrays on the device they are all rows. ``before`` is for
    each result what earlier parts have left, where it has no operand's buffer; ``None`` in the first part.
    """
    s, shards, pins = p.slice, how.shards, p.slice.pins
    place = {v: i for i, v in enumerate(s.inputs)}
    pairs = zip(s.outputs, how.buffers, strict=True)
    kept = [None if old is None or is_host_aval(v.aval) else place[old] for v, old in pairs]

    def run(start: Any, operands: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        given = list(operands)
        for i, (v, dim) in enumerate(zip(s.inputs, how.dims, strict=True)):
            if dim is not None and not is_host_aval(v.aval):
                given[i] = read_rows(given[i], dim.dim, start, n, shards, pins.get(v))
        # read once, before they are overwritten: XLA copies a buffer that two of its fusions still read
        held = [i for i in kept if i is not None]
        for i, x in zip(held, jax.lax.optimization_barrier([given[i] for i in held]), strict=True):
            given[i] = x
        new, found = _updated(p, how, n, start, given, names), list[Any]()
        for v, to, i, x, old in zip(s.outputs, how.out_dims, kept, new, before, strict=True):
            if is_host_aval(v.aval):
                found.append(x)
            elif isinstance(to, Partial):
                found.append(x if old is None else to.combine(old, x))
            else:
                old = operands[i] if i is not None else old
                if old is None:
                    old = constrained(jnp.zeros(v.aval.shape, v.aval.dtype), typed_sharding(v.aval) or pins.get(v))
                found.append(write_rows(old, x, to.dim, start, shards, pins.get(v)))
        return found

    return run


def _updated(p: Planned, how: Chunked, n: int, start: Any, rows: Sequence[Any], names: Names) -> list[Any]:
    """The slice's results for these rows: through its window, as any slice's."""
    s, inner = p.slice, core(p.slice)
    where = how.shape[how.axis], how.shape, how.axis

    def update(start: Any, *rows: Any) -> list[Any]:
        args = [to_device(x) if v in inner.loads else x for v, x in zip(s.inputs, rows, strict=True)]
        new = run_chunk(inner.jaxpr, how.dims, where, row_indices(where[0], start, n, how.shards), *args)
        return [to_host(x) if is_host_aval(v.aval) else x for v, x in zip(s.outputs, new, strict=True)]

    traced, _ = jaxpr_of(update, start, *rows)
    j, known = traced.jaxpr, dict[Var, Any](zip(traced.jaxpr.constvars, traced.consts, strict=True))
    inputs = [*j.constvars, *j.invars]
    own = dict(zip(s.inputs, j.invars[1:], strict=True))
    shards = {own[v]: cut for v, cut in s.shards.items() if v in own}
    outputs = list(dict.fromkeys(variables(j.outvars)))  # others are numbers
    few = Slice(inputs, outputs, Jaxpr([], inputs, outputs, j.eqns, j.effects, nameless(j.debug_info)), shards)
    pairs = zip(j.outvars, how.buffers, strict=True)
    reuse = {v: own[old] for v, old in pairs if old is not None and not isinstance(v, Literal)}
    fits = few.loaded_bytes <= p.window.nbytes
    planned = Planned(few, Whole() if fits else transfer_of(few, reuse, p.window.nbytes), p.window)
    named = {new: names[v] for v, new in own.items() if v in names}
    pairs = zip(s.outputs, j.outvars, strict=True)
    named |= {new: names[v] for v, new in pairs if v in names and not isinstance(new, Literal)}
    env = known | dict(zip(j.invars, [start, *rows], strict=True))
    functions([planned], named, lowered=True)(planned, env)
    return values_of(env, j.outvars)
