"""Skipped steps: not a bit of the state changes. Loss scaling around them: tests/test_random_steps.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.trees import gradients

HOST = "pinned_host"
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OFFLOADS = {
    "stored": jo.offload(ADAMW, min_bytes=1024, storage={"mu": "int8", "nu": "uint8"}),
    "adamw": jo.offload(ADAMW, min_bytes=1024),
    "in chunks": jo.offload(ADAMW, min_bytes=1024, window=8000),
    "masters": jo.offload(jo.with_master_params(ADAMW), min_bytes=1024),
    "clipping outside": optax.chain(optax.clip_by_global_norm(1.0), jo.offload(optax.adamw(1e-2), min_bytes=1024)),
    "MultiSteps": jo.offload(optax.MultiSteps(ADAMW, 2), min_bytes=1024),
}


def parameters(dtype=jnp.float32):
    w = jax.random.normal(jax.random.key(0), (6, 16, 32))
    params = {"layers": w.astype(dtype), "embed": w[:2].reshape(64, 16).astype(dtype), "norm": jnp.ones(32)}
    return jax.device_put(params, jax.devices()[0])


def assert_same(a, b):
    """Bit for bit, and in the same memory."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype
        assert x.sharding.memory_kind == y.sharding.memory_kind


def host_leaves(state):
    return [x for x in jax.tree.leaves(state) if x.ndim and x.nbytes >= 1024]


@pytest.mark.oldest("branches over host memory")
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_skipped_update_changes_no_bit(name):
    """What a step does that is not skipped: tests/test_equivalence.py."""
    tx, params = OFFLOADS[name], parameters(jnp.bfloat16 if name == "masters" else jnp.float32)
    params = jax.tree.map(lambda x: x.at[0].set(-0.0), params)  # -0 + 0 is +0: the updates of a skipped step are -0
    good = gradients(params)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), good)
    _, state = jax.jit(tx.update)(good, tx.init(params), params)
    own, update = jax.jit(functools.partial(jo.update_params, tx)), jax.jit(tx.update)
    assert_same(own(bad, state, params, skip=jnp.array(True)), (params, state))
    updates, after = update(bad, state, params, skip=jnp.array(True))
    assert_same(after, state)
    assert all(not np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    assert_same(optax.apply_updates(params, updates), params)
    for new, after in (
        own(good, state, params, skip=jnp.array(False)),
        update(good, state, params, skip=jnp.array(False)),
    ):
        assert all(x.sharding.memory_kind == HOST for x in host_leaves(after))
        assert name == "MultiSteps" or not any(map(np.array_equal, host_leaves(new), host_leaves(params)))
        assert not all(map(np.array_equal, host_leaves(after), host_leaves(state)))


@pytest.mark.parametrize("skip", [True, False])
def test_a_resident_state_moves_even_in_a_skipped_step(skip):
    tx, params = OFFLOADS["adamw"], parameters()
    resident = jo.to_device(tx.init(params))
    for update in tx.update, functools.partial(jo.update_params, tx):
        _, state = jax.jit(update)(gradients(params), resident, params, skip=jnp.array(skip))
        assert all(x.sharding.memory_kind == HOST for x in host_leaves(state))
        assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(resident))) == skip


def test_bad_input():
    tx, params = OFFLOADS["adamw"], parameters()
    state = tx.init(params)
    for wrong, shown in ((jnp.zeros(3, bool), r"bool\[3\]"), (1.0, r"float32\[\]"), (jnp.int32(1), r"int32\[\]")):
        for update in tx.update, functools.partial(jo.update_params, tx):
            with pytest.raises(ValueError, match=f"skip: expected .* got {shown}"):
                update(params, state, params, skip=wrong)
