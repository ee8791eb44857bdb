"""How a leaf in files is divided into ranges of its rows: one group of the store for each.

A range is the same rows of every part that the leaf's first axis has on several devices, so each of its entries is what
some device has of it. The ranges are those with which the files were made, and stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_offload._base.on_disk import Ends, Place, Range
from jax_offload._base.shardings import shards_of
from jax_offload._disk.layout import Entry, dtype_of
from jax_offload._disk.store import Store
from jax_offload._files.extents import Box, Parts, box_in, entries_of, shape_in, shape_of

Room = Callable[[int], np.ndarray[Any, Any]]  # of so many bytes


@dataclasses.dataclass(frozen=True)
class InFiles:
    """A leaf in files.

    Attributes:
      groups: of the store, in the order of rows.
      boxes: of each group those of its entries: of this process's devices.
      dtype: of the leaf.
      shape: of the leaf, over all processes.
    """

    groups: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def all_boxes(self) -> list[Box]:
        return [box for boxes in self.boxes for box in boxes]

    def shape_of(self, rows: Range | None = None) -> tuple[int, ...]:
        """Of an array with some ranges of every device's part."""
        first, *rest = self.shape
        return self.shape if rows is None else (first // self.ends[-1] * (rows[1] - rows[0]), *rest)

    @property
    def ends(self) -> Ends:
        """Where the ranges end, in rows of each device's part."""
        firsts = [min(boxes) for boxes in self.boxes]
        return tuple(first[0][1] - firsts[0][0][0] for first in firsts)

    def within(self, rows: Range | None = None) -> list[tuple[int, Sequence[Box]]]:
        """The groups of some ranges, each with the boxes that its entries are in an array of just these rows."""
        if rows is None:
            return list(zip(self.groups, self.boxes, strict=True))
        (begin, end), ends, found = rows, self.ends, list[tuple[int, Sequence[Box]]]()
        for k, first, last, boxes in zip(self.groups, (0, *ends), ends, self.boxes, strict=False):
            if begin <= first and last <= end:
                places = [(box[0][0] // ends[-1]) * (end - begin) + first - begin for box in boxes]
                found.append((k, [((at, at + last - first), *box[1:]) for at, box in zip(places, boxes, strict=True)]))
        return found


def leaves_in(store: Store) -> dict[str, InFiles]:
    """The leaves of a store, by their names."""
    groups: dict[str, list[int]] = {}
    for k, entries in enumerate(store.groups):
        groups.setdefault(entries[0].path, []).append(k)
    found: dict[str, InFiles] = {}
    for name, own in groups.items():
        boxes = [tuple(map(box_in, store.groups[k])) for k in own]
        in_order = sorted(range(len(own)), key=lambda i: min(boxes[i]))
        dtype = dtype_of(store.groups[own[0]][0].dtype)
        shape = shape_in([entry for k in own for entry in store.groups[k]])
        found[name] = InFiles(tuple(own[i] for i in in_order), tuple(boxes[i] for i in in_order), dtype, shape)
    return found


def groups_of(leaf: Place) -> list[list[Entry]]:
    """The groups that a leaf is to be in new files."""
    entries, shards = entries_of(leaf.name, leaf, leaf.on_its_way), shards_of(leaf.on_its_way, leaf.shape)[0]
    size = leaf.shape[0] // shards
    n = max(1, leaf.rows // shards) if leaf.rows else size
    return [[_cut(entry, begin, min(n, size - begin)) for entry in entries] for begin in range(0, size, n)]


def _cut(entry: Entry, begin: int, n: int) -> Entry:
    (first, *others), (_, *rest) = entry.begin, entry.shape
    return dataclasses.replace(entry, shape=(n, *rest), begin=(first + begin, *others))


def read(store: Store, found: Sequence[tuple[int, Sequence[Box]]], dtype: Any, room: Room, committed: bool) -> Parts:
    """What is in some groups. Those of one device's are read into one buffer, so that nothing is put together."""
    sizes = [store.nbytes(k) for k, _ in found]
    exact = [len(boxes) == 1 and math.prod(shape_of(boxes[0])) * dtype.itemsize for _, boxes in found]
    if len(found) == 1 or exact[:-1] != sizes[:-1] or not exact[-1]:
        reading = [store.read(k, room(size), committed=committed) for (k, _), size in zip(found, sizes, strict=True)]
        pairs = zip(found, reading, strict=True)
        return [pair for (_, boxes), each in pairs for pair in zip(boxes, each.result(), strict=True)]
    buffer, begins = room(sum(sizes)), [sum(sizes[:i]) for i in range(len(sizes))]
    reading = [
        store.read(k, buffer[begin : begin + size], committed=committed)
        for (k, _), begin, size in zip(found, begins, sizes, strict=True)
    ]
    for each in reading:
        each.result()
    first, last = found[0][1][0], found[-1][1][0]
    box: Box = ((first[0][0], last[0][1]), *first[1:])
    return [(box, buffer[: begins[-1] + exact[-1]].view(dtype).reshape(shape_of(box)))]
