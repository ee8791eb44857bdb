"""Scans whose results begin with them."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from jax_offload._base.jaxprs import closed, jax_fun, scan_of
from jax_offload._emit import results
from tests.support.trees import FAST

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
ROWS = np.linspace(-2, 2, 60, dtype=np.float32).reshape(5, 3, 4)


def forward(w, xs, reverse=False):
    """Carries one value, and makes rows of three dtypes."""

    def body(carry, x):
        y = jnp.tanh(x @ w) + carry
        return y.sum(0), (y.astype(jnp.bfloat16), jnp.argmax(y, -1), y > 0)

    return jax.lax.scan(body, jnp.ones(4), xs, reverse=reverse)


def backward(w, xs):
    return forward(w, xs, reverse=True)


def gradients(w, xs):
    """Made by loops in checkpoints."""

    @jax.checkpoint
    def layer(xs):
        return jax.lax.map(jax.checkpoint(lambda x: jnp.tanh(x @ w)), xs)

    return jax.grad(lambda xs: layer(layer(xs)).sum())(xs)


def in_a_batch(w, xs):
    return jax.vmap(forward, (None, 2), 1)(w, jnp.stack([xs, -xs], 2))


def loops(jaxpr):
    """The scans of a jaxpr and of the calls in it, not those of scans."""
    for eqn in jaxpr.eqns:
        if (scan := scan_of(eqn)) is not None:
            yield scan
        else:
            for inner in jex.jaxprs_in_params(eqn.params):
                yield from loops(inner)


@pytest.mark.parametrize("f", [forward, backward, gradients, in_a_batch])
def test_the_same_numbers(f, monkeypatch):
    monkeypatch.setattr(results, "LARGE", 1)
    plain = jax.make_jaxpr(f)(W, ROWS)
    changed = closed(results.in_time(plain.jaxpr, {}), plain.consts)
    assert any(scan.ys for scan in loops(plain.jaxpr))
    assert [scan.ys for scan in loops(changed.jaxpr)] == [[] for _ in loops(plain.jaxpr)]
    expected, found = (jax.jit(jax_fun(each), compiler_options=FAST)(W, ROWS) for each in (plain, changed))
    for x, y in zip(expected, found, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_small_loops_and_what_knows_its_own_axes_stay():
    plain = jax.make_jaxpr(forward)(W, ROWS).jaxpr
    assert results.in_time(plain, {}) is plain
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    large = jax.ShapeDtypeStruct((5, 2**17, 4), jnp.float32)
    summed = jax.shard_map(
        lambda w, xs: jax.lax.map(lambda x: jax.lax.psum(x @ w, "data"), xs),
        mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(),
    )  # fmt: skip
    manual = jax.make_jaxpr(summed)(W, large).jaxpr
    assert results.in_time(manual, {}) is manual
    one = jax.make_jaxpr(lambda w, xs: jax.lax.map(lambda x: x @ w, xs))(W, large).jaxpr
    assert results.in_time(one, {}) is not one
