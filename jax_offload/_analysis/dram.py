"""The host's memory, measured: how fast the cores that this process may use read and write it."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

ARRAY = 2**29  # bytes of each of two: far beyond what caches hold
REPEATS = 3


def dram_bandwidth() -> float | None:
    """Bytes per second of ``a += 2 b`` by XLA's CPU code, whose threads are those that the process may use cores.

    STREAM's triad, but into one of its operands, as an update is: 12 bytes cross for an element, whether or not a cache
    reads a line before it is written. ``None`` where jax was told to do without its CPU backend.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    with jax.default_device(cpu):
        a, b = (jax.jit(lambda: jnp.full(ARRAY // 4, 0.1, jnp.float32))() for _ in range(2))
        triad = jax.jit(lambda a, b: a + 2 * b, donate_argnums=0)
        found: list[float] = []
        for _ in range(1 + REPEATS):
            jax.block_until_ready((a, b))
            began = time.perf_counter()
            a = jax.block_until_ready(triad(a, b))
            found.append(time.perf_counter() - began)
    return 3 * ARRAY / min(found[1:])  # the first one compiles
