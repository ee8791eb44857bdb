"""The step of the peaks in notes/results.md, and its rows: needs no compiler of a chip, and no test tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo

N_LAYERS, WIDTH, BATCH = 24, 4096, 512
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)

# model, stacked, resident optimizer, ours
ROWS = [
    ("unrolled layers", False, ADAMW, jo.offload(ADAMW)),
    ("unrolled, global-norm clipping", False, CLIPPED, jo.offload(CLIPPED)),
    ("stacked layers (`lax.scan`)", True, ADAMW, jo.offload(ADAMW)),
    ("stacked, clipping inside `offload`", True, CLIPPED, jo.offload(CLIPPED)),
    (
        "stacked, clipping outside `offload`",
        True,
        CLIPPED,
        optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW)),
    ),
]


def parameters(n_layers: int, width: int, stacked: bool, sharding: Any, dtype: Any = jnp.float32) -> Any:
    if stacked:
        return {"w": jax.ShapeDtypeStruct((n_layers, width, width), dtype, sharding=sharding)}
    layer = jax.ShapeDtypeStruct((width, width), dtype, sharding=sharding)
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


def step_of(
    tx: optax.GradientTransformation,
    loss: Callable[[Any, Any], jax.Array],
    *,
    update_params: bool = False,
    skip: bool | str = False,
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(params, state, batch) -> (params, state). ``skip``: see ``cases.measure_update``."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all() if skip else None
        extra = {"skip": ~finite} if skip and skip != "outside" else {}
        if update_params:
            new = jo.update_params(tx, grads, state, params, **extra)
            return jax.tree.map(partial(jnp.where, finite), new, (params, state)) if skip == "outside" else new
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step
