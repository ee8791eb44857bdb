"""Checksums of arrays: what storage did to a checkpoint shows, however it is sharded when it comes back.

They are the CRC-32 (that of zip and PNG) of an array's bytes in row-major order, with zlib's own code for the bytes. A
CRC is linear: the parts of an array, each multiplied by a power of x for the bytes behind it, add up (XOR) to the
whole. So every process takes what it holds, and none needs what is elsewhere; xxhash and its kind would need the bytes
in order, in one place. Any error within 32 bits in a row and any two flipped bits (of 512 MiB) change it for certain,
other damage goes unseen once in 2³².
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, reduce
from operator import xor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._base import memory as _memory

_POLYNOMIAL = 0xEDB88320  # CRC-32's. Bits are reflected, here and below: the highest is that of x⁰
_ONES = 2**32 - 1
_PIECE = 2**23  # bytes of the host's memory that a thread takes at a time
_THREADS = 8
_SHORT = 64  # bytes in a row, below which the tables are faster than a call of zlib, which takes 250 ns at least

Start = tuple[int, ...]


def checksums(leaves: Sequence[Any]) -> list[int]:
    """For each leaf, an array or a number, the CRC-32 of its bytes in row-major order: ``zlib.crc32`` of the whole.

    What is on a device is copied to the host for it, at most eight shards at a time. With several processes it is a
    collective: all must call it with the same leaves.
    """
    leaves = _without_keys(leaves)
    pieces = [(i, *piece) for i, x in enumerate(leaves) for piece in _pieces(x)]
    shares = np.zeros(len(leaves), np.uint32)
    with ThreadPoolExecutor(_THREADS) as pool:
        for i, share in pool.map(lambda piece: (piece[0], _share(*piece[1:])), pieces):
            shares[i] ^= share
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        shares = np.bitwise_xor.reduce(np.asarray(multihost_utils.process_allgather(shares)), axis=0)
    return [int(share) ^ _of_zeros(_nbytes(x)) for x, share in zip(leaves, shares, strict=True)]


def word_sums(leaves: Sequence[Any]) -> list[int]:
    """What ``save_args`` stored before there were checksums: sums of 32-bit words, which do not see their order."""
    leaves = _without_keys(leaves)
    sums = np.array([sum(_words(_fetched(part)) for part, *_ in _pieces(x)) % 2**32 for x in leaves], np.uint64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # as 32 bits: jax has no others unless told to
        sums = np.asarray(multihost_utils.process_allgather(sums.astype(np.uint32))).sum(axis=0, dtype=np.uint64)
    return [int(x) % 2**32 for x in sums]


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of PRNG keys, or the description of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(leaves: Sequence[Any]) -> list[Any]:
    return [jax.random.key_data(x) if is_key(x) else x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


# Pieces of an array


def _pieces(x: Any) -> Iterator[tuple[Any, Start, tuple[int, ...]]]:
    """What this process has to sum up of ``x``, of each part of it the first replica.

    As (array, its start in ``x``, shape of ``x``): pieces of what is on the host, whole shards of what is on a device.
    """
    if isinstance(x, jax.Array):
        shards = [s for s in x.addressable_shards if s.replica_id == 0]
        parts = [(s.data, tuple(cut.indices(n)[0] for cut, n in zip(s.index, x.shape, strict=True))) for s in shards]
    else:
        parts = [(x, (0,) * x.ndim)] if jax.process_index() == 0 else []
    for part, at in parts:
        if isinstance(part, jax.Array) and not _memory.on_host(part):
            yield part, at, x.shape
        else:
            yield from ((piece, start, x.shape) for piece, start in _cut(np.asarray(part), at))


def _cut(part: np.ndarray, at: Start) -> Iterator[tuple[np.ndarray, Start]]:
    """Contiguous pieces of ``part`` with their starts, where ``part`` starts at ``at``."""
    for start, shape in _blocks(part.shape, max(1, _PIECE // part.dtype.itemsize)):
        piece = part[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        yield np.asarray(piece), tuple(a + b for a, b in zip(at, start, strict=True))


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[Start, tuple[int, ...]]]:
    """Starts and shapes that cut ``shape`` into contiguous pieces of at most ``most`` elements."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    rows = max(1, most // max(1, row))
    for start in range(0, shape[0], rows):
        for inner, size in _blocks(shape[1:], most) if row > most else [((0,) * len(shape[1:]), shape[1:])]:
            yield (start, *inner), (min(rows, shape[0] - start), *size)


def _fetched(part: Any) -> np.ndarray:
    """In the memory of this process. jax keeps what it copies as long as the array lives: so of an alias."""
    if isinstance(part, jax.Array):
        part = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
    return np.asarray(part)


def _share(part: Any, at: Start, full: tuple[int, ...]) -> int:
    """What a part adds to the checksum of an array of shape ``whole``, in which it starts at ``at``."""
    return reduce(xor, (_shifted(piece, start, full) for piece, start in _cut(_fetched(part), at)), 0)


def _words(x: np.ndarray) -> int:
    x = np.ascontiguousarray(np.atleast_1d(x))
    return int(x.view(f"uint{8 * min(4, x.dtype.itemsize)}").sum(dtype=np.uint64))


# Arithmetic of CRCs: polynomials over the integers modulo 2, modulo CRC-32's


def _shifted(piece: np.ndarray, at: Start, full: tuple[int, ...]) -> int:
    """The CRC (without its start and end) of an array of shape ``whole`` that is 0 but for ``piece`` at ``at``."""
    piece, at, full = (piece, at, full) if full else (piece.reshape(1), (0,), (1,))
    if not piece.size:
        return 0
    strides = [math.prod(full[k + 1 :]) * piece.dtype.itemsize for k in range(len(full))]
    inner = max([k for k in range(len(full)) if piece.shape[k] != full[k]], default=0)  # contiguous from here on
    outer = piece.shape[:inner]
    sums = _crcs(np.ascontiguousarray(piece).view(np.uint8).reshape(math.prod(outer), -1)).reshape(outer)
    for stride in reversed(strides[:inner]):
        sums = _folded(sums, stride)
    last = sum((a + n - 1) * stride for a, n, stride in zip(at, piece.shape, strides, strict=True))
    return _times(int(sums), _power(strides[0] * full[0] - last - piece.dtype.itemsize))


def _crcs(runs: np.ndarray) -> np.ndarray:
    """The CRC (without its start and end) of each row of bytes."""
    if runs.shape[1] >= _SHORT:
        return np.array([zlib.crc32(run, _ONES) ^ _ONES for run in runs], np.uint32)
    width = math.gcd(runs.shape[1], 4)
    words = runs.view(f"<u{width}").astype(np.uint32) << 32 - 8 * width
    return _scaled(_folded(words, width), _power(4))


def _folded(sums: np.ndarray, stride: int) -> np.ndarray:
    """Along the last axis, of which each element stands ``stride`` bytes before the next: the sum of the whole."""
    while (n := sums.shape[-1]) > 1:
        if n % 2:
            sums = np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)
        sums = _scaled(sums[..., ::2], _power(stride)) ^ sums[..., 1::2]
        stride *= 2
    return sums[..., 0]


def _of_zeros(n: int) -> int:
    """The CRC-32 of ``n`` zeros, which holds all that a CRC is beside its linear part."""
    return _times(_ONES, _power(n)) ^ _ONES


def _scaled(values: np.ndarray, factor: int) -> np.ndarray:
    """``_times``, of many values."""
    tables = _tables(factor)
    product = tables[0][values & 255]
    for k in (1, 2, 3):
        product ^= tables[k][values >> 8 * k & 255]
    return product


@lru_cache(maxsize=256)
def _tables(factor: int) -> np.ndarray:
    """The products of ``factor`` and all values that differ from 0 in one byte, for each byte."""
    return np.stack([_times(np.arange(256, dtype=np.uint32) << 8 * k, factor) for k in range(4)])


def _power(n: int) -> int:
    """x to the power of 8 ``n``: by it a sum is multiplied that stands ``n`` bytes before the end."""
    product = 1 << 31
    for k in range(n.bit_length()):
        if n >> k & 1:
            product = _times(product, _square(k))
    return product


@cache
def _square(k: int) -> int:
    """x to the power of 8 · 2ᵏ."""
    return 1 << 23 if k == 0 else _times(_square(k - 1), _square(k - 1))


def _times(a: Any, b: int) -> Any:
    """The product of a polynomial, or an array of them, and another."""
    product = a ^ a
    for bit in range(31, -1, -1):
        product ^= (a >> bit & 1) * b
        b = b >> 1 ^ (b & 1) * _POLYNOMIAL
    return product
