"""Draws the pictures of docs/inspect.md: a step by the usual recipe, and offloaded; steps whose state has 30 and 1,000
leaves. Compiled for an H200, not run.

    JAX_PLATFORMS=cpu python docs/timelines.py [usual offloaded 30 1000]

Needs ``pip install 'jax_offload[aot,plot]'``; takes half a minute each, the last one minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_offload as jo

LAYERS, WIDTH, TOKENS = 24, 4096, 8192
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ADAMW = optax.adamw(1e-3)


def loss(params: Any, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    if "w" in params:
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0] ** 2).mean()
    for name in sorted(params):
        x = layer(x, params[name])
    return (x**2).mean()


def usual_recipe(params: Any, state: Any, batch: jax.Array) -> Any:
    """What the documentation of jax shows: all to the device, update, all back."""
    loaded = jax.tree.map(lambda x: jax.device_put(x, DEVICE) if x.ndim else x, state)
    updates, new = ADAMW.update(jax.grad(loss)(params, batch), loaded, params)
    return optax.apply_updates(params, updates), jax.tree.map(lambda x: jax.device_put(x, HOST) if x.ndim else x, new)


def saved(name: str, step: Any, params: Any, state: Any, tokens: int) -> None:
    width = jax.tree.leaves(params)[0].shape[-1]
    batch = jax.ShapeDtypeStruct((tokens, width), jnp.float32, sharding=device())
    seen = jo.inspect(step, params, state, batch, target="h200")
    print(seen, end="\n\n")
    if seen.timeline is not None:
        seen.timeline.save(Path(__file__).with_name(f"timeline-{name}.png"))


def device() -> NamedSharding:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind="device")


def main(names: list[str]) -> None:
    tx = jo.offload(ADAMW)
    ours = jo.jit(
        lambda params, state, x: jo.update_params(tx, jax.grad(loss)(params, x), state, params), donate_argnums=(0, 1)
    )
    scanned = {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=device())}
    for name, step in {"usual": jax.jit(usual_recipe, donate_argnums=(0, 1)), "offloaded": ours}.items():
        if name in names:
            saved(name, step, scanned, jo.abstract_state(tx, scanned), TOKENS)
    for leaves, width, tokens in ((30, 4096, 8192), (1000, 1024, 4096)):
        if str(leaves) in names:
            leaf = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=device())
            params = {f"w{k:03d}": leaf for k in range(leaves // 2)}
            saved(str(leaves), ours, params, jo.abstract_state(tx, params), tokens)


if __name__ == "__main__":
    main(sys.argv[1:] or ["usual", "offloaded", "30", "1000"])
