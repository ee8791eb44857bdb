"""A function of single numbers is one operation of the program, and otherwise the function it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_offload._base.own_primitives import elementwise
from jax_offload._precision.formats import NAMES, Storage, decode, encode

pytestmark = pytest.mark.oldest("a primitive with a lowering of its own")


def _grow(x, y, *, factor):
    x = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFFF00), jnp.float32)
    return lax.select(x > y, lax.sin(x) * factor, y)


def _as_map(x, y):
    return elementwise(_grow, x, y, factor=3.0)


def _as_is(x, y):
    return _grow(x, y, factor=3.0)


X, Y = (np.random.default_rng(k).normal(size=(8, 6)).astype(np.float32) for k in range(2))


def test_one_operation_with_the_values_of_many():
    text = jax.jit(_as_map).lower(X, Y).as_text()
    assert text.count("stablehlo.map") == 1
    assert "call @" not in text
    np.testing.assert_array_equal(jax.jit(_as_map)(X, Y), jax.jit(_as_is)(X, Y))
    np.testing.assert_array_equal(_as_map(jnp.asarray(X), jnp.asarray(Y)), jax.jit(_as_is)(X, Y))


@pytest.mark.parametrize(("in_axes", "args"), [((0, 0), (X, Y)), ((1, 1), (X, Y)), ((0, None), (X, Y[0]))])
def test_vmap(in_axes, args):
    got, want = (jax.jit(jax.vmap(f, in_axes))(*args) for f in (_as_map, _as_is))
    np.testing.assert_array_equal(got, want)


def test_gradients():
    got, want = (jax.jit(jax.grad(lambda x, y, f=f: f(x, y).sum(), (0, 1)))(X, Y) for f in (_as_map, _as_is))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.any(np.asarray(want[1]) != 0)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_it_is_sharded_as_its_operands_are(axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axes, axes))
    sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
    x, y = (jax.device_put(x, sharding) for x in (X, Y))
    with jax.set_mesh(mesh):
        got = jax.jit(_as_map)(x, y)
        compiled = jax.jit(_as_map).lower(x, y).compile().as_text()
    assert got.sharding.is_equivalent_to(sharding, 2)
    assert not any(name in compiled for name in ("all-gather", "all-reduce", "collective-permute"))
    np.testing.assert_array_equal(got, jax.jit(_as_is)(X, Y))


def test_inside_shard_map_where_not_all_operands_vary():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("a")

    def mapped(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))

    np.testing.assert_array_equal(mapped(_as_map)(X, Y[:1]), mapped(_as_is)(X, Y[:1]))


@pytest.mark.parametrize("name", NAMES)
def test_few_operations_encode_and_decode(name):
    """XLA compiles for as long as a program has operations; this is per leaf of the state."""
    storage = Storage(name)
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    there = jax.make_jaxpr(lambda x, seed: encode(x, storage, seed))(x, np.uint32(1))
    back = jax.make_jaxpr(lambda *values: decode(*values, storage))(*jax.eval_shape(lambda x: encode(x, storage), x))
    assert len(there.eqns) <= 12
    assert len(back.eqns) <= 6
