"""Slices, gates and loops keep the numbers: tiny windows force chunks, tails, and several leaves in flight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.jaxprs import inner_of
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import emitted
from jax_offload._plan import transfers as _chunking
from tests.support.rows import rows
from tests.support.trees import gradients

HOST = "pinned_host"
# XLA's passes are those of any program; only LLVM does less, and compiles in half the time.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def parameters(dtype=jnp.float32):
    shapes = {"stacked": (7, 8, 12), "embed": (97, 8), "flat": (2051,), "layers_2": (16, 16), "layers_10": (16, 16)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {name: jax.random.normal(k, shape, dtype) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return jax.device_put(params, jax.devices()[0])


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(1e-2), 3),
    "apply_if_finite of clip": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 3),
    "MultiSteps that skips": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "prodigy": optax.contrib.prodigy(1.0),
    "MultiSteps of clip": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2
    ).gradient_transformation(),
}


# One for each way in which an update can need other rows, other leaves, or numbers of its own.
DAILY = ["clip", "lion", "MultiSteps that skips", "apply_if_finite of clip", "adafactor", "lamb", "schedule_free"]


def close(a, b, dtype, scale=0.0):
    """Law 2. ``scale``: of the operands whose difference a result is, where rounding is relative to them."""
    if dtype == jnp.bfloat16:
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=1e-6)
    else:
        difference = np.linalg.norm(np.float64(a) - np.float64(b))
        assert difference <= 1e-6 * max(np.linalg.norm(np.float64(b)), scale)


@pytest.mark.long("more optimizers", but=["lamb-rows", "clip-bf16"])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        pytest.param(1, jnp.float32, id="rows"),
        pytest.param(500, jnp.bfloat16, id="bf16"),
        pytest.param(3000, jnp.float32, id="f32", marks=pytest.mark.exhaustive("as rows, in fewer chunks")),
    ],
)
@pytest.mark.parametrize("name", rows(OPTIMIZERS, "compiles three programs", daily=DAILY))
def test_one_update_equals_resident_whatever_the_window(name, window, dtype):
    inner, params = OPTIMIZERS[name], parameters(dtype)
    tx = jo.offload(inner, min_bytes=0, window=window)
    resident = inner.init(params)
    for _ in range(2):
        _, resident = jit(inner.update)(gradients(params), resident, params)
    expected = jit(inner.update)(gradients(params), resident, params)
    result = jit(tx.update)(gradients(params), jo.to_host(tx, resident, params), params)
    # schedule_free's updates are new minus old parameters: their rounding is that of the parameters
    scales = [float(jnp.linalg.norm(p.ravel())) if name == "schedule_free" else 0.0 for p in jax.tree.leaves(params)]
    if name == "lamb":  # the resident norm, one long sum, is off by 1.4e-6 itself; ours by less than 1e-7
        scales = [3 * float(jnp.linalg.norm(u.ravel())) for u in jax.tree.leaves(expected[0])]
    scales += [0.0] * len(jax.tree.leaves(resident))
    for a, b, scale in zip(jax.tree.leaves(result), jax.tree.leaves(expected), scales, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        close(a, b, dtype, scale)
    where = [leaf.host for leaf in jo.placement(tx, params).leaves]
    assert [x.sharding.memory_kind == HOST for x in jax.tree.leaves(result[1])] == where


@pytest.mark.parametrize("before", [0.0, 0.3, 0.6, 1.0])
def test_chunks_of_a_state_that_was_placed_otherwise(before):
    """One step brings every leaf home, also where only a part of a parameter's state has to be streamed for it."""
    params = parameters()
    other = jo.offload(OPTIMIZERS["adamw"], min_bytes=0, fraction=before)
    expected = None
    for fraction in (0.4, 1.0):
        tx = jo.offload(OPTIMIZERS["adamw"], min_bytes=0, window=500, fraction=fraction)
        result = jit(tx.update)(gradients(params), other.init(params), params)
        where = [leaf.host for leaf in jo.placement(tx, params).leaves]
        assert [x.sharding.memory_kind == HOST for x in jax.tree.leaves(result[1])] == where
        expected = expected or jit(OPTIMIZERS["adamw"].update)(
            gradients(params), OPTIMIZERS["adamw"].init(params), params
        )
        jax.tree.map(lambda a, b: close(a, b, a.dtype), result, expected)


@pytest.mark.parametrize(
    "name",
    rows(["adamw", "clip", "MultiSteps", "apply_if_finite of clip", "lion"], "100 steps", daily=["clip", "MultiSteps"]),
)
def test_fifty_donated_steps_follow_the_resident_run(name):
    inner = OPTIMIZERS[name]

    def losses(tx):
        def step(params, state):
            loss, grads = jax.value_and_grad(lambda p: sum((x**2).mean() for x in jax.tree.leaves(p)))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        step = jit(step, donate_argnums=(0, 1))
        params, values = parameters(), []
        state = tx.init(params)
        for _ in range(50):
            params, state, loss = step(params, state)
            values.append(float(loss))
        return values

    np.testing.assert_allclose(losses(jo.offload(inner, min_bytes=0, window=700)), losses(inner), rtol=1e-4)


def loops(fun, *args):
    """How many loops over host buffers the traced function has."""
    text = str(emitted(jax.make_jaxpr(fun)(*args)))
    return text.count("scan[") + text.count("while[")


@pytest.mark.parametrize(
    ("name", "chunked"),
    [
        ("adamw", 3), ("lion", 3), ("momentum", 3), ("lamb", 9), ("clip", 3), ("MultiSteps", 3),
        ("apply_if_finite of clip", 3), ("MultiSteps that skips", 6),
    ],
)  # fmt: skip
def test_which_updates_are_independent_along_an_axis(name, chunked):
    """Adam keeps rows apart; so does LAMB once its norms are known, which take two loops of their own."""
    params = parameters()
    tx = jo.offload(OPTIMIZERS[name], min_bytes=0, window=2500)
    assert loops(tx.update, params, tx.init(params), params) == chunked


@pytest.mark.oldest("a loop that runs once")
@pytest.mark.parametrize(
    "name",
    rows(
        ["adamw", "MultiSteps of clip", "schedule_free", "adafactor"],
        "compiles three programs",
        daily=["MultiSteps of clip"],
    ),
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_pieces_run_apart_and_equal_resident(name, dtype):
    """In a loop that runs once; with ``update`` and ``update_params``, donated, and not where a window is given."""
    inner, params = OPTIMIZERS[name], parameters(dtype)
    tx = jo.offload(inner, min_bytes=0)
    state = tx.init(params)
    assert " while[" in str(emitted(jax.make_jaxpr(tx.update)(params, state, params)))
    given = jo.offload(inner, min_bytes=0, window=2**20)
    assert " while[" not in str(emitted(jax.make_jaxpr(given.update)(params, state, params)))
    expected = jit(inner.update)(gradients(params), inner.init(params), params)
    applied = optax.apply_updates(params, expected[0])
    result = jit(tx.update)(gradients(params), tx.init(params), params)
    step = jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
    new = step(jax.tree.map(jnp.copy, params), state, gradients(params))
    where = [leaf.host for leaf in jo.placement(tx, params).leaves]
    for got, want in (result, expected), (new, (applied, expected[1])):
        assert [x.sharding.memory_kind == HOST for x in jax.tree.leaves(got[1])] == where
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            close(a, b, dtype, 1.0 if name == "schedule_free" else 0.0)


@pytest.mark.long("more shardings")
@pytest.mark.oldest("a loop that runs once")
@pytest.mark.parametrize("axes", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_small_pieces_of_replicated_parameters(axes):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        inner, half = OPTIMIZERS["adamw"], jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        tx = jo.offload(inner, min_bytes=0)
        for grads in gradients(params), gradients(half):  # of which the updates are of another type
            got = jit(tx.update)(grads, tx.init(params), params)
            want = jit(inner.update)(grads, inner.init(params), params)
            jax.tree.map(lambda a, b: close(a, b, jnp.float32), got, want)


def test_chunks_cut_where_tiles_end():
    assert _chunking._rows(2, size=24, total=24 * 100, window=1000) == 5  # 24 rows in 5 chunks
    assert _chunking._rows(1, size=1000, total=1000 * 100, window=20_000) == 96
    assert _chunking._rows(2, size=24, total=24 * 100, window=1) == 1  # a row is never split
    assert _chunking._rows(0, size=5000, total=5000 * 4, window=16_384) == 1024


def written(jaxpr):
    """How many rows are written into host memory at a time."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dynamic_update_slice" and is_host_aval(eqn.invars[0].aval):
            yield eqn.invars[1].aval.shape[-2]
        batched = [eqn.params["call"].jaxpr] if eqn.primitive.name == "custom_vmap_call" else []
        for inner in [*batched, *(inner.jaxpr for inner in inner_of(eqn))]:
            yield from written(inner)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tail_is_written_in_whole_tiles_and_less_than_one(shards):
    """A TPU writes no other number of rows into host memory: 12 of 108 are left on each device."""
    inner, params = optax.adam(1e-2), {"w": jax.random.normal(jax.random.key(0), (shards * 108, 16))}
    mesh = jax.make_mesh((shards,), ("x",), axis_types=(AxisType.Auto,))
    params = jax.device_put(params, NamedSharding(mesh, P("x")))
    tx = jo.offload(inner, min_bytes=0, window=1)
    args = gradients(params), tx.init(params), params
    assert {*written(emitted(jit(tx.update).trace(*args).jaxpr).jaxpr)} == {32, 8, 4}
    got, want = jit(tx.update)(*args), jit(inner.update)(args[0], inner.init(params), params)
    jax.tree.map(lambda a, b: close(a, b, jnp.float32), got, want)


@pytest.mark.long("more optimizers", but=["offload-clip"])
@pytest.mark.parametrize(
    "name",
    rows(["adamw", "clip", "MultiSteps", "schedule_free"], "compiles two programs", daily=["clip", "schedule_free"]),
)
@pytest.mark.parametrize("outside", [False, True], ids=["offload", "in a chain"])
def test_update_params_is_update_and_apply_updates(name, outside):
    params = parameters(jnp.bfloat16)
    tx = jo.offload(OPTIMIZERS[name], min_bytes=0, window=700)
    if outside:
        tx = optax.chain(optax.clip(0.5), tx)
    state, grads = tx.init(params), gradients(params)

    def two_steps(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    expected = jit(two_steps)(grads, state, params)
    result = jit(lambda g, s, p: jo.update_params(tx, g, s, p))(grads, state, params)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.sharding.memory_kind) == (b.shape, b.dtype, b.sharding.memory_kind)
        close(a, b, jnp.bfloat16)


@pytest.mark.long("more derivatives")
@pytest.mark.oldest("derivatives through an update")
def test_grad_through_a_state_that_is_a_constant():
    """Its tangents are zeros that jax makes; by the learning rate, through two updates."""
    params = parameters()

    def after_two(tx, scale):
        state, new = tx.init(params), params
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(lambda p: p * scale, params), state, new)
            new = optax.apply_updates(new, updates)
        return sum((x**2).sum() for x in jax.tree.leaves(new))

    inner = optax.sgd(1e-2, momentum=0.9)
    for window in (None, 500):
        tx = jo.offload(inner, min_bytes=0, window=window)
        got, want = (jax.grad(functools.partial(after_two, t))(1.1) for t in (tx, inner))
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.oldest("batching")
def test_vmap_falls_back_to_whole_leaves():
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), parameters())
    inner = optax.adamw(1e-2)
    tx = jo.offload(inner, min_bytes=0, window=500)
    result = jit(jax.vmap(tx.update))(params, jax.vmap(tx.init)(params), params)
    expected = jit(jax.vmap(inner.update))(params, jax.vmap(inner.init)(params), params)
    jax.tree.map(lambda a, b: close(a, b, a.dtype), result, expected)


@pytest.mark.long("more derivatives", but=["None"])
@pytest.mark.oldest("derivatives through an update")
@pytest.mark.parametrize("window", [500, None])
def test_grad_through_update(window):
    """The third one: Adam's first hardly depends on the size of the gradient, so that its derivative is rounding."""
    inner, params = optax.adamw(1e-2), parameters()
    state = inner.init(params)
    for _ in range(2):
        _, state = jit(inner.update)(jax.tree.map(jnp.cos, params), state, params)

    def value(tx, state):
        def f(grads, state):
            updates, _ = tx.update(grads, state, params)
            return sum((u**2).sum() for u in jax.tree.leaves(updates))

        return jit(jax.grad(f))(gradients(params), state)  # the state is no constant, of which XLA takes powers anew

    got, want = value(jo.offload(inner, min_bytes=0, window=window), state), value(inner, state)
    assert all(jnp.linalg.norm(x) > 1e-4 for x in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: close(a, b, a.dtype), got, want)
