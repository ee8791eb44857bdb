"""Skipped steps: not a bit of the state changes; and dynamic loss scaling in float16 around it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jax_offload as jo
from tests.support.trees import gradients

HOST = "pinned_host"
LONG = pytest.mark.long("more kinds of steps")
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OFFLOADS = {
    "adamw": jo.offload(ADAMW, min_bytes=1024),
    "in chunks": jo.offload(ADAMW, min_bytes=1024, window=8000),
    "stored": jo.offload(ADAMW, min_bytes=1024, storage={"mu": "int8", "nu": "uint8"}),
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
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("stored", "masters") else LONG) for n in OFFLOADS])
def test_a_skipped_update_changes_no_bit_and_the_next_goes_on(name):
    tx, params = OFFLOADS[name], parameters(jnp.bfloat16 if name == "masters" else jnp.float32)
    own = jax.jit(lambda p, s, g, skip: jo.update_params(tx, g, s, p, skip=skip))
    step = jax.jit(lambda p, s, g, skip: tx.update(g, s, p, skip=skip))
    plain = jax.jit(lambda p, s, g: tx.update(g, s, p))
    good = gradients(params)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), good)
    yes, no = jnp.array(True), jnp.array(False)

    state = plain(params, tx.init(params), good)[1]
    assert_same(own(params, state, bad, yes), (params, state))
    updates, after = step(params, state, bad, yes)
    assert_same(after, state)
    assert all(not np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    assert all(x.sharding.memory_kind == HOST for x in host_leaves(after))
    assert_same(optax.apply_updates(params, updates), params)

    wanted, expected = plain(params, state, good)
    got, after = step(params, state, good, no)
    for x, y in zip(jax.tree.leaves((got, after)), jax.tree.leaves((wanted, expected)), strict=True):
        assert x.sharding.memory_kind == y.sharding.memory_kind and x.dtype == y.dtype
        x, y = np.float32(x), np.float32(y)
        assert (np.abs(x - y) > 1e-6 + 1e-6 * np.abs(y)).mean() < 1e-3  # fusion; one number in 8 bits may round apart
    new, after = own(params, state, good, no)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (new, params)), strict=True)
               ) or name == "MultiSteps"  # fmt: skip
    assert all(x.sharding.memory_kind == HOST for x in host_leaves(after))


def test_a_zero_keeps_its_sign():
    """-0 + 0 is +0: the updates of a skipped step are -0."""
    tx, params = OFFLOADS["adamw"], jax.tree.map(lambda x: x.at[0].set(-0.0), parameters())
    state = tx.init(params)
    for call in (tx.update, jax.jit(tx.update)):
        updates, _ = call(gradients(params), state, params, skip=True)
        assert_same(optax.apply_updates(params, updates), params)


def test_a_resident_state_moves_even_in_a_skipped_step():
    tx, params = OFFLOADS["adamw"], parameters()
    resident = jo.to_device(tx.init(params))
    for skip in True, False:
        for f in (
            jax.jit(lambda p, s, skip: jo.update_params(tx, gradients(p), s, p, skip=skip)),
            jax.jit(lambda p, s, skip: tx.update(gradients(p), s, p, skip=skip)),
        ):
            _, state = f(params, resident, jnp.array(skip))
            assert all(x.sharding.memory_kind == HOST for x in host_leaves(state))
            same = all(
                np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(resident), strict=True)
            )
            assert same == skip


def test_updates_of_another_dtype_than_the_gradients():
    tx, params = OFFLOADS["masters"], parameters(jnp.bfloat16)
    state = tx.init(params)
    for skip in True, False:
        updates, _ = jax.jit(lambda s, skip: tx.update(gradients(params), s, params, skip=skip))(state, skip)
        assert updates["layers"].dtype == jnp.float32
        assert bool(jnp.any(updates["layers"])) != skip
    wanted, _ = jax.jit(lambda s: tx.update(gradients(params), s, params))(state)
    np.testing.assert_allclose(updates["layers"], wanted["layers"], rtol=1e-6, atol=1e-9)


def test_bad_input():
    tx, params = OFFLOADS["adamw"], parameters()
    state = tx.init(params)
    for wrong, shown in ((jnp.zeros(3, bool), r"bool\[3\]"), (1.0, r"float32\[\]"), (jnp.int32(1), r"int32\[\]")):
        with pytest.raises(ValueError, match=f"skip: expected .* got {shown}"):
            tx.update(params, state, params, skip=wrong)
        with pytest.raises(ValueError, match=f"skip: expected .* got {shown}"):
            jo.update_params(tx, params, state, params, skip=wrong)


# Training in float16 with flax's DynamicScale.


def loss_fn(params, x):
    h = jnp.tanh(x.astype(jnp.float16) @ params["embed"].T.astype(jnp.float16))
    for w in params["layers"].astype(jnp.float16):
        h = h + jnp.tanh(h[:, :16] @ w)[:, :16].repeat(4, 1)
    return (h.astype(jnp.float32) ** 2).mean() + (params["norm"] ** 2).mean()


def scaled_training(tx, params, steps, through):
    """Trains with a scale so large that the first steps overflow; says which steps were skipped, and their scales."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, scale, x):
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x)
        if through == "skip":
            new, after = jo.update_params(tx, grads, state, params, skip=~finite)
        elif through == "update":
            updates, after = tx.update(grads, state, params, skip=~finite)
            new = optax.apply_updates(params, updates)
        else:  # flax's own way, around it
            updates, after = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            new = jax.tree.map(functools.partial(jnp.where, finite), new, params)
            after = jax.tree.map(functools.partial(jnp.where, finite), after, state)
        return new, after, scale, finite, loss

    state = tx.init(params)
    scale = jax.device_put(DynamicScale(growth_interval=3, scale=2.0**22), jax.devices()[0])
    history = []
    for k in range(steps):
        x = jax.random.normal(jax.random.key(k), (8, 16)) * 4
        before = jax.tree.map(np.asarray, (params, state))
        params, state, scale, finite, loss = step(params, state, scale, x)
        if not finite:
            for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves(before), strict=True):
                assert np.asarray(a).tobytes() == b.tobytes()
        history.append((bool(finite), float(scale.scale), float(loss)))
    return params, state, history


@pytest.mark.long("more kinds of steps")
def test_dynamic_scale_skips_inside_and_gives_the_numbers_of_the_choice_outside():
    tx, dtype = jo.offload(jo.with_master_params(ADAMW), min_bytes=1024), jnp.float16
    runs = {
        way: scaled_training(tx, jax.tree.map(jnp.copy, parameters(dtype)), 28, way)
        for way in ("skip", "update", "outside")
    }
    params, state, history = runs["skip"]
    finite, scales = [f for f, _, _ in history], [s for _, s, _ in history]
    assert not finite[0] and any(finite) and any(b > a for a, b in itertools.pairwise(scales))
    for k, (ok, after) in enumerate(zip(finite, scales, strict=True)):
        before = scales[k - 1] if k else 2.0**22
        assert after == before / 2 if not ok else after in (before, 2 * before)
    assert int(optax.tree.get(state, "count")) == sum(finite)  # the count waits too
    for way in "update", "outside":
        other, _, same = runs[way]
        assert [f for f, _, _ in same] == finite and [s for _, s, _ in same] == scales
        for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_a_leaf_that_an_update_widens(through):
    """As dadapt_adamw does in float16: the types are those of the update, whether it is skipped or not."""

    def moved(u, s, p=None):
        return u, jax.tree.map(lambda b: b.astype(jnp.float32) + 1, s)

    inner = optax.GradientTransformation(optax.tree.ones_like, moved)
    params = jax.device_put({"w": jnp.ones((8, 16), jnp.float16)}, jax.devices()[0])
    tx = jo.offload(inner, min_bytes=0)

    @jax.jit
    def step(params, state, skip):
        if through == "update_params":
            return jo.update_params(tx, params, state, params, skip=skip)
        return tx.update(params, state, params, skip=skip)

    for skip, value in (True, 1), (False, 2):
        new, state = step(params, tx.init(params), np.bool_(skip))
        assert state["w"].dtype == jnp.float32 and state["w"].sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(state["w"], np.full((8, 16), value, np.float32))
        kept = np.float16(1 if through == "update_params" else 0)
        assert not skip or np.array_equal(new["w"], np.full((8, 16), kept))
