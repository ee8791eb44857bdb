"""The files of a store: the operating system's calls, page-aligned memory, and whole blocks with a checksum each."""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import shutil
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

PAGE = 4096  # O_DIRECT wants addresses, lengths and offsets that are multiples of this on today's disks
BLOCK = 8 * 2**20  # bytes that one system call moves, with one checksum
_TRIES = 8  # how many calls in a row may move nothing before the file counts as broken
_SUMMED = 64 * PAGE  # stays in a core's cache, so that its second sum costs little
_FIXES = {
    errno.ENOSPC: "Free space there, or give a directory on a larger disk.",
    errno.EDQUOT: "The quota is used up: raise it, or give a directory on another disk.",
    errno.EIO: "The disk failed; the system's log says how. Replace it, and restore what it lost from a checkpoint.",
    errno.EROFS: "The filesystem is read-only: mounted so, or become so after errors, as the system's log says.",
    errno.EACCES: "This process may not write there: give a directory in which it may.",
    errno.EEXIST: "There is a file of that name: give a directory.",
    errno.ENOTDIR: "A part of that path is a file: give a directory.",
}


@contextlib.contextmanager
def saying(doing: str, path: Path) -> Iterator[None]:
    """Name the operation, and the fix, in an ``OSError``."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        text = f"{doing}: {os.strerror(number)}. {_FIXES.get(number, '')}".rstrip()
        raise OSError(number, text, str(path)) from error


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory will outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(path: Path, nbytes: int, need: int) -> None:
    """Make a file ``nbytes`` long in space of its own: a full disk shows now and not in the thousandth step.

    ``need``: the bytes of the whole store, for the error.
    """
    free = shutil.disk_usage(path.parents[0]).free
    doing = f"making {nbytes} bytes of space ({free} are free) for {need} bytes in all"
    with saying(doing, path), open(path, "wb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        file.truncate(nbytes)
    sync_directory(path.parents[0])


def swap_in(path: Path, data: bytes) -> None:
    """Write a small file: after a loss of power at any moment there is the file before or this one, whole."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parents[0])


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

    Any thread may take one. New memory for each read would take several times as long as the read.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()  # needs no lock, as an array may end in a thread that holds it
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """Lend a buffer of at least ``nbytes``: the smallest free one that is large enough, else a new one."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            self._free.sort(key=len)
            k = bisect.bisect_left(self._free, nbytes, key=len)
            found = self._free.pop(min(k, len(self._free) - 1)) if self._free else None
        if found is None or len(found) < nbytes:
            found = _mapped(nbytes)  # instead of the largest of those that are too small
        lent = np.frombuffer(found, np.uint8)  # NumPy makes this array the base of every view
        weakref.finalize(lent, self._returned.append, found).atexit = False
        return lent


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """An open file of a store. ``direct``: it bypasses the page cache, and so takes whole pages only."""

    path: Path
    descriptor: int
    direct: bool

    @classmethod
    def at(cls, path: Path) -> File:
        """Open a file for blocks, directly where the filesystem can.

        State is read once per step, in turn: a page cache would cost a copy and the memory that the state was moved
        out of.
        """
        with saying("opening a file of a store", path):
            direct, descriptor = getattr(os, "O_DIRECT", 0), -1
            try:
                descriptor = os.open(path, os.O_RDWR | direct)
                os.preadv(descriptor, [pages(PAGE)], 0)  # some filesystems refuse only here
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                descriptor, direct = os.open(path, os.O_RDWR), 0
            return cls(path, descriptor, bool(direct))

    def read(self, memory: np.ndarray, offset: int, checksums: Sequence[int], what: str, pool: Executor) -> None:
        """Fill ``memory``, whole pages, with blocks that ``pool`` reads.

        Raises:
          OSError: the system cannot read a block.
          ValueError: its checksum is not the one in ``checksums``.
        """

        def one(begin: int, checksum: int) -> None:
            block = memory[begin : begin + BLOCK]
            place = self._move(os.preadv, block, offset + begin, f"reading {what}")
            if (found := checksum_of(block)) != checksum:
                raise ValueError(
                    f"{what}, {place} {str(self.path)!r} are damaged: their checksum is {found:08x}, and was "
                    f"{checksum:08x} when they were written. Check the disk and restore from a checkpoint."
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
            self._move(os.pwritev, block, offset + begin, f"writing {what}")
            return checksum

        return tuple(_all(pool, one, range(0, values.nbytes, BLOCK)))

    def sync(self) -> None:
        """Bring the file's bytes to the disk. ``OSError`` also where the file no longer has its name."""
        with saying("bringing a file of a store to disk", self.path):
            os.fsync(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.descriptor), os.stat(self.path)):
                return
        raise OSError(errno.ENOENT, "the file of a store was removed or replaced while in use", str(self.path))

    def _move(self, call: Callable[[int, Any, int], int], memory: np.ndarray, offset: int, doing: str) -> str:
        """Read or write a block by as many calls as it takes; return the words for its place in the file."""
        place, done, stuck = f"bytes {offset} to {offset + memory.nbytes} of the file", 0, 0
        while done < memory.nbytes:
            with saying(f"{doing}, {place}", self.path):
                moved = call(self.descriptor, [memory[done:]], offset + done)
            now = done + moved
            if self.direct and now < memory.nbytes:
                now -= now % PAGE  # the rest must begin on a page
            stuck = 0 if now > done else stuck + 1
            if moved == 0 or stuck == _TRIES:
                raise OSError(
                    errno.EIO,
                    f"{doing}, {place}: only {now} of {memory.nbytes} bytes. Is it shorter than it was? "
                    "Then restore from a checkpoint.",
                    str(self.path),
                )
            done = now
        return place


def _all(pool: Executor, run: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """Run a function in a pool for each row of its arguments. Raise the first error when none runs any more."""
    futures = [pool.submit(run, *row) for row in zip(*columns, strict=True)]
    wait(futures)
    return [future.result() for future in futures]


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
