"""to_plain and from_plain: to the state of plain optax and back, or to another format."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.test_storage import ADAM_STORAGE, ADAMW, HOST, encoded, gradients, parameters


@pytest.mark.parametrize(("storage", "given"), [("int8", False), *((name, True) for name in ADAM_STORAGE)])
def test_to_plain_and_back(storage, given):
    params = parameters()
    tx = jo.offload(ADAMW, storage=ADAM_STORAGE[storage], min_bytes=1024)
    state = jax.jit(tx.update)(gradients(params), tx.init(params), params)[1]
    bare = jo.to_plain(tx, state)
    like = ADAMW.init(params)
    assert jax.tree.structure(bare) == jax.tree.structure(like)
    for x, y in zip(jax.tree.leaves(bare), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert bare[1][0].mu["layers"].sharding.memory_kind == HOST
    again = jo.from_plain(tx, bare, params if given else None)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(again.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.sharding == y.sharding and x.sharding.memory_kind == y.sharding.memory_kind
    # and goes on, in plain optax and in another format
    updates, _ = jax.jit(ADAMW.update)(gradients(params), jo.to_device(bare), params)
    other = jo.offload(ADAMW, storage="bfloat16", min_bytes=1024)
    new = jo.from_plain(other, bare, params)
    got, _ = jax.jit(other.update)(gradients(params), new, params)
    assert float(optax.tree.norm(optax.tree.sub(got, updates))) < 0.01 * float(optax.tree.norm(updates))


def test_conversion_through_chains_under_jit_and_of_float32():
    params = parameters()
    tx = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(optax.adamw(1e-2), storage="bfloat16", min_bytes=1024))
    state = tx.init(params)
    bare = jo.to_plain(tx, state)
    assert jax.tree.structure(bare) == jax.tree.structure(ADAMW.init(params))
    under = jax.jit(lambda s: jo.from_plain(tx, jo.to_plain(tx, s), params))(state)
    assert jax.tree.structure(under) == jax.tree.structure(state)
    assert all(x.values.sharding.memory_kind == HOST for x in encoded(under))
    same = jo.offload(ADAMW, min_bytes=1024)
    s = same.init(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(jo.to_plain(same, s)), jax.tree.leaves(s), strict=True))


def test_a_part_of_a_state():
    params = parameters()
    tx = jo.offload(ADAMW, storage="int8", min_bytes=1024)
    state = jax.jit(tx.update)(gradients(params), tx.init(params), params)[1]
    part, complete = jo.to_plain(tx, optax.tree.get(state, "mu")), jo.to_plain(tx, state)[1][0].mu
    for x, y in zip(jax.tree.leaves(part), jax.tree.leaves(complete), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_masters_want_the_parameters():
    params = parameters(jnp.bfloat16)
    tx = jo.offload(jo.with_master_params(ADAMW), storage="bfloat16", min_bytes=1024)
    bare = jo.to_plain(tx, tx.init(params))
    assert jax.tree.structure(bare) == jax.tree.structure(jo.with_master_params(ADAMW).init(params))
    with pytest.raises(ValueError, match=r"state: not a plain state of tx(.|\n)*masters(.|\n)*: pass params"):
        jo.from_plain(tx, bare)
    jo.from_plain(tx, bare, params)


def test_bad_input():
    params = parameters()
    tx = jo.offload(ADAMW, storage="int8", min_bytes=1024)
    with pytest.raises(ValueError, match="state: is stored, not plain"):
        jo.from_plain(tx, tx.init(params), params)
    with pytest.raises(ValueError, match="state: not a plain state of tx"):
        jo.from_plain(tx, optax.sgd(1.0).init(params), params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, ADAMW.init(params))
    with pytest.raises(ValueError, match=r"a leaf is bfloat16\[.*tx has float32"):
        jo.from_plain(tx, half, params)
