"""Laws of compiled steps that hold whatever their figures are. The figures: tests/aot/compiled.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.aot.compiled import Row, abstract
from tests.aot.harness import H200, MIB, V5E, array, require
from tests.support.steps import step_of

ADAMW = optax.adamw(1e-3)


@pytest.mark.long("compiles more of the same for a chip")
def test_the_window_bounds_what_is_on_the_device():
    """Twice the window is at most the window more: no gradient waits for its state."""
    require(H200)
    params, batch, loss = abstract(Row("24x4096^2 unrolled", 512, ("adamw", None), "jit"))
    layer = 2 * 4096**2 * 4

    def peak(window):  # without jo.compiler_options, with which more copies are in flight
        tx = jo.offload(ADAMW, window=window)
        step = jax.jit(step_of(tx, loss=loss), donate_argnums=(0, 1))
        return jo.inspect(step, params, jo.abstract_state(tx, params), batch, target=H200).peak

    one, two, four, eight = (peak(k * layer) for k in (1, 2, 4, 8))
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
    given = sum(x.size for x in params.values()) * 4
    assert found.stored >= given
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
