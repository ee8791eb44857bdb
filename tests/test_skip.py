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


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_a_leaf_that_an_update_widens(through):
    """As dadapt_adamw does in float16: the types are those of the update, whether it is skipped or not."""

    def moved(u, s, p=None):
        return u, jax.tree.map(lambda b: b.astype(jnp.float32) + 1, s)

    inner = optax.GradientTransformation(optax.tree.ones_like, moved)
    params = jax.device_put({"w": jnp.ones((8, 16), jnp.float16)}, jax.devices()[0])
    tx = jo.offload(inner, min_bytes=0)

    update = tx.update if through == "update" else functools.partial(jo.update_params, tx)
    for skip, value in (True, 1), (False, 2):
        new, state = jax.jit(update)(params, tx.init(params), params, skip=np.bool_(skip))
        assert state["w"].dtype == jnp.float32 and state["w"].sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(state["w"], np.full((8, 16), value, np.float32))
        kept = np.float16(1 if through == "update_params" else 0)
        assert not skip or np.array_equal(new["w"], np.full((8, 16), kept))


def test_a_weak_type_is_that_of_jnp_where():
    """An average of integers becomes a weak float: with ``skip=``, too."""
    tx = optax.chain(jo.offload(optax.set_to_zero()), optax.ema(0.9))
    params = jax.device_put({"count": jnp.ones((8, 16), jnp.int32)}, jax.devices()[0])
    state = tx.init(params)
    _, plain = jax.jit(tx.update)(params, state, params)
    _, skipped = jax.jit(lambda s: jo.update_params(tx, params, s, params, skip=jnp.bool_(False)))(state)
    ema = lambda s: optax.tree.get(s, "ema")["count"]  # noqa: E731
    assert ema(plain).weak_type and ema(skipped).weak_type and ema(skipped).dtype == ema(plain).dtype
