"""``jo.pipelined(..., gradients="host")``: where pending gradients wait, and when none can."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    CLIPPED,
    DEVICE,
    HOST,
    LAYERS,
    WIDTH,
    advance,
    batch,
    committed,
    loop,
    loss_of,
    now,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, copied


def pipelined(step):
    return jo.pipelined(step, donate_argnums=(0, 1), gradients="host")


def waiting(carry):
    """By shape, where each gradient waits and its dtype."""
    return {x.shape: (x.sharding.memory_kind, x.dtype) for x in carry.kept[1].values() if x.ndim > 1}


@pytest.mark.parametrize(("axis", "unrolled"), [(0, False), (0, True), (1, False)])
def test_large_gradients_wait_on_the_host(axis, unrolled):
    """After ``start`` and after a call, in their own dtype; the head's stays."""
    tx, params = offloaded(CLIPPED), parameters(axis)
    train = pipelined(step_of(tx, axis=axis, unrolled=unrolled))
    carry, _ = train((copied(params), tx.init(params)), batch(0))
    shape = (WIDTH, LAYERS, WIDTH) if axis else (LAYERS, WIDTH, WIDTH)
    for _ in range(2):
        assert waiting(carry) == {shape: (HOST, jnp.float32), (WIDTH, 8): (DEVICE, jnp.float32)}
        carry, _ = train(carry, batch(1))
    train.finish(carry)


def test_a_gradient_waits_divided_as_its_state():
    """Which is divided further than its parameter."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx, params = offloaded(CLIPPED, shard_over="x"), jax.device_put(parameters(), NamedSharding(mesh, P()))
    train = pipelined(step_of(tx))
    carry, _ = train((params, tx.init(params)), jax.device_put(batch(0), NamedSharding(mesh, P("x"))))
    (waits,) = (x for x in carry.kept[1].values() if x.ndim == 3)
    moment = optax.tree.get(tx.init(params), "mu")["layers"]
    assert waits.sharding.is_equivalent_to(moment.sharding, 3) and not moment.sharding.is_fully_replicated


@pytest.mark.long("more kinds of steps")
def test_bfloat16_gradients_wait_as_they_are():
    """They are made of bfloat16 parameters, 64 KiB of them, and cast to float32 by the update alone."""
    inner, wide = jo.with_master_params(CLIPPED), 2 * WIDTH

    def params():
        layers = jax.random.normal(jax.random.key(0), (LAYERS, wide, wide)) / wide**0.5
        return committed({"layers": layers.astype(jnp.bfloat16)})

    def step_on(tx):
        def step(params, state, x):
            def loss(params):
                h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["layers"])
                return (h.astype(jnp.float32) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) * 0.5, grads)
            return *jo.update_params(tx, grads, state, params), value

        return step

    batches = committed([jax.random.normal(jax.random.key(k), (8, wide)).astype(jnp.bfloat16) for k in range(5)])
    wanted, losses = loop(step_on(inner), (params(), inner.init(params())), batches)
    tx = offloaded(inner)
    train = pipelined(step_on(tx))
    carry, returned = advance(train, (params(), tx.init(params())), batches)
    assert [*waiting(carry).values()] == [(HOST, jnp.bfloat16)]
    np.testing.assert_allclose(now(returned), losses, rtol=2e-2)
    assert_close(train.finish(carry)[0], wanted[-1][0], 2e-2)


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
