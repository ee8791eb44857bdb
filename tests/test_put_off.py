"""Under plain ``jit`` of many tokens an update runs after the backward pass, says so, and gives the same numbers."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.words import words
from tests.test_interleaved import assert_close, step_of

LAYERS, WIDTH = 6, 256
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
OPTIONS = {"min_bytes": 1024, "window": 2**20}  # pieces this small would run apart in a window of the default


def parameters():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return jax.device_put({f"w{k}": jax.random.normal(key, (WIDTH, WIDTH)) / 16 for k, key in enumerate(keys)},
                          jax.devices()[0])  # fmt: skip


def loss(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return (x**2).mean()


def batch(rows):
    return jax.random.normal(jax.random.key(1), (rows, WIDTH))


def table(tx, rows, jit=jax.jit, update_params=True):
    params = parameters()
    return words(jo.placement(jit(step_of(tx, loss, update_params)), params, tx.init(params), batch(rows)))


@pytest.mark.parametrize(
    ("tx", "rows", "apart"),
    [
        (jo.offload(ADAMW, **OPTIONS), 64, False),
        (jo.offload(ADAMW, **OPTIONS), 4096, False),  # the copies hold the matmuls back
        (jo.offload(ADAMW, **OPTIONS), 65536, True),  # too short for that
        (jo.offload(ADAMW, fraction=0.5, **OPTIONS), 64, False),
        (jo.offload(ADAMW, fraction=0.5, **OPTIONS), 4096, True),
        (jo.offload(CLIPPED, **OPTIONS), 4096, True),
    ],
)
def test_where_it_runs_and_what_placement_says(tx, rows, apart):
    said = "jax_offload.jit can hide these transfers"
    assert (said in table(tx, rows)) == apart
    if apart:
        assert said not in table(jo.offload(ADAMW, **OPTIONS), rows, jo.jit)


def test_clipping_outside_is_seen_in_the_trace():
    tx = optax.chain(optax.clip_by_global_norm(0.1), jo.offload(ADAMW, **OPTIONS))
    assert "once the backward pass is over" in table(tx, 4096, update_params=False)
    assert "once the backward pass is over" not in table(tx, 64, update_params=False)


@pytest.mark.long("more kinds of steps", but=["outside, half-True"])
@pytest.mark.parametrize("update_params", [True, False])
@pytest.mark.parametrize(
    ("inner", "tx"),
    [
        (ADAMW, jo.offload(ADAMW, fraction=0.5, **OPTIONS)),
        (CLIPPED, jo.offload(CLIPPED, **OPTIONS)),
        (CLIPPED, optax.chain(optax.clip_by_global_norm(0.1), jo.offload(ADAMW, fraction=0.5, **OPTIONS))),
    ],
    ids=["half", "inside", "outside, half"],
)
def test_the_numbers_of_the_resident_step(inner, tx, update_params):
    x, found = batch(2048), []
    assert "once the backward pass is over" in table(tx, 2048, update_params=update_params)
    for each in inner, tx:
        step, params = jax.jit(step_of(each, loss, update_params and each is tx), donate_argnums=(0, 1)), parameters()
        state, value = each.init(params), None
        for _ in range(3):
            params, state, value = step(params, state, x)
        found.append((params, value))
    assert_close(found[1], found[0], 1e-5)
    assert any(leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(state))
