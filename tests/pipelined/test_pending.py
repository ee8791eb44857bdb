"""``jo.pipelined(..., gradients="host")``: pending gradients in host memory, and the numbers of the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._interop.pending import home_of
from tests.support.pipelined import (
    ADAMW,
    DEVICE,
    HOST,
    LAYERS,
    WIDTH,
    advance,
    assert_close,
    batch,
    broken,
    check,
    copied,
    loop,
    loss_of,
    now,
    offloaded,
    parameters,
    pipelined,
    step_of,
)
from tests.support.rows import rows

ON_HOST = {"gradients": "host"}


def kinds(carry):
    """Of what waits, by shape: where it is."""
    return {x.shape: x.sharding.memory_kind for x in carry.kept[1].values() if x.ndim > 1}


def assert_waits_on_host(train, params, state, shape=(LAYERS, WIDTH, WIDTH), dtype=jnp.float32):
    """The large gradients do, after ``start`` and after a call, in their own dtype; the head's stays."""
    carry, _ = train.start(copied(params), copied(state), batch(0))
    for _ in range(2):
        own = [x for x in carry.kept[1].values() if x.shape == shape]
        assert [x.dtype for x in own] == [dtype] * len(own)
        assert kinds(carry) == {shape: HOST, (WIDTH, 8): DEVICE}
        carry, _ = train(carry, batch(1))
    return train.finish(carry)


# Numbers and placement


@pytest.mark.long("more kinds of steps", but=["update-how3"])
@pytest.mark.parametrize(
    ("form", "how"),
    rows(
        [
            ("update_params", {}),
            ("update", {}),
            ("update_params", {"unrolled": True}),
            ("update", {"unrolled": True}),
            ("update_params", {"axis": 1}),
        ],
        "trains plain and turned",
        daily=[("update_params", {}), ("update", {"unrolled": True})],
    ),
)
def test_clipped_adamw(form, how):
    tx, params = offloaded(), parameters(how.get("axis", 0))
    scan = "unrolled" not in how
    train, _ = check(
        step_of(tx, form, **how), step_of(ADAMW, "update", **how), tx.init, ADAMW.init, params, scan=scan, **ON_HOST
    )
    shape = (WIDTH, LAYERS, WIDTH) if how.get("axis") else (LAYERS, WIDTH, WIDTH)
    assert_waits_on_host(train, params, tx.init(params), shape)


@pytest.mark.long("more kinds of steps")
def test_bfloat16_gradients_wait_as_they_are():
    """They are made of bfloat16 parameters, 64 KiB of them, and cast to float32 by the update alone."""
    inner, wide = jo.with_master_params(ADAMW), 2 * WIDTH
    tx = offloaded(inner)

    def params():
        layers = jax.random.normal(jax.random.key(0), (LAYERS, wide, wide)) / wide**0.5
        return jax.device_put({"layers": layers.astype(jnp.bfloat16)}, jax.devices()[0])

    def step_on(tx):
        def step(params, state, x):
            def loss(params):
                h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["layers"])
                return (h.astype(jnp.float32) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) * 0.5, grads)
            return *jo.update_params(tx, grads, state, params), value

        return step

    batches = [jax.random.normal(jax.random.key(k), (8, wide)).astype(jnp.bfloat16) for k in range(5)]
    batches = jax.device_put(batches, jax.devices()[0])
    wanted, losses = loop(step_on(inner), (params(), inner.init(params())), batches)
    train = pipelined(step_on(tx), **ON_HOST)
    carry, returned = advance(train, (params(), tx.init(params())), batches)
    assert [(x.dtype, x.sharding.memory_kind) for x in carry.kept[1].values() if x.ndim] == [(jnp.bfloat16, HOST)]
    np.testing.assert_allclose(now(returned), losses, rtol=2e-2)
    assert_close(train.finish(carry)[0], wanted[-1][0], 2e-2)


def test_a_result_that_needs_gradients_and_new_parameters():
    """The gradients' norm is known at once; the angle between them and the update loads them once more."""

    def step_on(tx):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            old = params
            params, state = jo.update_params(tx, grads, state, params)
            change = jax.tree.map(jnp.subtract, params, old)
            return params, state, {"loss": value, "norm": optax.tree.norm(grads), "dot": optax.tree.vdot(grads, change)}

        return step

    tx, batches = offloaded(), list(map(batch, range(4)))
    _, others = loop(step_on(ADAMW), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_on(tx), **ON_HOST)
    carry, returned = advance(train, (parameters(), tx.init(parameters())), batches)
    assert HOST in kinds(carry).values()
    _, last = train.finish(carry, with_late=True)
    for aux, after, other in zip(returned, [aux.late for aux in returned[1:]] + [last], others, strict=True):
        np.testing.assert_allclose([aux.now["loss"], aux.now["norm"]], [other["loss"], other["norm"]], rtol=1e-4)
        np.testing.assert_allclose(after["dot"], other["dot"], rtol=1e-3)


def started(step, params=None):
    params = parameters() if params is None else params
    return pipelined(step, **ON_HOST).start(params, offloaded().init(params), batch(0))


def test_a_gradient_waits_divided_as_its_state():
    """Which may be divided further than its parameter."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    own, further = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    w, m = (jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=s) for s in (own, further))
    (v,) = jaxpr_of(lambda x: 2 * x, jnp.ones(w.shape))[0].jaxpr.outvars
    assert home_of(v, {"w": w, "m": m}) == home_of(v, {"m": m, "w": w}) == NamedSharding(mesh, P("x"))
    assert home_of(v, {"w": w}) is None


def test_errors():
    def branching(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        update = lambda: jo.update_params(offloaded(), grads, state, params)  # noqa: E731
        return *jax.lax.cond(jnp.isfinite(value), update, lambda: (params, state)), value

    with pytest.raises(ValueError, match="gradients: expected 'device' or 'host', got 'disk'"):
        pipelined(step_of(offloaded()), gradients="disk")
    with pytest.raises(ValueError, match="gradients='host': the step's update runs in a cond"):
        started(branching)
    with pytest.raises(ValueError, match="has no update of an offload"):
        started(broken("no update")[0])

    def of_the_head(params, state, batch):
        value, grads = jax.value_and_grad(lambda head: loss_of(parameters() | head, batch))(params)
        return *jo.update_params(offloaded(), grads, state, params), value

    head = {"head": parameters()["head"]}
    with pytest.raises(ValueError, match="gradients='host': none that the update reads is a float array of 64 KiB"):
        started(of_the_head, head)
