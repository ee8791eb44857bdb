"""Memory spaces and kinds. Only this module knows how jax names them, and asks the machine about them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_offload._program import private

Space = jax.memory.Space
HOST_KIND = "pinned_host"
DEVICE_KIND = "device"
DEFAULT_MIN_BYTES = 2**16  # below this a transfer costs the link its latency (about 10 us) rather than its bytes


def is_host_aval(aval: Any) -> bool:
    """Return whether an abstract value, the type of an array or of a jaxpr's variable, is in host memory."""
    return getattr(aval, "memory_space", None) is Space.Host  # a type of no array has none


def on_device_aval(aval: Any) -> Any:
    """Return the type of a value after its move to the device."""
    return aval.update(memory_space=Space.Device) if is_host_aval(aval) else aval


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
    """Return the sharding of an array that nobody placed: replicated over the mesh that is set, or one device."""
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return NamedSharding(mesh, PartitionSpec())
    return jax.numpy.zeros(()).sharding


def with_kind(sharding: Sharding, kind: str) -> Sharding:
    """Return ``sharding`` in memory ``kind``; for one device a new one, because a plain sharding may carry no kind."""
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(next(iter(sharding.device_set)), memory_kind=kind)
    return sharding.with_memory_kind(kind)


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
