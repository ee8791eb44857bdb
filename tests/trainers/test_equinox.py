"""Equinox: ``filter_jit`` with every value of ``donate``."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
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


def test_what_the_documentation_shows():
    page = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
    names = {"jax": jax, "optax": optax, "jo": jo, "batch": jnp.ones((4, 128))}
    exec(re.search(r"## Equinox\n+```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert kinds([x for x in jax.tree.leaves(names["state"]) if x.nbytes >= 2**16]) == {"pinned_host"}
