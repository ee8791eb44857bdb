"""Master parameters: the model's parameters are always their rounding, and nothing that was changed is reverted."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jax_offload as jo
from tests.support.trees import assert_close, gradients

HOST = "pinned_host"
DTYPES = {"bfloat16": (jnp.bfloat16, 15), "float16": (jnp.float16, 12)}  # and how far exponents may be apart
ADAMW = optax.adamw(1e-2)


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[np.asarray(x).dtype.itemsize])


def parameters(dtype=jnp.bfloat16):
    w = jax.random.normal(jax.random.key(0), (6, 16, 32))
    params = {"layers": w.astype(dtype), "embed": (w[0] * 0.1).astype(dtype), "norm": jnp.ones(32)}
    return jax.device_put(params, jax.devices()[0])


def masters(state):
    (node,) = (x for x in jax.tree.leaves(state, is_leaf=is_master) if is_master(x))
    return node.master


def is_master(x):
    return hasattr(x, "master")


def to(master):
    """An optimizer whose update leads any master to ``master``: the bits decide, not an optimizer's arithmetic."""

    def update(updates, state, params=None):
        del updates
        return jax.tree.map(lambda p: jnp.where(p == master, 0, master - p), params), state

    return optax.GradientTransformation(lambda p: optax.EmptyState(), update)


@functools.cache
def landing(low_bits):
    """One step from a parameter to a master, compiled once for all examples."""

    def step(p, master):
        tx = jo.with_master_params(to(master), low_bits=low_bits)
        updates, state = tx.update({"w": p}, tx.init({"w": p}), {"w": p})
        return optax.apply_updates({"w": p}, updates)["w"], state.master["w"]

    return jax.jit(step)


ties = st.one_of(  # halfway between two neighbors of bfloat16, of float16, and of its subnormal numbers
    st.integers(0, 2**16 - 1).map(lambda k: k << 16 | 0x8000),
    st.integers(0, 2**19 - 1).map(lambda k: k << 13 | 0x1000),
    st.integers(0, 2**10 - 1).map(lambda k: int(np.float32((k + 0.5) * 2.0**-24).view(np.uint32))),
)
words = st.one_of(st.integers(0, 2**32 - 1), ties)
patterns = st.lists(st.tuples(st.integers(0, 2**16 - 1), words), min_size=64, max_size=64)
# the message names the wrong numbers among the 64, so nothing is gained by shrinking the list, which takes minutes
EXAMPLES = settings(max_examples=60, deadline=None, phases=[Phase.generate])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.daily("subnormal numbers"))])
@EXAMPLES
@given(patterns)
def test_a_parameter_lands_on_its_rounded_master(dtype, examples):
    """Whatever the bits, within the bound that the docs give."""
    dtype, reach = DTYPES[dtype]
    p = np.array([a for a, _ in examples], np.uint16).view(dtype)
    wanted = np.array([b for _, b in examples], np.uint32).view(np.float32)
    new, master = (np.asarray(x) for x in landing(False)(p, wanted))
    # the master that the update made: its own float32 arithmetic has rounded it
    target = np.asarray(jnp.asarray(master).astype(dtype))
    a, b, c = (np.float32(x) for x in (p, target, new))
    same = (bits(new) == bits(target)) | (np.isnan(b) & np.isnan(c))
    normal = ml_dtypes.finfo(dtype).tiny
    with np.errstate(over="ignore", invalid="ignore"):
        within = (np.abs(a) < 2.0**reach * np.abs(b)) | (b == 0)
        within &= np.isfinite(a) & np.isfinite(b) & np.isfinite(np.float32(b - a))
        within &= ((np.abs(a) >= normal) | (a == 0)) & ((np.abs(b) >= normal) | (b == 0))
    same |= ~within | ((b == 0) & (c == 0))  # with zero the sign may differ: p + (-p) is +0
    assert same.all(), (p[~same], master[~same], new[~same])


@EXAMPLES
@given(patterns)
def test_the_low_bits_and_the_parameter_are_the_master(examples):
    p = np.array([a for a, _ in examples], np.uint16).view(jnp.bfloat16)
    wanted = np.array([b for _, b in examples], np.uint32).view(np.float32)
    new, low = (np.asarray(x) for x in landing(True)(p, wanted))
    joined = ((bits(new).astype(np.int64) << 16) + low).astype(np.uint32).view(np.float32)
    a, b = np.float32(p), np.float32(new)
    with np.errstate(over="ignore", invalid="ignore"):
        # what the update made: float32(p + float32(wanted - p))
        updated = np.where(a == wanted, a, a + np.float32(wanted - a)).astype(np.float32)
        reachable = np.isfinite(updated) & np.isfinite(np.float32(b - a)) & np.isfinite(a)
        reachable &= np.abs(a) < 2.0**15 * np.abs(b)
        for x in updated, a, wanted - a, b - a:  # a CPU flushes subnormal numbers
            reachable &= (np.abs(x) > 1e-37) | (x == 0)
    assert (bits(joined) == bits(updated))[reachable].all()
    away = ((bits(updated).astype(np.int64) + 0x8000) >> 16).astype(np.uint16)  # to nearest, ties away from zero
    assert (bits(new) == away)[reachable].all()


@pytest.mark.oldest("masters, step by step")
@pytest.mark.parametrize(("low_bits", "window"), [(False, 6000), (True, None)])
def test_masters_are_the_parameters_of_a_step_in_float32(low_bits, window):
    """As by ``update``, so by ``update_params``; offloaded or not: tests/test_equivalence.py."""
    inner = optax.adamw(1e-2, weight_decay=10.0)  # so that it matters which parameters it is given
    tx = jo.offload(jo.with_master_params(inner, low_bits=low_bits), min_bytes=1024, window=window)
    params = own = parameters()
    plain = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, own_state, plain_state = tx.init(params), tx.init(params), inner.init(plain)
    step, plain_step = (
        jax.jit(lambda g, s, p, tx=tx: (optax.apply_updates(p, (new := tx.update(g, s, p))[0]), new[1]))
        for tx in (tx, inner)
    )
    for k in range(5):
        grads = gradients(params, k)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        own, own_state = jo.update_params(tx, gradients(own, k), own_state, own)
        params, state = step(grads, state, params)
        plain, plain_state = plain_step(wide, plain_state, plain)
    kept = masters(state)
    for name in "layers", "embed":
        master = np.asarray(kept[name])
        if low_bits:
            high = bits(params[name]).astype(np.int64) << 16
            master = (high + master).astype(np.uint32).view(np.float32)
        np.testing.assert_allclose(master, plain[name], rtol=1e-5, atol=1e-6)
        assert low_bits or (np.asarray(params[name]) == master.astype(jnp.bfloat16)).all()
        assert kept[name].sharding.memory_kind == HOST and kept[name].dtype == (jnp.int16 if low_bits else jnp.float32)
        assert params[name].dtype == jnp.bfloat16 and params[name].sharding.memory_kind == "device"
    assert isinstance(kept["norm"], optax.MaskedNode) and params["norm"].dtype == jnp.float32  # precise enough
    assert_close((own, own_state), (params, state), 1e-5)


@pytest.mark.parametrize("low_bits", [False, True])
def test_a_parameter_that_was_changed_is_followed_and_the_others_keep_their_masters(low_bits):
    tx = jo.offload(jo.with_master_params(optax.sgd(0.0), low_bits=low_bits), min_bytes=0)
    params = parameters()
    state = tx.init(params)
    tiny = jo.offload(jo.with_master_params(optax.sgd(1.0), low_bits=low_bits), min_bytes=0)
    nudge = jax.tree.map(lambda p: jnp.full_like(p, 1e-5), params)
    params, state = jax.jit(lambda p, s: jo.update_params(tiny, nudge, s, p))(params, state)
    loaded = {**params, "layers": params["layers"].at[2].set(0.5)}  # weights loaded into one layer
    new, after = jax.jit(lambda p, s: jo.update_params(tx, nudge, s, p))(loaded, state)
    assert (new["layers"] == loaded["layers"]).all()  # not reverted
    if not low_bits:
        before, now = np.asarray(masters(state)["layers"]), np.asarray(masters(after)["layers"])
        assert (now[2].astype(jnp.bfloat16) == 0.5).all()
        assert (now[2] == 0.5).mean() > 0.9  # of the others the master was there already
        untouched = np.arange(6) != 2
        assert (now[untouched] == before[untouched]).all()
        assert (now[0] != np.float32(loaded["layers"])[0]).any()  # more precise than the parameter: it was kept


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, np.nan])
@pytest.mark.parametrize("low_bits", [False, True])
def test_whatever_a_parameter_is_set_to_stays_a_number_or_none(low_bits, value):
    tx = jo.offload(jo.with_master_params(optax.sgd(1e-3, momentum=0.9), low_bits=low_bits), min_bytes=0)
    params = parameters()
    state, step = tx.init(params), jax.jit(lambda p, s, g: jo.update_params(tx, g, s, p))
    for k in range(3):
        params, state = step(params, state, gradients(params, k))
    params, _ = step(jax.tree.map(lambda p: jnp.full_like(p, value), params), state, gradients(params))
    assert (np.isfinite(np.float32(params["layers"])) == np.isfinite(value)).all()


def test_a_zero_of_the_other_sign_is_no_change():
    """A float16 parameter that stays zero while its master grows from below: 0 + -0 is +0."""
    tx = jo.offload(jo.with_master_params(optax.sgd(1.0)), min_bytes=0)
    params = {"w": jnp.zeros((4, 8), jnp.float16)}
    state, grads = tx.init(params), {"w": jnp.full((4, 8), 1e-8)}
    for _ in range(20):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(masters(state)["w"], -2e-7, rtol=1e-5)


BEHIND = {  # the transformation behind the masters, and the storage of moments
    "all": (optax.scale(0.5), None),
    "decay": (optax.add_decayed_weights(0.1), "bfloat16"),
    "one of two": (optax.masked(optax.scale(0.5), {"w": True, "v": False, "b": False}), None),
    "masters": (jo.with_master_params(optax.scale(0.5)), None),
}


@pytest.mark.parametrize(("after", "storage"), BEHIND.values(), ids=BEHIND)
@pytest.mark.filterwarnings("ignore:offload:UserWarning")
def test_masters_have_the_last_word_in_a_chain(after, storage):
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "v": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4)}
    chains = (
        optax.chain(jo.with_master_params(ADAMW), after),
        optax.MultiSteps(optax.chain(optax.clip(1.0), jo.with_master_params(ADAMW, low_bits=True), after), 2),
    )
    for inner in chains:
        tx = jo.offload(inner, min_bytes=0, storage=storage)
        for update in (tx.update, lambda *args, tx=tx: jo.update_params(tx, *args)):
            with pytest.raises(ValueError, match=r"inner: a chain changes .* jo.with_master_params\(optax.chain\("):
                update(params, tx.init(params), params)


@pytest.mark.filterwarnings("ignore:offload:UserWarning")
def test_what_hands_the_updates_of_masters_on_may_stand_behind_them():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "v": jnp.ones((4, 4), jnp.bfloat16)}
    both = [
        optax.masked(jo.with_master_params(optax.sgd(1.0)), mask)
        for mask in ({"w": True, "v": False}, {"w": False, "v": True})
    ]
    seeing = jo.with_master_params(optax.sgd(1.0))
    for inner in (
        optax.chain(seeing, optax.identity()),
        optax.chain(*both),
        optax.chain(optax.scale(0.5), optax.MultiSteps(seeing, 2).gradient_transformation()),
        optax.chain(seeing),
    ):
        tx = jo.offload(inner, min_bytes=0)
        jo.update_params(tx, params, tx.init(params), params)


def test_bad_input():
    with pytest.raises(TypeError, match=r"offload\(\.\.\.\) goes outside"):
        jo.with_master_params(jo.offload(ADAMW))
    around = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW, min_bytes=0))
    inside, params = jo.with_master_params(around), parameters()
    resident = jo.with_master_params(optax.chain(optax.clip_by_global_norm(1.0), ADAMW)).init(params)
    for wrong in inside.init, lambda params: inside.update(params, resident, params):
        for call in wrong, jax.jit(wrong):
            with pytest.raises(TypeError, match=r"jo\.offload\(jo\.with_master_params\(inner\)\)"):
                call(params)
    with pytest.raises(TypeError, match="inner: expected an optax"):
        jo.with_master_params(lambda x: x)
    for wrong in jnp.int32, "float33":
        with pytest.raises(ValueError, match="dtype: expected a floating"):
            jo.with_master_params(ADAMW, wrong)
    with pytest.raises(ValueError, match="masters of float16 have not the range of a parameter of bfloat16"):
        jo.with_master_params(ADAMW, jnp.float16).init(parameters())
    with pytest.raises(TypeError, match=r"with_master_params.* already"):
        jo.with_master_params(jo.with_master_params(ADAMW))
    with pytest.raises(ValueError, match="low_bits: expected True or False; got 'yes'"):
        jo.with_master_params(optax.adam(1e-3), low_bits="yes")
    with pytest.raises(ValueError, match="low_bits: completes bfloat16 to float32"):
        jo.with_master_params(ADAMW, jnp.bfloat16, low_bits=True)
    with pytest.raises(ValueError, match="got one of float16"):
        jo.with_master_params(ADAMW, low_bits=True).init(parameters(jnp.float16))
    tx = jo.with_master_params(ADAMW)
    params = parameters()
    with pytest.raises(ValueError, match="params: with_master_params needs them"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="its masters do not fit parameters"):
        tx.update({"w": params["embed"]}, tx.init(params), {"w": params["embed"]})
