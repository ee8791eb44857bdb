"""Plain optax loops, in every way of jitting and donating."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.trainers._common import INNER, STEPS, assert_same_losses, kinds, offloaded

BATCHES = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(STEPS)]


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - x) ** 2)


def train(tx, donate=(), state_first=False, mesh=None):
    home = jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    params = {"up": jax.random.normal(jax.random.key(0), (32, 64)) / 6, "down": jnp.full((64, 32), 0.1)}
    params = {**jax.device_put(params, home)}
    everywhere = home if mesh is None else NamedSharding(mesh, PartitionSpec())
    params["bias"] = jax.device_put(jnp.zeros(64), everywhere)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnames=donate)
    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (loss, state, params) if state_first else (loss, params, state)

    losses, memories = [], []
    for x in BATCHES:
        loss, *trees = step(params, state, jax.device_put(x, everywhere))
        state, params = trees if state_first else trees[::-1]
        losses.append(float(loss))
        memories.append(kinds(state))
    return losses, memories


@pytest.mark.parametrize("state_first", [False, True])
@pytest.mark.parametrize("donate", [(), ("params",), ("state",), ("params", "state")])
def test_every_way_of_donating(donate, state_first):
    losses, memories = train(offloaded(), donate, state_first)
    assert_same_losses(losses, train(INNER)[0])
    assert memories == [{"pinned_host"}] * STEPS


@pytest.mark.parametrize("donate", [(), ("state",), ("params", "state")])
def test_on_a_mesh(donate):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    losses, memories = train(offloaded(), donate, mesh=mesh)
    assert_same_losses(losses, train(INNER, mesh=mesh)[0])
    assert memories == [{"pinned_host"}] * STEPS


def test_a_scan_over_steps():
    def losses_of(tx):
        params = jax.device_put({"up": jnp.full((32, 64), 0.1), "bias": jnp.zeros(64)}, jax.devices()[0])
        params["down"] = jax.device_put(jnp.full((64, 32), 0.1), jax.devices()[0])

        def step(carry, x):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (_, state), losses = jax.jit(lambda *args: jax.lax.scan(step, args[:2], args[2]))(
            params, tx.init(params), jax.device_put(jnp.stack(BATCHES), jax.devices()[0])
        )
        return losses.tolist(), kinds(state)

    losses, memories = losses_of(offloaded())
    assert_same_losses(losses, losses_of(INNER)[0])
    assert memories == {"pinned_host"}
