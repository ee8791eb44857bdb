"""Decide which slices of a state on disk go through in parts, some rows of their leaves at a time.

A leaf is divided when its files are made, before there is a plan: into as many rows as make a group, whatever the
optimizer. A slice whose rows stay apart is then read, updated and written part by part; any other takes all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from jax_offload._base.arrays import nbytes, row_indices
from jax_offload._base.jaxprs import Atom, Aval, Jaxpr, Literal, Var, jaxpr_of, nameless, variables
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Chunked, Planned, Whole
from jax_offload._plan.rules import Dim, Rows, run_chunk
from jax_offload._plan.transfers import tile_of, transfer_of

# Bytes of one parameter's leaves that are a part, at least, and less than twice that: a group (see `_drive/stages`).
PART_BYTES = 2**26


def rows_in_part(row_bytes: int, ndim: int, size: int) -> int:
    """The number of rows in a part of leaves with ``size`` rows of ``row_bytes`` bytes together; 0: all of them.

    A power of two, so that parts of leaves with longer rows end where those with shorter ones do.
    """
    rows = tile_of(ndim - 1)
    while rows * row_bytes < PART_BYTES and rows < size:
        rows *= 2
    return rows if rows < size else 0


@dataclasses.dataclass(frozen=True)
class DiskGroups:
    """How a slice comes from disk: so many rows at a time.

    Attributes:
      sizes: the rows of each part; a single part with all rows if the slice comes whole.
      why: the reason why it comes whole although a part would be smaller.
    """

    sizes: tuple[int, ...]
    why: str = ""

    def __str__(self) -> str:
        if len(self.sizes) > 1:
            return f"from disk in {len(self.sizes)} parts of {self.sizes[0]} rows"
        return f"from disk as a whole: {self.why}" if self.why else ""


def disk_groups(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> DiskGroups:
    """The parts in which a slice comes from files made for it; for the arguments see ``in_parts``."""
    loads = p.slice.loads
    size = loads[0].aval.shape[0] if loads else 1
    if any(v.aval.shape[:1] != (size,) for v in loads):
        return DiskGroups((size,), "leaves of different shapes depend on each other")
    rows = rows_in_part(sum(nbytes(v.aval) // size for v in loads), max((v.aval.ndim for v in loads), default=1), size)
    how = in_parts(p, reuse, there) if rows else None
    if isinstance(how, Chunked):
        rows = max(1, rows // how.shards) * how.shards
        return DiskGroups(tuple(min(rows, size - begin) for begin in range(0, size, rows)))
    return DiskGroups((size,), "" if how is None else how.reason)


def in_parts(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> Chunked | Whole:
    """How a slice would run on some rows of its leaves, which are all on disk; or why it takes them whole.

    Args:
      p: the slice.
      reuse: result -> the operand whose next value it is.
      there: operands that are on disk.
    """
    s = p.slice
    if s.jaxpr.effects:
        return Whole("it has an effect")
    if any(v not in there for v in [*s.loads, *(reuse[v] for v in s.stores if v in reuse)]):
        return Whole("not all of its leaves are on disk")
    how = transfer_of(s, reuse, 1)
    if not isinstance(how, Chunked):
        return how if isinstance(how, Whole) else Whole()
    if how.axis or any(d != Rows(0) for v, d in zip(s.outputs, how.out_dims, strict=True) if v in s.stores):
        return Whole("rows of its first axis depend on each other")
    return how


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """The update of some rows of a slice, wherever they begin, and their transfer.

    Attributes:
      of: the slice.
      how: it would run on some rows, as `in_parts` has it.
      rows: how many, of each shard.
      update: the slice on these rows alone, and its transfer: through the window of the whole.
      operands: the number of the first row, and rows of the slice's operands, as variables of ``update``.
      results: the same of its results.
      consts: of ``update``.
    """

    of: Slice
    how: Chunked
    rows: int
    update: Planned
    operands: list[Var]
    results: list[Atom]
    consts: Mapping[Var, Any]


def part_of(p: Planned, how: Chunked, rows: int) -> PlannedPart:
    """The plan of so many rows of a slice; for the arguments see ``PlannedPart``."""
    s, inner = p.slice, p.slice.core

    def update(start: Any, *given: Any) -> list[Any]:
        args = [to_device(x) if v in inner.loads else x for v, x in zip(s.inputs, given, strict=True)]
        new = run_chunk(inner.jaxpr, how.dims, how.where, row_indices(how.where.size, start, rows, how.shards), *args)
        return [to_host(x) if is_host_aval(v.aval) else x for v, x in zip(s.outputs, new, strict=True)]

    given = [_some(v.aval, dim, rows * how.shards) for v, dim in zip(s.inputs, how.dims, strict=True)]
    traced, _ = jaxpr_of(update, jax.ShapeDtypeStruct((), np.int32), *given)
    j = traced.jaxpr
    own = dict(zip(s.inputs, j.invars[1:], strict=True))
    shards = {own[v]: cut for v, cut in s.shards.items() if v in own}
    inputs, outputs = [*j.constvars, *j.invars], list(dict.fromkeys(variables(j.outvars)))  # others are numbers
    few = Slice(inputs, outputs, Jaxpr([], inputs, outputs, j.eqns, j.effects, nameless(j.debug_info)), shards)
    pairs = zip(j.outvars, how.buffers, strict=True)
    reuse = {v: own[old] for v, old in pairs if old is not None and not isinstance(v, Literal)}
    fits = few.loaded_bytes <= p.window.nbytes
    planned = Planned(few, Whole() if fits else transfer_of(few, reuse, p.window.nbytes), p.window)
    return PlannedPart(s, how, rows, planned, j.invars, j.outvars, dict(zip(j.constvars, traced.consts, strict=True)))


def _some(aval: Any, dim: Dim, n: int) -> Aval:
    """The type of ``n`` rows of an operand."""
    if not isinstance(dim, Rows):
        return aval
    return aval.update(shape=(*aval.shape[: dim.dim], n, *aval.shape[dim.dim + 1 :]))
