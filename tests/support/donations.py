"""Training steps that donate and return in every order, for tests and for a run on a device (``benchmarks``)."""

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
STEPS = 3


def on_device():
    """No constant: whoever only reads the names of the cases must not open the device."""
    return SingleDeviceSharding(jax.devices()[0], memory_kind="device")


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["v"]) @ params["w"] - 1) ** 2)


def create(tx, sharding=None):
    keys = zip("vw", jax.random.split(jax.random.key(0)), strict=True)
    params = jax.device_put({n: jax.random.normal(k, (16, 16)) / 4 for n, k in keys}, sharding or on_device())
    return params, tx.init(params)


# Training steps. Each gives (step, arguments, donate_argnums, the next arguments from (arguments, results)).


def train_step(donate, state_first, tx):
    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return ((state, params) if state_first else (params, state)), loss

    return (
        step,
        (*create(tx), BATCH),
        donate,
        lambda args, out: (*out[0][:: -1 if state_first else 1], args[2]),
    )


def apply_gradients(donate, state_first, tx):
    """optax's order of arguments. More device buffers are donated than there are device results."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (state, params) if state_first else (params, state)

    def following(args, out):
        params, state = out[:: -1 if state_first else 1]
        return jax.tree.map(jnp.sin, params), state, params

    params, state = create(tx)
    return step, (jax.tree.map(jnp.sin, params), state, params), donate, following


def train_state(donate, state_first, tx):
    """A step that returns its gradients too."""

    def step(state, x):
        loss, grads = jax.value_and_grad(state.apply_fn)(state.params, x)
        state = state.apply_gradients(grads=grads)
        return (state, (loss, grads)) if state_first else ((loss, grads), state)

    state = TrainState.create(apply_fn=loss_fn, params=create(tx)[0], tx=tx)
    state = state.replace(step=jax.device_put(jnp.int32(0), on_device()))
    return step, (state, BATCH), donate, lambda args, out: (out[0 if state_first else 1], args[1])


def with_average(donate, state_first, tx):
    """An average of the parameters, which has their types, stands between them and the state."""

    def step(params, state, average, x):
        grads = jax.grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        return (state, average, params) if state_first else (params, average, state)

    def following(args, out):
        params, average, state = out[:: -1 if state_first else 1]
        return params, state, average, args[3]

    params, state = create(tx)
    return step, (params, state, jax.tree.map(jnp.sin, params), BATCH), donate, following


def both_in_one(donate, state_first, tx):
    """``update_params``, which returns new parameters."""

    def step(params, state, x):
        new = jo.update_params(tx, jax.grad(loss_fn)(params, x), state, params)
        return new[::-1] if state_first else new

    return step, (*create(tx), BATCH), donate, lambda args, out: (*out[:: -1 if state_first else 1], args[2])


# What is donated -> what is returned: the step, and whether jax by itself pairs buffers of different memory kinds
# (without out_shardings; with them for every result, but an uncommitted argument).
CASES = {
    "params -> params, state": (train_step, 0, False, (False, False)),
    "params -> state, params": (train_step, 0, True, (True, True)),
    "state -> params, state": (train_step, 1, False, (True, True)),
    "state -> state, params": (train_step, 1, True, (False, False)),
    "params and state -> params, state": (train_step, (0, 1), False, (False, False)),
    "params and state -> state, params": (train_step, (0, 1), True, (True, True)),
    "grads, state and params -> params, state": (apply_gradients, (0, 1, 2), False, (False, False)),
    "grads, state and params -> state, params": (apply_gradients, (0, 1, 2), True, (True, False)),
    "grads and params -> params, state": (apply_gradients, (0, 2), False, (True, False)),
    "grads and params -> state, params": (apply_gradients, (0, 2), True, (True, False)),
    "all -> average between": (with_average, (0, 1, 2), False, (True, True)),
    "all -> state first": (with_average, (0, 1, 2), True, (True, True)),
    "state and average -> average between": (with_average, (1, 2), False, (True, True)),
    "update_params: state -> params, state": (both_in_one, 1, False, (True, True)),
    "update_params: all -> state, params": (both_in_one, (0, 1), True, (True, True)),
    "TrainState -> TrainState, grads": (train_state, 0, True, (False, False)),
    "TrainState -> grads, TrainState": (train_state, 0, False, (True, True)),
}


def buffers(tree):
    leaves = [x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in jax.tree.leaves(tree)]
    return Counter((x.shape, x.dtype, KIND[x.memory_space]) for x in leaves)


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
