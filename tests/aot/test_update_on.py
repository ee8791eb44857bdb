"""The first program of a driven step, compiled for an H200: gradients go down as they are made, and nothing waits."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval
from jax_offload._drive.run import Driven
from jax_offload._interop.xla_options import options_for_sending
from tests.aot.harness import H200, MIB, measure, mesh_for, require
from tests.aot.model import loss, parameters, step_of

RESIDENT = {512: 5048, 16384: 11328}  # MiB, the whole step


def model(share, tokens):
    """24 unrolled layers of 4096×4096, compiled up to its update."""
    where = NamedSharding(mesh_for(H200), PartitionSpec())
    params = parameters(24, 4096, False, where)
    tx = jo.offload(optax.adamw(1e-3), update_on=share)
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((tokens, 4096), jnp.float32, sharding=where)
    return step_of(tx, loss, update_params=True), args, where


def first_program(share, tokens):
    step, args, where = model(share, tokens)
    closed, _ = jaxpr_of(step, *args)
    leaves = jax.tree.leaves(args)
    driven = Driven(closed, leaves, [True] * (len(leaves) - 1) + [False], {}, {}, segments=False)
    (task, program), *_ = driven._tasks
    given = dict(zip(driven._step.inputs, [*driven._step.consts, *leaves], strict=True))
    kinds = [HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND for v in task.outputs] + [HOST_KIND for _ in task.down]
    places = [where.with_memory_kind(kind) for kind in kinds]
    operands = tuple(given[v] for v in task.inputs)
    return measure(H200, program.__wrapped__, operands, (), places, options_for_sending("cuda"))


@pytest.mark.long("compiles more of the same for a chip", but=["host-512*"])
@pytest.mark.parametrize(
    ("share", "tokens", "peak", "hidden"),
    [("host", 512, 1856, 0.95), ("host", 16384, 8256, 0.95), (0.3, 16384, 9344, 0.85)],
)
def test_gradients_go_down_as_they_are_made(share, tokens, peak, hidden):
    require(H200)
    found = first_program(share, tokens)
    assert found.peak <= 1.02 * peak < RESIDENT[tokens]
    assert found.host_temp == 0 and found.loaded == 0
    assert found.stored == pytest.approx(1536 if share == "host" else 448)
    assert found.hidden >= hidden


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
