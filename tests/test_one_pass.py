"""Kernels of one pass, which the host's cores run where numba is installed: their numbers, and whose memory they write.

Special numbers pass through an optimizer whose new state is any expression of a gradient, a parameter and a scalar.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo

numba = pytest.importorskip("numba", reason="without numba updates on the cores are XLA's")

# What LLVM contracts counts in the last bit: the plain step as it is outside of tests, whose flags are in conftest.py.
AS_EVER = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
SPECIAL = np.array([0.0, -0.0, 1.0, -2.5, 1e30, -3e38, np.inf, -np.inf, np.nan, 1e-3, 65504.5, 1.00390625], np.float32)
ODD = np.resize(SPECIAL, 2**16 * 2 + 5)  # three parts, the last a small one
_rates = itertools.count(1)


def rate(about):
    """A learning rate that no other test has, so that its kernel is compiled anew."""
    return about * (1 + next(_rates) / 1024)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that numba compiles."""
    compiled, njit = [], numba.njit

    def recorded(*args, **options):
        if args and isinstance(args[0], str):
            compiled.append(args[0])
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", recorded)
    return compiled


def on_the_cores(fun, x, y, s, dtype=None):
    """``fun`` of two arrays and a scalar, as an optimizer's new state, beside the same under ``jax.jit``."""

    def init(params):
        return jnp.zeros(params.shape, dtype or params.dtype)

    def update(grads, state, params, *, s):
        zero = jnp.zeros((), state.dtype)  # the state is read, or the cores have no part in the update
        return grads, jnp.where(state == zero, fun(grads, params, s), state)

    tx = jo.offload(optax.GradientTransformationExtraArgs(init, update), min_bytes=0, update_on="host")
    x, y, s = (jax.device_put(each, jax.devices()[0]) for each in (x, y, s))
    step = jo.jit(lambda p, state, g, s: tx.update(g, state, p, s=s)[1])
    return np.asarray(jo.to_device(step(y, tx.init(y), x, s))), np.asarray(jax.jit(fun)(x, y, s))


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_special_numbers(name, dtype, kernels):
    """In bfloat16 to the last bit: rounded after each operation, with scalars in bfloat16 too."""
    x, y = ODD.astype(dtype), np.roll(ODD, 5).astype(dtype)
    got, want = on_the_cores(EXPRESSIONS[name], x, y, dtype(1.5))
    if name == "powers" and dtype == jnp.bfloat16:
        assert not kernels  # which are XLA's
        return
    assert len(kernels) == 1 and got.dtype == dtype
    got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6 if dtype == jnp.float32 else 0)
    assert np.all((np.signbit(got) == np.signbit(want)) | np.isnan(got))


@pytest.mark.parametrize(
    "rounded", [lambda x, y, s: x.astype(jnp.bfloat16), lambda x, y, s: jax.lax.reduce_precision(x, 8, 7)]
)
def test_bfloat16_is_rounded_as_xla_rounds(rounded, kernels):
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), SPECIAL])
    got, want = on_the_cores(rounded, x, x, np.float32(0), jax.eval_shape(rounded, x, x, x).dtype)
    assert len(kernels) == 1
    normal = np.isnan(x) | (abs(x) >= np.finfo(np.float32).tiny) | (x == 0)  # XLA's threads flush the others to zero
    np.testing.assert_array_equal(got[normal].astype(np.float32), want[normal].astype(np.float32))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y, s: jnp.cumsum(x),
        lambda x, y, s: jnp.exp(x),
        lambda x, y, s: x.astype(jnp.float16).astype(jnp.float32),
        lambda x, y, s: x.astype(jnp.int32).astype(jnp.float32),
        lambda x, y, s: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    ],
)
def test_what_is_not_elementwise_is_left_to_xla(fun, kernels):
    got, want = on_the_cores(fun, np.arange(1.0, 9.0, dtype=np.float32), np.ones(8, np.float32), np.float32(1))
    assert not kernels
    np.testing.assert_allclose(got, want, rtol=1e-6)


def parameters(dtype=jnp.float32):
    w = {k: jax.random.normal(jax.random.key(n), shape).astype(dtype) for n, (k, shape) in enumerate(SHAPES.items())}
    return jax.device_put(w, jax.devices()[0])


SHAPES = {"a": (300, 500), "b": (64, 64), "c": (300, 500)}
CLIPPED = lambda lr: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(lr))  # noqa: E731


def addresses(tree):
    shards = [shard.data for x in jax.tree.leaves(tree) if x.ndim for shard in x.addressable_shards]
    return [shard.unsafe_buffer_pointer() for shard in shards]


STEPS = {  # an optimizer by its learning rate, the parameters' dtype, donated, divided
    "clipped, divided": (CLIPPED, jnp.float32, True, True),
    "clipped, not donated": (CLIPPED, jnp.float32, False, False),
    "masters": (lambda lr: jo.with_master_params(optax.adamw(lr)), jnp.bfloat16, True, False),
    "bfloat16": (optax.adamw, jnp.bfloat16, True, False),
    "moments of bfloat16": (lambda lr: optax.adamw(lr, mu_dtype=jnp.bfloat16), jnp.float32, True, False),
}


@pytest.mark.oldest("views of host memory, and what jax says of donation")
@pytest.mark.parametrize("name", STEPS)
def test_values_placement_and_buffers(name, kernels):
    """A kernel writes each shard in place; bfloat16 leaves equal plain optax bit for bit.

    tests/test_equivalence.py covers other optimizers.
    """
    make, dtype, donated, divided = STEPS[name]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    place = NamedSharding(mesh, PartitionSpec(None, "x")) if divided else jax.devices()[0]
    inner = make(rate(1e-2))
    tx = jo.offload(inner, min_bytes=0, update_on="host")
    ours = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1) if donated else ())
    plain = jax.jit(lambda p, s, g: jo.update_params(inner, g, s, p), compiler_options=AS_EVER)
    params, want = (jax.device_put(parameters(dtype), place, may_alias=False) for _ in range(2))
    state, resident = tx.init(params), inner.init(want)
    for k in range(3):
        grads = jax.tree.map(lambda p, k=k: (jnp.sin(p) + k).astype(dtype) / 8, want)
        before = addresses((params, state))
        held = jax.tree.map(np.array, jo.to_device((params, state)))
        old = params, state
        params, state = ours(params, state, grads)
        want, resident = plain(want, resident, grads)
        assert (before == addresses((params, state))) == donated
        if not donated:
            jax.tree.map(np.testing.assert_array_equal, jo.to_device(old), held)
    assert len(kernels) == 1  # for leaves of all shapes, and all steps
    for got, right in zip(jax.tree.leaves((params, state)), jax.tree.leaves((want, resident)), strict=True):
        a, b = np.asarray(got), np.asarray(right)
        if got.dtype == jnp.bfloat16:
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
        else:
            assert a.dtype == b.dtype and np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim} == {"pinned_host"}
    assert all(jax.typeof(p).memory_space == jax.memory.Space.Device for p in jax.tree.leaves(params))


@pytest.mark.oldest("layouts of arrays")
@pytest.mark.parametrize("donated", [(0, 1), ()])
def test_arrays_of_another_layout_are_read_as_they_are(donated, kernels):
    """Column by column, as a compiler may choose it."""
    inner = optax.adamw(rate(1e-2))
    tx, params = jo.offload(inner, min_bytes=0, update_on="host"), parameters()
    columns = Format(Layout(major_to_minor=(1, 0)), params["a"].sharding)
    params = {name: jax.device_put(x, columns) for name, x in params.items()}
    state, given = tx.init(params), jax.tree.map(jnp.copy, params)
    got, _ = jo.jit(lambda p, s: jo.update_params(tx, jax.tree.map(jnp.sin, p), s, p), donate_argnums=donated)(
        jax.tree.map(lambda x: jax.device_put(x, columns), given), state
    )
    want, _ = jax.jit(lambda p: jo.update_params(inner, jax.tree.map(jnp.sin, p), inner.init(p), p))(params)
    assert kernels
    for name in SHAPES:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_memory_that_is_not_ours_is_not_written(kernels):
    """On a CPU, ``device_put`` takes a NumPy array as it is: donated or not, it stays the user's."""
    raw = np.empty(64 * 64 * 4 + 64, np.uint8)
    mine = raw[-raw.ctypes.data % 64 :][: 64 * 64 * 4].view(np.float32).reshape(64, 64)
    mine[:] = 2.0
    given = {"w": jax.device_put(mine, jax.devices()[0], may_alias=True)}
    assert given["w"].unsafe_buffer_pointer() == mine.ctypes.data
    tx = jo.offload(optax.adam(rate(0.1)), min_bytes=0, update_on="host")
    step = jo.jit(lambda p, s: jo.update_params(tx, jax.tree.map(jnp.sin, p), s, p), donate_argnums=(0, 1))
    params, _ = step(given, tx.init(given))
    assert kernels and np.all(mine == 2.0) and np.all(np.asarray(params["w"]) < 2.0)


@pytest.mark.parametrize("after", [True, False])
def test_old_parameters_that_are_still_read(after, kernels):
    """By the update of another leaf, and by what follows: neither is written over before."""
    inner = optax.adam(rate(0.1))
    tx = jo.offload(inner, min_bytes=0, update_on="host")

    def crossed(params):
        return {"a": params["c"], "b": 2 * params["b"], "c": params["a"]}

    def step(params, state):
        new, state = jo.update_params(tx, crossed(params), state, params)
        return new, state, jax.tree.map(jnp.subtract, new, params) if after else None

    params = parameters()
    updates, _ = inner.update(crossed(params), inner.init(params), params)
    got, _, change = jo.jit(step, donate_argnums=(0, 1))(jax.tree.map(jnp.copy, params), tx.init(params))
    assert kernels
    for name in SHAPES:
        np.testing.assert_allclose(got[name], params[name] + updates[name], rtol=1e-5, atol=1e-6)
        if after:
            np.testing.assert_allclose(change[name], updates[name], rtol=1e-4, atol=1e-5)


def test_memory_is_written_when_whoever_reads_it_has_ended(kernels):
    """A program that reads the donated parameters is under way, and still reads the old ones."""

    @jax.jit
    def slow(params):
        y = jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y @ y), jnp.ones((256, 256)))
        return jax.tree.map(lambda x: x + 0 * y.sum(), params)

    tx = jo.offload(optax.adam(rate(0.1)), min_bytes=0, update_on="host")
    step = jo.jit(lambda p, s: jo.update_params(tx, jax.tree.map(jnp.cos, p), s, p), donate_argnums=(0, 1))
    params, state = step(parameters(), tx.init(parameters()))
    before = jax.tree.map(np.array, params)
    read = slow(params)
    params, state = step(params, state)
    assert kernels
    jax.tree.map(np.testing.assert_array_equal, read, before)


def test_without_numba(tmp_path):
    """XLA's programs run, also where numba refuses NumPy. It is looked for once, so this asks another interpreter."""
    import subprocess

    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.0 or less')")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import jax, jax.numpy as jnp, numpy as np, optax
import jax_offload as jo
tx, params = jo.offload(optax.adam(0.1), min_bytes=0, update_on="host"), dict(w=jnp.ones((64, 64)))
params = jax.device_put(params, jax.devices()[0])
got, state = jo.jit(lambda p, s: jo.update_params(tx, p, s, p))(params, tx.init(params))
np.testing.assert_allclose(got["w"], 0.9, rtol=1e-5)
assert state[0].mu["w"].sharding.memory_kind == "pinned_host"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
