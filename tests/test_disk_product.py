"""Ten optimizers, three formats of their state and three sizes of the cache in host memory, each with each."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive import stages
from tests.support.optimizers import assert_same, copied
from tests.support.rows import rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "schedule": optax.nadam(optax.cosine_decay_schedule(1e-2, 10)),
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "prodigy": optax.contrib.prodigy(1.0),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}
CASES = [(name, storage, cache) for name in OPTIMIZERS for storage in (None, "bfloat16", "int8")
         for cache in ("none", "part", "all")]  # fmt: skip
DAILY = [("lamb", "bfloat16", "part"), ("lion", "int8", "none")]
X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
LAYERS = ["layer_1", "layer_2"]


def model():
    w = {name: {"w": jax.random.normal(jax.random.key(k), (32, 32)) / 6} for k, name in enumerate(LAYERS)}
    return jax.device_put(w, jax.devices()[0])


def step_of(tx):
    def loss(params, x):
        for name in LAYERS:
            x = jnp.tanh(x @ params[name]["w"])
        return (x**2).mean()

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        return jo.update_params(tx, grads, state, params)

    return step


def offload(name, storage, disk=None):
    return jo.offload(OPTIMIZERS[name], min_bytes=0, storage=storage, disk=disk)


@functools.cache
def in_memory(name, storage):
    """The step of plain optax, or, of a state in fewer bits, of one in host memory; and its transformation."""
    tx = OPTIMIZERS[name] if storage is None else offload(name, storage)
    return jax.jit(step_of(tx)), tx


@pytest.mark.exhaustive("ninety states on disk", but=["lamb*", "lion-int8-none"])
@pytest.mark.parametrize(("name", "storage", "cache"), rows(CASES, "ninety states on disk", daily=DAILY))
def test_an_update_is_that_of_a_state_in_memory(name, storage, cache, tmp_path, monkeypatch):
    """Two donated updates, each from the same state; what the cache has no room for is on disk, the rest pinned."""
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    params, total = model(), jo.placement(offload(name, storage), model()).host_bytes
    budget = {"none": 0, "part": total // 2, "all": total}[cache]
    with contextlib.closing(jo.disk(tmp_path, host_bytes=budget)) as files:
        tx = offload(name, storage, files)
        step, (plain, other) = jo.jit(step_of(tx), donate_argnums=(0, 1)), in_memory(name, storage)
        state = tx.init(params)
        for k in range(2):
            given = jo.to_device(state) if storage is None else jo.to_host(other, state, params)
            want = plain(params, given, X)
            params, state = step(copied(params), state, X)
            assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}
            assert_same((params, jo.to_device(state)), (want[0], jo.to_device(want[1])), f"step {k}")
        leaves = jax.tree.leaves(state, is_leaf=is_on_disk)
        on_disk = sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in leaves if is_on_disk(x))
        pinned = [x for x in leaves if not is_on_disk(x) and x.sharding.memory_kind == "pinned_host"]
        assert sum(x.nbytes for x in pinned) == total - on_disk <= budget
        assert (on_disk > 0, bool(pinned)) == (cache != "all", cache != "none")
