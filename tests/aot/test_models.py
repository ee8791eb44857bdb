"""Peaks of models whose leaves are not all alike, compiled for an H200 and a TPU (MiB)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.aot.cases import device_sharding, measure_update
from tests.aot.harness import H200, MIB, V5E, require
from tests.support.rows import rows


def mib(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree)) / MIB


@pytest.mark.parametrize("target", rows([H200, V5E], "a TPU's compiler takes its time", daily=[H200]))
def test_a_huge_embedding_and_four_layers(target):
    """One leaf that is larger than all others together: 131072x4096, in chunks of rows."""
    require(target)
    sharding = device_sharding(target)
    params = {f"layers_{i}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding) for i in range(4)}
    params["embed"] = jax.ShapeDtypeStruct((131072, 4096), jnp.float32, sharding=sharding)

    def loss(params, tokens):
        x = params["embed"][tokens]
        for i in range(4):
            x = jnp.tanh(x @ params[f"layers_{i}"])
        return (x**2).mean()

    tokens = jax.ShapeDtypeStruct((512,), jnp.int32, sharding=sharding)
    m = measure_update(target, jo.offload(optax.adamw(1e-3)), params, loss, tokens)
    assert m.peak <= 1.1 * 2 * mib(params)
    assert m.host_temp == 0
