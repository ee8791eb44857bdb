"""A stacked leaf on disk goes through a program of some of its rows: what that holds, compiled for an H200."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.memory import is_host_aval
from jax_offload._drive import stages
from jax_offload._interop.jit import Undone
from jax_offload._plan import transfers as by_rows
from tests.aot.harness import H200, measure, mesh_for, require

LAYERS, WIDTH = 12, 512  # 24 MiB of moments, of which a group is 4


def loss(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0].astype(jnp.float32).sum()


@pytest.mark.long("compiles more of the same for a chip", but=["False"])
@pytest.mark.parametrize("masters", [False, True])
def test_the_parameter_is_updated_in_place(masters, tmp_path, monkeypatch):
    """One program for all groups; beside the parameter and its gradient it holds rows, before and after their update.
    Neither is copied."""
    require(H200)
    part = 4 * 2**20 * (3 if masters else 2) // 2
    monkeypatch.setattr(stages, "GROUP_BYTES", part)
    monkeypatch.setattr(by_rows, "PART_BYTES", part)
    inner = jo.with_master_params(optax.adamw(1e-3)) if masters else optax.adamw(1e-3)
    tx = jo.offload(inner, disk=jo.disk(tmp_path), window=part)
    dtype = jnp.bfloat16 if masters else jnp.float32
    params = jax.device_put({"w": jnp.zeros((LAYERS, WIDTH, WIDTH), dtype)}, jax.devices("cpu")[0])
    state, step = (
        tx.init(params),
        jo.jit(lambda p, s, x: jo.update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1)),
    )
    args = params, state, jnp.zeros((8, WIDTH), dtype)
    undone = Undone.found_in(step._outermost(args, {})(*args))
    step(*args)
    ((driven, _),) = undone.programs.values()
    groups = [(task, run) for task, run in driven._tasks if task.stage.name == "group"]
    assert len(groups) == 6 and len({id(run) for _, run in groups}) == 1
    task, run = groups[-1]
    kinds = [["pinned_host" if is_host_aval(v.aval) else "device" for v in of] for of in (task.inputs, task.outputs)]
    places = [[NamedSharding(mesh_for(H200), P(), memory_kind=kind) for kind in of] for of in kinds]
    args = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s)
        for v, s in zip(task.inputs, places[0], strict=True)
    ]
    found = measure(H200, run.__wrapped__, tuple(args), donate=task.reused, out_shardings=places[1])
    both, rows = 2 * params["w"].nbytes / 2**20, part / 2**20
    assert found.host_arguments == found.loaded == found.stored == rows and found.host_temp == 0
    assert found.arguments < both + 0.01
    assert found.peak < both + 2.5 * rows
    stack = f"[{LAYERS},{WIDTH},{WIDTH}]"
    copies = [line for line in found.text.splitlines() if f"{stack}" in line and " copy(" in line]
    assert stack in found.text and not copies, copies
