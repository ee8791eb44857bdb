"""A scan and its last iteration apart, or its first, are the scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_offload._base.jaxprs import jax_fun, scan_of
from jax_offload._ir.peel import peeled, why_not_peeled
from jax_offload._ir.program import flat
from tests.support.trees import FAST

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def summing(length, reverse, w, xs):
    def body(carry, x):
        total, key = carry
        product = jnp.tanh(x @ w) + key
        return (total + product.sum(), key + 1), (product, product.mean(), key)

    return jax.lax.scan(body, (jnp.zeros(()), jnp.int32(3)), xs, length=length, reverse=reverse)


def flattened(fun, *args):
    program = flat(jax.make_jaxpr(fun)(*args))
    (at,) = (k for k, eqn in enumerate(program.eqns) if eqn.primitive.name == "scan")
    return program, at


def apart(fun, *args, first=False):
    program, at = flattened(fun, *args)
    assert not why_not_peeled(program, at)
    return peeled(program, at, first=first)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_values_and_their_order(length, reverse, first):
    w, xs = jnp.arange(16.0).reshape(4, 4) / 16, jnp.arange(length * 8.0).reshape(length, 2, 4)
    found = apart(lambda w, xs: summing(length, reverse, w, xs), w, xs, first=first)
    scans = [scan.length for eqn in found.eqns if (scan := scan_of(eqn))]
    assert scans == [length - 1] * (length > 1) or (
        length == 2 and "while" in {eqn.primitive.name for eqn in found.eqns}
    )
    assert "tanh" in {eqn.primitive.name for eqn in found.eqns}  # the one's, inlined
    both = jax.jit(lambda w, xs: (jax_fun(found.closed)(w, xs), summing(length, reverse, w, xs)), compiler_options=FAST)
    got, want = both(w, xs)
    for x, y in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_without_rows():
    def powers(x):
        return jax.lax.scan(lambda x, _: (x * x, None), x, None, length=3)[0]

    found = apart(powers, jnp.float32(2))
    assert jax_fun(found.closed)(jnp.float32(2)) == [256]


def test_what_stays_whole():
    def printed(xs):
        def body(total, x):
            jax.debug.print("{}", x)
            return total + x, None

        return jax.lax.scan(body, 0.0, xs)[0]

    assert "effects" in why_not_peeled(*flattened(printed, jnp.ones(3)))
    assert "no iterations" in why_not_peeled(
        *flattened(lambda xs: jax.lax.scan(lambda c, x: (c + x, x), 0.0, xs), jnp.ones((0, 2)).sum(1))
    )
    there = jax.memory.Space.Host
    sent = lambda xs: jax.lax.scan(lambda c, x: (c + x, jax.device_put(x, there)), 0.0, xs)  # noqa: E731
    assert "host memory" in why_not_peeled(*flattened(sent, jnp.ones(2)))
    assert why_not_peeled(flat(jax.make_jaxpr(jnp.sin)(1.0)), 0)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="an Explicit mesh of jax 0.10 needs a context of its own")
def test_rows_whose_type_says_how_they_are_divided():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    xs = jax.device_put(jnp.arange(16.0).reshape(2, 8), NamedSharding(mesh, P(None, "x")))
    found = apart(lambda xs: jax.lax.scan(lambda c, x: (c + x.sum(), 2 * x), 0.0, xs), xs)
    total, rows = jax.jit(jax_fun(found.closed), compiler_options=FAST)(xs)
    assert total == xs.sum() and jax.typeof(rows).sharding.spec == P(None, "x")
    np.testing.assert_array_equal(rows, 2 * xs)
