"""A composite is one equation until it is lowered, and then the function it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_offload._base.jaxprs import closed, jax_fun, jaxpr_of
from jax_offload._base.own_primitives import COMPOSITE, composite, decomposed

pytestmark = pytest.mark.oldest("the same")


def _halves(x, y=None, *, factor):
    scaled = x * factor if y is None else x * y + factor
    return [lax.sin(scaled), scaled.sum(-1)]


def _as_one(x, y):
    return composite(_halves, x, y, factor=3.0)


def _as_is(x, y):
    return _halves(x, y, factor=3.0)


X, Y = (np.random.default_rng(k).normal(size=(8, 6)).astype(np.float32) for k in range(2))


def test_one_equation_with_the_values_of_many():
    assert [eqn.primitive.name for eqn in jax.make_jaxpr(_as_one)(X, Y).eqns] == [COMPOSITE]
    assert COMPOSITE not in jax.jit(_as_one).lower(X, Y).as_text()
    for got in (jax.jit(_as_one)(X, Y), _as_one(X, Y)):
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(_as_is)(X, Y))


@pytest.mark.parametrize(("in_axes", "args"), [((0, 0), (X, Y)), ((1, 1), (X, Y)), ((0, None), (X, Y[0]))])
def test_vmap(in_axes, args):
    got, want = (jax.jit(jax.vmap(f, in_axes))(*args) for f in (_as_one, _as_is))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_gradients():
    got, want = (
        jax.jit(jax.grad(lambda x, y, f=f: sum(map(jnp.sum, f(x, y))), (0, 1)))(X, Y) for f in (_as_one, _as_is)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert np.any(np.asarray(want[1]) != 0)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_it_is_sharded_as_its_operands_are(axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axes, axes))
    sharding = NamedSharding(mesh, PartitionSpec("a", None))
    x, y = (jax.device_put(x, sharding) for x in (X, Y))
    with jax.set_mesh(mesh):
        got = jax.jit(_as_one)(x, y)
        compiled = jax.jit(_as_one).lower(x, y).compile().as_text()
    assert got[0].sharding.is_equivalent_to(sharding, 2)
    assert not any(name in compiled for name in ("all-gather", "all-reduce", "collective-permute"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, jax.jit(_as_is)(X, Y))


def test_inside_shard_map_where_not_all_operands_vary():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")

    def mapped(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))

    got, want = (mapped(f)(X, Y[:1]) for f in (_as_one, _as_is))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def _counted(x):
    return [x + jnp.arange(6.0)]


def test_64_bits_are_those_of_the_trace():
    """What was traced with types of 64 bits off is not taken for a trace with them on."""
    found = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            found.append(jax.make_jaxpr(lambda x: composite(_counted, x))(X).out_avals[0].dtype)
    assert found == [np.float32, np.float64]


def test_decomposed_keeps_operands_and_results():
    traced, _ = jaxpr_of(lambda x, y: [_as_one(x, y), jnp.cos(x)], X, Y)
    jaxpr = traced.jaxpr
    eqns = decomposed(jaxpr.eqns)
    assert COMPOSITE not in {eqn.primitive.name for eqn in eqns} and len(eqns) > len(jaxpr.eqns)
    got = jax_fun(closed(type(jaxpr)([], jaxpr.invars, jaxpr.outvars, eqns, jaxpr.effects, jaxpr.debug_info)))(X, Y)
    jax.tree.map(np.testing.assert_array_equal, got[:2], _as_is(jnp.asarray(X), jnp.asarray(Y)))
