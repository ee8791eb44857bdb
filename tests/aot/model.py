"""A step of checkpointed layers, for what is compiled: needs no compiler of a chip, and no test tools."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def parameters(n_layers: int, width: int, stacked: bool, sharding: Any) -> Any:
    if stacked:
        return {"w": jax.ShapeDtypeStruct((n_layers, width, width), jnp.float32, sharding=sharding)}
    layer = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=sharding)
    return {f"w{i:03d}": layer for i in range(n_layers)}


def loss(params: Any, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    if "w" in params:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])
    else:
        for name in sorted(params):
            x = layer(x, params[name])
    return (x.astype(jnp.float32) ** 2).mean()


def two_by_two(params: Any, x: jax.Array) -> jax.Array:
    """Checkpointed layers of two matrices each, scanned."""
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])
    return (x.astype(jnp.float32) ** 2).mean()
