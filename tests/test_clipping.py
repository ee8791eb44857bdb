"""Clips inside and outside ``offload``: numbers of the resident run, norms over all chunks and shards, and the peak.

The tests compare moments too: AdamW hardly feels a constant factor on its gradients, its moments do.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._storage import Encoded, rules_of
from tests.aot.cases import measure_step
from tests.aot.harness import H200, require
from tests.test_storage import resident

HOST, DEVICE = "pinned_host", "device"
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile
SHAPES = {"stacked": (7, 8, 12), "embed": (97, 8), "flat": (2051,), "head": (16, 24), "bias": (8,)}
SPECS = {
    "stacked": P(None, "fsdp"),
    "embed": P(None, "fsdp"),
    "flat": P(),
    "head": P("fsdp", "data"),
    "bias": P("fsdp"),
}
ADAMW = optax.adamw(1e-2)
STORAGE = {"mu": "bfloat16", "nu": "float16"}


def per_example(clip):
    """optax has these as functions of a tree of gradients, with the examples of the batch along axis 0."""
    return optax.stateless(lambda grads, params: clip(grads)[0])


def committed_key():
    """Or the second step would compile again, as in plain optax."""
    return jax.device_put(jax.random.key(1), jax.devices()[0])


# Made anew for each run: what init of differentially_private_aggregate returns is its own key, and steps donate it.
# Each threshold is such that some units, leaves or examples are clipped, and others not.
CLIPS = {
    "global_norm": lambda: optax.clip_by_global_norm(3.0),
    "adaptive": lambda: optax.adaptive_grad_clip(1.5),
    "block_rms": lambda: optax.clip_by_block_rms(1.0),
    "example_norm": lambda: per_example(lambda g: optax.per_example_global_norm_clip(g, 3.0)),
    "example_layer": lambda: per_example(lambda g: optax.per_example_layer_norm_clip(g, 3.0, uniform=False)),
    "private": lambda: optax.contrib.differentially_private_aggregate(3.0, 0.1, key=committed_key()),
}
LEAFWISE = ["global_norm", "adaptive", "block_rms"]


def put(x, name, mesh, *examples):
    if mesh is None:
        return jax.device_put(x, jax.devices()[0])
    return jax.device_put(x, NamedSharding(mesh, P(*examples, *SPECS[name])))


def some(cases, often):
    """All cases; those for which ``often`` is false run with ``--everything`` only."""
    return [pytest.param(*case, marks=() if often(k, *case) else pytest.mark.long) for k, case in enumerate(cases)]


def parameters(dtype=np.float32, mesh=None):
    rng = np.random.default_rng(0)
    return {k: put(rng.standard_normal(s).astype(dtype), k, mesh) for k, s in SHAPES.items()}


def gradients(k, examples, dtype=np.float32, mesh=None):
    """Of one step; with four examples along axis 0, the first of which no clip has to shorten."""
    rng = np.random.default_rng(100 + k)
    grads = {}
    for name, shape in SHAPES.items():
        g = rng.standard_normal((4, *shape)) * np.reshape([0.01, 1, 2, 4], (4, *[1] * len(shape)))
        g = (g if examples else g[2] * (0.1 if name == "bias" else 1)).astype(dtype)
        grads[name] = put(g, name, mesh, *[None] * examples)
    return grads


def wrapped(name, where, inner=ADAMW, **options):
    """The clip and ``inner``; ``where``: offloaded with the clip inside or outside, or not at all."""
    if where == "resident":
        return optax.chain(CLIPS[name](), inner)
    options = {"min_bytes": 0, **options}
    if where == "inside":
        return jo.offload(optax.chain(CLIPS[name](), inner), **options)
    return optax.chain(CLIPS[name](), jo.offload(inner, **options))


def run(tx, name, form="update", dtype=np.float32, mesh=None):
    """Parameters and state after donated steps."""
    params, examples = parameters(dtype, mesh), name not in LEAFWISE
    state = tx.init(params)
    out = jax.tree.map(lambda x: x.sharding, (params, state)) if mesh else None

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out, compiler_options=FAST)
    def step(params, state, grads):
        if form == "update_params":
            return jo.update_params(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(3):
        params, state = step(params, state, gradients(k, examples, dtype, mesh))
    return params, state


@functools.cache
def expected(name):
    return run(wrapped(name, "resident"), name)


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, np.float64)


def same(got, want, rtol=1e-6):
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        difference = np.linalg.norm(numbers(x) - numbers(y))
        assert difference <= rtol * np.linalg.norm(numbers(y)), jax.tree_util.keystr(path)


def assert_memory(state):
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        assert x.sharding.memory_kind == (HOST if x.ndim else DEVICE), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", CLIPS)
def test_the_clips_do_clip(name):
    """Or what follows would pass without them."""
    total = jnp.mean if name == "private" else jnp.sum
    unclipped = optax.stateless(lambda g, p: g if name in LEAFWISE else jax.tree.map(lambda x: total(x, 0), g))
    mu, free = (optax.tree.get(s, "mu") for s in (expected(name)[1], run(optax.chain(unclipped, ADAMW), name)[1]))
    ratios = {k: np.linalg.norm(mu[k]) / np.linalg.norm(free[k]) for k in SHAPES}
    assert all(ratios[k] < 0.95 for k in ("stacked", "embed", "flat")), ratios


FORMS = list(itertools.product(("inside", "outside"), ("update", "update_params"), (None, 500)))
HALF = FORMS[1], FORMS[2], FORMS[4], FORMS[7]  # each option with each other once


@pytest.mark.parametrize(
    ("name", "where", "form", "window"),
    some([(name, *form) for name in CLIPS for form in FORMS], lambda k, name, *form: form in HALF),
)
def test_steps_equal_resident(name, where, form, window):
    params, state = run(wrapped(name, where, window=window), name, form)
    same((params, state), expected(name))
    assert_memory(state)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("global_norm", {"stacked": "7 chunks of axis 0", "embed": "4 chunks of axis 0", "flat": "3 chunks of axis 0"}),
        ("block_rms", {"stacked": "7 chunks of axis 0", "embed": "4 chunks of axis 0", "flat": "3 chunks of axis 0"}),
        # of a unit of its rows: axis 0, the layers, is one of them; 8 columns are less than a tile
        ("adaptive", {"flat": "3 chunks of axis 0", "embed": "whole: broadcast_in_dim of a reduction over all rows"}),
    ],
)
def test_how_the_state_streams_behind_a_clip(name, how):
    """Each leaf once: the norm is of gradients, and known before any state is loaded."""
    rows = jo.placement(wrapped(name, "inside", window=500), parameters()).leaves
    got = {row.path: row.streams for row in rows}
    for leaf, text in how.items():
        assert got[f"[1][0].mu['{leaf}']"] == f"{text}, 2 leaves together", got


def resident_storage(name, where):
    """What ``offload(..., storage=)`` does, without host memory."""
    if where == "inside":
        return resident(wrapped(name, "resident"), rules_of(STORAGE), 0)
    return optax.chain(CLIPS[name](), resident(ADAMW, rules_of(STORAGE), 0))


@pytest.mark.parametrize(
    ("name", "where", "form", "window"),
    some([(n, *f) for n in LEAFWISE for f in FORMS], lambda k, *_: k in (1, 13, 19)),
)
def test_with_storage(name, where, form, window):
    params, state = run(wrapped(name, where, window=window, storage=STORAGE), name, form)
    for x, y in zip(jax.tree.leaves((params, state)), jax.tree.leaves(stored_run(name, where)), strict=True):
        x, y = np.float64(x), np.float64(y)
        # another last bit of a norm is, once in a while, another rounding
        assert (np.abs(x - y) > 1e-5 * np.abs(y)).mean() < 2e-3
    kinds = [x.values for x in jax.tree.leaves(state, is_leaf=is_encoded) if is_encoded(x)]
    assert {(x.dtype.name, x.sharding.memory_kind) for x in kinds} == {("bfloat16", HOST), ("float16", HOST)}


def is_encoded(x):
    return isinstance(x, Encoded)


@functools.cache
def stored_run(name, where):
    return run(resident_storage(name, where), name)


@functools.cache
def master_run(name):
    """The clip and AdamW on float32 parameters, with the gradients that bfloat16 ones have."""
    params = jax.tree.map(lambda p: p.astype(jnp.float32), parameters(jnp.bfloat16))
    tx = wrapped(name, "resident")
    step, state = jax.jit(tx.update, compiler_options=FAST), tx.init(params)
    for k in range(3):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), gradients(k, False, jnp.bfloat16))
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    ("name", "where", "form", "window"),
    some([(n, *f) for n in LEAFWISE for f in FORMS[:4]], lambda k, *_: k in (1, 7, 10)),
)
def test_with_master_params(name, where, form, window):
    """The clip is inside of ``with_master_params``, so that it has float32 gradients and parameters."""
    tx = jo.offload(jo.with_master_params(wrapped(name, "resident")), min_bytes=0, window=window)
    params, state = run(tx, name, form, dtype=jnp.bfloat16)
    assert_memory(state)
    want_params, want = master_run(name)
    same((state.master, state.inner_state), (want_params, want))
    for k, p in params.items():
        assert p.dtype == jnp.bfloat16 and (np.asarray(p) == np.asarray(state.master[k]).astype(p.dtype)).all()


SHARDED = [
    (name, where, form, axes, over)
    for name in (*LEAFWISE, "example_norm")
    for axes in (AxisType.Auto, AxisType.Explicit)
    for over in (None, "data")
    for where, form in (("inside", "update"), ("outside", "update_params"))
    if (name, axes) != ("adaptive", AxisType.Explicit)  # optax's own type error: its norms are of no sharding
]


@pytest.mark.parametrize(
    ("name", "where", "form", "axes", "over"),
    some(SHARDED, lambda k, name, *_: name == "global_norm" or k % 4 in (0, 3)),
)
def test_norms_of_sharded_gradients_are_global(name, where, form, axes, over):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(axes,) * 2)
    with jax.set_mesh(mesh):
        tx = wrapped(name, where, window=1, shard_over=over)
        params, state = run(tx, name, form, mesh=mesh)
    same((params, state), expected(name))
    assert_memory(state)
    mu = optax.tree.get(state, "mu")["stacked"].sharding
    assert mu.is_equivalent_to(NamedSharding(mesh, P(None, "fsdp", over), memory_kind=HOST), 3), mu


PEAKS = [
    (False, "inside", "update", 2300),  # 4950 resident
    (False, "outside", "update", 2300),
    (True, "inside", "update", 3500),  # 6496 resident
    (True, "outside", "update", 4750),  # a second copy of the gradients, and adaptive_grad_clip's norms
    (True, "outside", "update_params", 3500),
]


@pytest.mark.parametrize(
    ("name", "stacked", "where", "form", "at_most"),
    some([(name, *p) for name in ("adaptive", "block_rms") for p in PEAKS], lambda k, *_: k in (0, 2, 3, 4, 6, 7)),
)
def test_peak(name, stacked, where, form, at_most):
    """No gradient waits for another's norm: unrolled, these peak lower than ``clip_by_global_norm``."""
    require(H200)
    m = measure_step(H200, wrapped(name, where), stacked=stacked, update_params=form == "update_params")
    assert m.peak <= at_most
    assert (m.loaded, m.stored) == pytest.approx((3072, 3072), abs=1)
    assert m.host_temp == 0
