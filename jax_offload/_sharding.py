"""How parameters are sharded, and how their state is: like them, or over further axes of the mesh too (ZeRO-1).

Inside a traced program jax tells shardings only where a mesh's axes are Explicit. With Auto axes ``offload`` remembers
what it has seen of its parameters: in eager init, and wherever shardings are asked for (``abstract_state``,
``state_shardings``). The streaming needs it, for windows count bytes per device and a loop takes the same rows of every
shard; ``shard_over`` cannot do without.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from jax_offload._paths import key_of

Shardings = dict[str, Sharding]  # path of a parameter -> its sharding
Layouts = dict[str, NamedSharding]  # the same, on a mesh
Shards = tuple[int, ...]  # for each axis of an array, into how many parts it is divided between devices

_SEEN: contextvars.ContextVar[Shardings | None] = contextvars.ContextVar("seen", default=None)


def shardings_of(params: Any) -> Shardings:
    """Of each parameter, by its path, as far as it says."""
    if (seen := _SEEN.get()) is not None:
        return seen
    return _told_by(params)


@contextlib.contextmanager
def known(params: Any) -> Iterator[None]:
    """Inside, every traced ``init`` hears of the shardings of ``params``, which its tracers do not tell."""
    token = _SEEN.set(_told_by(params))
    try:
        yield
    finally:
        _SEEN.reset(token)


def _told_by(params: Any) -> Shardings:
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {key_of(path): s for path, x in flat if (s := sharding_of(x)) is not None}


def sharding_of(x: Any) -> Sharding | None:
    """The sharding of an array or a ``ShapeDtypeStruct``; of a tracer, where the axes of its mesh are Explicit."""
    return typed_sharding(jax.typeof(x)) if isinstance(x, Tracer) else getattr(x, "sharding", None)


def typed_sharding(aval: Any) -> NamedSharding | None:
    """What a type tells of its sharding: with Auto axes nothing."""
    sharding = getattr(aval, "sharding", None)
    return None if sharding is None or sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding


def shards_of(sharding: Sharding | None, shape: Sequence[int]) -> Shards:
    """Into how many parts each axis is divided; none where the sharding is not known."""
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


def without_axes(sharding: NamedSharding, axes: Sequence[int | None]) -> NamedSharding:
    """For an array whose axes are these of the parameter's (``None``: none of them)."""
    spec = padded(sharding.spec, max((a for a in axes if a is not None), default=-1) + 1)
    return sharding.update(spec=PartitionSpec(*(None if a is None else spec[a] for a in axes)))


def constrained(x: Any, sharding: Sharding | None) -> Any:
    """``x``, traced or not, in this sharding and in the memory where it is."""
    if sharding is None:
        return x
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def names_in(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
