"""How a leaf in files is divided: into boxes, one for each part that some device of this process has of it, and these
into ranges of rows.

A range is the same rows of every device's part along the leaf's first axis. The division is that with which the files
were made, and stays. Another sharding, after a ``resume`` for example, reads and writes the same boxes, and puts its
parts together from them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.memory import well_typed, with_kind
from jax_offload._base.on_disk import Ends, Place, Range
from jax_offload._base.shardings import shards_of
from jax_offload._disk.blocks import PAGE
from jax_offload._disk.store import Entry, Store, dtype_of

Box = tuple[tuple[int, int], ...]  # from where to where, along each axis
Parts = Sequence[tuple[Box, np.ndarray[Any, Any]]]
Room = Callable[[int], np.ndarray[Any, Any]]  # makes a buffer of so many bytes


# ---- boxes -----------------------------------------------------------------------------------------------------------


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """Convert the slices by which jax describes a shard."""
    return tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))


def box_of_shape(shape: Sequence[int]) -> Box:
    """Return the box of a whole leaf."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> list[Box]:
    """The boxes of a leaf in this process, each once: what is replicated has one copy in the files."""
    return sorted({box_of(index or (), shape) for index in _here(sharding, shape).values()})


def _here(sharding: Sharding, shape: Sequence[int]) -> Mapping[Any, Any]:
    return sharding.addressable_devices_indices_map(tuple(shape))


def covered(box: Box, by: Iterable[Box]) -> bool:
    """Whether these boxes, no two of which overlap, cover ``box`` together."""
    overlaps = ([min(b, d) - max(a, c) for (a, b), (c, d) in zip(each, box, strict=True)] for each in by)
    return sum(math.prod(overlap) for overlap in overlaps if all(n > 0 for n in overlap)) == math.prod(shape_of(box))


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


# ---- arrays and their parts ------------------------------------------------------------------------------------------


def parts_here(x: jax.Array) -> list[tuple[Box, jax.Array]]:
    """What the devices of this process have of an array, each part once, where it is."""
    return list({box_of(s.index, x.shape): s.data for s in reversed(x.addressable_shards)}.items())


def parts_of(x: jax.Array | np.ndarray[Any, Any]) -> Parts:
    """The same in NumPy. An array of NumPy, read from another disk for example, is one part."""
    if isinstance(x, np.ndarray):
        return [(box_of_shape(x.shape), x)]
    return [(box, np.asarray(data)) for box, data in parts_here(x)]


def gathered(parts: Parts, box: Box) -> np.ndarray[Any, Any]:
    """The values in a box, from parts that cover it: a view of one of these if it covers the box alone."""
    for own, x in parts:
        if all(a <= c and d <= b for (a, b), (c, d) in zip(own, box, strict=True)):
            return x[_within(box, own)]
    found = np.empty(shape_of(box), parts[0][1].dtype)
    for own, x in parts:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True)]
        if all(begin < end for begin, end in both):
            found[_within(both, box)] = x[_within(both, own)]
    return found


def _within(box: Sequence[tuple[int, int]], outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def assembled(parts: Parts, sharding: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """Put a leaf of this shape together on its devices, from the parts that this process has of it.

    On a CPU its shards are the buffers into which they were read, which the pool takes back when the array is gone.
    """
    boxes = {d: box_of(index or (), shape) for d, index in _here(sharding, shape).items()}
    found = {box: gathered(parts, box) for box in dict.fromkeys(boxes.values())}
    alone = {d: with_kind(SingleDeviceSharding(d), str(sharding.memory_kind)) for d in boxes}
    with jax.enable_x64(True):  # each leaf keeps its dtype; a context belongs to one thread, and this may be another
        shards = [jax.device_put(found[box], alone[d], may_alias=True) for d, box in boxes.items()]
    return well_typed(jax.make_array_from_single_device_arrays(shape, sharding, shards))


# ---- leaves in a store -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """A leaf in a store.

    Attributes:
      name: the leaf's.
      entries: its entries in the store, with the box of each.
      dtype: the leaf's.
      shape: the leaf's, over all processes.
      rows: how many rows each device has.
    """

    name: str
    entries: Sequence[tuple[int, Box]]
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
        """The entries of some ranges, each with its box in an array of just these rows."""
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
    found: dict[str, list[int]] = {}
    for k, entry in enumerate(store.entries):
        found.setdefault(entry.path, []).append(k)
    return {name: _stored(store, entries) for name, entries in found.items()}


def _stored(store: Store, entries: Sequence[int]) -> Stored:
    some, boxed = store.entries[entries[0]], list[tuple[int, Box]]()
    for k in entries:
        entry = store.entries[k]
        boxed.append((k, tuple((a, a + n) for a, n in zip(entry.begin, entry.shape, strict=True))))
    in_order = sorted(boxed, key=lambda each: each[1])
    return Stored(some.path, in_order, dtype_of(some.dtype), some.leaf_shape, some.rows)


def entries_of(leaf: Place) -> list[Entry]:
    """The entries of a leaf in new files: of each range a part for each box."""
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
    """Read entries of a leaf into one buffer; rows that follow each other there are one part.

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
