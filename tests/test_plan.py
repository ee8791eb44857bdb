"""The printed plan is the program that runs: what ``placement`` says of each leaf is what the compiled step moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import jax_offload as jo
from tests.aot.harness import H200, require

ADAMW = optax.adamw(1e-3)
OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    "adamw": ADAMW,
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),  # a pass for its norms
    "muon": optax.contrib.muon(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "accumulated": optax.MultiSteps(ADAMW, 2),
    "accumulated, clipped": optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), ADAMW), 2),
    "finite": optax.apply_if_finite(ADAMW, 3),
    "masters": jo.with_master_params(ADAMW),
}
SHAPES = {"embed": (1024, 128), "layers": (6, 128, 128), "out": (128, 384)}


@pytest.mark.parametrize(
    ("name", "window"), [*((name, 2**18) for name in OPTIMIZERS), ("lamb", None), ("masters", None)]
)
def test_what_is_printed_is_what_moves(name, window):
    """Each leaf as often as its row says and in as many pieces, and once back."""
    require(H200)
    tx = jo.offload(OPTIMIZERS[name], min_bytes=2**12, window=window)
    place = SingleDeviceSharding(jax.devices("cpu")[0])
    dtype = "bfloat16" if name == "masters" else "float32"
    params = {key: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for key, shape in SHAPES.items()}
    state = jo.abstract_state(tx, params)

    def step(params, state):
        return jo.update_params(tx, jax.tree.map(jnp.cos, params), state, params)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    planned = {leaf.path: leaf for leaf in jo.placement(jitted, params, state).leaves if leaf.host}
    found = jo.inspect(jitted, params, state, target=H200)
    assert planned and found.problems == ()
    for t in found.transfers:
        leaf = planned[f"[1]{t.leaf.removeprefix('state')}"]
        repeated = re.search(r" \((\d+) times\)$", leaf.streams)
        ways = [leaf.streams] * int(repeated[1]) if repeated else leaf.streams.split("; then ")
        chunks = [int(of[1]) if (of := re.match(r"(\d+) chunks", way)) else 1 for way in ways]
        assert t.nbytes == leaf.nbytes * (len(ways) if t.loads else 1), (t, leaf.streams)
        assert t.pieces == sum(chunks) or not t.loads, (t, leaf.streams)
    moved = {(f"[1]{t.leaf.removeprefix('state')}", t.loads) for t in found.transfers}
    assert moved == {(path, way) for path in planned for way in (True, False)}


@pytest.mark.oldest("effects")
@pytest.mark.parametrize("window", [None, 2**12])
@pytest.mark.parametrize("of_host", [True, False])
def test_an_effect_happens_once(of_host, window):
    """In a branch that makes an array and a number: it must not stand in two slices, nor in two passes."""
    calls = []

    def update(updates, state, params=None):
        def new(m):
            jax.debug.callback(lambda: calls.append(1))
            return m * 2, (m * m).sum()

        given = state["w"] + updates["w"] if of_host else updates["w"]
        x, n = jax.lax.cond(updates["w"][0, 0] > -9, new, lambda m: (m, 1.0), given)
        return {"w": x / n + state["w"], "v": state["v"] / n}, jax.tree.map(jnp.add, updates, state)

    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update)
    params = jax.device_put({"w": jnp.ones((64, 8)), "v": jnp.ones((64, 8, 8))}, jax.devices()[0])
    tx = jo.offload(inner, min_bytes=0, window=window)
    got = jax.jit(tx.update)(params, tx.init(params), params)
    want = jax.jit(inner.update)(params, inner.init(params), params)
    jax.effects_barrier()
    assert len(calls) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
