"""Figures for accelerators and their hosts, from ``chips.toml`` or a measurement on this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_offload._program.memory import DEVICE_KIND, HOST_KIND, Space, check_platform
from jax_offload._step.jit import compiler_options

_FILE = Path(__file__).with_name("chips.toml")
_TPU_KINDS = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e"}  # as jax has them in device_kind
# Suffixes of the card that the figures describe, as opposed to PCIe, NVL, a MIG slice, or another memory.
_SAME_CARD = re.compile(r"sxm\d*|hbm\w*|80gb|141gb|480gb")

FRACTION, OTHER_NAME, BY_DEFAULT = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", 0.75
HEADROOM = 0.05  # the share of JAX's device memory to leave free; of host memory, twice as much
MOST = 0.95  # of a GPU's memory that jax can be told to take
PIECE, PIECES = 2**26, 16  # copies of 64 MiB are far beyond the size at which their latency is felt
ON_CPU = 2**20
ARRAY = 2**29  # bytes of each of two arrays in host memory: far larger than the caches
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Chip:
    """The capacities and speeds of one accelerator and its host, in bytes, bytes per second and operations per second.

    Attributes:
      name: the name by which ``chip`` knows it.
      platform: ``"cuda"`` or ``"tpu"``.
      hbm_bytes: bytes of device memory.
      bf16: operations per second of large matmuls in bfloat16 or float16.
      f32: operations per second of large matmuls in other dtypes.
      hbm_bandwidth: bytes per second that fusions read and write in device memory.
      host_link: bytes per second between pinned host memory and the device, in one direction alone.
      host_link_both: bytes per second of both directions at once, added together.
      interconnect: bytes per second that the accelerator sends in a ring, while it receives as many.
      dram_bytes: bytes of the host's memory for each of its accelerators.
      dram_bandwidth: bytes per second of the host's memory for each of its accelerators.
      sources: for each figure, where it is published, how it was measured, or why it is assumed.

    Example:
      >>> import jax_offload as jo
      >>> h100 = jo.chip("h100")
      >>> round(h100.hbm_bytes / 2**30), h100.host_link / 1e9
      (80, 53.0)
      >>> jo.chip("a100").sources["host_link_both"]
      'assumed: 1.49 times one way, as measured on an h100'
    """

    name: str
    platform: str
    hbm_bytes: int
    bf16: float
    f32: float
    hbm_bandwidth: float
    host_link: float
    host_link_both: float
    interconnect: float
    dram_bytes: int
    dram_bandwidth: float
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def beside_others(self) -> Chip:
        """The chip while the other accelerators of its host are busy too: its link shares the host's memory."""
        both = min(self.host_link_both, self.dram_bandwidth)
        if both == self.host_link_both:
            return self
        said = {"host_link_both": "assumed: as dram_bandwidth, as all accelerators of a host share its memory"}
        link = min(self.host_link, both)
        return dataclasses.replace(self, host_link=link, host_link_both=both, sources={**self.sources, **said})


class Chips:
    """Return the figures of an accelerator, known by its name or measured.

    Args:
      name: a name that the library knows (``a100``, ``h100``, ``h200``, ``b200``, ``gh200``, ``gb200``, ``v5e``,
        ``v5p``, ``v6e``); jax's name for a device, ``jax.devices()[0].device_kind``; or a ``Chip``, which is returned.
        For another card, change a known one: ``dataclasses.replace(jax_offload.chip("h100"), host_link=25e9)``.

    Returns:
      A ``Chip``. ``jax_offload.chip.measured()`` returns this machine's accelerator, with its link measured.

    Raises:
      TypeError: ``name`` is none of these.
      ValueError: no chip has that name.

    Example:
      >>> import jax_offload as jo
      >>> jo.chip("TPU v5e").hbm_bytes / 2**30
      16.0
    """

    def __call__(self, name: str | Chip) -> Chip:
        if isinstance(name, Chip):
            return name
        known = f"Known: {', '.join(_known())}"
        if not isinstance(name, str):
            raise TypeError(f"chip: expected a name or a Chip; got a {type(name).__name__}. {known}.")
        if found := known_as(name):
            return _known()[found]
        raise ValueError(
            f"chip: {name!r} is not known. {known}; or dataclasses.replace(jax_offload.chip('h100'), ...) with the "
            "figures of another."
        )

    def measured(self, device: Any = None) -> Chip:
        """Measure the link and the host's memory of this machine, and return the figures of its accelerator.

        It takes a second or two: it copies 16 GiB, and reads and writes 6 GiB of host memory. Meanwhile it holds 2 GiB
        of device memory and 2 GiB of host memory.

        Args:
          device: a ``jax.Device``; the first one if left out.

        Returns:
          A ``Chip`` with ``host_link``, ``host_link_both`` and ``dram_bandwidth`` in bytes per second, the best of
          three runs, and ``dram_bytes``, this host's memory for each of its accelerators. The other figures are those
          of the known chip of that name, or else of an ``h100``; ``sources`` says which. On a CPU jax copies nothing,
          and the link's figures mean nothing.

        Raises:
          TypeError: ``device`` is not a device.
          ValueError: the device has no pinned host memory.
        """
        device = jax.local_devices()[0] if device is None else device
        figures: dict[str, Any] = _link(device)
        name, sharing = known_as(device.device_kind), jax.local_device_count()
        like, memory = self(name or "h100"), host_memory()
        limit = (device.memory_stats() or {}).get("bytes_limit")
        figures |= _dram(1 if device.platform == "cpu" else sharing)
        figures |= {} if memory is None else {"dram_bytes": memory // sharing}
        # jax tells its own share of a GPU
        figures |= {} if name or not limit else {"hbm_bytes": round(limit / jax_takes(like)[0])}
        sources = {key: f"as {like.name}" for key in like.sources} | dict.fromkeys(figures, "measured on this machine")
        return dataclasses.replace(like, name=name or device.device_kind, sources=sources, **figures)


chip = Chips()


def on_gpus(chip: Chip | None) -> bool:
    return chip is None or chip.platform == "cuda"


def jax_takes(chip: Chip | None) -> tuple[float, str]:
    """Return the share of a device's memory that jax takes, and why."""
    if not on_gpus(chip):
        return 1.0, "jax takes all of a TPU's memory"
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() == "platform":
        return 1.0, "XLA_PYTHON_CLIENT_ALLOCATOR=platform takes what there is"
    name = next((name for name in (FRACTION, OTHER_NAME) if os.environ.get(name)), "")
    try:
        share = float(os.environ.get(name, BY_DEFAULT))
    except ValueError:
        share = math.nan
    if not share > 0:
        raise ValueError(f"{name}: expected a share such as 0.9 in the environment; got {os.environ[name]!r}.")
    return share, f"jax takes {share:.0%} ({name or f'by default; {FRACTION} sets another share'})"


def usable(chip: Chip | None, memory: int) -> int:
    """Return the bytes of a device's memory that a step may take: jax's share, less the headroom."""
    return int(memory * jax_takes(chip)[0] * (1 - HEADROOM))


def share_for(chip: Chip | None, memory: int, peak: int) -> float:
    """Return the share of a GPU's memory that jax has to take for a peak and the headroom; infinite if none is set."""
    return math.ceil(100 * peak / (1 - HEADROOM) / memory) / 100 if on_gpus(chip) and memory else math.inf


def larger_share(chip: Chip | None, memory: int, peak: int) -> str:
    """Say how a peak that the device has room for, but not within jax's share, fits."""
    needed = share_for(chip, memory, peak)
    return f"fits with {FRACTION}={needed:g} before jax starts" if needed <= MOST else "leaves no headroom"


def known_as(name: str) -> str | None:
    """Return the known chip that a name stands for: ``tpu-v5e``, ``NVIDIA H100 80GB HBM3``, ``TPU v5 lite``."""
    plain = re.sub(r"nvidia|tpu", "", name.lower()).strip(" -_")
    first, *rest = re.split(r"[\s_-]+", _TPU_KINDS.get(plain, plain))
    return first if first in _known() and all(map(_SAME_CARD.fullmatch, rest)) else None


@functools.cache
def _known() -> dict[str, Chip]:
    return {name: Chip(name, **table) for name, table in tomllib.loads(_FILE.read_text()).items()}


# -- measured


def _link(device: Any) -> dict[str, float]:
    """Measure the link of one device in compiled programs, as in a step: each direction alone, and both at once."""
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"device: expected a jax.Device, of jax.local_devices(); got {device!r}. jax_offload.chip(name) has the "
            "figures of a chip that is not there."
        )
    check_platform([device])
    piece = ON_CPU if device.platform == "cpu" else PIECE
    sent = np.random.default_rng(0).integers(0, 2**32, piece // 4, np.uint32)
    there, here = (SingleDeviceSharding(device, memory_kind=kind) for kind in (HOST_KIND, DEVICE_KIND))
    on_host, on_device = ([jax.device_put(sent, where) for _ in range(PIECES)] for where in (there, here))

    def speed(loads: list[Any], stores: list[Any]) -> float:
        def move(loads: list[Any], stores: list[Any]) -> Any:
            return [jax.device_put(x, Space.Device) for x in loads], [jax.device_put(x, Space.Host) for x in stores]

        options: Any = compiler_options(device.platform) or None
        places = [here] * len(loads), [there] * len(stores)
        program = jax.jit(move, out_shardings=places, compiler_options=options)
        return piece * (len(loads) + len(stores)) / _best(lambda: program(loads, stores))

    alone = min(speed(on_host, []), speed([], on_device))
    return {"host_link": alone, "host_link_both": speed(on_host, on_device)}


def _dram(sharing: int) -> dict[str, float]:
    """Measure the bytes per second of ``a += 2 b`` on the cores that this process may use, in XLA's CPU code.

    This is STREAM's triad into one of its operands, as in an update: 12 bytes cross for each element. Nothing is
    measured if jax was told to do without its CPU backend. ``sharing``: the devices that share them.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return {}
    with jax.default_device(cpu):
        held, b = (jax.jit(lambda: jnp.full(ARRAY // 4, 0.1, jnp.float32))() for _ in range(2))
        triad = jax.jit(lambda a, b: a + 2 * b, donate_argnums=0)

        def run() -> Any:
            nonlocal held
            held = triad(held, b)
            return held

        return {"dram_bandwidth": 3 * ARRAY / _best(run) / sharing}


def _best(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of a few runs; the first run compiles and does not count."""
    jax.block_until_ready(run())
    found: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return min(found)


def host_memory(root: Path = Path("/")) -> int | None:
    """Return how many more bytes of host memory this process may take: the least that the kernel and the process's
    groups (cgroup v2) leave; ``None`` if none of them tells.

    ``root``: the folder of the kernel's files, for tests.
    """
    found = [
        int(kib) * 1024 for kib in re.findall(r"^MemAvailable: +(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    ]
    top = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)", _text(root / "proc/self/cgroup"), re.MULTILINE)
    group = top / (own[1] if own else "")  # a container may not have the group's own path
    for at in (group, *group.parents[: len(group.parts) - len(top.parts)]):
        limit, used = (_text(at / name).strip() for name in ("memory.max", "memory.current"))
        # the kernel gives the memory of inactive files back
        files = re.search(r"^inactive_file (\d+)", _text(at / "memory.stat"), re.MULTILINE)
        if limit.isdigit():
            found.append(max(0, int(limit) - max(0, int(used or 0) - int(files[1] if files else 0))))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
