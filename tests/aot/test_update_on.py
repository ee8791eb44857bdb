"""The first program of a driven step, compiled for an H200: gradients go down as they are made, and nothing waits."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from tests.aot.harness import H200, MIB, mesh_for, require
from tests.aot.model import loss, parameters, step_of


def model(share, tokens):
    """24 unrolled layers of 4096×4096, compiled up to its update."""
    where = NamedSharding(mesh_for(H200), PartitionSpec())
    params = parameters(24, 4096, False, where)
    tx = jo.offload(optax.adamw(1e-3), update_on=share)
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((tokens, 4096), jnp.float32, sharding=where)
    return step_of(tx, loss, update_params=True), args, where


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize(("share", "tokens", "peak"), [("host", 16384, 8256), (0.3, 16384, 9344)])
def test_inspect_looks_at_the_pass(share, tokens, peak):
    require(H200)
    fun, args, _ = model(share, tokens)
    step = jo.jit(fun, donate_argnums=(0, 1))
    report = jo.inspect(step, *args, target=H200)
    assert report.program == "before" and report.errors == () and report.peak / MIB == pytest.approx(peak, rel=0.02)
    assert {t.leaf for t in report.transfers} == {"gradients"}


@pytest.mark.long("compiles more of the same for a chip")
def test_the_stack_of_gradients_is_nowhere_on_the_device():
    """Rows go down inside the scan that makes them."""
    require(H200)
    where = NamedSharding(mesh_for(H200), PartitionSpec())
    params = parameters(12, 4096, True, where)
    tx = jo.offload(optax.adamw(1e-3), update_on="host")
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((512, 4096), jnp.float32, sharding=where)
    step = jo.jit(step_of(tx, loss, update_params=True), donate_argnums=(0, 1))
    report = jo.inspect(step, *args, target=H200)
    assert report.program == "before" and report.errors == ()
    assert report.peak < 2 * params["w"].size * 4  # the parameters, and a stack as large
