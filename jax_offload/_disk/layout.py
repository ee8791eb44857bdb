"""Where the bytes of groups of arrays are: in a buffer, cut into blocks, and striped over files. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALIGNED = 4096  # bytes: addresses, lengths and offsets of O_DIRECT are multiples of it on the disks of today
# Bytes that one call of the system moves, with one checksum: with 4, 8 and 16 MiB a disk gave the same, within its own
# spread (docs/notebook.md).
BLOCK = 8 * 2**20


@dataclass(frozen=True)
class Entry:
    """An array of a group: a leaf of the state, or the part of one that begins at ``begin``.

    ``full_shape``: the leaf's shape, where a part of it is in another process.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    begin: tuple[int, ...] = ()
    full_shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Block:
    """``nbytes`` of a group's buffer from ``begin``, at ``offset`` of the file in directory ``directory``."""

    begin: int
    nbytes: int
    directory: int
    offset: int


@dataclass(frozen=True)
class Group:
    """Arrays that are read and written together, as in one buffer: each begins at a multiple of ``ALIGNED``."""

    entries: tuple[Entry, ...]
    begins: tuple[int, ...]
    nbytes: int
    blocks: tuple[Block, ...]


def dtype_of(name: str) -> np.dtype:
    """The dtype of this name, also of those that ``ml_dtypes`` adds to NumPy's."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def padded(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of ``ALIGNED``."""
    return -(-nbytes // ALIGNED) * ALIGNED


def laid_out(
    groups: Sequence[Sequence[Entry]], directories: int, block: int = BLOCK
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """The groups with their blocks, and how long the file of each directory is.

    Blocks go to the directories in turn, on from group to group, so that each group comes from all disks at once and
    none has more than a block more than another.
    """
    lengths = [0] * directories
    found, turn = [], 0
    for entries in groups:
        begins, nbytes = [], 0
        for entry in entries:
            begins.append(nbytes)
            nbytes += padded(entry.nbytes)
        blocks = []
        for begin in range(0, nbytes, block):
            length = min(block, nbytes - begin)
            blocks.append(Block(begin, length, turn, lengths[turn]))
            lengths[turn] += length
            turn = (turn + 1) % directories
        found.append(Group(tuple(entries), tuple(begins), nbytes, tuple(blocks)))
    return tuple(found), tuple(lengths)


def arrays_in(group: Group, buffer: np.ndarray) -> list[np.ndarray]:
    """The arrays of a group, as views of its buffer."""
    return [
        buffer[begin : begin + entry.nbytes].view(dtype_of(entry.dtype)).reshape(entry.shape)
        for entry, begin in zip(group.entries, group.begins, strict=True)
    ]


def named(number: int, entries: Sequence[Entry]) -> str:
    """A group, for messages."""
    paths = [entry.path for entry in entries]
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f"group {number} ({', '.join(map(repr, paths[:2]))}{more})"


def check(number: int, entries: Sequence[Entry], arrays: Sequence[np.ndarray]) -> None:
    """``ValueError`` where ``arrays`` are not of the shapes and dtypes of a group."""
    if len(arrays) != len(entries):
        raise ValueError(f"{named(number, entries)} has {len(entries)} arrays, and {len(arrays)} are given")
    for entry, array in zip(entries, arrays, strict=True):
        if array.shape != entry.shape or array.dtype != dtype_of(entry.dtype):
            raise ValueError(
                f"{entry.path!r} of group {number} is {entry.dtype}{list(entry.shape)} in the store, and "
                f"{array.dtype}{list(array.shape)} is given"
            )
