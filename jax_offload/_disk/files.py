"""The files of a store: the operating system's calls, page-aligned memory, and whole blocks with a checksum each."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import socket
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

PAGE = 4096  # O_DIRECT wants addresses, lengths and offsets that are multiples of this on today's disks
BLOCK = 8 * 2**20  # bytes that one system call moves, with one checksum
_TRIES = 8  # calls in a row that may move nothing
_SUMMED = 64 * PAGE  # stays in a core's cache, so that its second sum costs little
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_FIXES = {
    errno.ENOSPC: "Free space there, or give a directory on a larger disk.",
    errno.EDQUOT: "The quota is used up: raise it, or give a directory on another disk.",
    errno.EIO: "The disk failed; the system's log says how. Replace it, and restore what it lost from a checkpoint.",
    errno.EROFS: "The filesystem is read-only: mounted so, or become so after errors, as the system's log says.",
    errno.EACCES: "This process may not write there: give a directory in which it may.",
    errno.EEXIST: "There is a file of that name: give a directory.",
    errno.ENOTDIR: "A part of that path is a file: give a directory.",
}
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


def failed(error: OSError, doing: str, path: Path) -> OSError:
    """Return the same error with what was being done and how to fix it."""
    number = error.errno or errno.EIO
    return OSError(number, f"{doing}: {os.strerror(number)}. {_FIXES.get(number, '')}".rstrip(), str(path))


# ---- memory ----------------------------------------------------------------------------------------------------------


def padded(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def pages(nbytes: int) -> np.ndarray:
    """Allocate bytes that begin on a page, as ``O_DIRECT`` wants them; the last view frees them."""
    return np.frombuffer(_mapped(nbytes), np.uint8)[:nbytes]


def _mapped(nbytes: int) -> mmap.mmap:
    found = mmap.mmap(-1, padded(max(nbytes, 1)))
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2**21:
        found.madvise(mmap.MADV_HUGEPAGE)  # so that a disk has 512 times fewer pages to pin
    return found


class Buffers:
    """A pool of page-aligned buffers, each taken back when its last view, a jax array for example, is gone.

    Any thread may take one.

    Attributes:
      nbytes: the size of all buffers, in use or not.
      most: the largest ``nbytes`` so far.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()  # needs no lock, as an array may end in a thread that holds it
        self._lock = threading.Lock()
        self.nbytes = 0
        self.most = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Lend a buffer of at least ``nbytes``: the smallest free one that is large enough, else a new one."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fits = [k for k, found in enumerate(self._free) if len(found) >= nbytes]
            if fits:
                found = self._free.pop(min(fits, key=lambda k: len(self._free[k])))
            else:
                if self._free:
                    self.nbytes -= len(self._free.pop())
                found = _mapped(nbytes)
                self.nbytes += len(found)
                self.most = max(self.most, self.nbytes)
        lent = np.frombuffer(found, np.uint8)  # NumPy makes this array the base of every view
        weakref.finalize(lent, self._returned.append, found).atexit = False
        return lent


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """An open file of a store. ``direct``: it bypasses the page cache, and so takes whole pages only."""

    files: Files
    path: Path
    descriptor: int
    direct: bool

    @classmethod
    def at(cls, path: Path, files: Files) -> Opened:
        """Open a file for blocks, directly where the filesystem can."""
        try:
            descriptor = files.open(path, direct=True)
            try:
                files.preadv(descriptor, pages(PAGE), 0)  # some filesystems refuse only here
                return cls(files, path, descriptor, direct=True)
            except OSError:
                files.close(descriptor)
                raise
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise failed(error, "opening a file of a store", path) from error
        return cls(files, path, files.open(path), direct=False)

    def read(self, memory: np.ndarray, offset: int, checksums: Sequence[int], what: str, pool: Executor) -> None:
        """Fill ``memory``, whole pages, with blocks that ``pool`` reads.

        Raises:
          OSError: the system cannot read a block.
          ValueError: its checksum is not the one in ``checksums``.
        """

        def one(begin: int, checksum: int) -> None:
            block = memory[begin : begin + BLOCK]
            place = _place(what, offset + begin, block)
            self._move(self.files.preadv, block, offset + begin, f"reading {place}")
            if (found := checksum_of(block)) != checksum:
                raise ValueError(
                    f"{place} {str(self.path)!r} are damaged: their checksum is {found:08x}, and was {checksum:08x} "
                    "when they were written. Check the disk and restore from a checkpoint."
                )

        _all(pool, one, range(0, memory.nbytes, BLOCK), checksums)

    def write(self, x: np.ndarray, offset: int, what: str, staging: Buffers, pool: Executor) -> tuple[int, ...]:
        """Write an array by blocks in ``pool``, and return their checksums. ``OSError`` where the system cannot.

        ``staging``: buffers for blocks that are not whole pages.
        """
        values = np.ascontiguousarray(x).reshape(-1).view(np.uint8)

        def one(begin: int) -> int:
            block = values[begin : begin + BLOCK]
            if block.nbytes % PAGE or (self.direct and block.__array_interface__["data"][0] % PAGE):
                whole = staging.take(BLOCK)[: padded(block.nbytes)]
                whole[: block.nbytes] = block
                whole[block.nbytes :] = 0
                block = whole
            checksum = checksum_of(block)
            self._move(self.files.pwritev, block, offset + begin, f"writing {_place(what, offset + begin, block)}")
            return checksum

        return tuple(_all(pool, one, range(0, values.nbytes, BLOCK)))

    def sync(self) -> None:
        """Bring the file's bytes to the disk. ``OSError`` also where the file no longer has its name."""
        try:
            self.files.sync(self.descriptor)
        except OSError as error:
            raise failed(error, "bringing a file of a store to disk", self.path) from error
        if not self.files.same(self.descriptor, self.path):
            raise OSError(errno.ENOENT, "the file of a store was removed or replaced while in use", str(self.path))

    def _move(self, call: Callable[[int, np.ndarray, int], int], memory: np.ndarray, offset: int, doing: str) -> None:
        done = stuck = 0
        while done < memory.nbytes:
            try:
                moved = call(self.descriptor, memory[done:], offset + done)
            except OSError as error:
                raise failed(error, doing, self.path) from error
            now = done + moved
            if self.direct and now < memory.nbytes:
                now -= now % PAGE  # the rest must begin on a page
            stuck = 0 if now > done else stuck + 1
            if moved == 0 or stuck == _TRIES:
                raise OSError(
                    errno.EIO,
                    f"{doing}: only {now} of {memory.nbytes} bytes. Is it shorter than it was? "
                    "Then restore from a checkpoint.",
                    str(self.path),
                )
            done = now


def _all(pool: Executor, run: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """Run a function in a pool for each row of its arguments. Raise the first error when none runs any more."""
    futures = [pool.submit(run, *row) for row in zip(*columns, strict=True)]
    wait(futures)
    return [future.result() for future in futures]


def _place(what: str, offset: int, block: np.ndarray) -> str:
    return f"{what}, bytes {offset} to {offset + block.nbytes} of the file"


def checksum_of(memory: np.ndarray) -> int:
    """Compute a checksum of whole pages: the CRC-32 of the sums of their 64-bit words along rows and columns.

    A row is a page, and 64 of them are summed at a time. Up to three flipped bits change the sums for certain, as does
    a page in another's place; then the CRC misses one change in 2^32. This takes a third of the time of a CRC-32 of
    the bytes, which matters as the processor is busier than the disk.
    """
    checksum = 0
    for begin in range(0, memory.nbytes, _SUMMED):
        rows = memory[begin : begin + _SUMMED].view(np.uint64).reshape(-1, PAGE // 8)
        checksum = zlib.crc32(np.add.reduce(rows, axis=1), checksum)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum
