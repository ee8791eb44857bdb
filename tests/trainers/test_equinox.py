"""Equinox: ``filter_jit`` with every value of ``donate``."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.words import words
from tests.trainers._common import INNER, STEPS, assert_same_losses, kinds, offloaded

eqx = pytest.importorskip("equinox")

BATCHES = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(STEPS)]


def train(tx, donate):
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, jax.devices()[0]), static)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate=donate)
    def step(x, model, state):
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - x) ** 2))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    losses, memories = [], []
    for x in BATCHES:
        model, state, loss = step(jnp.copy(x), model, state)
        losses.append(float(loss))
        memories.append(kinds(state))
    return losses, memories


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # the batch has no result of its shape
@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first", "none"])
def test_filter_jit(donate):
    losses, memories = train(offloaded(), donate)
    assert_same_losses(losses, train(INNER, "none")[0])
    assert memories == [{"pinned_host"}] * STEPS


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable", "ignore:offload\\(\\)")
def test_what_looks_at_a_step_takes_it_as_it_is():
    """``filter_jit`` takes and returns functions among its arrays; what it donates is seen."""
    arrays, static = eqx.partition(eqx.nn.MLP(128, 128, 128, 1, key=jax.random.key(0)), eqx.is_array)
    model, tx = eqx.combine(jax.device_put(arrays, jax.devices()[0]), static), jo.offload(optax.adamw(1e-3))

    def written(model, state, x):
        grads = eqx.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    state, x = tx.init(eqx.filter(model, eqx.is_inexact_array)), jnp.ones((8, 128))
    step = eqx.filter_jit(written, donate="all")
    found = jo.verify(step, model, state, x)
    assert found.problems == ()
    assert found.peak < jo.verify(eqx.filter_jit(written), model, state, x).peak
    table = jo.placement(step, model, state, x)
    assert "whole, 2 leaves together" in words(table) and "not loaded" not in words(table)
    assert len([leaf for leaf in table.leaves if leaf.host]) == 4
    with pytest.raises(ValueError, match="belongs in host memory and arrives on the device"):
        jo.verify(step, model, jo.to_device(state), x)


def test_a_module_is_no_array():
    with pytest.raises(TypeError, match="was called with a non-array argument"):
        jo.jit(lambda model: model)(eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0)))
