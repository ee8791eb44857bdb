"""``jo.pipelined(..., gradients="host")``: where pending gradients wait, and when none can."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    CLIPPED,
    DEVICE,
    HOST,
    WIDTH,
    batch,
    loss_of,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import copied


def pipelined(step):
    return jo.pipelined(step, donate_argnums=(0, 1), gradients="host")


def waiting(carry):
    """By shape, where each gradient waits and its dtype."""
    return {x.shape: (x.sharding.memory_kind, x.dtype) for x in carry.kept[1].values() if x.ndim > 1}


@pytest.mark.parametrize(
    ("axis", "unrolled", "dtype"),
    [(0, False, jnp.float32), (0, True, jnp.float32), (1, False, jnp.float32), (0, False, jnp.bfloat16)],
)
def test_large_gradients_wait_on_the_host(axis, unrolled, dtype):
    """After the first call and the next, in their own dtype, though the step casts them; the head's stays."""
    tx, params = offloaded(jo.with_master_params(CLIPPED)), parameters(axis, dtype)
    if dtype == jnp.bfloat16:
        params["layers"] = jnp.concatenate([params["layers"]] * 2)  # of 64 KiB

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch, axis=axis, unrolled=unrolled)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * 0.5, grads)
        return *jo.update_params(tx, grads, state, params), value

    train = pipelined(step)
    carry, _ = train((copied(params), tx.init(params)), batch(0))
    for _ in range(2):
        assert waiting(carry) == {params["layers"].shape: (HOST, dtype), (WIDTH, 8): (DEVICE, jnp.float32)}
        carry, _ = train(carry, batch(1))
    train.finish(carry)


@pytest.mark.parametrize(
    ("gradients", "spec", "options"),
    [("host", P(), {"shard_over": "x"}), ("device", P(None, "x"), {}), ("device", P(), {"shard_over": "x"})],
)
def test_a_gradient_waits_divided_as_its_state(gradients, spec, options):
    """Which may be divided further than its parameter."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    places = {"layers": NamedSharding(mesh, spec), "head": NamedSharding(mesh, P()), "bias": NamedSharding(mesh, P())}
    tx, params = offloaded(CLIPPED, **options), jax.device_put(parameters(), places)
    state, x = tx.init(params), jax.device_put(batch(0), NamedSharding(mesh, P("x")))
    train = jo.pipelined(step_of(tx), donate_argnums=(0, 1), gradients=gradients)
    said = train.turned(params, state, x)[1][1]  # where arguments are abstract
    carry, _ = train((params, state), x)
    for name, waits in carry.kept[1].items():
        assert waits.ndim < 3 or not waits.sharding.is_fully_replicated
        assert waits.ndim < 3 or said[name].sharding.is_equivalent_to(waits.sharding, 3)


def test_errors():
    tx, state = offloaded(CLIPPED), offloaded(CLIPPED).init(parameters())

    def branching(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        update = lambda: jo.update_params(tx, grads, state, params)  # noqa: E731
        return *jax.lax.cond(jnp.isfinite(value), update, lambda: (params, state)), value

    def of_the_head(params, state, batch):
        value, grads = jax.value_and_grad(lambda head: loss_of(parameters() | head, batch))(params)
        return *jo.update_params(tx, grads, state, params), value

    with pytest.raises(ValueError, match="gradients: expected 'device' or 'host', got 'disk'"):
        jo.pipelined(step_of(tx), donate_argnums=(0, 1), gradients="disk")
    with pytest.raises(ValueError, match="gradients='host': the step's update runs in a cond"):
        pipelined(branching)((parameters(), state), batch(0))
    head = {"head": parameters()["head"]}
    with pytest.raises(ValueError, match="gradients='host': none that the update reads is a float array of 64 KiB"):
        pipelined(of_the_head)((head, tx.init(head)), batch(0))
