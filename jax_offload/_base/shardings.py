"""How parameters are sharded, and how their state is: like them, or over further axes of the mesh too (ZeRO-1).

Inside a traced program jax tells shardings only if a mesh's axes are Explicit. With Auto axes ``offload`` remembers the
shardings that its parameters had in eager init, and wherever shardings are asked for (``abstract_state``). Streaming
needs them, because windows count bytes per device and a loop takes the same rows of every shard; ``shard_over`` cannot
do without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from jax_offload._base.arrays import is_array

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
    while entries and entries[-1] is None:
        entries.pop()
    return sharding.update(spec=PartitionSpec(*entries))


def without_axes(sharding: NamedSharding, axes: Sequence[int | None]) -> NamedSharding:
    """The sharding for an array with these axes of the parameter (``None``: an axis that the parameter lacks)."""
    spec = padded(sharding.spec, max((a for a in axes if a is not None), default=-1) + 1)
    entries = [None if a is None else spec[a] for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return sharding.update(spec=PartitionSpec(*entries))


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
