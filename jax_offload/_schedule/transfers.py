"""Decide whether a slice streams in chunks, along which axis and of how many rows, and in which groups from disk.

A leaf on disk is divided when its files are made, before there is a plan: into as many rows as make a group, whatever
the optimizer. A slice whose rows stay apart is then read, updated and written group by group; any other takes all rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import TypeGuard

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Aval, Var
from jax_offload._program.memory import is_host_aval
from jax_offload._program.rules import Dependent, Dim, Partial, Rows, Where, chunked_dims, rows_like
from jax_offload._program.shardings import same_sharding, typed_sharding
from jax_offload._program.slices import Slice
from jax_offload._schedule.schedule import Chunked, Planned, Transfer, Whole

# Bytes of one parameter's leaves that are a part, at least, and less than twice that: a group (see `_host/stages`).
PART_BYTES = 2**26


def transfer_of(s: Slice, reuse: Mapping[Var, Var], window: int) -> Transfer:
    """Decide that a slice goes in chunks, with at most ``window`` bytes of host leaves in flight, or whole, and why.

    A chunk of a sharded axis is the same rows of every shard, so no device needs another's rows.

    Args:
      s: the slice.
      reuse: result -> operand of the same type whose buffer it may take, because it is that operand's next value.
      window: bytes on one device.
    """
    if not all(v in reuse for v in s.stores):
        return Whole("it makes a leaf that was not in the state before")
    if not all(is_host_aval(reuse[v].aval) for v in s.stores):
        return Whole("it moves to the host in this step")  # no host buffer yet to write its rows into
    old_of = buffers(s, reuse)
    if any(old is None and is_host_aval(v.aval) for v, old in zip(s.outputs, old_of, strict=True)):
        return Whole("its next value is of another type or sharding, or not its own")
    inner, why = s.core, "it is smaller than a tile"
    lead = max((v.aval for v in s.loads), key=nbytes)
    for axis in range(max(1, lead.ndim - 1)):
        size = lead.shape[axis]
        dims = [rows_like(v.aval, lead.shape, axis) for v in s.inputs]
        parts = [s.shards[v][d.dim] for v, d in zip(s.inputs, dims, strict=True) if d is not None and v in s.shards]
        shards = max(parts, default=1)
        if size % shards or any(shards % n for n in parts):
            why = f"the shards of axis {axis} do not match"
            continue
        rows = _rows(s, lead.ndim - 1 - axis, size // shards, window)
        if rows == size // shards:
            continue  # a tile that is larger than the window
        if any(d is None for v, d in zip(s.inputs, dims, strict=True) if is_host_aval(v.aval)):
            why = "leaves of different shapes depend on each other"
            continue
        try:
            out_dims = chunked_dims(inner.jaxpr, dims, Where(size, lead.shape, axis, shards))
        except Dependent as dependent:
            why = str(dependent)
            continue
        written = [d for v, d in zip(s.outputs, out_dims, strict=True) if _writable(d, v in s.stores)]
        if len(written) < len(out_dims):
            why = "a result has no such axis"
            continue
        old_of = [None if isinstance(d, Partial) else old for old, d in zip(old_of, written, strict=True)]
        return Chunked(lead.shape, axis, tuple(dims), tuple(written), tuple(old_of), shards, rows)
    return Whole(why)


def _writable(dim: Dim, on_host: bool) -> TypeGuard[Rows | Partial]:
    """Whether a result can be put together from the chunks' results."""
    return dim == Rows(dim.dim) if isinstance(dim, Rows) else dim is not None and not on_host


def _rows(s: Slice, minor_dims: int, size: int, window: int) -> int:
    """The number of rows in a chunk: two fit the window, all are about equal, and each ends where a tile ends."""
    tile, pins = tile_of(minor_dims), s.pins
    total = max(s.decoded_bytes, sum(nbytes(v.aval) for v in s.outputs if v in pins))
    fitting = max(1, window // 2 * size // total)
    chunks = math.ceil(size / fitting)
    rows = math.ceil(size / chunks)
    return min(size, max(1, rows // tile) * tile)


def tile_of(minor_dims: int) -> int:
    """The number of rows that make a tile of the accelerator: a TPU tiles an array's last two dimensions."""
    return {0: 1024, 1: 32}.get(minor_dims, 1)


def buffers(s: Slice, reuse: Mapping[Var, Var]) -> list[Var | None]:
    """The operand whose buffer each result overwrites, row by row as the rows are used; ``None``: a new buffer."""
    taken: set[Var] = set()
    found: list[Var | None] = []
    for v in s.outputs:
        old = reuse.get(v)
        if old is None or old not in s.inputs or old in taken or not same_type(old.aval, v.aval):
            found.append(None)
            continue
        found.append(old)
        taken.add(old)
    return found


def same_type(a: Aval, b: Aval) -> bool:
    """Whether a result of one type can take the buffer of an operand of the other."""
    if (a.shape, a.dtype, is_host_aval(a)) != (b.shape, b.dtype, is_host_aval(b)):
        return False
    ours, theirs = typed_sharding(a), typed_sharding(b)
    return ours is theirs if ours is None or theirs is None else same_sharding(ours, theirs)


# ---- groups of rows from disk


def rows_in_part(row_bytes: int, ndim: int, size: int) -> int:
    """The number of rows in a part of leaves with ``size`` rows of ``row_bytes`` bytes together; 0: all of them.

    A power of two, so that parts of leaves with longer rows end where those with shorter ones do.
    """
    rows = tile_of(ndim - 1)
    while rows * row_bytes < PART_BYTES and rows < size:
        rows *= 2
    return rows if rows < size else 0


def from_disk(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> str:
    """How a slice comes from files that are made for it, in words; for the arguments see ``in_parts``."""
    loads, said = p.slice.loads, str(p.transfer)
    size = loads[0].aval.shape[0] if loads else 1
    if any(v.aval.shape[:1] != (size,) for v in loads):
        why = "leaves of different shapes depend on each other"
    else:
        ndim = max((v.aval.ndim for v in loads), default=1)
        rows = rows_in_part(sum(nbytes(v.aval) // size for v in loads), ndim, size)
        how = in_parts(p, reuse, there) if rows else Whole()
        if isinstance(how, Chunked):
            rows = max(1, rows // how.shards) * how.shards
            return f"from disk in {math.ceil(size / rows)} parts of {min(rows, size)} rows"
        why = how.reason
    if not why:
        return said
    return f"{said}, from disk as a whole{' too' if said.endswith(why) else f': {why}'}"


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
    return dataclasses.replace(how, rows=_rows(s, len(how.shape) - 1, how.shape[0] // how.shards, p.window.nbytes))
