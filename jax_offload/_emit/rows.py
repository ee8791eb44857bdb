"""Rows of an array, read and written in a loop: the same rows of every shard of the axis.

No device then needs the rows of another, and XLA sees that it does not. ``sharding``, where it is given, is pinned at
every step: left to itself XLA may divide the loop's carry like what is written into it, and gather the whole each time.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._base.shardings import constrained, padded, typed_sharding


def read_rows(x: jax.Array, dim: int, start: Any, n: int, shards: int, sharding: NamedSharding | None) -> jax.Array:
    """``n`` rows from ``start`` on of each of the ``shards`` parts of axis ``dim``."""
    x = constrained(x, sharding)
    if shards == 1:
        return jax.lax.dynamic_slice_in_dim(x, start, n, dim)
    return _merged(jax.lax.dynamic_slice_in_dim(_by_shard(x, dim, shards, sharding), start, n, dim + 1), dim, sharding)


def write_rows(
    x: jax.Array, rows: jax.Array, dim: int, start: Any, shards: int, sharding: NamedSharding | None
) -> jax.Array:
    """``x`` with ``rows``, as ``read_rows`` gives them, in their places."""
    x = constrained(x, sharding)
    rows = constrained(rows, sharding)
    if shards == 1:
        return constrained(jax.lax.dynamic_update_slice_in_dim(x, rows, start, dim), sharding)
    into, rows = (_by_shard(array, dim, shards, sharding) for array in (x, rows))
    into = jax.lax.dynamic_update_slice_in_dim(into, rows, start, dim + 1)
    return _merged(constrained(into, _sharding_by_shard(sharding, into.ndim - 1, dim)), dim, sharding)


def _by_shard(x: jax.Array, dim: int, shards: int, sharding: NamedSharding | None) -> jax.Array:
    """Axis ``dim`` as two: shards, and the rows of each."""
    shape = (*x.shape[:dim], shards, x.shape[dim] // shards, *x.shape[dim + 1 :])
    typed = _sharding_by_shard(typed_sharding(jax.typeof(x)), x.ndim, dim)
    return constrained(jax.lax.reshape(x, shape, out_sharding=typed), _sharding_by_shard(sharding, x.ndim, dim))


def _merged(x: jax.Array, dim: int, sharding: NamedSharding | None) -> jax.Array:
    shape = (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    typed = typed_sharding(jax.typeof(x))
    if typed is not None:
        spec = padded(typed.spec, x.ndim)
        typed = typed.update(spec=PartitionSpec(*spec[: dim + 1], *spec[dim + 2 :]))
    return constrained(jax.lax.reshape(x, shape, out_sharding=typed), sharding)


def _sharding_by_shard(sharding: NamedSharding | None, ndim: int, dim: int) -> NamedSharding | None:
    if sharding is None:
        return None
    spec = padded(sharding.spec, ndim)
    return sharding.update(spec=PartitionSpec(*spec[: dim + 1], None, *spec[dim + 1 :]))
