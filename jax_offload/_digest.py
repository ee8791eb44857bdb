"""Sums over the bits of arrays: what storage did to a checkpoint shows, however it is sharded when it comes back.

A sum of words does not depend on how an array is cut, so that every process adds up what it holds. One flipped bit
always changes it; worse damage goes unseen about once in 2³² (2¹⁶ where the elements have 16 bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload import _memory

_MODULUS = 2**32


def digests(leaves: Sequence[Any]) -> list[int]:
    """For each leaf, an array or a number, the sum of its 32-bit words modulo 2³² (of its elements, if smaller).

    Host leaves are added up on the host, device leaves on the device. With several processes it is a collective: all
    must call it with the same leaves.
    """
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    on_device = [isinstance(x, jax.Array) and not _memory.on_host(x) for x in leaves]
    local = np.array([0 if d else _local(x) for x, d in zip(leaves, on_device, strict=True)], np.uint32)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        local = multihost_utils.process_allgather(local).sum(axis=0, dtype=np.uint64) % _MODULUS
    summed = [_on_device(x) if d else None for x, d in zip(leaves, on_device, strict=True)]
    return [int(here if there is None else there) for here, there in zip(local, summed, strict=True)]


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of PRNG keys, or the description of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _local(x: Any) -> int:
    """This process's share of the sum: of each part of the array the first replica counts."""
    if isinstance(x, jax.Array):
        parts = [np.asarray(shard.data) for shard in x.addressable_shards if shard.replica_id == 0]
    else:
        parts = [np.asarray(x)] if jax.process_index() == 0 else []
    return sum(int(_words(part).sum(dtype=np.uint64)) for part in parts) % _MODULUS


def _words(x: np.ndarray) -> np.ndarray:
    if x.dtype.itemsize > 4:
        return np.ascontiguousarray(np.atleast_1d(x)).view(np.uint32)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@jax.jit
def _on_device(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _on_device(x.real) + _on_device(x.imag)
    if x.dtype != jnp.bool:
        bits = jax.dtypes.itemsize_bits(x.dtype)
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(bits, 32)}"))
    return jnp.sum(x, dtype=jnp.uint32)
