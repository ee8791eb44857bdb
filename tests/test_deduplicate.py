"""Slices that do the same share one trace; those that differ anywhere do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo

pytestmark = pytest.mark.oldest("jits that are called many times")

WIDTHS = {f"layers_{i}": 8 for i in range(6)} | {"head": 4}


def parameters():
    params = {name: jnp.linspace(-1, 1, 8 * n).reshape(8, n) for name, n in WIDTHS.items()}
    return jax.device_put(params, jax.devices()[0])


def traces(tx, params):
    """How many different functions the program of an update calls for its slices, and how often."""
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    return text.count("func private @update_slice"), text.count("call @update_slice")


def test_layers_of_one_shape_are_traced_once():
    assert traces(jo.offload(optax.adamw(1e-3), min_bytes=0), parameters()) == (1, 6)  # the head is like no other


@pytest.mark.parametrize("differ", ["constant", "operand", "nothing"])
def test_slices_that_differ_keep_their_own_numbers(differ):
    def scaled(name, g):
        return {"constant": g * (2.0 if name == "layers_3" else 3.0), "nothing": g * 3.0}.get(
            differ, g * g if name == "layers_3" else g + g
        )

    def scale(updates, params):
        return {name: scaled(name, g) for name, g in updates.items()}

    inner = optax.chain(optax.stateless(scale), optax.sgd(0.1, momentum=0.9))
    tx, params = jo.offload(inner, min_bytes=0), parameters()
    grads = jax.tree.map(jnp.cos, params)
    assert traces(tx, params) == ((1, 6) if differ == "nothing" else (1, 5))
    got = jax.jit(tx.update)(grads, tx.init(params), params)
    wanted = jax.jit(inner.update)(grads, inner.init(params), params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(got[1]) if x.ndim)
