"""Training steps that donate and return in every order."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding

import jax_offload as jo

KIND = {jax.memory.Space.Host: "pinned_host", jax.memory.Space.Device: "device"}
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)  # uncommitted, as from a data loader


def on_device():
    """No constant: whoever only reads the names of the cases must not open the device."""
    return SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["v"]) @ params["w"] - 1) ** 2)


def create(tx, sharding=None):
    keys = zip("vw", jax.random.split(jax.random.key(0)), strict=True)
    params = jax.device_put({n: jax.random.normal(k, (16, 16)) / 4 for n, k in keys}, sharding or on_device())
    return params, tx.init(params)


STEP = "params state x"
GRADS = "grads state params"  # optax's order of arguments; more buffers are donated than there are device results
AVERAGE = "params state average x"  # of the parameters, which has their types
# What is donated -> what is returned: arguments, those donated, results; and whether jax by itself pairs buffers of
# different memory kinds (without out_shardings; with them for every result, but an uncommitted argument).
CASES = {
    "params -> params, state": (STEP, 0, "params state loss", (False, False)),
    "params -> state, params": (STEP, 0, "state params loss", (True, True)),
    "state -> params, state": (STEP, 1, "params state loss", (True, True)),
    "state -> state, params": (STEP, 1, "state params loss", (False, False)),
    "params and state -> params, state": (STEP, (0, 1), "params state loss", (False, False)),
    "params and state -> state, params": (STEP, (0, 1), "state params loss", (True, True)),
    "grads, state and params -> params, state": (GRADS, (0, 1, 2), "params state", (False, False)),
    "grads, state and params -> state, params": (GRADS, (0, 1, 2), "state params", (True, False)),
    "grads and params -> params, state": (GRADS, (0, 2), "params state", (True, False)),
    "grads and params -> state, params": (GRADS, (0, 2), "state params", (True, False)),
    "all -> average between": (AVERAGE, (0, 1, 2), "params average state", (True, True)),
    "all -> state first": (AVERAGE, (0, 1, 2), "state average params", (True, True)),
    "state and average -> average between": (AVERAGE, (1, 2), "params average state", (True, True)),
    "update_params: state -> params, state": (STEP, 1, "params state", (True, True)),
    "update_params: all -> state, params": (STEP, (0, 1), "state params", (True, True)),
    "TrainState -> TrainState, grads": ("train x", 0, "train loss grads", (False, False)),
    "TrainState -> grads, TrainState": ("train x", 0, "loss grads train", (True, True)),
}


def make(case, tx):
    """The step of a case, and its arguments."""
    takes, _, returns, _ = CASES[case]
    takes, returns = takes.split(), returns.split()
    params, state = create(tx)
    train = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)
    train = train.replace(step=jax.device_put(jnp.int32(0), on_device()))
    grads, average = (jax.tree.map(jnp.sin, params) for _ in range(2))
    values = {"params": params, "state": state, "grads": grads, "average": average, "train": train, "x": BATCH}

    def step(*args):
        given = dict(zip(takes, args, strict=True))
        params = given["train"].params if "train" in given else given["params"]
        new = dict(given)
        if "grads" not in given:
            new["loss"], new["grads"] = jax.value_and_grad(loss_fn)(params, given["x"])
        if "train" in given:
            new["train"] = given["train"].apply_gradients(grads=new["grads"])
        elif "update_params" in case:
            new["params"], new["state"] = jo.update_params(tx, new["grads"], given["state"], params)
        else:
            updates, new["state"] = tx.update(new["grads"], given["state"], params)
            new["params"] = optax.apply_updates(params, updates)
        if "average" in given:
            new["average"] = optax.incremental_update(new["params"], given["average"], 0.1)
        return tuple(new[name] for name in returns)

    return step, tuple(values[name] for name in takes)


def buffers(tree):
    leaves = [x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in jax.tree.leaves(tree)]
    return Counter((x.shape, x.dtype, KIND[x.memory_space]) for x in leaves)
