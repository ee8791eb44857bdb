"""Whether a slice streams in chunks, along which axis and of how many rows: decided, not emitted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Aval, Var
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import padded, typed_sharding
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Chunked, Transfer, Whole
from jax_offload._plan.rules import Dependent, Dim, Partial, Rows, chunked_dims


def transfer_of(s: Slice, reuse: Mapping[Var, Var], window: int) -> Transfer:
    """Decide that a slice goes in chunks, with at most ``window`` bytes of host leaves in flight, or whole, and why.

    A chunk of a sharded axis is the same rows of every shard, so that no device needs those of another.

    Args:
      s: the slice.
      reuse: result -> operand of the same type whose buffer it may take, because it is the next value of it.
      window: bytes on one device.
    """
    if not all(v in reuse for v in s.stores):
        return Whole("it makes a leaf that was not in the state before")
    if not all(is_host_aval(reuse[v].aval) for v in s.stores):
        return Whole("it moves to the host in this step")  # no host buffer yet to write its rows into
    old_of = buffers(s, reuse)
    if any(old is None and is_host_aval(v.aval) for v, old in zip(s.outputs, old_of, strict=True)):
        return Whole("its next value is of another type, or not its own")
    inner, why, pins = s.core, "it is smaller than a tile", s.pins
    gathered = sum(nbytes(v.aval) for v in s.outputs if v in pins)
    lead = max((v.aval for v in s.loads), key=nbytes)
    for axis in range(max(1, lead.ndim - 1)):
        size = lead.shape[axis]
        dims = [_rows_of(v.aval, lead.shape, axis) for v in s.inputs]
        parts = [s.shards[v][d.dim] for v, d in zip(s.inputs, dims, strict=True) if d is not None and v in s.shards]
        shards = max(parts, default=1)
        if size % shards or any(shards % n for n in parts):
            why = f"the shards of axis {axis} do not match"
            continue
        rows = _rows(lead.ndim - 1 - axis, size // shards, max(s.decoded_bytes, gathered), window)
        if rows == size // shards:
            continue  # a tile that is larger than the window
        if any(d is None for v, d in zip(s.inputs, dims, strict=True) if is_host_aval(v.aval)):
            why = "leaves of different shapes depend on each other"
            continue
        try:
            out_dims = chunked_dims(inner.jaxpr, dims, size, lead.shape, axis)
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
    """Whether a result can be put together from those of the chunks."""
    return dim == Rows(dim.dim) if isinstance(dim, Rows) else dim is not None and not on_host


def _rows_of(aval: Aval, lead: tuple[int, ...], axis: int) -> Rows | None:
    """A guess that the equations confirm or not: operands of the leaf's shape, or of that up to the axis."""
    return Rows(axis) if aval.shape[: axis + 1] == lead[: axis + 1] else None


def _rows(minor_dims: int, size: int, total: int, window: int) -> int:
    """Rows per chunk, two chunks to a window, chunks about equal, cut where a tile of the accelerator ends."""
    tile = tile_of(minor_dims)
    fitting = max(1, window // 2 * size // total)
    chunks = math.ceil(size / fitting)
    rows = math.ceil(size / chunks)
    return min(size, max(1, rows // tile) * tile)


def tile_of(minor_dims: int) -> int:
    """Rows that are a tile of the accelerator, of so many dimensions each: a TPU tiles the last two."""
    return {0: 1024, 1: 32}.get(minor_dims, 1)


def buffers(s: Slice, reuse: Mapping[Var, Var]) -> list[Var | None]:
    """For each result the operand whose buffer it overwrites, row by row as they are used; ``None``: a new one."""
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

    def type_of(x: Aval) -> tuple[Any, ...]:
        typed = typed_sharding(x)
        spec = padded(typed.spec, x.ndim) if typed else []
        return x.shape, x.dtype, is_host_aval(x), spec if any(spec) else []

    return type_of(a) == type_of(b)
