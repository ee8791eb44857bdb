"""``jo.plan(make, tx)``: the rows of a step of yours, compiled for a chip that need not be there."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from tests.aot.harness import H200, device_sharding, mesh_for, require
from tests.aot.model import ADAMW, CLIPPED, loss, parameters
from tests.support.steps import step_of

NAMES = ["resident", "offload", "cores"]


def array(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or device_sharding(H200))


def maker(layers=8, width=512, tokens=256, stacked=True, sharding=None, of_batch=None):
    def make(tx):
        params = parameters(layers, width, stacked, sharding or device_sharding(H200))
        batch = array(tokens, width, sharding=of_batch)
        return step_of(tx, loss=loss), params, jo.abstract_state(tx, params), batch

    return make


def test_without_a_target_only_what_is_exact():
    """The parameters are those that the state is made of; how much a step takes is not known."""
    found = jo.plan(maker(), ADAMW, chip="h100", device_memory="1GiB")
    sizes = jo.plan(ADAMW, parameters(8, 512, True, None), chip="h100", device_memory="1GiB")
    assert [row.name for row in found.options] == NAMES
    assert [row.peak for row in found.options] == [row.peak for row in sizes.options]
    assert all(row.fits is None for row in found.options)
    assert "pip install 'jax_offload[aot]'" in str(found) and "target=" in str(found)

    def jitted(tx):
        step, *args = maker()(tx)
        return jo.jit(lambda *given: step(*given)), *args

    assert jo.plan(jitted, ADAMW, chip="h100", device_memory="1GiB").options == found.options


def test_a_target_whose_compiler_is_not_installed(monkeypatch):
    """It is an error, as in ``inspect``, rather than a table without peaks."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"target: jax-cuda13-plugin, which compiles for h200, is not installed"):
        jo.plan(maker(), ADAMW, target=H200)


@pytest.mark.parametrize("inner", [ADAMW, CLIPPED], ids=["adamw", "clipped"])
def test_each_row_is_what_inspect_finds(inner):
    require(H200)
    make, target = maker(), H200
    found = jo.plan(make, inner, target=target)
    assert [row.name for row in found.options] == (
        NAMES if inner is ADAMW else ["resident", "offload", "pipelined", "cores"])  # fmt: skip
    step, *args = make(inner)
    resident = jo.inspect(jax.jit(step, donate_argnums=(0, 1)), *args, target=target)
    step, *args = make(jo.offload(inner))
    offload = jo.inspect(jo.jit(step, donate_argnums=(0, 1)), *args, target=target)
    assert (found["resident"].peak, found["offload"].peak) == (resident.peak, offload.peak)
    assert found["offload"].host == offload.host == 2 * 8 * 512**2 * 4
    assert found["offload"].added == offload.timeline.exposed and found["offload"].compiled == H200
    assert (found["offload"].loaded, found["offload"].stored) == (offload.loaded, offload.stored)
    assert found["cores"].overhead == found["cores"].added / resident.timeline.compute
    if inner is CLIPPED:
        turned = jo.inspect(jo.pipelined(step, donate_argnames=("params", "state")), *args, target=target)
        assert found["pipelined"].peak == turned.peak
    for row in found.options:
        assert row.peak == row.parameters + row.gradients + row.state + row.window + row.activations
        assert row.name == "resident" or row.adds == "nothing" or row.adds.endswith("%")
    assert str(found).count("in act.") == len(found.options)


def test_a_parameter_that_the_step_does_not_read():
    """The program leaves it out, and it stays on the device: it is in the sum, and the window is not negative."""
    require(H200)
    params = {"read": parameters(2, 256, True, device_sharding(H200)), "unread": array(8192, 8192)}

    def make(tx):
        def step(params, state, batch):
            grads = jax.grad(lambda params: loss(params["read"], batch))(params)
            updates, state = tx.update(grads, state, params)
            return {**params, "read": optax.apply_updates(params["read"], updates["read"])}, state

        return step, params, jo.abstract_state(tx, params), array(256, 256)

    for row in jo.plan(make, optax.masked(optax.adam(1e-3), {"read": True, "unread": False}), target=H200).options:
        assert row.window >= 0 and row.activations >= 0 and row.parameters >= 8192**2 * 4, row


def test_a_step_that_is_wrapped_already():
    """Each row wraps the function itself instead of the result of ``jo.jit`` or ``jo.pipelined``."""
    require(H200)

    def wrapped(by):
        def make(tx):
            step, *args = maker(2, 256)(tx)
            return by(step, donate_argnums=(0, 1)), *args

        return make

    plain = jo.plan(maker(2, 256), CLIPPED, target=H200)
    assert "pipelined" in [row.name for row in plain.options]
    for by in (jo.jit, jo.pipelined, jax.jit):
        found = jo.plan(wrapped(by), CLIPPED, target=H200)
        assert found.options == plain.options and "no row" not in str(found), by


@pytest.mark.long("compiles a step with several fractions for an H200")
def test_the_smallest_fraction_that_fits_is_compiled_too():
    require(H200)
    make = maker(6, 512, stacked=False)
    whole = jo.plan(make, ADAMW, target=H200)
    peak = (whole["resident"].peak + whole["offload"].peak) // 2
    found = jo.plan(make, ADAMW, target=H200, device_memory=int(peak / 0.75 / 0.95))
    row = found["fraction"]
    assert row.fits and row.compiled == H200 and found["resident"].fits is False
    assert whole["offload"].peak < row.peak <= peak and row.host < whole["offload"].host


def test_a_train_state():
    """Flax's, the only argument that comes back."""
    require(H200)
    params = parameters(4, 512, True, device_sharding(H200))

    def make(tx):
        count, opt_state = array(dtype=jnp.int32), jo.abstract_state(tx, params)
        state = TrainState(step=count, apply_fn=loss, params=params, tx=tx, opt_state=opt_state)

        def step(state, batch):
            value, grads = jax.value_and_grad(loss)(state.params, batch)
            new, opt_state = jo.update_params(tx, grads, state.opt_state, state.params)
            return state.replace(step=state.step + 1, params=new, opt_state=opt_state), value

        return step, state, array(64, 512)

    found = jo.plan(make, ADAMW, target=H200)
    assert found["offload"].peak < found["resident"].peak
    assert found["resident"].peak >= 4 * 4 * 512**2 * 4  # parameters, gradients and moments: all donated, none twice


def test_sharded_over_eight_devices():
    """Bytes are those of one device, in the exact parts and as compiled."""
    require(H200)
    mesh = mesh_for(H200, (4,), ("data",))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"), memory_kind="device")
    rows = NamedSharding(mesh, PartitionSpec("data"))
    found = jo.plan(maker(4, 1024, 1024, sharding=columns, of_batch=rows), ADAMW, target=H200)
    assert found.devices == 4 and found["offload"].host == 2 * 4 * 1024**2 * 4 // 4
    assert found["offload"].peak < found["resident"].peak
    assert [row.name for row in found.options] == NAMES and "no row" not in str(found)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda tx: 3, TypeError, r"is to return \(step, \*arguments\).* cannot unpack .* int"),
        (lambda tx: (lambda p: p, 1, 2), TypeError, r"can be called with these arguments.* too many positional"),
        (lambda tx: (lambda p: p, jnp.ones(2)), ValueError, "make: it has made no state .* jo.abstract_state"),
    ],
)  # fmt: skip
def test_what_is_told(make, error, says):
    with pytest.raises(error, match=says):
        jo.plan(make, optax.adamw(1e-3))
    with pytest.raises(TypeError, match=r"plan\(make, tx\).*jo.inspect\(step, \*args, target="):
        jo.plan(*maker()(jo.offload(ADAMW)))
