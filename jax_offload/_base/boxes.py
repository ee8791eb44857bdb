"""Boxes: which part of an array a device has, the parts of an array that a process has, and arrays made of parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.memory import well_typed, with_kind

Box = tuple[tuple[int, int], ...]  # from where to where, along each axis
Parts = Sequence[tuple[Box, np.ndarray[Any, Any]]]


def box_of(index: Iterable[slice], shape: Sequence[int]) -> Box:
    """Convert the slices by which jax describes a shard."""
    return tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))


def box_of_shape(shape: Sequence[int]) -> Box:
    """Return the box of a whole leaf."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def boxes_of(sharding: Sharding, shape: Sequence[int]) -> list[Box]:
    """The boxes of a leaf in this process, each once: the files hold one copy of replicated parts."""
    return sorted({box_of(index or (), shape) for index in _here(sharding, shape).values()})


def _here(sharding: Sharding, shape: Sequence[int]) -> Mapping[Any, Any]:
    return sharding.addressable_devices_indices_map(tuple(shape))


def covered(box: Box, by: Iterable[Box]) -> bool:
    """Whether these boxes, which do not overlap, together cover ``box``."""
    overlaps = ([min(b, d) - max(a, c) for (a, b), (c, d) in zip(each, box, strict=True)] for each in by)
    return sum(math.prod(overlap) for overlap in overlaps if all(n > 0 for n in overlap)) == math.prod(shape_of(box))


def parts_here(x: jax.Array) -> list[tuple[Box, jax.Array]]:
    """The parts of an array on this process's devices, each once, in the memory that holds it."""
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
