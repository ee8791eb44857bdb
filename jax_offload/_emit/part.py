"""A slice on some rows of its leaves on disk, which are arrays of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax_offload._base.barriers import read_once
from jax_offload._base.jaxprs import Var, values_of
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.rows import buffers_of, fresh
from jax_offload._emit.transfers import Names
from jax_offload._plan.by_rows import PlannedPart


def part(planned: PlannedPart, names: Names) -> Callable[..., list[Any]]:
    """``run(start, operands, before)``: the slice's results, for its rows of each shard from ``start`` on.

    Of host leaves operands and results are these rows, as arrays of their own; of arrays on the device they are all
    rows, in the old buffers. ``before`` is for each result what earlier parts have left, where it has no operand's
    buffer; ``None`` in the first part. The first row is an operand, so one program serves all parts of as many rows.
    """
    s, how, n = planned.of, planned.how, planned.rows
    buffers = buffers_of(s, how, names)
    into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
    overwritten = [v for v in s.inputs if v in into and not is_host_aval(v.aval)]

    def run(start: Any, operands: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        wholes = dict(zip(s.inputs, operands, strict=True))
        given = {v: x if is_host_aval(v.aval) else buffers.read(v, x, start, n) for v, x in wholes.items()}
        given |= zip(overwritten, read_once([given[v] for v in overwritten]), strict=True)
        left = {v: x for v, x in zip(s.outputs, before, strict=True) if x is not None}
        wholes |= {v: x for v, x in fresh(s, how).items() if not is_host_aval(v.aval)} | left
        new = _of_rows(planned, [start, *(given[v] for v in s.inputs)], names)
        stored = buffers.keep(s, how, new, wholes, start)
        return [stored[v] if v in stored else wholes[v] for v in into]

    return run


def _of_rows(planned: PlannedPart, operands: Sequence[Any], names: Names) -> list[Any]:
    """The slice's results for these rows: through its window, as any slice's."""
    env: dict[Var, Any] = {**planned.consts, **dict(zip(planned.operands, operands, strict=True))}
    of_rows = [*zip(planned.of.inputs, planned.operands[1:], strict=True)]
    of_rows += [(v, new) for v, new in zip(planned.of.outputs, planned.results, strict=True) if isinstance(new, Var)]
    named = {new: names[v] for v, new in of_rows if v in names}
    functions([planned.update], named, lowered=True)(planned.update, env)
    return values_of(env, planned.results)
