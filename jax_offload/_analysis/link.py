"""The link between a device and its host, and the host's memory, measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_offload._analysis.dram import dram_bandwidth
from jax_offload._analysis.exposure import Link
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, Space, check_platform
from jax_offload._interop.xla_options import compiler_options

PIECE, PIECES = 2**26, 16  # copies of 64 MiB are far beyond what their latency is felt in
ON_CPU = 2**20
REPEATS = 3


def measure_link(device: Any = None) -> Link:
    """How fast one device and its host copy, each way alone and both ways at once: of a compiled program, as in a step.
    And how fast the host's cores read and write its memory, which ``update_on=`` lives on.

    Meant to take a second or two: its copies, 16 GiB, take one at 15 GB/s each way, and of the host's memory 6 GiB are
    read and written. 2 GiB of the device, and as much of host memory, are taken meanwhile.

    Args:
      device: a ``jax.Device``; the first where it is left out.

    Returns:
      A ``Link``, in bytes per second: the best of three. On a CPU jax copies nothing, and its figures are no link's.
      Its ``dram`` is what the cores reach that this process may use, divided by its accelerators: of several processes
      that share a host's cores each finds all of it.

    Raises:
      TypeError: ``device`` is none.
      ValueError: the device has no pinned host memory.

    Example:
      >>> import dataclasses, jax_offload as jo
      >>> link = jo.measure_link()
      >>> mine = dataclasses.replace(
      ...     jo.chip("h100"), host_link=link.load, host_link_both=2 * link.both, dram_bandwidth=link.dram
      ... )
    """
    device = jax.local_devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"device: expected a jax.Device, of jax.local_devices(); got {device!r}. jax_offload.chip(name) has the "
            "figures of a chip that is not there."
        )
    check_platform([device])
    piece = ON_CPU if device.platform == "cpu" else PIECE
    there, here = (SingleDeviceSharding(device, memory_kind=kind) for kind in (HOST_KIND, DEVICE_KIND))
    sent = np.random.default_rng(0).integers(0, 2**32, piece // 4, np.uint32)
    on_host, on_device = ([jax.device_put(sent, where) for _ in range(PIECES)] for where in (there, here))

    def load(xs: Any) -> Any:
        return [jax.device_put(x, Space.Device) for x in xs]

    def store(xs: Any) -> Any:
        return [jax.device_put(x, Space.Host) for x in xs]

    def seconds(move: Callable[..., Any], out: Any, *args: Any) -> float:
        options: Any = compiler_options(device.platform) or None
        program = jax.jit(move, out_shardings=out).lower(*args).compile(compiler_options=options)
        jax.block_until_ready(program(*args))
        found = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            jax.block_until_ready(program(*args))
            found.append(time.perf_counter() - began)
        return min(found)

    nbytes = piece * PIECES
    found = Link(
        load=nbytes / seconds(load, [here] * PIECES, on_host),
        store=nbytes / seconds(store, [there] * PIECES, on_device),
        both=nbytes / seconds(
            lambda xs, ys: (load(xs), store(ys)), ([here] * PIECES, [there] * PIECES), on_host, on_device
        ),
    )  # fmt: skip
    del on_host, on_device
    dram, sharing = dram_bandwidth(), 1 if device.platform == "cpu" else jax.local_device_count()
    return dataclasses.replace(found, dram=None if dram is None else dram / sharing)
