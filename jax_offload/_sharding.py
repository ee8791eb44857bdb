"""Along which axes parameters are sharded, remembered from init: a loop must not cut a leaf there.

Inside a traced program jax tells shardings only where a mesh's axes are Explicit. With Auto axes, a dynamic slice along
a sharded axis would have every device gather the whole leaf. So ``offload`` remembers what it has seen of a
parameter's sharding: in eager init, and wherever shardings are asked for (``abstract_state``, ``state_shardings``).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from jax_offload._boxes import key_of

Axes = frozenset[int]
Sharded = dict[str, Axes]  # path of a parameter -> its sharded axes

_SEEN: contextvars.ContextVar[Sharded | None] = contextvars.ContextVar("seen", default=None)


def sharded_axes(params: Any) -> Sharded:
    """Of each parameter, by its path: the axes that are divided between devices, as far as it says."""
    if (seen := _SEEN.get()) is not None:
        return seen
    found: Sharded = {}
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
        if sharding is not None:
            shard = sharding.shard_shape(x.shape)
            found[key_of(path)] = frozenset(i for i, (n, m) in enumerate(zip(x.shape, shard, strict=True)) if n != m)
    return found


@contextlib.contextmanager
def known(params: Any) -> Iterator[None]:
    """Inside, every traced ``init`` hears of the shardings of ``params``, which its tracers do not tell."""
    token = _SEEN.set(sharded_axes(params))
    try:
        yield
    finally:
        _SEEN.reset(token)


def explicit_spec(aval: Any) -> tuple[Any, ...]:
    """How a type says that it is sharded, axis by axis; empty where it does not say."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return ()
    return tuple(sharding.spec)


def explicit_axes(aval: Any) -> Axes:
    """The axes along which a type says that it is sharded."""
    return frozenset(i for i, names in enumerate(explicit_spec(aval)) if names)
