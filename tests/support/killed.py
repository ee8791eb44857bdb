"""A small training run with checkpoints by orbax, in a process of its own: to be killed at any moment."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jax_offload as jo

WIDTH, LAYERS, EVERY = 64, 4, 3
TX = jo.offload(
    optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 10**4))), min_bytes=1024
)
WAYS = ("jo.jit", "finished", "carry")  # of a turned step: what ``finish`` gives is saved, or the carry


def start():
    w = np.random.default_rng(0).standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / WIDTH**0.5
    params = jax.device_put({"layers": w, "head": w[0, :, :8]}, jax.devices()[0])
    return params, TX.init(params)


def batch(k):
    """Every fifth overflows, and is skipped."""
    x = np.random.default_rng(k).standard_normal((8, WIDTH), np.float32)
    return x * np.float32(np.inf) if k % 5 == 4 else x


def step(params, state, x):
    def loss(params):
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return ((y @ params["head"] - 1) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    finite = jnp.isfinite(optax.tree.norm(grads))
    return *jo.update_params(TX, grads, state, params, skip=~finite), value


def train(way, folder, steps):
    """From what is saved, or from the start; says each step that it has saved. Returns parameters and state.

    A carry of step k has not had the update for batch k - 1 yet.
    """
    jitted = jo.jit(step, donate_argnums=(0, 1))
    turned = jo.pipelined(step, donate_argnames=("params", "state"))
    carried = start()
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        at = manager.latest_step() or 0
        if way == "carry":
            carried, _ = turned(carried, batch(0))
        if at:
            carried = jo.restore(manager, carried)
        for k in range(at or (way == "carry"), steps):
            if way == "jo.jit":
                *carried, _ = jitted(*carried, batch(k))
            elif way == "carry":
                carried, _ = turned(carried, batch(k))
            else:
                carried, _ = turned(carried, batch(k))
                carried = turned.finish(carried) if (k + 1) % EVERY == 0 else carried
            if (k + 1) % EVERY == 0:
                manager.wait_until_finished()
                print(manager.latest_step() or 0, flush=True)
                manager.save(k + 1, args=jo.save_args(carried if way == "carry" else tuple(carried)))
    return turned.finish(carried) if way == "carry" else carried


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
