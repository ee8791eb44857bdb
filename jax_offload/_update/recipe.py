"""What the recipes of ``offload`` and ``update_params`` are made of: where values are, how divided, and what skips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_offload._base.barriers import opaque
from jax_offload._base.memory import on_host, stored, to_device, to_host
from jax_offload._base.on_disk import not_from_disk
from jax_offload._placement.placement import Leaf
from jax_offload._placement.zero import resharded
from jax_offload._plan.options import Options


def returned(state: Any, plan: Sequence[Leaf]) -> Any:
    """Move the leaves of a traced state that belong on the host there before anything is updated.

    If they were updated from device memory, old and new leaves would be on the device side by side, because neither
    can be written into the other's buffer. Leaves that ZeRO-1 divides are divided on the device first.
    """

    def to_its_place(x: Any, leaf: Leaf) -> Any:
        if not isinstance(x, Tracer) or not leaf.host:
            return x
        x = not_from_disk(x) if leaf.disk and not on_host(x) else x
        return x if leaf.shard_over else to_host(x)

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [to_its_place(x, leaf) for x, leaf in zip(leaves, plan, strict=True)])


def where_it_was(new: Any, old: Any) -> Any:
    """Move each leaf of ``new``, a tree like ``old``, to the memory of that leaf of ``old``."""
    on_hosts = [on_host(x) for x in jax.tree.leaves(old)]
    return stored(new, on_hosts) if any(on_hosts) else new


def sharded_params(params: Any, options: Options) -> Any:
    """Divide the parameters as their gradients are. Their own sharding comes first, or XLA divides them too early."""
    return resharded(resharded(params, options.replicated), options.partitions)


def replicated_into(params: Any, new: Any, options: Options) -> Any:
    """Gather the new parameters into the memory of the old ones.

    XLA does not gather into a donated buffer, but it selects in place between two arrays if it cannot know the outcome.
    """
    if not options.partitions:
        return new
    true = opaque(True)
    new, old = resharded(new, options.replicated), resharded(params, options.replicated)
    return resharded(jax.tree.map(lambda new, old: jnp.where(true, new, old), new, old), options.replicated)


def checked_skip(skip: Any) -> jax.Array | None:
    """Return ``skip`` as a bool of rank 0; ``None`` without one.

    Raises:
      ValueError: it is anything else.
    """
    if skip is None:
        return None
    skip = jnp.asarray(skip)
    if skip.shape != () or skip.dtype != jnp.bool_:
        raise ValueError(
            f"skip: expected a bool, a scalar; got {skip.dtype}{list(skip.shape)}. Reduce it with jnp.any."
        )
    return to_device(skip)


def zero_where(skip: jax.Array | None, updates: Any) -> Any:
    """Return ``updates``, or -0 where ``skip`` holds: -0 + 0 would be +0 in a parameter that is -0."""
    if skip is None:
        return updates
    return jax.tree.map(lambda x: jnp.where(skip, opaque(-jnp.zeros((), x.dtype)), x), updates)


def old_where(skip: jax.Array | None, old: Any, new: Any) -> Any:
    """Return ``new``, or ``old`` where ``skip`` holds: two trees with the same leaves, chosen on the device.

    Each value is chosen inside the update, so a slice of it streams, chunks and hides as any other does. A step that is
    skipped moves the bytes of its state and changes none of them. A choice outside the update would load and store all
    of the state once more.
    """
    if skip is None:
        return new

    def chosen(old: Any, new: Any) -> Any:
        kept = to_device(old) if old.dtype == new.dtype else to_device(old).astype(new.dtype)
        x = jnp.where(skip, kept, to_device(new))
        return to_host(x) if on_host(new) else x

    return jax.tree.map(chosen, old, new)
