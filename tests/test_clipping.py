"""Clips inside and outside ``offload``: numbers of the resident run, norms over all chunks and shards.

The tests compare moments too: AdamW hardly feels a constant factor on its gradients, its moments do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import FAST, assert_close

SHAPES = {"stacked": (7, 8, 12), "embed": (97, 8), "flat": (2051,), "bias": (8,)}
SPECS = {"stacked": P(None, "fsdp"), "embed": P(None, "fsdp"), "flat": P(), "bias": P("fsdp")}
ADAMW = optax.adamw(1e-2)


def per_example(clip):
    """optax has these as functions of a tree of gradients, with the examples of the batch along axis 0."""
    return optax.stateless(lambda grads, params: clip(grads)[0])


# Made anew for each run: what init of differentially_private_aggregate returns is its own key, and steps donate it.
# Each threshold is such that some units, leaves or examples are clipped, and others not.
CLIPS = {
    "global_norm": lambda: optax.clip_by_global_norm(3.0),
    "adaptive": lambda: optax.adaptive_grad_clip(1.5),
    "block_rms": lambda: optax.clip_by_block_rms(1.0),
    "example_norm": lambda: per_example(lambda g: optax.per_example_global_norm_clip(g, 3.0)),
    "example_layer": lambda: per_example(lambda g: optax.per_example_layer_norm_clip(g, 3.0, uniform=False)),
    "private": lambda: optax.contrib.differentially_private_aggregate(3.0, 0.1, key=jax.random.key(1)),
}
LEAFWISE = ["global_norm", "adaptive", "block_rms"]


def put(x, name, mesh, *examples):
    return jax.device_put(x, NamedSharding(mesh, P(*examples, *SPECS[name])) if mesh else jax.devices()[0])


def parameters(mesh=None):
    rng = np.random.default_rng(0)
    return {k: put(rng.standard_normal(s, np.float32), k, mesh) for k, s in SHAPES.items()}


def gradients(k, examples, mesh=None):
    """Of one step; with four examples along axis 0, the first of which no clip has to shorten."""
    rng = np.random.default_rng(100 + k)
    grads = {}
    for name, shape in SHAPES.items():
        g = rng.standard_normal((4, *shape)) * np.reshape([0.01, 1, 2, 4], (4, *[1] * len(shape)))
        g = (g if examples else g[2] * (0.1 if name == "bias" else 1)).astype(np.float32)
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


def run(tx, name, form="update", mesh=None):
    """Parameters and state after donated steps."""
    params, examples = parameters(mesh), name not in LEAFWISE
    state = tx.init(params)
    if not mesh:  # committed, or the key makes the second step compile again, as in plain optax
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
    out = jax.tree.map(lambda x: x.sharding, (params, state)) if mesh else None

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=out, compiler_options=FAST)
    def step(params, state, grads):
        if form == "update_params":
            return jo.update_params(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(3):
        params, state = step(params, state, gradients(k, examples, mesh))
    return params, state


@functools.cache
def expected(name):
    return run(wrapped(name, "resident"), name)


def assert_memory(state):
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        assert x.sharding.memory_kind == ("pinned_host" if x.ndim else "device"), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", CLIPS)
def test_the_clips_do_clip(name):
    """Or what follows would pass without them."""
    total = jnp.mean if name == "private" else jnp.sum
    unclipped = optax.stateless(lambda g, p: g if name in LEAFWISE else jax.tree.map(lambda x: total(x, 0), g))
    mu, free = (optax.tree.get(s, "mu") for s in (expected(name)[1], run(optax.chain(unclipped, ADAMW), name)[1]))
    ratios = {k: np.linalg.norm(mu[k]) / np.linalg.norm(free[k]) for k in SHAPES}
    assert all(ratios[k] < 0.95 for k in ("stacked", "embed", "flat")), ratios


HOW = [("inside", "update", 500), ("inside", "update_params", None), ("outside", "update", None)]
HOW += [("outside", "update_params", 500)]


@pytest.mark.parametrize(("name", "where", "form", "window"), [(n, *HOW[k % 4]) for k, n in enumerate(CLIPS)])
def test_steps_equal_resident(name, where, form, window):
    params, state = run(wrapped(name, where, window=window), name, form)
    assert_close((params, state), expected(name), 1e-6)
    assert_memory(state)


@pytest.mark.parametrize("name", LEAFWISE)
def test_how_the_state_streams_behind_a_clip(name):
    """Each leaf once, in chunks, also where norms are of columns: those of gradients are known before."""
    got = {row.path: row.streams for row in jo.placement(wrapped(name, "inside", window=500), parameters()).leaves}
    for leaf, n in ("embed", 4), ("flat", 3), *([("stacked", 7)] if name != "adaptive" else []):  # see test_peak
        assert got[f"[1][0].mu['{leaf}']"] == f"{n} chunks of axis 0, 2 leaves together", got


@pytest.mark.parametrize(
    ("name", "where", "form", "axes", "over"),
    [
        ("adaptive", "outside", "update_params", AxisType.Auto, None),
        ("block_rms", "outside", "update_params", AxisType.Explicit, None),
        ("example_norm", "inside", "update", AxisType.Explicit, "data"),
    ],
)
def test_norms_of_sharded_gradients_are_global(name, where, form, axes, over):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(axes,) * 2)
    with jax.set_mesh(mesh):
        tx = wrapped(name, where, window=1, shard_over=over)
        params, state = run(tx, name, form, mesh=mesh)
    assert_close((params, state), expected(name), 1e-6)
    assert_memory(state)
    mu = optax.tree.get(state, "mu")["stacked"].sharding
    assert mu.is_equivalent_to(NamedSharding(mesh, P(None, "fsdp", over), memory_kind="pinned_host"), 3), mu
