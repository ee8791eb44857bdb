"""Gradients that take turns are the same gradients. What it does to the peak: tests/aot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo

pytestmark = pytest.mark.oldest("barriers")

SHAPE = (256, 260)  # large enough to wait for each other
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 1e30, 1e-40]


def produced(grads):
    """The same gradients, but made in the step, as those of a backward pass are: these wait for each other."""
    return jax.tree.map(lambda x: jnp.flip(jnp.flip(x, -1), -1), grads)


@pytest.fixture
def grads():
    """The first number of each, by which a gradient shows that it is there, is a special one."""
    keys = jax.random.split(jax.random.key(0), len(SPECIAL))
    produced = {f"w{i}": jax.random.normal(key, SHAPE) for i, key in enumerate(keys)}
    produced = {name: g.at[0, 0].set(first) for (name, g), first in zip(produced.items(), SPECIAL, strict=True)}
    return jax.device_put(produced | {"scale": jnp.ones(3)}, jax.devices()[0])


@pytest.mark.parametrize(
    ("inner", "fraction"),
    [
        pytest.param(optax.sgd(0.1, momentum=0.9), 0.5, id="sgd"),
        pytest.param(optax.chain(optax.zero_nans(), optax.adam(1e-3)), 1.0, id="zero_nans"),
        pytest.param(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 1.0, id="clipped"),
        pytest.param(optax.apply_if_finite(optax.adam(1e-3), 2), 0.5, id="apply_if_finite"),
    ],
)
def test_special_numbers_change_nothing_else(inner, fraction, grads):
    params = jax.tree.map(jnp.ones_like, grads)
    tx = jo.offload(inner, fraction=fraction)
    state = tx.init(params)
    assert any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state))
    updates, state = jax.jit(lambda g, s, p: tx.update(produced(g), s, p))(grads, state, params)
    expected, plain = jax.jit(inner.update)(grads, inner.init(params), params)
    for ours, theirs in zip(jax.tree.leaves((updates, state)), jax.tree.leaves((expected, plain)), strict=True):
        a, b = np.asarray(ours), np.asarray(theirs)
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


COLLECTIVES = ("all-reduce(", "all-reduce-start(", "all-gather", "collective-permute")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


@pytest.mark.parametrize(("inner", "fraction"), [(optax.adamw(1e-3), 0.5), (CLIPPED, 1.0)])
@pytest.mark.parametrize(
    ("spec", "constraint", "known"),
    [
        pytest.param(ROWS, None, True, id="divided parameters"),
        pytest.param(ROWS, None, False, id="parameters that init has not seen"),
        pytest.param(WHOLE, ROWS, True, id="divided gradients"),
    ],
)
def test_divided_gradients_do_not_wait_by_a_collective_each(spec, constraint, known, inner, fraction):
    """The only collective is the norm's."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put({f"w{i}": jnp.ones(SHAPE) for i in range(4)}, jax.sharding.NamedSharding(mesh, spec))
    state = jo.offload(inner, fraction=fraction).init(params)
    tx = jo.offload(inner, fraction=fraction)
    if known:
        state = tx.init(params)

    def step(grads, state, params):
        grads = produced(grads)
        if constraint is not None:
            grads = jax.lax.with_sharding_constraint(grads, jax.sharding.NamedSharding(mesh, constraint))
        return tx.update(grads, state, params)

    text = jax.jit(step).lower(params, state, params).compile().as_text()
    found = sum(text.count(f" {kind}") for kind in COLLECTIVES)
    assert found == (inner is CLIPPED)


def test_devices_that_the_step_does_not_use_change_nothing():
    """Gradients wait for each other beside seven more devices, before and after ``init`` has seen the parameters."""
    params = jax.device_put({f"w{i}": jnp.ones(SHAPE) for i in range(4)}, jax.devices()[0])
    state, tx = jo.offload(CLIPPED).init(params), jo.offload(CLIPPED)

    def barriers():
        traced = jax.jit(lambda grads, state: tx.update(produced(grads), state, params)).trace(params, state)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("optimization_barrier")

    before = barriers()
    tx.init(params)
    assert barriers() == before >= len(params)
