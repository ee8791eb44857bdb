"""Blocks between memory and files: whole, and with a checksum each."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jax_offload._disk.files import Files
from jax_offload._disk.layout import ALIGNED

_TRIES = 8  # calls in a row that move nothing, before that is an error

_ROW = ALIGNED
_PIECE = 64 * _ROW  # within a core's cache, so that the second sum costs little

_FIXES = {
    errno.ENOSPC: "Free space there, or give a store more directories.",
    errno.EDQUOT: "The quota is used up: raise it, or give a store more directories.",
    errno.EIO: "The disk failed; the system's log says how. Replace it, and restore from a checkpoint what it lost.",
    errno.EROFS: "The filesystem is read-only: mounted so, or become so after errors, as the system's log says.",
    errno.EACCES: "This process may not write there: give a directory in which it may.",
    errno.EEXIST: "There is a file of that name: give a directory.",
    errno.ENOTDIR: "A part of that path is a file: give a directory.",
}


@dataclass(frozen=True)
class Opened:
    """A file of a store. ``direct``: without the page cache, and so in whole multiples of ``ALIGNED`` only."""

    path: Path
    descriptor: int
    direct: bool


def failed(error: OSError, doing: str, path: Path) -> OSError:
    """The same error with what was being done, and what helps."""
    number = error.errno or errno.EIO
    return OSError(number, f"{doing}: {os.strerror(number)}. {_FIXES.get(number, '')}".rstrip(), str(path))


def checksum_of(memory: np.ndarray) -> int:
    """A checksum of bytes, a multiple of 4 KiB of them.

    The CRC-32 of sums of 64-bit words, along rows and columns: a row is 4 KiB, and 64 of them are summed at a time. Up
    to three flipped bits change the sums for certain, as does a page in another's place; then the CRC misses one change
    in 2³². Beside a disk it is processors that are short: this takes a third of the time of a CRC-32 of the bytes, with
    which two loaded cores brought a sweep to half of what the disk gave.
    """
    checksum = 0
    for begin in range(0, memory.nbytes, _PIECE):
        rows = memory[begin : begin + _PIECE].view(np.uint64).reshape(-1, _ROW // 8)
        checksum = zlib.crc32(np.add.reduce(rows, axis=1), checksum)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum


def read_block(files: Files, file: Opened, memory: np.ndarray, offset: int, checksum: int, what: str) -> None:
    """Fills ``memory``. The first error says what was read and where; so does a checksum that differs."""
    place = f"{what}, bytes {offset} to {offset + memory.nbytes} of the file"
    _move(files.preadv, file, memory, offset, f"reading {place}")
    found = checksum_of(memory)
    if found != checksum:
        raise ValueError(
            f"{place} {str(file.path)!r} are damaged: their checksum is {found:08x}, and was {checksum:08x} when they "
            "were written. Check the disk and restore from a checkpoint."
        )


def write_block(files: Files, file: Opened, memory: np.ndarray, offset: int, what: str) -> int:
    """Writes ``memory``. Its checksum."""
    checksum = checksum_of(memory)
    _move(
        files.pwritev, file, memory, offset, f"writing {what}, bytes {offset} to {offset + memory.nbytes} of the file"
    )
    return checksum


def _move(
    call: Callable[[int, np.ndarray, int], int], file: Opened, memory: np.ndarray, offset: int, doing: str
) -> None:
    done = stuck = 0
    while done < memory.nbytes:
        try:
            moved = call(file.descriptor, memory[done:], offset + done)
        except OSError as error:
            raise failed(error, doing, file.path) from error
        now = done + moved
        if file.direct and now < memory.nbytes:
            now -= now % ALIGNED  # what is left must begin where O_DIRECT may
        stuck = 0 if now > done else stuck + 1
        if moved == 0 or stuck == _TRIES:
            raise OSError(
                errno.EIO,
                f"{doing}: only {now} of {memory.nbytes} bytes. Is it shorter than it was? "
                "Then restore from a checkpoint.",
                str(file.path),
            )
        done = now
