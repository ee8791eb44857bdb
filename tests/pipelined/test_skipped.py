"""Skipped steps of ``jo.pipelined``: batches that overflow, the last one too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    advance,
    assert_close,
    batch,
    copied,
    loop,
    loss_of,
    now,
    offloaded,
    parameters,
    pipelined,
)


def with_a_bad_one(k):
    """Batches of which some overflow: the last one, too."""
    return jax.tree.map(lambda x: x * jnp.where(k in (2, 5), jnp.inf, 1.0), batch(k))


def step_that_skips(tx, form="update_params"):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        finite = jnp.isfinite(optax.tree.norm(grads))
        if form == "update_params":
            params, state = jo.update_params(tx, grads, state, params, skip=~finite)
        else:
            updates, after = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), (new, after), (params, state))
        return params, state, (value, finite)

    return step


WAITS = ["device", pytest.param("host", marks=pytest.mark.long("trains plain and turned"))]


@pytest.mark.parametrize("gradients", WAITS)
def test_skip(gradients):
    tx, batches = offloaded(), [with_a_bad_one(k) for k in range(6)]
    wanted, others = loop(step_that_skips(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_that_skips(tx), gradients=gradients)
    carry, returned = advance(train, (parameters(), tx.init(parameters())), batches)
    assert [bool(f) for _, f in now(returned)] == [bool(f) for _, f in others] == [k not in (2, 5) for k in range(6)]
    params, state = train.finish(carry)
    assert_close(params, wanted[-1][0], 1e-5)
    assert int(optax.tree.get(state, "count")) == 4


@pytest.mark.parametrize("gradients", WAITS)
def test_a_skipped_update_in_the_forward_pass_changes_no_bit(gradients):
    """Though the state moves: each slice of the update chooses, and the codes of its moments are as they were."""
    tx = offloaded(storage={"mu": "int8", "nu": "bfloat16"})
    train = pipelined(step_that_skips(tx), gradients=gradients)
    params, state = parameters(), tx.init(parameters())
    table = jo.placement(train, params, state, batch(0))
    assert any("in the scan that reads the parameters" in leaf.streams for leaf in table.leaves), table
    carry, _ = train.start(params, state, batch(0))
    carry, _ = train(carry, with_a_bad_one(2))
    before = jax.tree.map(np.asarray, carry.kept[0])
    places = jax.tree.map(lambda x: x.sharding, carry.kept[0])
    carry, _ = train(carry, batch(3))
    after = carry.kept[0]
    assert {*after} == {*before} and len(before) > 6
    for name, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[name].dtype, np.asarray(after[name]).tobytes()), name
    assert jax.tree.map(lambda x: x.sharding, after) == places
    carry, _ = train(carry, batch(4))
    assert any(x.tobytes() != np.asarray(carry.kept[0][name]).tobytes() for name, x in before.items())


def test_dynamic_scale_is_carried_beside():
    def step(tx):
        def step(params, state, scale, batch):
            scale, finite, value, grads = scale.value_and_grad(loss_of)(params, batch)
            params, state = jo.update_params(tx, grads, state, params, skip=~finite)
            return params, state, scale, {"loss": value, "finite": finite}

        return step

    tx = offloaded()
    batches = [with_a_bad_one(k) for k in range(6)]
    scale = jax.device_put(DynamicScale(growth_interval=2, scale=2.0**10), jax.devices()[0])
    wanted, others = loop(step(tx), (parameters(), tx.init(parameters()), scale), batches)
    train = jo.pipelined(step(tx), donate_argnames=("params", "state", "scale"))
    carry, returned = advance(train, copied((parameters(), tx.init(parameters()), scale)), batches)
    assert [bool(x["finite"]) for x in now(returned)] == [bool(x["finite"]) for x in others]
    assert False in [bool(x["finite"]) for x in others]
    got = train.finish(carry)
    assert float(got[2].scale) == float(wanted[-1][2].scale) == 2.0**8
    assert_close(got[:2], wanted[-1][:2], 1e-5)
