"""Draw the pictures of docs/inspect.md: a step by the usual recipe, and offloaded. Compiled for an H200, not run.

    JAX_PLATFORMS=cpu python docs/timelines.py

It needs ``pip install 'jax_offload[aot,plot]'``, and takes a minute.
"""

from __future__ import annotations

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
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0] ** 2).mean()


def usual_recipe(params: Any, state: Any, batch: jax.Array) -> Any:
    """Move all to the device, update, move all back, as jax's documentation shows."""
    loaded = jax.tree.map(lambda x: jax.device_put(x, DEVICE) if x.ndim else x, state)
    updates, new = ADAMW.update(jax.grad(loss)(params, batch), loaded, params)
    return optax.apply_updates(params, updates), jax.tree.map(lambda x: jax.device_put(x, HOST) if x.ndim else x, new)


def device() -> NamedSharding:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind="device")


def main() -> None:
    tx = jo.offload(ADAMW)
    ours = jo.jit(
        lambda params, state, x: jo.update_params(tx, jax.grad(loss)(params, x), state, params), donate_argnums=(0, 1)
    )
    params = {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=device())}
    batch = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32, sharding=device())
    for name, step in {"usual": jax.jit(usual_recipe, donate_argnums=(0, 1)), "offloaded": ours}.items():
        seen = jo.inspect(step, params, jo.abstract_state(tx, params), batch, target="h200")
        print(seen, end="\n\n")
        if seen.timeline is not None:
            seen.timeline.save(Path(__file__).with_name(f"timeline-{name}.png"))


if __name__ == "__main__":
    main()
