"""Outside of any jit an update is compiled once, and computes what it computes inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo

pytestmark = pytest.mark.oldest("updates outside of jit")

DEVICE = jax.devices()[0]


def counted():
    """An optimizer in chunks that takes a number and a function, and how often it was traced."""
    inner, traced = optax.adam(1e-2), []

    def update(updates, state, params=None, *, value=None, value_fn=None, **_):
        traced.append(1)
        updates = updates if value_fn is None else jax.tree.map(lambda u: u * value_fn(value), updates)
        return inner.update(updates, state, params)

    tx = optax.GradientTransformationExtraArgs(inner.init, update)
    return jo.offload(tx, min_bytes=0, window=2**10), tx, traced


def params_of(sharding=DEVICE):
    return jax.device_put({"a": jnp.ones((32, 32)), "b": jnp.arange(64.0)}, sharding)


def double(x):
    return 2 * x


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_it_is_compiled_once(through):
    tx, plain, traced = counted()
    params = params_of()
    state, expected = tx.init(params), plain.init(params)
    for k in range(4):
        grads, extra = jax.tree.map(jnp.sin, params), {"value": 0.5 + k, "value_fn": double}  # another number each time
        updates, expected = jax.jit(lambda g, s, v: plain.update(g, s, value=v, value_fn=double))(
            grads, expected, extra["value"]
        )
        traced.clear()
        if through == "update":
            ours, state = tx.update(grads, state, params, **extra)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, updates)
            params = optax.apply_updates(params, ours)
        else:
            params, state = jo.update_params(tx, grads, state, params, **extra)
        assert k == 0 or not traced
        mu = state[0].mu["a"]
        assert mu.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(mu, expected[0].mu["a"], rtol=1e-6)


def test_what_is_compiled_in_compiles_anew():
    tx, _, traced = counted()
    params = params_of()
    state = tx.init(params)
    for function in double, jnp.sin, double:
        tx.update(params, state, params, value=1.0, value_fn=function)
    assert len(traced) == 2


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("axis_type", jax.sharding.AxisType.__members__.values())
def test_each_sharding_has_its_own(axis_type):
    if axis_type == jax.sharding.AxisType.Manual:
        pytest.skip("only inside shard_map")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    tx, plain, _ = counted()
    for spec in P(), P("x"):
        params = params_of(NamedSharding(mesh, spec))
        updates, state = tx.update(params, tx.init(params), params)
        expected, _ = plain.update(params, plain.init(params), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
        mu = state[0].mu["a"].sharding
        assert mu.memory_kind == "pinned_host" and mu.is_equivalent_to(
            NamedSharding(mesh, spec, memory_kind="pinned_host"), 2
        )


def test_without_jit_at_all():
    tx, plain, _ = counted()
    params = params_of()
    state = tx.init(params)
    expected, _ = plain.update(params, plain.init(params), params)
    with jax.disable_jit():
        updates, _ = tx.update(params, state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
