"""``inspect`` and ``verify`` of steps on four devices: bytes are those of one."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from tests.aot.harness import H200, mesh_for, require
from tests.aot.model import ADAMW, loss, parameters, step_of

MIB = 2**20
MODELS = {"FSDP": (("data",), None), "ZeRO-1": ((), "data")}  # how the parameters are divided, and shard_over


def placed(*spec, kind="device"):
    return NamedSharding(mesh_for(H200, (4,), ("data",)), PartitionSpec(*spec), memory_kind=kind)


@pytest.mark.parametrize("name", MODELS)
def test_per_device(name):
    """Six layers of 4 MiB: 24 of parameters, 48 of state; a quarter of the state, and under FSDP of all, on each.

    Of stacked layers: tests/aot/compiled.py.
    """
    require(H200)
    spec, over = MODELS[name]
    params, tx = parameters(6, 1024, False, placed(*spec)), jo.offload(ADAMW, shard_over=over)
    batch = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=placed("data"))
    args = params, jo.abstract_state(tx, params), batch
    step = step_of(tx, loss, update_params=True)
    out = jax.tree.map(lambda a: a.sharding, args[:2])
    report = jo.verify(jo.jit(step, donate_argnums=(0, 1), out_shardings=out), *args, target=H200)
    assert report.problems == () and (report.host, report.host_temp) == (12 * MIB, 0)
    assert report.parts["parameters"] == (6 if name == "FSDP" else 24) * MIB
    assert report.loaded == report.stored == 12 * MIB
    assert report.timeline.collectives > 0
    assert report.timeline.link == pytest.approx((report.loaded + report.stored) / 64e9)  # the host's memory, shared
    # updated between the passes, a layer's moments while the next one's come
    assert 0 < report.timeline.window <= 4 * MIB


def test_a_resident_state():
    """48 MiB of moments, a quarter on each device."""
    require(H200)
    params = parameters(6, 1024, True, placed(None, "data"))
    leaf = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.float32, sharding=placed(None, "data"))
    state = jax.tree.map(lambda x: leaf if x.ndim else x, jax.eval_shape(ADAMW.init, params))
    fun = jax.jit(lambda p, s: ADAMW.update(p, s, p), donate_argnums=1)
    with pytest.raises(ValueError, match=r"state has 3 leaves, 12.00 MiB, on the device"):
        jo.verify(fun, params, state, target=H200)
