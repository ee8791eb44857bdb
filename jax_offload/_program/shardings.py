"""How arrays are divided between devices: shardings, and boxes, the parts of an array that a device or a process has.

Inside a traced program jax tells shardings only if a mesh's axes are Explicit. With Auto axes ``offload`` remembers the
shardings that its parameters had in eager init, and wherever shardings are asked for (``abstract_state``). Streaming
needs them, because windows count bytes per device and a loop takes the same rows of every shard; ``shard_over`` cannot
do without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_offload._program.arrays import is_array
from jax_offload._program.memory import well_typed, with_kind

Shardings = dict[str, Sharding]  # path of a parameter -> its sharding
Layouts = dict[str, NamedSharding]  # the same, on a mesh
Shards = tuple[int, ...]  # for each axis of an array, into how many parts it is divided between devices


def inside_shard_map(shardings: Shardings) -> Shardings:
    """Adapt shardings to the trace: inside ``shard_map`` shapes are local, and manual axes divide nothing more."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)

    def rest(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(tuple(n for n in names_in(entry) if n not in manual) or None for entry in spec))

    return {
        path: s.update(spec=rest(s.spec)) if manual and isinstance(s, NamedSharding) else s
        for path, s in shardings.items()
    }


def same_sharding(a: Sharding, b: Sharding) -> bool:
    """Whether two shardings divide alike, in whatever memory."""
    if isinstance(a, NamedSharding) and isinstance(b, NamedSharding):
        n = max(len(a.spec), len(b.spec))
        entries = ([names_in(e) for e in padded(s.spec, n)] for s in (a, b))
        return a.mesh == b.mesh and next(entries) == next(entries)
    return type(a) is type(b) and a.device_set == b.device_set


def sharding_of(x: Any) -> Sharding | None:
    """The sharding of an array, a ``ShapeDtypeStruct``, or a tracer on a mesh with Explicit axes."""
    return typed_sharding(jax.typeof(x)) if isinstance(x, Tracer) else getattr(x, "sharding", None)


def typed_sharding(aval: Any) -> NamedSharding | None:
    """The sharding that a type carries; with Auto axes it carries none."""
    sharding = getattr(aval, "sharding", None)
    return None if sharding is None or sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding


def types_of_axes(aval: Any) -> tuple[AxisType, ...]:
    """The types of the axes of a type's mesh; empty if it has none."""
    sharding = getattr(aval, "sharding", None)
    return () if sharding is None or sharding.mesh.empty else tuple(sharding.mesh.axis_types)


def devices_of(x: Any) -> int:
    """The number of devices between which an array or a tracer might be divided: a tracer tells its mesh, though with
    Auto axes not its sharding. 1 if nothing tells; the manual axes of a ``shard_map`` divide nothing more."""
    mesh = jax.typeof(x).sharding.mesh
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in sizes if kind != AxisType.Manual)


def is_manual() -> bool:
    """Whether the trace is inside ``shard_map``."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_explicit(mesh: Any) -> bool:
    """Whether the types tell all about shardings on this mesh."""
    return set(mesh.axis_types) == {AxisType.Explicit}


def shards_of(sharding: Sharding | None, shape: Sequence[int]) -> Shards:
    """The number of parts of each axis; 1 if the sharding is not known."""
    if sharding is None:
        return (1,) * len(shape)
    if isinstance(sharding, NamedSharding):  # its mesh may be abstract
        sizes = dict(sharding.mesh.shape)
        return tuple(math.prod(sizes[name] for name in names_in(entry)) for entry in padded(sharding.spec, len(shape)))
    shard = sharding.shard_shape(tuple(shape))
    return tuple(n // m if m else 1 for n, m in zip(shape, shard, strict=True))


def padded(spec: PartitionSpec, ndim: int) -> list[Any]:
    """The entries of a spec, one for every axis."""
    return [*spec, *(None for _ in range(ndim - len(spec)))]


def fitted(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """``sharding`` for an array of as many axes; axes that it does not divide evenly, such as blocks, stay whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec, shards = padded(sharding.spec, len(shape)), shards_of(sharding, shape)
    entries = [None if n % k else entry for n, k, entry in zip(shape, shards, spec, strict=True)]
    return sharding.update(spec=spec_of(entries))


def without_axes(sharding: NamedSharding, axes: Sequence[int | None]) -> NamedSharding:
    """The sharding for an array with these axes of the parameter (``None``: an axis that the parameter lacks)."""
    spec = padded(sharding.spec, max((a for a in axes if a is not None), default=-1) + 1)
    return sharding.update(spec=spec_of([None if a is None else spec[a] for a in axes]))


def spec_of(entries: Sequence[Any]) -> PartitionSpec:
    """The spec of these entries as XLA spells it: P("x", None) instead of P("x") would compile a second time."""
    named = [axis for axis, entry in enumerate(entries) if entry is not None]
    return PartitionSpec(*entries[: named[-1] + 1 if named else 0])


def constrained(x: Any, sharding: Sharding | None) -> Any:
    """Put ``x``, traced or not, into this sharding, in the memory where it is."""
    if sharding is None:
        return x
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def zeros(aval: Any) -> jax.Array:
    """Zeros of a type: its shape and dtype, and its sharding where it tells one."""
    return constrained(jax.numpy.zeros(aval.shape, aval.dtype), typed_sharding(aval))


def names_in(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def types_tell(tree: Any) -> bool:
    """Whether types tell shardings, so that arrays of different ones cannot be added."""
    return any(typed_sharding(jax.typeof(x)) is not None for x in jax.tree.leaves(tree) if is_array(x))


# ---- boxes: which part of an array a device has, and arrays made of parts

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
