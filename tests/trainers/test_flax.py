"""Flax's ``nnx.Optimizer``, as its tutorials use it, in every way of donating."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.trainers._common import INNER, STEPS, assert_same_losses, kinds, offloaded

BATCHES = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(STEPS)]


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


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


@pytest.mark.parametrize("donate", [(), ("model",), ("optimizer",), ("model", "optimizer")])
@pytest.mark.parametrize("options", [{}, {"graph": False}])
def test_nnx_optimizer(options, donate):
    losses, memories = nnx_optimizer(offloaded(), donate, **options)
    assert_same_losses(losses, nnx_optimizer(INNER, donate, **options)[0])
    assert memories == [{"pinned_host"}] * STEPS
