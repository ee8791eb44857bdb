"""What trainers do around an ``offload`` costs no more than a resident step: compiled for an H200."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.aot.cases import device_sharding, loss, measure_step, parameters
from tests.aot.harness import H200, measure, require

LAYERS = 16


@pytest.mark.long("compiles more of the same for a chip")
def test_a_state_that_was_moved_goes_home_first():
    """Updated in place it cannot be, and beside the old one the new would be above resident."""
    require(H200)
    sharding = device_sharding(H200)
    params, tx = parameters(LAYERS, 4096, False, sharding), jo.offload(optax.adamw(1e-3))
    home = jo.abstract_state(tx, params)
    moved = jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("device")), home)
    batch = jax.ShapeDtypeStruct((512, 4096), jnp.float32, sharding=sharding)

    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    out = jax.tree.map(lambda x: x.sharding, (params, home))
    resident = measure_step(H200, optax.adamw(1e-3), n_layers=LAYERS)
    assert measure(H200, step, (params, moved, batch), (0, 1), out).peak <= resident.peak + 160
