"""A small training run whose state is on disk, in a process of its own: to be killed, or to be asked for its memory."""

import os
import re
import resource
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.disk.faulty import Faulty
from tests.support.sizes import set_sizes
from tests.support.trees import is_on_disk

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
WITH_MASTERS = jo.with_master_params(optax.adamw(1e-2))  # of parameters in two bytes a state in twelve


def model(width, layers, devices=1, dtype=jnp.float32):
    """Its matrices are divided between the devices, where there are several."""
    keys = {f"layer_{k}": jax.random.key(k) for k in range(layers)}
    w = {name: (jax.random.normal(key, (width, width)) / width**0.5).astype(dtype) for name, key in keys.items()}
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    return jax.device_put(w, jax.devices()[0] if devices == 1 else NamedSharding(mesh, P(None, "x")))


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


def train(disk, width, layers, steps, devices=1, commits=True, kill_at=None):
    """From where ``disk`` is, or from the start; says each step that it has committed. It kills itself so many calls of
    the system's after the first of these."""
    tx, params, start = jo.offload(INNER, min_bytes=1024, disk=disk), model(width, layers, devices), 0
    if disk is not None and disk.last_commit is not None:
        target = {"params": params, "state": jo.abstract_state(tx, params)}
        tree, start = disk.resume(target)
        params, state = tree["params"], tree["state"]
    else:
        state = tx.init(params)
    step = step_of(tx)
    for k in range(start, steps):
        params, state, _ = step(params, state, batch(k, width))
        if commits and disk.commit(k + 1, {"params": params, "state": state}):
            print(k + 1, flush=True)
            if kill_at is not None:
                Faulty(disk.directory, killed_at(kill_at))
                kill_at = None
    return params, state


def killed_at(calls):
    left = iter(range(calls))

    def fault(name, path, *arguments):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def in_parts(set_=setattr):
    """Matrices of 16 KiB go by their rows."""
    set_sizes(set_, part=2**14)


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


def values(*trees):
    return [np.asarray(x) for x in jax.tree.leaves(trees, is_leaf=is_on_disk)]


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
        print("MiB", *through_orbax(folder, *sizes[:2]))
        sys.exit()
    if what.startswith("limited"):
        print("MiB", limited(folder if what == "limited" else None, host_bytes, *sizes))
        sys.exit()
    in_parts()
    files = jo.disk(folder, host_bytes=host_bytes, commit_every=2)
    train(files, *sizes[:4], kill_at=sizes[4])
