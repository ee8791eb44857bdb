"""Checksums of arrays: what storage did to a checkpoint shows, however it is sharded when it comes back.

The checksum of an array is a sum modulo 2^64 of its 32-bit words (or shorter ones), each multiplied by an odd key that
its position in the array decides. So every process sums what it holds, in any order, and none needs what is elsewhere.
One changed word changes the sum for certain, as its key is odd; other damage, words in each other's place included,
goes unseen about once in 2^32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PIECE = 2**20  # bytes that are summed at a time, as 64-bit products of each word
_THREADS = 8


def checksums(leaves: Sequence[Any]) -> list[int]:
    """Compute the checksum of each leaf, an array or a number, in 64 bits.

    What is on a device is copied to the host for it, at most eight shards at a time. With several processes it is a
    collective: all must call it with the same leaves.
    """
    leaves = [jax.random.key_data(x) if is_key(x) else x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
    shards = [(i, *shard) for i, x in enumerate(leaves) for shard in _shards_here(x)]
    sums = [0] * len(leaves)
    with ThreadPoolExecutor(_THREADS) as pool:
        for i, part in pool.map(lambda shard: (shard[0], _sum_of_shard(*shard[1:])), shards):
            sums[i] += part
    found = np.array([x % 2**64 for x in sums], np.uint64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = multihost_utils.process_allgather(found.view(np.uint32))  # jax has no 64 bits unless told to
        found = np.asarray(words).view(np.uint64).sum(axis=0)
    return [int(x) for x in found]


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of PRNG keys, or the description of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shards_here(x: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The shards of ``x`` that this process sums, each with its start in ``x``: the first replica of each."""
    if isinstance(x, jax.Array):
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                yield shard.data, tuple(cut.indices(n)[0] for cut, n in zip(shard.index, x.shape, strict=True))
    elif jax.process_index() == 0:
        yield x, (0,) * x.ndim


def _sum_of_shard(shard: Any, start: tuple[int, ...]) -> int:
    if isinstance(shard, jax.Array):
        # jax keeps the copy on the host for as long as the array lives, so the copy is made of an alias.
        shard = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    values = np.ascontiguousarray(shard)  # which has an axis at least
    start = start or (0,)
    words = values.view(f"uint{8 * min(4, values.dtype.itemsize)}")
    if (count := values.dtype.itemsize // 4) > 1:
        return _keyed_sum(words.reshape(*values.shape, count), (*start, 0))
    return _keyed_sum(words, start)


def _keyed_sum(words: np.ndarray, start: Sequence[int]) -> int:
    """Sum ``words``, which begin at ``start`` in the whole array, each times the product of a key for each axis."""
    row, total = words[:1].nbytes, 0
    rows = max(1, _PIECE // max(1, row))
    for begin in range(0, len(words), rows):
        piece = words[begin : begin + rows]
        if words.ndim > 1 and row > _PIECE:
            sums = np.array([_keyed_sum(piece[0], start[1:])], np.uint64)
        else:
            sums = piece.astype(np.uint64)
            for axis in range(words.ndim - 1, 0, -1):
                sums = (sums * _keys(words.ndim - axis, start[axis], words.shape[axis])).sum(axis=axis)
        total += int((sums * _keys(words.ndim, start[0] + begin, len(sums))).sum())
    return total % 2**64


def _keys(axis: int, begin: int, count: int) -> np.ndarray:
    """Odd keys of the positions from ``begin`` on along an axis, counted from the last: SplitMix64's mixing."""
    x = np.arange(begin, begin + count, dtype=np.uint64) + np.uint64(axis << 56)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31)) | np.uint64(1)
