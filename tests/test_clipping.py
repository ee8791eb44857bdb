"""Clips inside and outside ``offload``: the numbers of the resident run, norms over all chunks and shards, and the peak.

The tests compare moments too: AdamW hardly feels a constant factor on its gradients, its moments do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo

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
STEPS = 3


def per_example(clip):
    """optax has these as functions of a tree of gradients, with the examples of the batch along axis 0."""
    return optax.stateless(lambda grads, params: clip(grads)[0])


# Made anew for each run: what init of differentially_private_aggregate returns is its own key, and steps donate it.
# Each threshold is such that some units, leaves or examples are clipped, and others not.
CLIPS = {
    "global_norm": lambda: optax.clip_by_global_norm(3.0),
    "adaptive": lambda: optax.adaptive_grad_clip(2.0),
    "block_rms": lambda: optax.clip_by_block_rms(1.0),
    "example_norm": lambda: per_example(lambda g: optax.per_example_global_norm_clip(g, 3.0)),
    "example_layer": lambda: per_example(lambda g: optax.per_example_layer_norm_clip(g, 3.0, uniform=False)),
    "private": lambda: optax.contrib.differentially_private_aggregate(3.0, 0.1, key=jax.random.key(1)),
}
LEAFWISE = ["global_norm", "adaptive", "block_rms"]


def has_examples(name):
    return name not in LEAFWISE


def parameters(dtype=np.float32, mesh=None):
    rng = np.random.default_rng(0)
    where = {k: NamedSharding(mesh, spec) if mesh else jax.devices()[0] for k, spec in SPECS.items()}
    return {k: jax.device_put(rng.standard_normal(s).astype(dtype), where[k]) for k, s in SHAPES.items()}


def gradients(k, examples, dtype=np.float32, mesh=None):
    """Of one step; with four examples along axis 0, the first of which no clip has to shorten."""
    rng = np.random.default_rng(100 + k)
    grads = {}
    for name, shape in SHAPES.items():
        g = rng.standard_normal((4, *shape)) * np.reshape([0.01, 1, 2, 4], (4, *[1] * len(shape)))
        g = (g if examples else g[2] * (0.1 if name == "bias" else 1)).astype(dtype)
        spec = P(None, *SPECS[name]) if examples else SPECS[name]
        grads[name] = jax.device_put(g, NamedSharding(mesh, spec) if mesh else jax.devices()[0])
    return grads


def wrapped(name, where, inner=ADAMW, **options):
    """The clip and ``inner``; ``where``: offloaded with the clip inside or outside, or not at all."""
    if where == "resident":
        return optax.chain(CLIPS[name](), inner)
    options = {"min_bytes": 0, **options}
    if where == "inside":
        return jo.offload(optax.chain(CLIPS[name](), inner), **options)
    return optax.chain(CLIPS[name](), jo.offload(inner, **options))


def run(tx, examples=False, form="update", dtype=np.float32, mesh=None):
    """Parameters and state after donated steps."""
    params = parameters(dtype, mesh)
    state = tx.init(params)
    out = jax.tree.map(lambda x: x.sharding, (params, state)) if mesh else None

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out, compiler_options=FAST)
    def step(params, state, grads):
        if form == "update_params":
            return jo.update_params(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(STEPS):
        params, state = step(params, state, gradients(k, examples, dtype, mesh))
    return params, state


@functools.cache
def expected(name):
    return run(wrapped(name, "resident"), has_examples(name))


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
    unclipped = ADAMW
    if has_examples(name):
        mean = jnp.mean if name == "private" else jnp.sum
        unclipped = optax.chain(optax.stateless(lambda g, p: jax.tree.map(lambda x: mean(x, 0), g)), ADAMW)
    mu, free = (optax.tree.get(s, "mu") for s in (expected(name)[1], run(unclipped, has_examples(name))[1]))
    ratios = {k: np.linalg.norm(mu[k]) / np.linalg.norm(free[k]) for k in SHAPES}
    assert all(ratios[k] < 0.95 for k in ("stacked", "embed", "flat", "head")), ratios


@pytest.mark.parametrize("form", ["update", "update_params"])
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", CLIPS)
def test_steps_equal_resident(name, where, window, form):
    params, state = run(wrapped(name, where, window=window), has_examples(name), form)
    same((params, state), expected(name))
    assert_memory(state)


@pytest.mark.parametrize("name", LEAFWISE)
def test_which_chunks_a_clip_leaves(name):
    """Norms over all rows of a leaf are put together from its chunks; no leaf has to be loaded whole, or twice."""
    tx = wrapped(name, "inside", window=500)
    how = {row.path: row.streams for row in jo.placement(tx, parameters()).leaves}
    for leaf in "stacked", "embed", "flat", "head":
        assert "chunks of axis" in how[f"[1][0].mu['{leaf}']"], how
        assert "times" not in how[f"[1][0].mu['{leaf}']"], how
