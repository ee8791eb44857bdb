"""Loops of one pass, which the cores run where numba is installed: their numbers, and whose memory they write."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._drive import one_pass as module
from jax_offload._drive.loop_source import as_scalar, loop_source
from jax_offload._drive.loops import _compiled, aligned, fair_share, has_numba

if not has_numba():
    pytest.skip("numba is not installed: updates on the cores are XLA's", allow_module_level=True)

# What LLVM contracts counts in the last bit: the plain step as it is outside of tests, whose flags are in conftest.py.
AS_EVER = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
SPECIAL = np.array([0.0, -0.0, 1.0, -2.5, 1e30, -3e38, np.inf, -np.inf, np.nan, 1e-3, 65504.5, 1.00390625], np.float32)
ODD = np.resize(SPECIAL, 2**16 * 2 + 5)  # three parts, the last a small one


def by_loop(fun, *arrays):
    """``fun`` of flat arrays of one shape and scalars, by its loop."""
    jaxpr, _ = jaxpr_of(fun, *arrays)
    source = loop_source(jaxpr.jaxpr, {})
    assert source is not None
    results = [aligned(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.outvars]
    flat = [np.asarray(arrays[i]) for i in source.arrays]
    flat = [x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for x in flat]
    scalars = [as_scalar(arrays[i]) for i in source.scalars]
    _compiled(source.text, source.types)(0, flat[0].size, *flat, *results, *scalars)
    return [x.view(v.aval.dtype) for x, v in zip(results, jaxpr.jaxpr.outvars, strict=True)]


EXPRESSIONS = {
    "arithmetic": lambda x, y, s: x * 3 - y / (s + jnp.square(x)) + abs(-y),
    "roots": lambda x, y, s: jnp.sqrt(abs(x)) + jax.lax.rsqrt(abs(y) + s),
    "powers": lambda x, y, s: x**2 - y**3 + x**4,
    "sign": lambda x, y, s: jnp.sign(x) * s,
    "maximum": lambda x, y, s: jnp.maximum(x, y),
    "minimum": lambda x, y, s: jnp.minimum(x, s),
    "clamp": lambda x, y, s: jnp.clip(x, -1.0, s),
    "where": lambda x, y, s: jnp.where((x > y) & ~(x == s) | jnp.isnan(y), x, jnp.zeros_like(y)),
    "finite": lambda x, y, s: jnp.where(jnp.isfinite(x), 1.0, y),
    "nan_to_num": lambda x, y, s: jnp.nan_to_num(x),
    "comparisons": lambda x, y, s: jnp.where((x >= y) ^ (x < s) ^ (y <= s), x, y),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_special_numbers(name):
    x, y, s = ODD, np.roll(ODD, 5), np.float32(1.5)
    (got,), want = by_loop(EXPRESSIONS[name], x, y, s), jax.jit(EXPRESSIONS[name])(x, y, s)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    same_sign = np.signbit(got) == np.signbit(np.asarray(want))
    assert np.all(same_sign | np.isnan(got))


def test_bfloat16_is_rounded_as_xla_rounds():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), SPECIAL])

    def both(x):
        low = x.astype(jnp.bfloat16)
        return low, low.astype(jnp.float32), jax.lax.reduce_precision(x, 8, 7)

    low, back, reduced = by_loop(both, x)
    want = np.asarray(jnp.asarray(x).astype(jnp.bfloat16))
    normal = np.isnan(x) | (abs(x) >= np.finfo(np.float32).tiny) | (x == 0)  # XLA's threads flush the others to zero
    np.testing.assert_array_equal(low[normal].astype(np.float32), want[normal].astype(np.float32))
    np.testing.assert_array_equal(back[normal], want[normal].astype(np.float32))
    np.testing.assert_array_equal(reduced[normal], want[normal].astype(np.float32))


@pytest.mark.parametrize("name", [name for name in EXPRESSIONS if name != "powers"])
def test_arithmetic_in_bfloat16_is_xlas(name):
    """To the last bit: rounded after each operation, with scalars in bfloat16 too."""
    x, y = ODD.astype(jnp.bfloat16), np.random.default_rng(0).permutation(ODD).astype(jnp.bfloat16)
    (got,), want = by_loop(EXPRESSIONS[name], x, y, s := jnp.bfloat16(1.5)), jax.jit(EXPRESSIONS[name])(x, y, s)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x / jnp.sum(x),
        lambda x: x[::-1],
        jnp.exp,
        lambda x: x.astype(jnp.float16),
        lambda x: (x.astype(jnp.bfloat16) ** 3).astype(jnp.float32),
        lambda x: x.astype(jnp.int32),
        lambda x: x**-1,
        lambda x: x[:4],
        lambda x: x.reshape(2, -1),
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    ],
)
def test_what_is_no_loop(fun):
    jaxpr, _ = jaxpr_of(fun, jnp.ones(8))
    assert loop_source(jaxpr.jaxpr, {}) is None


@pytest.fixture
def loops(monkeypatch):
    """Counts the pieces that ran as loops."""
    ran = []
    started = module._started
    monkeypatch.setattr(module, "_started", lambda *args: ran.append(args) or started(*args))
    return ran


def parameters(dtype=jnp.float32):
    w = {k: jax.random.normal(jax.random.key(n), shape).astype(dtype) for n, (k, shape) in enumerate(SHAPES.items())}
    return jax.device_put(w, jax.devices()[0])


SHAPES = {"a": (300, 500), "b": (64, 64), "c": (300, 500)}
OPTIMIZERS = {
    "adamw": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), jnp.float32),
    "momentum": (optax.sgd(1e-2, momentum=0.9, nesterov=True), jnp.float32),
    "lion": (optax.lion(1e-4), jnp.float32),
    "amsgrad": (optax.amsgrad(1e-3), jnp.float32),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), jnp.float32),
    "masters": (jo.with_master_params(optax.adamw(1e-3)), jnp.bfloat16),
}


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_placement_and_buffers(name, donated, loops):
    inner, dtype = OPTIMIZERS[name]
    tx = jo.offload(inner, min_bytes=0, update_on="host")

    def step_of(tx):
        def step(params, state, grads):
            return jo.update_params(tx, grads, state, params)

        return step

    ours = jo.jit(step_of(tx), donate_argnums=(0, 1) if donated else ())
    plain = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*inner.update(g, s, p)))
    params, want = parameters(dtype), parameters(dtype)
    state, resident = tx.init(params), inner.init(want)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: (p + k).astype(p.dtype) / 8, parameters(dtype))
        before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.ndim]
        held = jax.tree.map(np.array, jo.to_device((params, state)))
        old = params, state
        params, state = ours(params, state, grads)
        want, resident = plain(want, resident, grads)
        after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.ndim]
        assert (before == after) == donated
        if not donated:
            jax.tree.map(np.testing.assert_array_equal, jo.to_device(old), held)
    assert len(loops) == 3 * len(SHAPES)
    for got, right in zip(jax.tree.leaves((params, state)), jax.tree.leaves((want, resident)), strict=True):
        a, b = np.asarray(got, np.float64), np.asarray(right, np.float64)
        assert np.linalg.norm(a - b) <= (1e-6 if got.dtype != jnp.bfloat16 else 4e-3) * np.linalg.norm(b)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim} == {"pinned_host"}
    assert all(jax.typeof(p).memory_space == jax.memory.Space.Device for p in jax.tree.leaves(params))


LOW = {
    "parameters": (optax.adamw(1e-2), jnp.bfloat16),
    "moments": (optax.adamw(1e-2, mu_dtype=jnp.bfloat16), jnp.float32),
}


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_leaves_are_those_of_plain_optax(name, loops):
    """Bit for bit, after three updates."""
    inner, dtype = LOW[name]
    tx = jo.offload(inner, min_bytes=0, update_on="host")
    ours = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
    plain = jax.jit(lambda p, s, g: jo.update_params(inner, g, s, p), compiler_options=AS_EVER)
    params, want = parameters(dtype), parameters(dtype)
    state, resident = tx.init(params), inner.init(want)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: (jnp.sin(p) + k).astype(dtype) / 8, want)
        params, state = ours(params, state, grads)
        want, resident = plain(want, resident, grads)
    assert len(loops) == 3 * len(SHAPES)
    low = 0
    for got, right in zip(jax.tree.leaves((params, state)), jax.tree.leaves((want, resident)), strict=True):
        a, b = np.asarray(got), np.asarray(right)
        if got.dtype == jnp.bfloat16:
            low += 1
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert low == len(SHAPES) * (3 if dtype == jnp.bfloat16 else 1)


def test_memory_that_is_not_ours_is_not_written(loops):
    """On a CPU, ``device_put`` takes a NumPy array as it is: donated or not, it stays the user's."""
    mine = aligned((64, 64), jnp.float32)
    mine[:] = 2.0
    given = {"w": jax.device_put(mine, jax.devices()[0], may_alias=True)}
    assert given["w"].unsafe_buffer_pointer() == mine.ctypes.data
    tx = jo.offload(optax.adam(0.1), min_bytes=0, update_on="host")
    step = jo.jit(lambda p, s: jo.update_params(tx, jax.tree.map(jnp.sin, p), s, p), donate_argnums=(0, 1))
    params, _ = step(given, tx.init(given))
    assert loops and np.all(mine == 2.0) and np.all(np.asarray(params["w"]) < 2.0)


@pytest.mark.parametrize("after", [True, False])
def test_old_parameters_that_are_still_read(after, loops):
    """By the update of another leaf, and by what follows: neither is written over before."""
    tx = jo.offload(optax.adam(0.1), min_bytes=0, update_on="host")

    def crossed(params):
        return {"a": params["c"], "b": 2 * params["b"], "c": params["a"]}

    def step(params, state):
        new, state = jo.update_params(tx, crossed(params), state, params)
        return new, state, jax.tree.map(jnp.subtract, new, params) if after else None

    params, plain = parameters(), optax.adam(0.1)
    updates, _ = plain.update(crossed(params), plain.init(params), params)
    got, _, change = jo.jit(step, donate_argnums=(0, 1))(jax.tree.map(jnp.copy, params), tx.init(params))
    assert loops
    for name in SHAPES:
        np.testing.assert_allclose(got[name], params[name] + updates[name], rtol=1e-5, atol=1e-6)
        if after:
            np.testing.assert_allclose(change[name], updates[name], rtol=1e-4, atol=1e-5)


def test_memory_is_written_when_whoever_reads_it_has_ended(monkeypatch, loops):
    """What says whose memory it is waits for programs under way, and may copy; here it takes long."""

    def slowly(x):
        y = jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y @ y), jnp.ones((256, 256), x.dtype))
        return x + 0 * y.sum()

    view, early = module.view_of, []
    monkeypatch.setattr(module, "_same", lambda places: jax.jit(lambda *xs: tuple(map(slowly, xs))))
    monkeypatch.setattr(module, "view_of", lambda x: early.append(x) if not x.is_ready() else view(x))
    tx = jo.offload(optax.adam(0.1), min_bytes=0, update_on="host")
    params = parameters()
    jo.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))(params, tx.init(params))
    assert loops and not early


@pytest.mark.parametrize(
    ("masks", "threads"),
    [([[1, 1, 1, 1]], 4), ([[1, 1, 1, 1]] * 2, 2), ([[1, 1, 1, 1]] * 3, 1), ([[1, 1, 1, 1]] * 9, 1),
     ([[1, 1, 0, 0], [0, 0, 1, 1]], 2), ([[1, 1, 1, 0], [0, 1, 1, 1]], 2), ([[1, 0, 0, 0], [1, 1, 1, 1]], 1)],
)  # fmt: skip
def test_processes_of_a_host_share_its_cores(masks, threads):
    assert fair_share(np.array(masks[0]), np.array(masks)) == threads


def test_without_numba(monkeypatch, loops):
    monkeypatch.setitem(sys.modules, "numba", None)
    has_numba.cache_clear()
    try:
        tx = jo.offload(optax.adam(0.1), min_bytes=0, update_on="host")
        params = parameters()
        jo.jit(lambda p, s: jo.update_params(tx, p, s, p))(params, tx.init(params))
        assert not loops
    finally:
        monkeypatch.undo()
        has_numba.cache_clear()
