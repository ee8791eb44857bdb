"""Laws of compiled steps that hold whatever their figures are. The figures: tests/aot/compiled.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.aot.harness import H200, MIB, V5E, array, require
from tests.aot.model import loss, step_of

ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def inspected(tx, layers, width, *, stacked=False, devices=1, target=H200, update_params=False):
    """One step of checkpointed layers with 512 tokens per device, by the names of ``jo.inspect``."""
    spec = P(None, "data") if stacked else P("data")
    shape = {"w": (layers, width, width)} if stacked else {f"w{k:03d}": (width, width) for k in range(layers)}
    params = {name: array(*s, spec=spec if devices > 1 else P(), n=devices) for name, s in shape.items()}
    args = params, jo.abstract_state(tx, params), array(devices * 512, width, spec=P("data"), n=devices)
    out = jax.tree.map(lambda x: x.sharding, args[:2])
    step = jax.jit(step_of(tx, loss, update_params=update_params), donate_argnums=(0, 1), out_shardings=out)
    return jo.inspect(step, *args, target=target)


# Layers and width, with state from 1 MiB to 1 GiB: in an early version each was above resident.
POINTS = {
    "stacked and clipped": (12, 1024, {"stacked": True, "update_params": True}, CLIPPED, {}),
    "two layers": (2, 4096, {"stacked": True}, ADAMW, {}),
    "sharded": (12, 4096, {"stacked": True, "devices": 8}, ADAMW, {}),
    "unrolled, 1 MiB of state": (8, 128, {}, ADAMW, {}),
    "unrolled and clipped, 8 MiB": (16, 256, {"update_params": True}, CLIPPED, {}),
    "unrolled, 144 MiB": (32, 768, {}, ADAMW, {}),
    "lamb": (12, 512, {"update_params": True}, optax.lamb(1e-3), {}),
    "bfloat16 storage": (12, 512, {"stacked": True, "update_params": True}, ADAMW, {"storage": "bfloat16"}),
    "on a TPU": (4, 512, {"target": V5E}, ADAMW, {}),
}


@pytest.mark.parametrize("name", POINTS)
def test_defaults_are_never_above_resident(name):
    """By more than the larger of 1 % and 1 MiB; and not because the state stayed."""
    layers, width, how, inner, options = POINTS[name]
    require(how.get("target", H200))
    resident, ours = (
        inspected(inner, layers, width, **how),
        inspected(jo.offload(inner, **options), layers, width, **how),
    )
    assert ours.peak <= resident.peak + max(resident.peak / 100, MIB)
    state = 8 * layers * width**2 / how.get("devices", 1)
    assert ours.host == pytest.approx(state / (2 if options else 1), rel=0.01) and ours.host_temp == 0
    assert ours.stored == pytest.approx(ours.host, rel=0.01) and ours.errors == ()


@pytest.mark.long("compiles more of the same for a chip")
def test_the_window_bounds_what_is_on_the_device():
    """Twice the window is at most the window more: no gradient waits for its state."""
    require(H200)
    layer = 2 * 4096**2 * 4
    one, two, four, eight = (inspected(jo.offload(ADAMW, window=k * layer), 24, 4096).peak for k in (1, 2, 4, 8))
    assert one <= two < four < eight
    assert four - two <= 2 * layer + 16 * MIB and eight - four <= 4 * layer + 16 * MIB


@pytest.mark.oldest("memory of init")
@pytest.mark.parametrize("inner", [ADAMW, optax.contrib.schedule_free_adamw(1e-3)])
def test_init_holds_two_leaves(inner):
    """The leaves have different shapes, or XLA would merge their zeros into one."""
    require(H200)
    tx = jo.offload(inner)
    params = {f"w{k}": array(1024 + 8 * k, 4096) for k in range(24)}
    out = jax.tree.map(lambda x: x.sharding, jo.abstract_state(tx, params))
    found = jo.inspect(jax.jit(tx.init, out_shardings=out), params, target=H200)
    given = sum(x.size for x in params.values()) * 4 * (inner is not ADAMW)  # jit drops arguments that are not read
    assert found.stored >= sum(x.size for x in params.values()) * 4
    leaves = 2 if jax.__version_info__ >= (0, 11) else 3  # the XLA of jax 0.10 keeps one more
    assert found.peak <= given + leaves * (1024 + 8 * 23) * 4096 * 4 + MIB


SHAPES = {"embed": (512, 256), "up": (256, 512), "square": (256, 256), "down": (512, 256), "stacked": (3, 256, 256)}
RETURNED = {
    "params, state": lambda params, state, grads: (params, state),
    "state, params": lambda params, state, grads: (state, params),
    "grads, params, state": lambda params, state, grads: (grads, params, state),
}
DONATED = {"params": (0,), "state": (1,), "both": (0, 1)}


@pytest.mark.oldest("aliases in compiled programs")
@pytest.mark.parametrize("target", [H200, V5E])
@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("donated", ["both", "params", "state"])
def test_no_alias_crosses_memories_and_every_host_leaf_keeps_its_buffer(donated, returned, target):
    require(target)
    tx, params = jo.offload(ADAMW, min_bytes=0), {name: array(*shape) for name, shape in SHAPES.items()}
    state = jo.abstract_state(tx, params)

    def step(params, state):
        grads = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(grads, state, params)
        return RETURNED[returned](optax.apply_updates(params, updates), state, grads)

    found = jo.inspect(jax.jit(step, donate_argnums=DONATED[donated]), params, state, target=target)
    size = 2 * 4 * sum(map(np.prod, SHAPES.values()))
    assert found.errors == ()  # inspect reads the aliases of the compiled program
    assert (found.host, found.host_temp) == (size if donated != "params" else 2 * size, 0)
