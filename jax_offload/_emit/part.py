"""A slice on some rows of its leaves, which are arrays of their own; on the device it has all rows, in the old buffers.

The number of the first row is an operand: so one program serves all parts that have as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jax_offload._base.barriers import read_once
from jax_offload._base.jaxprs import Var, values_of
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.rows import read_rows, write_rows
from jax_offload._emit.transfers import Names
from jax_offload._plan.by_rows import PlannedPart
from jax_offload._plan.rules import Partial


def part(planned: PlannedPart, names: Names) -> Callable[..., list[Any]]:
    """``run(start, operands, before)``: the slice's results, for its rows of each shard from ``start`` on.

    Of host leaves operands and results are these rows; of arrays on the device they are all rows. ``before`` is for
    each result what earlier parts have left, where it has no operand's buffer; ``None`` in the first part.
    """
    s, how, n = planned.of, planned.how, planned.rows
    shards, pins = how.shards, s.pins
    place = {v: i for i, v in enumerate(s.inputs)}
    pairs = zip(s.outputs, how.buffers, strict=True)
    kept = [None if old is None or is_host_aval(v.aval) else place[old] for v, old in pairs]

    def run(start: Any, operands: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        given = list(operands)
        for i, (v, dim) in enumerate(zip(s.inputs, how.dims, strict=True)):
            if dim is not None and not is_host_aval(v.aval):
                given[i] = read_rows(given[i], dim.dim, start, n, shards, pins.get(v))
        held = [i for i in kept if i is not None]
        for i, x in zip(held, read_once([given[i] for i in held]), strict=True):
            given[i] = x
        new, found = _updated(planned, [start, *given], names), list[Any]()
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


def _updated(planned: PlannedPart, operands: Sequence[Any], names: Names) -> list[Any]:
    """The slice's results for these rows: through its window, as any slice's."""
    env: dict[Var, Any] = {**planned.consts, **dict(zip(planned.operands, operands, strict=True))}
    of_rows = [*zip(planned.of.inputs, planned.operands[1:], strict=True)]
    of_rows += [(v, new) for v, new in zip(planned.of.outputs, planned.results, strict=True) if isinstance(new, Var)]
    named = {new: names[v] for v, new in of_rows if v in names}
    functions([planned.update], named, lowered=True)(planned.update, env)
    return values_of(env, planned.results)
