"""A skipped update: each value of the state and the parameters is chosen, old or new, inside the update.

So a slice of the update streams, chunks and hides as any other does. A step that is skipped moves the bytes of its
state and changes none of them. A choice outside the update would load and store all of the state once more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import opaque
from jax_offload._base.memory import on_host, to_device, to_host


def checked_skip(skip: Any) -> jax.Array:
    """``skip`` as a bool of rank 0.

    Raises:
      ValueError: it is none.
    """
    skip = jnp.asarray(skip)
    if skip.shape != () or skip.dtype != jnp.bool_:
        raise ValueError(
            f"skip: expected a bool, a scalar; got {skip.dtype}{list(skip.shape)}. Reduce it with jnp.any."
        )
    return skip


def zero_where(skip: jax.Array | None, updates: Any) -> Any:
    """``updates``, or -0 where ``skip`` holds: -0 + 0 would be +0 in a parameter that is -0."""
    if skip is None:
        return updates
    return jax.tree.map(lambda x: jnp.where(skip, opaque(-jnp.zeros((), x.dtype)), x), updates)


def old_where(skip: jax.Array | None, old: Any, new: Any) -> Any:
    """``new``, or ``old`` where ``skip`` holds: two trees with the same leaves, chosen on the device."""
    if skip is None:
        return new

    def chosen(old: Any, new: Any) -> Any:
        kept = to_device(old) if old.dtype == new.dtype else to_device(old).astype(new.dtype)
        x = jnp.where(skip, kept, to_device(new))
        return to_host(x) if on_host(new) else x

    return jax.tree.map(chosen, old, new)
