"""Stacked gradients that go to host memory inside the scan that makes them, for the cores to update their layers.

Another CPU device stands in the place of the CPU backend beside an accelerator. tests/aot/test_update_on.py compiles
such steps for one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._drive import run
from jax_offload._drive.cores import Cores
from tests.support.optimizers import assert_same, copied

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
LAYERS, WIDTH = 4, 128  # a row of the gradient is large enough to go down by itself
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr(run, "cores_beside", lambda devices: Cores(jax.devices()[1]))


def model(layers=LAYERS, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w": (layers, WIDTH, WIDTH), "b": (layers, WIDTH), "embed": (32, WIDTH), "head": (WIDTH, 4 * WIDTH)}
    tree = {name: jax.random.normal(key, shape) / 12 for (name, shape), key in zip(shapes.items(), keys, strict=True)}
    return jax.device_put(jax.tree.map(lambda x: x.astype(dtype), tree), jax.devices()[0])


def loss_of(reverse=False, unroll=1, cast=None, remat=False):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), x.mean()

    def loss(params, x):
        x = x @ params["embed"].T @ params["embed"]
        layers = {name: params[name] for name in ("w", "b")}
        layers = layers if cast is None else jax.tree.map(lambda w: w.astype(cast), layers)
        one = jax.checkpoint(layer) if remat else layer
        x, means = jax.lax.scan(one, x.astype(layers["w"].dtype), layers, reverse=reverse, unroll=unroll)
        return ((x @ params["head"]).astype(jnp.float32) ** 2).mean() + means.astype(jnp.float32).sum()

    return loss


def step_of(tx, loss, returned=False):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        new = jo.update_params(tx, grads, state, params)
        return *new, {"loss": value, "grads": grads if returned else None}

    return step


CASES = {
    "plain": {},
    "in reverse": {"reverse": True},
    "unrolled twice": {"unroll": 2},
    "checkpointed": {"remat": True},
    "five layers": {"layers": 5},
    "bfloat16 in the pass": {"cast": jnp.bfloat16},
    "not donated": {"donate": ()},
    "clipped by a norm that needs all gradients": {"inner": CLIPPED},
    "no arithmetic on elements alone": {"inner": optax.lamb(1e-2)},
    "gradients are returned too": {"returned": True},
    "masters": {"inner": jo.with_master_params(ADAMW), "dtype": jnp.bfloat16},
    "some stay on the device": {"update_on": {"w": "host", "b": "device", "embed": "host", "head": "device"}},
}


@pytest.mark.parametrize("case", CASES)
def test_values_placement_and_donation(case):
    """Two updates, each from the state that plain optax begins with."""
    of = dict(CASES[case])
    inner, dtype, donate = of.pop("inner", ADAMW), of.pop("dtype", jnp.float32), of.pop("donate", (0, 1))
    returned, where = of.pop("returned", False), of.pop("update_on", "host")
    params, tx = model(of.pop("layers", LAYERS), dtype), jo.offload(inner, min_bytes=512, update_on=where)
    loss = loss_of(**of)
    plain, step = jax.jit(step_of(inner, loss, returned)), jo.jit(step_of(tx, loss, returned), donate_argnums=donate)
    given = params, tx.init(params)
    for _ in range(2):
        want = plain(*jo.to_device(given), X)
        before = jax.tree.map(lambda x: (x.sharding, x.sharding.memory_kind), given)
        given = copied(given)
        got = step(*given, X)
        if dtype == jnp.float32:  # else gradients are rounded where fusions end, which are others
            assert_same(jo.to_device(got), want, "an update", 2e-2 if "cast" in of else 1e-6)
        assert jax.tree.map(lambda x: (x.sharding, x.sharding.memory_kind), got[:2]) == before
        assert all(x.is_deleted() is bool(donate) for x in jax.tree.leaves(given) if x.ndim)
        given = got[:2]
