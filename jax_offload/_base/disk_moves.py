"""Leaves of a state, from memory or disk to memory or disk, outside of any step: a few of them in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jax_offload._base.on_disk import OnDisk, Place, is_on_disk, place_of

_BATCH = 2**26  # bytes of leaves that are read together on their way to a disk


def read_to(leaf: OnDisk, sharding: Sharding) -> jax.Array:
    """A leaf's values where the sharding says. What is divided between processes is never whole in one of them."""
    if leaf.sharding.is_fully_addressable:
        return jax.device_put(np.asarray(leaf), sharding)
    here = leaf.place.home.sharded(leaf.place.name, leaf.token, leaf.sharding)
    return jax.device_put(here, sharding)


def check_in_memory(state: Any, what: str) -> None:
    """Raises ``ValueError`` where a leaf of the state is on disk, and ``what`` takes leaves in memory."""
    leaves = jax.tree.leaves(state, is_leaf=is_on_disk)
    if found := [x for x in leaves if is_on_disk(x)]:
        raise ValueError(
            f"{what}: {len(found)} leaves of the state are on disk, the first is {found[0]!r}. Fix: jo.to_device(part) "
            "reads a part of the state; jo.to_host(tx, state), with a tx without disk=, all of it."
        )


def read_into(target: Sequence[Any], read: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
    """Leaves where ``target`` says; those that belong on disk are read and written a few at a time.

    Args:
      target: their types.
      read: the values of leaves of these numbers; of those that belong in memory where they belong.
    """
    places = {k: place for k, like in enumerate(target) if (place := place_of(like)) is not None}
    rest = [k for k in range(len(target)) if k not in places]
    found = dict(zip(rest, read(rest), strict=True))
    for home in dict.fromkeys(place.home for place in places.values()):
        mine = [k for k, place in places.items() if place.home is home]
        values = (x for batch in _batches(mine, places) for x in read(batch))
        found |= zip(mine, home.fill([places[k] for k in mine], values), strict=True)
    return [found[k] for k in range(len(target))]


def brought(leaves: Sequence[Any], types: Callable[[], Sequence[Any]]) -> list[Any]:
    """Leaves from memory or disk to memory or disk, each where ``types()`` say."""
    if any(isinstance(x.token if is_on_disk(x) else x, Tracer) for x in leaves):
        raise ValueError(
            "state: is on disk, or is to be, which no program does. Fix: jo.to_host(tx, state) outside jit."
        )
    target = types()
    if all(_is_there(x, place_of(like)) for x, like in zip(leaves, target, strict=True)):
        return [x if is_on_disk(x) else _brought(x, like) for x, like in zip(leaves, target, strict=True)]
    return read_into(target, lambda indices: [_brought(leaves[k], target[k]) for k in indices])


def _is_there(x: Any, place: Place | None) -> bool:
    return x.place.is_leaf(place) if is_on_disk(x) else place is None


def _brought(x: Any, like: Any) -> Any:
    if is_on_disk(x):
        sharded = not x.sharding.is_fully_addressable
        x = read_to(x, like.sharding if place_of(like) is None else x.sharding) if sharded else np.asarray(x)
    return x if place_of(like) is not None else jax.device_put(x, like.sharding)


def _batches(indices: Sequence[int], places: Mapping[int, Place]) -> Iterator[list[int]]:
    """As many as have ``_BATCH`` bytes together, or one."""
    batch, nbytes = list[int](), 0
    for k in indices:
        size = math.prod(places[k].shape) * places[k].dtype.itemsize
        if batch and nbytes + size > _BATCH:
            yield batch
            batch, nbytes = [], 0
        batch.append(k)
        nbytes += size
    yield batch
