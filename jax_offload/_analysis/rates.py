"""This machine's accelerator as a ``Chip``, with its link and its host's memory measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_offload._analysis.chips import Chip, known_as
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.host import host_memory
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, Space, check_platform
from jax_offload._interop.xla_options import compiler_options

PIECE, PIECES = 2**26, 16  # copies of 64 MiB are far beyond what their latency is felt in
ON_CPU = 2**20
ARRAY = 2**29  # bytes of each of two arrays in host memory: far beyond what caches hold
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second between a device and its host.

    Attributes:
      load: from the host alone.
      store: to the host alone.
      both: each way, while both are busy.
      dram: that the host's cores read and write, for each accelerator; ``None`` where jax has no CPU backend.
    """

    load: float
    store: float
    both: float
    dram: float | None


def _measured(device: Any) -> Chip:
    device = jax.local_devices()[0] if device is None else device
    rates, name = rates_of(device), known_as(device.device_kind)
    like = chip_of(name or "h100")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    usable, sharing = host_memory().usable, max(1, jax.local_device_count())
    figures: dict[str, Any] = {
        "host_link": min(rates.load, rates.store),
        "host_link_both": 2 * rates.both,
        "dram_bandwidth": rates.dram,
        "dram_bytes": like.dram_bytes if usable is None else usable // sharing,
        "hbm_bytes": like.hbm_bytes if name or not limit else int(limit),
    }
    sources = {key: f"as {like.name}" for key in like.sources} | dict.fromkeys(figures, "measured on this machine")
    return dataclasses.replace(like, name=name or device.device_kind, sources=sources, **figures)


def rates_of(device: Any) -> Rates:
    """The link of one device in a compiled program, as in a step, and its host's memory. On a CPU jax copies nothing,
    and the link's figures say nothing."""
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
        return _best(lambda: program(*args))

    nbytes, both = piece * PIECES, ([here] * PIECES, [there] * PIECES)
    loads, stores = seconds(load, both[0], on_host), seconds(store, both[1], on_device)
    at_once = seconds(lambda xs, ys: (load(xs), store(ys)), both, on_host, on_device)
    del on_host, on_device
    dram, sharing = dram_bandwidth(), 1 if device.platform == "cpu" else jax.local_device_count()
    return Rates(nbytes / loads, nbytes / stores, nbytes / at_once, None if dram is None else dram / sharing)


def dram_bandwidth() -> float | None:
    """Bytes per second of ``a += 2 b`` by XLA's CPU code, whose threads use the cores that the process may use.

    STREAM's triad, but into one of its operands, as an update is: 12 bytes cross for each element. ``None`` where jax
    was told to do without its CPU backend.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    with jax.default_device(cpu):
        a, b = (jax.jit(lambda: jnp.full(ARRAY // 4, 0.1, jnp.float32))() for _ in range(2))
        triad = jax.jit(lambda a, b: a + 2 * b, donate_argnums=0)
        held = [a]

        def run() -> Any:
            held[0] = triad(held[0], b)
            return held[0]

        return 3 * ARRAY / _best(run)


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the best of a few runs, after one that does not count."""
    jax.block_until_ready(run())
    found: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return min(found)


class Chips:
    """The figures of an accelerator, by its name or measured.

    Args:
      name: one of those of the library (``a100``, ``h100``, ``h200``, ``b200``, ``gh200``, ``gb200``, ``v5e``, ``v5p``,
        ``v6e``), or what jax calls it, ``jax.devices()[0].device_kind``; the path of a file of your own,
        ``my_chip.toml``, with the fields of ``Chip`` at its top level; or a ``Chip``, which comes back. Such a file
        needs ``hbm_bytes``, ``flops``, ``hbm_bandwidth``, ``host_link`` and ``dram_bytes``; a ``like = "h100"`` in it
        takes all that it does not say from that chip.

    Returns:
      A ``Chip``. ``jax_offload.chip.measured()`` returns the accelerator of this machine, its link measured.

    Raises:
      TypeError: ``name`` is none of these.
      ValueError: no chip has that name; or the file lacks a figure, or has one that is unknown or not a number.

    Example:
      >>> import jax_offload as jo
      >>> jo.chip("TPU v5e").hbm_bytes / 2**30
      16.0
    """

    def __call__(self, name: str | Path | Chip) -> Chip:
        return chip_of(name)

    def measured(self, device: Any = None) -> Chip:
        """The figures of an accelerator of this machine, with its link and its host's memory measured.

        It takes a second or two: 16 GiB are copied, and 6 GiB of host memory are read and written. 2 GiB of the device,
        and as many of host memory, are taken meanwhile.

        Args:
          device: a ``jax.Device``; the first one where it is left out.

        Returns:
          A ``Chip`` with ``host_link``, ``host_link_both`` and ``dram_bandwidth`` in bytes per second, the best of
          three runs, and ``dram_bytes``, this host's memory for each of its accelerators. The other figures are those
          of the chip of that name, or of an ``h100`` where none is known; ``sources`` says which. On a CPU jax copies
          nothing, and the link's figures say nothing.

        Raises:
          TypeError: ``device`` is no device.
          ValueError: the device has no pinned host memory.
        """
        return _measured(device)


chip = Chips()
