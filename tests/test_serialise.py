"""Gradients that take turns are the same gradients. What it does to the peak: tests/aot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.trees import kinds

pytestmark = pytest.mark.oldest("barriers")

SHAPE = (256, 260)  # large enough to wait for each other
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 1e30, 1e-40]
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SOME = {  # the optimizer, and the fraction
    "sgd": (optax.sgd(0.1, momentum=0.9), 0.5),
    "zero_nans": (optax.chain(optax.zero_nans(), optax.adam(1e-3)), 1.0),
    "clipped": (CLIPPED, 1.0),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(1e-3), 2), 0.5),
}


def produced(grads):
    """The same gradients, but made in the step, as those of a backward pass are: these wait for each other."""
    return jax.tree.map(lambda x: jnp.flip(jnp.flip(x, -1), -1), grads)


def ones(where):
    return jax.device_put({f"w{i}": jnp.ones(SHAPE) for i in range(4)}, where)


def barriers(traced):
    """Count the barriers by which gradients and transfers wait; transfers alone need at most one per parameter."""
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("optimization_barrier")


@pytest.mark.parametrize("name", SOME)
def test_special_numbers_change_nothing_else(name):
    """The first number of each gradient, on which others wait, is a special one."""
    inner, fraction = SOME[name]
    random = jax.random.normal(jax.random.key(0), (len(SPECIAL), *SHAPE)).at[:, 0, 0].set(jnp.array(SPECIAL))
    grads = {f"w{i}": x for i, x in enumerate(random)} | {"scale": jnp.ones(3)}
    grads = jax.device_put(grads, jax.devices()[0])
    params, tx = jax.tree.map(jnp.ones_like, grads), jo.offload(inner, fraction=fraction)
    state = tx.init(params)
    assert "pinned_host" in kinds(state)
    got = jax.jit(lambda g, s, p: tx.update(produced(g), s, p))(grads, state, params)
    want = jax.jit(inner.update)(grads, inner.init(params), params)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


COLLECTIVES = ("all-reduce(", "all-reduce-start(", "all-gather", "collective-permute")
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
DIVIDED = {  # the specs of parameters and gradients, and whether init has seen the parameters
    "divided parameters": (ROWS, None, True),
    "parameters that init has not seen": (ROWS, None, False),
    "divided gradients": (WHOLE, ROWS, True),
}


@pytest.mark.parametrize(("inner", "fraction"), [(optax.adamw(1e-3), 0.5), (CLIPPED, 1.0)])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_gradients_do_not_wait_by_a_collective_each(name, inner, fraction):
    """The only collective is the norm's."""
    spec, constraint, known = DIVIDED[name]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, tx = ones(jax.sharding.NamedSharding(mesh, spec)), jo.offload(inner, fraction=fraction)
    state = (tx if known else jo.offload(inner, fraction=fraction)).init(params)

    def step(grads, state, params):
        grads = produced(grads)
        if constraint is not None:
            grads = jax.lax.with_sharding_constraint(grads, jax.sharding.NamedSharding(mesh, constraint))
        return tx.update(grads, state, params)

    traced = jax.jit(step).trace(params, state, params)
    text = traced.lower().compile().as_text()
    assert sum(text.count(f" {kind}") for kind in COLLECTIVES) == (inner is CLIPPED)
    assert barriers(traced) <= len(params)


def test_devices_that_the_step_does_not_use_change_nothing():
    """Gradients wait for each other beside seven more devices, before and after ``init`` has seen the parameters."""
    params, tx = ones(jax.devices()[0]), jo.offload(CLIPPED)
    state = jo.offload(CLIPPED).init(params)

    def found():
        return barriers(jax.jit(lambda grads, s: tx.update(produced(grads), s, params)).trace(params, state))

    before = found()
    tx.init(params)
    assert found() == before > len(params)
