"""Whole blocks between memory and an open file, with a checksum each; and page-aligned memory for them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_offload._disk.files import Files

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


# ---- files -----------------------------------------------------------------------------------------------------------


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

    def read(self, memory: np.ndarray, offset: int, checksum: int, what: str) -> None:
        """Fill ``memory`` with a block.

        Raises:
          OSError: the system cannot read it.
          ValueError: its checksum differs from ``checksum``.
        """
        place = f"{what}, bytes {offset} to {offset + memory.nbytes} of the file"
        self._move(self.files.preadv, memory, offset, f"reading {place}")
        if (found := checksum_of(memory)) != checksum:
            raise ValueError(
                f"{place} {str(self.path)!r} are damaged: their checksum is {found:08x}, and was {checksum:08x} when "
                "they were written. Check the disk and restore from a checkpoint."
            )

    def write(self, memory: np.ndarray, offset: int, what: str) -> int:
        """Write a block and return its checksum. ``OSError`` where the system cannot."""
        checksum = checksum_of(memory)
        place = f"{what}, bytes {offset} to {offset + memory.nbytes} of the file"
        self._move(self.files.pwritev, memory, offset, f"writing {place}")
        return checksum

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
