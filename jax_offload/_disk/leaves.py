"""How a leaf is divided in files: into one box for each part that a device of this process has, and each box into
ranges of rows.

A range is the same rows of every device's part along the leaf's first axis. The division is made with the files and
never changes. A run with another sharding, after ``resume`` for example, reads and writes the same boxes and assembles
its own parts from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jax_offload._base.on_disk import Ends, Place, Range
from jax_offload._base.shardings import (
    Box,
    Parts,
    boxes_of,
    covered,
    shape_of,
    shards_of,
)
from jax_offload._disk.files import PAGE
from jax_offload._disk.store import Entry, Store, dtype_of

Room = Callable[[int], np.ndarray[Any, Any]]  # makes a buffer of so many bytes


@dataclasses.dataclass(frozen=True)
class Stored:
    """A leaf in a store.

    Attributes:
      name, dtype: the leaf's name and dtype.
      entries: the leaf's entries in the store, each with its box.
      shape: the leaf's shape, over all processes.
      rows: how many rows each device has.
    """

    name: str
    entries: list[tuple[int, Box]]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int

    @property
    def boxes(self) -> list[Box]:
        return [box for _, box in self.entries]

    @property
    def ends(self) -> Ends:
        """Where the ranges end, in rows of each device's part."""
        return tuple(sorted({(box[0][1] - 1) % self.rows + 1 for box in self.boxes}))

    def shape_of(self, rows: Range | None) -> tuple[int, ...]:
        """The shape of an array with some ranges of every device's part."""
        first, *rest = self.shape
        return self.shape if rows is None else (first // self.rows * (rows[1] - rows[0]), *rest)

    def within(self, rows: Range | None) -> list[tuple[int, Box]]:
        """The entries of a range of rows, each with its box in an array of just these rows."""
        if rows is None:
            return list(self.entries)
        found = list[tuple[int, Box]]()
        for k, ((begin, end), *rest) in self.entries:
            shard, first = divmod(begin, self.rows)
            if rows[0] <= first and first + end - begin <= rows[1]:
                at = shard * (rows[1] - rows[0]) + first - rows[0]
                found.append((k, ((at, at + end - begin), *rest)))
        return found


def stored_in(store: Store) -> dict[str, Stored]:
    """The leaves of a store, by their names."""
    found: dict[str, Stored] = {}
    for k, e in enumerate(store.entries):
        leaf = found.setdefault(e.path, Stored(e.path, [], dtype_of(e.dtype), e.leaf_shape, e.rows))
        leaf.entries.append((k, tuple((a, a + n) for a, n in zip(e.begin, e.shape, strict=True))))
    for leaf in found.values():
        leaf.entries.sort(key=lambda each: each[1])
    return found


def entries_of(leaf: Place) -> list[Entry]:
    """Make the entries of a leaf for new files: one for each range of each box."""
    shards = shards_of(leaf.on_its_way, leaf.shape)[0]
    size = leaf.shape[0] // shards
    step = max(1, leaf.rows // shards if leaf.rows else size)
    found = list[Entry]()
    for begin in range(0, size, step):
        for (first, _), *rest in boxes_of(leaf.on_its_way, leaf.shape):
            shape = (min(step, size - begin), *shape_of(tuple(rest)))
            at = (first + begin, *(start for start, _ in rest))
            found.append(Entry(leaf.name, shape, leaf.dtype.name, at, leaf.shape, size))
    return found


def read_parts(store: Store, found: Sequence[tuple[int, Box]], room: Room, *, committed: bool) -> Parts:
    """Read entries of a leaf into one buffer. Entries whose rows are contiguous there become one part.

    Args:
      store: the store.
      found: the entries and their boxes.
      room: makes the buffer.
      committed: whether to read them as of the last commit.
    """
    entries, boxes = [k for k, _ in found], [box for _, box in found]
    buffer = room(store.nbytes(entries))
    arrays = store.read(entries, buffer, committed=committed)
    follow = all(a[0][1] == b[0][0] and a[1:] == b[1:] for a, b in pairwise(boxes))
    if len(found) == 1 or not follow or any(x.nbytes % PAGE for x in arrays[:-1]):
        return list(zip(boxes, arrays, strict=True))
    box: Box = ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])
    whole = buffer[: sum(x.nbytes for x in arrays)].view(arrays[0].dtype)
    return [(box, whole.reshape(shape_of(box)))]


def check_covered(what: str, wanted: Iterable[Box], have: Sequence[Box]) -> None:
    """Raise ``ValueError`` where this process needs a part of a leaf that it does not have."""
    for box in wanted:
        if not covered(box, have):
            raise ValueError(
                f"target: {what} is divided otherwise between processes than in the commit; here {_said(box)} of it is "
                f"needed, and {' and '.join(map(_said, have)) or 'nothing'} there. Fix: the mesh and the shardings of "
                "the run that was committed. Into others through a checkpoint: jo.save_args(tree) in that run, "
                "jo.restore(manager, target) in this."
            )


def _said(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"
