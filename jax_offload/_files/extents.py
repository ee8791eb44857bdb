"""How a leaf in files is divided: into boxes, one for each part that some device of this process has of it.

The division is that of the sharding with which the files were made, and stays. Other shardings, after a ``resume``
say, read and write the same boxes, and put their parts together of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.memory import well_typed, with_kind
from jax_offload._disk.layout import Entry

Box = tuple[tuple[int, int], ...]  # from where to where, along each axis
Parts = Sequence[tuple[Box, np.ndarray[Any, Any]]]


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """Of the slices that jax says of a shard."""
    return tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))


def box_of_shape(shape: Sequence[int]) -> Box:
    """That of a leaf as a whole."""
    return tuple((0, n) for n in shape)


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> list[Box]:
    """Those of a leaf in this process, each once: what is replicated has one copy in the files."""
    return sorted({box_of(index or (), shape) for index in _here(sharding, shape).values()})


def _here(sharding: Sharding, shape: Sequence[int]) -> Mapping[Any, Any]:
    return sharding.addressable_devices_indices_map(tuple(shape))


def entries_of(name: str, x: Any, sharding: Sharding) -> list[Entry]:
    """What is in this process's files of a leaf: a part for each box."""
    dtype, boxes = np.dtype(x.dtype).name, boxes_of(sharding, x.shape)
    shape = () if sharding.is_fully_addressable else tuple(x.shape)
    return [Entry(name, shape_of(box), dtype, tuple(begin for begin, _ in box), shape) for box in boxes]


def shape_in(entries: Sequence[Entry]) -> tuple[int, ...]:
    """The shape of the leaf that these are of."""
    return entries[0].full_shape or shape_of(hull(map(box_in, entries)))


def covered(box: Box, by: Iterable[Box]) -> bool:
    """Whether these boxes, no two of which overlap, are together at least ``box``."""
    overlaps = ([min(b, d) - max(a, c) for (a, b), (c, d) in zip(each, box, strict=True)] for each in by)
    return sum(math.prod(overlap) for overlap in overlaps if all(n > 0 for n in overlap)) == math.prod(shape_of(box))


def check_covered(what: str, wanted: Iterable[Box], have: Sequence[Box]) -> None:
    """Raises ``ValueError`` where this process needs a part of a leaf that it has not."""
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


def box_in(entry: Entry) -> Box:
    return tuple((begin, begin + n) for begin, n in zip(entry.begin, entry.shape, strict=True))


def parts_of(x: jax.Array | np.ndarray[Any, Any]) -> Parts:
    """What the devices of this process have of an array, each part once; one read of another disk is one part."""
    if isinstance(x, np.ndarray):
        return [(box_of_shape(x.shape), x)]
    return [(box, np.asarray(data)) for box, data in shards_of(x)]


def shards_of(x: jax.Array) -> list[tuple[Box, jax.Array]]:
    """What the devices of this process have of an array, each part once, where it is."""
    return list({box_of(s.index, x.shape): s.data for s in reversed(x.addressable_shards)}.items())


def hull(boxes: Iterable[Box]) -> Box:
    """That of the leaf whose boxes these are."""
    return tuple((0, max(end for _, end in axis)) for axis in zip(*boxes, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def gathered(parts: Parts, box: Box) -> np.ndarray[Any, Any]:
    """The values in a box, of parts that cover it: one of these itself, where it is just that."""
    for own, x in parts:
        if own == box:
            return x
    found = np.empty(shape_of(box), parts[0][1].dtype)
    for own, x in parts:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True)]
        if all(begin < end for begin, end in both):
            found[_within(both, box)] = x[_within(both, own)]
    return found


def _within(box: Sequence[tuple[int, int]], outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def all_of(parts: Parts) -> np.ndarray[Any, Any]:
    """The leaf of its parts."""
    return gathered(parts, hull(box for box, _ in parts))


def assembled(parts: Parts, sharding: Sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """A leaf of what was read of it, on its devices. ``shape``: the leaf's, where parts of it are in other processes.

    On a CPU its parts are the buffers that they were read into, which the pool has again when the array is gone.
    """
    shape = shape_of(hull(box for box, _ in parts)) if shape is None else shape
    boxes = {d: box_of(index or (), shape) for d, index in _here(sharding, shape).items()}
    found = {box: gathered(parts, box) for box in dict.fromkeys(boxes.values())}
    alone = {d: with_kind(SingleDeviceSharding(d), str(sharding.memory_kind)) for d in boxes}
    with jax.enable_x64(True):  # a context is one thread's, and this may be another: each leaf keeps its dtype
        shards = [jax.device_put(found[box], alone[d], may_alias=True) for d, box in boxes.items()]
    return well_typed(jax.make_array_from_single_device_arrays(shape, sharding, shards))
