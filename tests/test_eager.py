"""Outside of any jit an update is compiled once, and computes what it computes inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
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


def assert_close_to(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_it_is_compiled_once(through):
    """With another number each time; whether numbers are right, also tests/test_optimizers.py asks."""
    tx, plain, traced = counted()
    call = tx.update if through == "update" else functools.partial(jo.update_params, tx)
    wanted = plain.update if through == "update" else functools.partial(jo.update_params, plain)
    params = params_of()
    state, expected = tx.init(params), plain.init(params)
    for k in range(3):
        extra = {"value": 0.5 + k, "value_fn": double}
        want, expected = wanted(params, expected, params, **extra)
        traced.clear()
        got, state = call(params, state, params, **extra)
        assert k == 0 or not traced
        assert_close_to((got, state), (want, expected))
        assert state[0].mu["a"].sharding.memory_kind == "pinned_host"


def test_what_is_compiled_in_compiles_anew():
    tx, _, traced = counted()
    params = params_of()
    state = tx.init(params)
    for function in double, jnp.sin, double:
        tx.update(params, state, params, value=1.0, value_fn=function)
    assert len(traced) == 2


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_each_sharding_has_its_own(axes):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axes,))
    tx, plain, _ = counted()
    for spec in P(), P("x"):
        params = params_of(NamedSharding(mesh, spec))
        updates, state = tx.update(params, tx.init(params), params)
        assert_close_to(updates, plain.update(params, plain.init(params), params)[0])
        assert state[0].mu["a"].sharding.is_equivalent_to(NamedSharding(mesh, spec, memory_kind="pinned_host"), 2)


def test_without_jit_at_all():
    tx, plain, _ = counted()
    params = params_of()
    with jax.disable_jit():
        updates, _ = tx.update(params, tx.init(params), params)
    assert_close_to(updates, plain.update(params, plain.init(params), params)[0])
