"""The limits of pinned memory on this host: free memory, the cgroup, and XLA's pool."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
POOL_DEFAULT = 64 * 2**30
# XLA's pool was at 46.8 of 64 GB when an allocation failed: it fragments.
POOL_HEADROOM = 64 / 46.8


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes on one host.

    Attributes:
      available: what the kernel says can be taken without swapping; ``None`` where it does not say.
      cgroup: what the cgroup of this process has left; ``None`` where there is no limit.
      pool: the most that XLA pins on a GPU, in one process.
    """

    available: int | None
    cgroup: int | None
    pool: int

    @property
    def usable(self) -> int | None:
        """The least of what is available and what the cgroup leaves."""
        return min((n for n in (self.available, self.cgroup) if n is not None), default=None)


def pool_limit() -> int:
    """Bytes that XLA pins at most on a GPU, in one process.

    Raises:
      ValueError: the environment says something else than a number.
    """
    said = os.environ.get(POOL_VARIABLE)
    try:
        return POOL_DEFAULT if said is None else int(float(said) * 2**30)
    except ValueError as error:
        raise ValueError(f"{POOL_VARIABLE}: expected a number of GiB in the environment; got {said!r}.") from error


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Bytes of this host, for this process. ``root``: the folder of the kernel's files, for tests."""
    return HostMemory(_available(root), _cgroup_left(root), pool_limit())


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left(root: Path) -> int | None:
    """The least that a group of this process has left, or one above it (cgroup v2)."""
    own = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    parts = [] if own is None else [part for part in own.split("/") if part and part != ".."]
    left: list[int] = []
    for k in range(len(parts) + 1):  # in a container the group's own path may not be mounted
        group = root.joinpath("sys/fs/cgroup", *parts[:k])
        limit, used = (_text(group / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit():
            left.append(max(0, int(limit) - max(0, int(used or 0) - _reclaimable(group))))
    return min(left, default=None)


def _reclaimable(group: Path) -> int:
    """Bytes of files in memory that the kernel gives back when they are needed."""
    words = (line.split() for line in _text(group / "memory.stat").splitlines())
    return next((int(n) for name, n in words if name == "inactive_file"), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
