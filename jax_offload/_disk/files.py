"""The operating system's calls on files, each by a name: all that the disk tier asks of it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Any

# State is read once per step, in turn: a page cache would cost a copy and the memory that the state was moved out of.
_DIRECT = getattr(os, "O_DIRECT", 0)


class Files:
    """System calls. A test's subclass injects short reads, errors, delays and flipped bits."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Open for reading and writing. ``direct`` raises ``OSError`` (``EINVAL``) where the system cannot do that."""
        if direct and not _DIRECT:
            raise OSError(errno.EINVAL, "this system has no O_DIRECT", str(path))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | create * os.O_CREAT | direct * _DIRECT, 0o644)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def preadv(self, descriptor: int, buffer: Any, offset: int) -> int:
        """Return how many bytes were read, which may be fewer than ``buffer`` holds."""
        return os.preadv(descriptor, [buffer], offset)

    def pwritev(self, descriptor: int, buffer: Any, offset: int) -> int:
        """Return how many bytes were written, which may be fewer than ``buffer`` holds."""
        return os.pwritev(descriptor, [buffer], offset)

    def sync(self, descriptor: int) -> None:
        """Wait until the file's bytes, and what the system needs to find them, will outlive a loss of power."""
        os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Do the same for the names in a directory."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Make a file ``nbytes`` long in space of its own: a full disk shows now and not in the thousandth step."""
        os.ftruncate(descriptor, 0)
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        elif nbytes:
            os.ftruncate(descriptor, nbytes)

    def same(self, descriptor: int, path: Path) -> bool:
        """Whether the open file is still the one that has this name."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def read(self, path: Path) -> bytes:
        """Read a small file."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file and sync its bytes, but not its name: see ``sync_directory``."""
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def free(self, path: Path) -> int:
        """Return how many bytes this process may still write to the filesystem of a directory."""
        return shutil.disk_usage(path).free

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def lock(self, descriptor: int) -> bool:
        """Try to lock an open file. The lock ends with the process, however that ends."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def process(self) -> str:
        """Name this process for another one to read."""
        return f"process {os.getpid()} on {socket.gethostname()}"
