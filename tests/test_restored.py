"""What orbax brings back is what ``init`` made, and what it is still writing is not damage."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_offload as jo

pytestmark = pytest.mark.oldest("arrays as a checkpoint gives them")

DEVICE = jax.devices()[0]


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        yield manager


def offloaded():
    params = jax.device_put({"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64)) / 2}, DEVICE)
    tx = jo.offload(optax.adamw(1e-2), min_bytes=0)
    return tx, params, tx.init(params)


@pytest.mark.parametrize("with_target", [False, True])
def test_a_restored_state_has_the_types_of_what_init_made(manager, with_target):
    tx, params, state = offloaded()
    _, state = jo.update_params(tx, params, state, params)
    manager.save(0, args=jo.save_args(state))
    restored = jo.restore(manager, jo.abstract_state(tx, params) if with_target else None)
    leaves = jax.tree.leaves(restored)
    on_host = [jax.typeof(x).memory_space == jax.memory.Space.Host for x in leaves]
    assert on_host == [x.ndim > 0 for x in leaves] and sum(on_host) == 4
    assert all(x.sharding.memory_kind == ("pinned_host" if x.ndim else "device") for x in leaves)
    restored = jax.tree.unflatten(jax.tree.structure(state), leaves) if with_target else state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has moved it

        @jax.jit
        def steps(params, state):
            update = lambda c, _: (jo.update_params(tx, c[0], c[1], c[0]), None)  # noqa: E731
            return jax.lax.scan(update, (params, state), length=2)[0]

        steps(params, restored)
    moved = jax.jit(lambda p, s: (jax.tree.map(jnp.sin, p), jo.to_device(s)), donate_argnums=(0, 1))(params, restored)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {"device"}


def test_a_checkpoint_that_is_being_written_is_not_damaged(manager):
    tx, params, state = offloaded()
    manager.save(0, args=jo.save_args(state))
    manager.wait_until_finished()
    _, after = jo.update_params(tx, params, state, params)
    manager.save(1, args=jo.save_args(after))
    restored = jo.restore(manager, jo.abstract_state(tx, params), fallback=True)
    jax.tree.map(np.testing.assert_array_equal, restored, after)


@pytest.mark.parametrize("number", [np.float32(2.1), np.int32(3), np.float16(0.5), np.asarray(0.1, np.float32), 0.1, 7])
def test_numbers_are_not_damage(manager, number):
    manager.save(0, args=jo.save_args({"a": number, "w": jnp.ones(2)}))
    assert float(jo.restore(manager)["a"]) == pytest.approx(float(number), rel=1e-6)
