"""Flax's ``TrainState`` and ``nnx.Optimizer``, as their tutorials use them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from tests.trainers._common import INNER, STEPS, assert_same_losses, kinds, offloaded

BATCHES = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(STEPS)]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.relu(nn.Dense(64)(x)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def train_state(tx, donate):
    model = Linen()
    params = jax.device_put(model.init(jax.random.key(0), BATCHES[0])["params"], jax.devices()[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses, memories = [], []

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - x) ** 2))(state.params)
        return loss, state.apply_gradients(grads=grads)

    step = jax.jit(step, donate_argnums=(0,) if donate else ())
    for x in BATCHES:
        loss, state = step(state, x)
        losses.append(float(loss))
        memories.append(kinds(state.opt_state))
    return losses, memories


def nnx_optimizer(tx, donate, **options):
    model = nnx.jit(lambda: NNX(nnx.Rngs(0)))()
    nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnames=donate, **options)
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2), **options)(model)
        optimizer.update(model, grads)
        return loss

    losses, memories = [], []
    for x in BATCHES:
        losses.append(float(step(model, optimizer, x)))
        memories.append(kinds(nnx.state(optimizer)))
    return losses, memories


@pytest.mark.parametrize("donate", [False, True])
def test_train_state(donate):
    losses, memories = train_state(offloaded(), donate)
    assert_same_losses(losses, train_state(INNER, donate)[0])
    assert memories == [{"pinned_host"}] * STEPS


@pytest.mark.parametrize("donate", [(), ("model",), ("optimizer",), ("model", "optimizer")])
@pytest.mark.parametrize("options", [{}, {"graph": False}])
def test_nnx_optimizer(options, donate):
    losses, memories = nnx_optimizer(offloaded(), donate, **options)
    assert_same_losses(losses, nnx_optimizer(INNER, donate, **options)[0])
    assert memories == [{"pinned_host"}] * STEPS
