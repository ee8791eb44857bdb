"""The link between host and device: each direction alone, both at once, by size of a copy and copies in flight.

A compiled JAX program makes the copies, as a training step does. Rates are in bytes per second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

ALONE, TIMED = False, True
MIB = 2**20
SIZES = [64, 16, 256, 8, 32, 128, 4, 512, 2, 1]  # real leaves have the first of these sizes
IN_FLIGHT = [1, 2, 4, 16]
LIMIT = "xla_gpu_experimental_parallel_async_compute_limit"
DIRECTIONS = {"load": (True, False), "store": (False, True), "both": (True, True)}


def cases(toy: bool) -> list[str]:
    return [f"{mib} MiB" for mib in ([1] if toy else SIZES)]


def copies(size: int, total: int) -> int:
    """Return how many copies of ``size`` bytes make ``total`` bytes, at most 256."""
    return max(4, min(256, total // size))


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def in_jax(total: int, sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Copy whole buffers in one compiled program, which returns them on the other side."""
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    for mib in sizes:
        n = copies(mib * MIB, total)
        numbers = np.random.default_rng(0).integers(0, 2**32, (mib * MIB // 4,), np.uint32)
        for direction, (loads, stores) in DIRECTIONS.items():
            sources = [(there, here)] * loads + [(here, there)] * stores
            args = [[jax.device_put(numbers, source) for _ in range(n)] for source, _ in sources]
            out = [[to] * n for _, to in sources]

            def move(args: Any, sources: Any = sources) -> Any:
                spaces = [
                    jax.memory.Space.Host if to.memory_kind == "pinned_host" else jax.memory.Space.Device
                    for _, to in sources
                ]
                return [[jax.device_put(x, space) for x in xs] for xs, space in zip(args, spaces, strict=True)]

            for limit in IN_FLIGHT if device.platform != "cpu" else IN_FLIGHT[:1]:
                options = {LIMIT: limit} if device.platform in ("gpu", "cuda") else None
                program = jax.jit(move, out_shardings=out).lower(args).compile(compiler_options=options)
                seconds = median_seconds(lambda p=program, a=args: jax.block_until_ready(p(a)), repeats)
                rate = n * mib * MIB / seconds
                yield row("jax", direction, mib, limit, rate)
            del args


def row(by: str, direction: str, mib: int, in_flight: int, rate: float) -> dict[str, Any]:
    """``rate``: bytes per second in each direction that is in use."""
    return {"by": by, "direction": direction, "mib": mib, "in_flight": in_flight, "bytes_per_second": rate}


def run(name: str, toy: bool) -> dict[str, Any]:
    total, repeats = (4 * MIB, 1) if toy else (2 << 30, 5)
    return {"rows": list(in_jax(total, [int(name.split()[0])], repeats))}
