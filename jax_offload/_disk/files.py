"""The operating system's calls on files, each by a name: all that the disk tier asks of it, so that a test can put
faults in their place."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Any

# Flags of ``open`` that leave out the page cache. A cache does nothing for state that is read once per step, in turn:
# it costs a copy and the memory that the state was moved out of.
_DIRECT = getattr(os, "O_DIRECT", 0)


class Files:
    """System calls. A test's subclass injects short reads, errors, delays and flipped bits."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """A descriptor for reading and writing. ``direct`` raises ``OSError`` (``EINVAL``) where that cannot be had."""
        if direct and not _DIRECT:
            raise OSError(errno.EINVAL, "this system has no O_DIRECT", str(path))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | create * os.O_CREAT | direct * _DIRECT, 0o644)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def preadv(self, descriptor: int, buffer: Any, offset: int) -> int:
        """Bytes that came, which may be fewer than ``buffer`` holds."""
        return os.preadv(descriptor, [buffer], offset)

    def pwritev(self, descriptor: int, buffer: Any, offset: int) -> int:
        """Bytes that went, which may be fewer than ``buffer`` holds."""
        return os.pwritev(descriptor, [buffer], offset)

    def sync(self, descriptor: int) -> None:
        """Returns when the file's bytes, and what is needed to find them, will outlive a loss of power."""
        os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """The same for a directory's names: files that were made, or renamed, in it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Makes a file ``nbytes`` long, of space that is its own: a full disk shows now, not in the thousandth step."""
        os.ftruncate(descriptor, 0)  # so that none is shorter than it says, nor longer
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
        """A small file."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """A small file, on disk when this returns. Its name may not be: see ``sync_directory``."""
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def free(self, path: Path) -> int:
        """Bytes that this process may still write to the filesystem of a directory."""
        return shutil.disk_usage(path).free

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def lock(self, descriptor: int) -> bool:
        """Whether the lock of an open file is ours now. It ends with the process, however that ends."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def process(self) -> str:
        """This process, for another one to read."""
        return f"process {os.getpid()} on {socket.gethostname()}"
