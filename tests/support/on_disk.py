"""A small training run whose state is on disk, in a process of its own, which is asked for its memory."""

import re
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from tests.support.sizes import set_sizes

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
WITH_MASTERS = jo.with_master_params(optax.adamw(1e-2))  # of parameters in two bytes a state in twelve


def model(width, layers, dtype=jnp.float32):
    keys = {f"layer_{k}": jax.random.key(k) for k in range(layers)}
    w = {name: (jax.random.normal(key, (width, width)) / width**0.5).astype(dtype) for name, key in keys.items()}
    return jax.device_put(w, jax.devices()[0])


def loss(params, x):
    for name in params:
        x = jnp.tanh(x.astype(params[name].dtype) @ params[name])
    return (x.astype(jnp.float32) ** 2).mean()


def batch(k, width):
    return np.random.default_rng(k).normal(size=(4, width)).astype(np.float32)


def step_of(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, value

    return jo.jit(step, donate_argnums=(0, 1))


def peak() -> int:
    """Most MiB that this process has had in memory. ``getrusage`` says that of the one that has forked it too."""
    return addresses("VmHWM")


def limited(folder, host_bytes, width, layers, steps, mib):
    """Some steps with so many MiB more of addresses than a process has that has run jax; without ``folder`` the state
    is in host memory. The most that it has taken of them."""
    jax.block_until_ready(step_of(INNER)(w := model(64, 2), INNER.init(w), batch(0, 64)))
    begin = addresses("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (begin + mib << 20, resource.RLIM_INFINITY))
    tx = jo.offload(WITH_MASTERS, min_bytes=1024, disk=folder and jo.disk(folder, host_bytes=host_bytes))
    params = model(width, layers, dtype=jnp.bfloat16)
    state, step = tx.init(params), step_of(tx)
    for k in range(steps):
        params, state, value = step(params, state, batch(k, width))
        print("step", k, float(value), flush=True)
    jax.block_until_ready(params)
    return addresses("VmPeak") - begin


def addresses(what) -> int:
    """MiB, as Linux says of this process."""
    return int(re.findall(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[0]) // 1024


def through_orbax(folder, width, layers):
    """Peaks before a state on disk is saved to a checkpoint, after that, and after it is restored onto another disk."""
    import orbax.checkpoint as ocp

    files = jo.disk(folder / "disk")
    tx = jo.offload(INNER, min_bytes=1024, disk=files)
    state = tx.init(model(width, layers))
    peaks = [peak()]
    with ocp.CheckpointManager(folder / "orbax") as manager:
        manager.save(0, args=jo.save_args({"state": state}))
        manager.wait_until_finished()
        peaks.append(peak())
        files.close()
        other = jo.offload(INNER, min_bytes=1024, disk=jo.disk(folder / "other"))
        jo.restore(manager, {"state": jo.abstract_state(other, model(width, layers))})
    return [*peaks, peak()]


if __name__ == "__main__":
    what, folder, (host_bytes, *sizes) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    set_sizes(group=2**22)
    if what == "orbax":
        print("MiB", *through_orbax(folder, *sizes))
    else:
        print("MiB", limited(folder if what == "limited" else None, host_bytes, *sizes))
