"""Where arrays are: memory spaces and kinds, and how they are divided between devices.

Only this module knows how jax names memories, and asks the machine about them.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_offload._program import private
from jax_offload._program.arrays import is_array

Space = jax.memory.Space
HOST_KIND = "pinned_host"
DEVICE_KIND = "device"
DEFAULT_MIN_BYTES = 2**16  # below this a transfer costs the link its latency (about 10 us) rather than its bytes


def is_host_aval(aval: Any) -> bool:
    """Return whether an abstract value, the type of an array or of a jaxpr's variable, is in host memory."""
    return getattr(aval, "memory_space", None) is Space.Host  # a type of no array has none


def on_host(x: Any) -> bool:
    """Return whether an array or a tracer is in host memory.

    A tracer has no ``sharding``, so its type decides: a check of that attribute would silently do nothing under jit.
    For an array the sharding decides, because its type may be wrong (``well_typed``).
    """
    if not isinstance(x, jax.Array):
        return False
    return is_host_aval(jax.typeof(x)) if isinstance(x, Tracer) else x.sharding.memory_kind == HOST_KIND


def well_typed(x: Any) -> Any:
    """Return ``x`` with a type that names the memory where it is. Nothing is copied.

    jax types an array that is put together from parts on a single device as one in device memory, wherever it is (0.10
    to 0.12; orbax restores so). A program then sees another type than ``init`` made.
    """
    if not on_host(x) or is_host_aval(jax.typeof(x)):
        return x
    mesh = Mesh(np.array(list(x.sharding.device_set)), ("device",))
    return jax.device_put(jax.device_put(x, NamedSharding(mesh, PartitionSpec(), memory_kind=HOST_KIND)), x.sharding)


def to_host(x: jax.Array) -> jax.Array:
    """Move ``x`` to pinned host memory, unless it is there: moving again is not free (marin#3766)."""
    return x if on_host(x) else jax.device_put(x, Space.Host, src=Space.Device)


def to_device(x: jax.Array) -> jax.Array:
    """Move ``x`` to device memory, unless it is there."""
    return jax.device_put(x, Space.Device, src=Space.Host) if on_host(x) else x


def loaded(tree: Any) -> Any:
    """Return ``tree`` with its host leaves in device memory."""
    return _moved(tree, on_host, Space.Host, Space.Device)


def stored(tree: Any, chosen: Iterable[bool]) -> Any:
    """Return ``tree`` with the chosen leaves in host memory."""
    belongs = iter(chosen)
    return _moved(tree, lambda x: next(belongs) and not on_host(x), Space.Device, Space.Host)


def _moved(tree: Any, moves: Callable[[Any], bool], src: Any, to: Any) -> Any:
    """Move some leaves by one equation: a step moves hundreds."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [k for k, x in enumerate(leaves) if moves(x)]
    if chosen:
        for k, x in zip(chosen, jax.device_put([leaves[k] for k in chosen], to, src=src), strict=True):
            leaves[k] = x
    return jax.tree.unflatten(treedef, leaves)


def copy_on_host(x: jax.Array) -> jax.Array:
    """Copy ``x`` within its memory: host memory is copied from host to host.

    Each part is copied by itself, because jax does not copy arrays that are spread over processes. A compiled identity
    would compile for each shape and might forward its argument.
    """
    parts = [jax.device_put(part.data, part.data.sharding, may_alias=False) for part in x.addressable_shards]
    return well_typed(jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts))


class HostStruct(jax.ShapeDtypeStruct):
    """The type of an array in the host memory of one device, which jax would otherwise put in device memory."""

    __slots__ = ()


private.trace_as_on_host(HostStruct)


def abstract(shape: Sequence[int], dtype: Any, sharding: Sharding | None, weak_type: bool = False) -> Any:
    """Make an abstract value whose type says that it is in host memory if its sharding does."""
    on_host = sharding is not None and sharding.memory_kind == HOST_KIND
    return (HostStruct if on_host else jax.ShapeDtypeStruct)(shape, dtype, sharding=sharding, weak_type=weak_type)


def in_its_memory(x: Any) -> Any:
    """Return ``x``; a ``ShapeDtypeStruct`` with a type that tells its memory."""
    plain = type(x) is jax.ShapeDtypeStruct
    return abstract(x.shape, x.dtype, x.sharding, x.weak_type) if plain else x


def mesh_is_set() -> bool:
    """Return whether ``jax.set_mesh`` (or ``use_mesh``) is in force, which gives every array a sharding."""
    return not jax.sharding.get_abstract_mesh().empty


def ambient_sharding() -> Sharding:
    """Return the sharding of an array that nobody placed: replicated over the mesh that is set, or one device.

    Raises:
      ValueError: a trace is under way, in which arrays have no places.
    """
    if private.traces():
        raise ValueError(
            "params: these are tracers, which have no placement. Fix: call this function outside jax.jit and jax's "
            "transformations, with the parameters or jax.ShapeDtypeStructs; inside, tx.init(params) makes a state."
        )
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return NamedSharding(mesh, PartitionSpec())
    return jax.numpy.zeros(()).sharding


def check_platform(devices: Iterable[Any]) -> None:
    """Raise ``ValueError`` if a device has no pinned host memory: nothing falls back silently."""
    for device in devices:
        kinds = sorted(m.kind for m in device.addressable_memories())
        if HOST_KIND not in kinds:
            raise ValueError(
                f"offload(): {device} (platform {device.platform!r}) has no {HOST_KIND!r} memory, only {kinds}, "
                "so the optimizer state cannot be offloaded there. Use fraction=0, or the optimizer unwrapped."
            )


POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
POOL_HEADROOM = 1.4  # the pool fragments: an allocation failed while three quarters of it were in use


def pool_limit() -> int:
    """Return the most bytes that XLA pins on a GPU, in one process.

    Raises:
      ValueError: the environment says something else than a number.
    """
    said = os.environ.get(POOL_VARIABLE, "64")
    try:
        return int(float(said) * 2**30)
    except ValueError as error:
        raise ValueError(f"{POOL_VARIABLE}: expected a number of GiB in the environment; got {said!r}.") from error


def check_host_pool(
    leaves: Iterable[Any],
    platform: str,
    what: str = "offload(): the optimizer state",
    otherwise: str = "offload less (fraction, select)",
) -> None:
    """Raise ``ValueError`` if this process's share of the host leaves exceeds XLA's pinned pool on a GPU.

    XLA caps the pool, at 64 GB unless told otherwise, and says so only after the whole set-up, as a bare
    RESOURCE_EXHAUSTED.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return
    limit, needed = pool_limit(), 0
    for x in leaves:
        if x.sharding is not None and x.sharding.memory_kind == HOST_KIND:
            shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            needed += shard * len(x.sharding.addressable_devices)
    if needed > limit:
        enough = math.ceil(needed * POOL_HEADROOM / 2**30)
        raise ValueError(
            f"{what} of {needed / 2**30:.1f} GiB does not fit XLA's pool of pinned host memory, {limit / 2**30:g} GiB "
            f"in this process. Set the environment variable {POOL_VARIABLE} to {enough} before jax "
            f"starts, {POOL_HEADROOM} times as much because the pool fragments, or {otherwise}."
        )


# ---- shardings
#
# Inside a traced program jax tells shardings only if a mesh's axes are Explicit. With Auto axes ``offload`` remembers
# the shardings that its parameters had in eager init, and wherever shardings are asked for (``abstract_state``).
# Streaming needs them, because windows count bytes per device and a loop takes the same rows of every shard;
# ``shard_over`` cannot do without them.

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


def in_host_memory(x: Any) -> bool:
    """Return whether an array, concrete, abstract or traced, is in host memory."""
    return on_host(x) or getattr(sharding_of(x), "memory_kind", None) == HOST_KIND


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
    alone = {d: SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in boxes}
    with jax.enable_x64(True):  # each leaf keeps its dtype; a context belongs to one thread, and this may be another
        shards = [jax.device_put(found[box], alone[d], may_alias=True) for d, box in boxes.items()]
    return well_typed(jax.make_array_from_single_device_arrays(shape, sharding, shards))
