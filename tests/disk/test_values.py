"""Steps whose state is on disk, beside the same steps with it in host memory: one table of optimizers, formats, meshes,
and of leaves that go whole or by their rows."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive import stages
from jax_offload._plan import transfers as by_rows
from tests.support.trees import assert_close, assert_equal, handles, read

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
SHAPES = {"layers": (6, 32, 32), "bias": (6, 32), "embed": (160, 32), "odd": (7, 9)}
ROW = 2 * 32 * 32 * 4  # bytes of both moments of a layer
SPECS = {  # on a mesh of data, fsdp and tensor
    "minor axes": {"layers": P(None, "fsdp", "tensor"), "bias": P(None, "tensor"), "embed": P(None, "fsdp")},
    "rows": {"layers": P("tensor"), "bias": P(), "embed": P(("data", "fsdp"), "tensor")},
    "replicated": {"layers": P(), "bias": P(), "embed": P()},
    "zero": {"layers": P(), "bias": P(), "embed": P()},
    "one device": {"layers": P(), "bias": P(), "embed": P()},
}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
ADAMW, INT8 = optax.adamw(1e-2), {"mu": "int8", "nu": "uint8"}


@dataclasses.dataclass(frozen=True)
class Case:
    inner: Any = ADAMW
    mesh: str | None = None
    axes: Any = AxisType.Auto
    by_rows: bool = True
    options: dict = dataclasses.field(default_factory=dict)
    dtype: Any = np.float32
    donate: tuple = (0, 1)
    exact: bool = False  # moments bit for bit, where XLA fuses alike
    rtol: float = 2e-5


MULTI = optax.MultiSteps(ADAMW, 2).gradient_transformation()
COLUMNS = optax.stateless(lambda g, _: jax.tree.map(lambda x: x - x.mean(axis=0, keepdims=True), g))
MASTERS = {"inner": jo.with_master_params(ADAMW), "dtype": jnp.bfloat16, "rtol": 2e-2}
CASES = {
    "masters, zero": Case(**MASTERS, mesh="zero"),
    "adamw": Case(exact=True),
    "adamw, whole": Case(by_rows=False, exact=True),
    "adamw, in chunks": Case(options={"window": 2**14}, exact=True),
    "adamw, whole, in chunks": Case(by_rows=False, options={"window": 2**12}, exact=True),
    "adamw, nothing donated": Case(donate=(), exact=True),
    "clipped": Case(CLIPPED),
    "sgd": Case(optax.sgd(1e-2, momentum=0.9), exact=True),
    "lion": Case(optax.lion(1e-2), exact=True),
    "lamb": Case(optax.lamb(1e-2)),
    "lamb, in chunks": Case(optax.lamb(1e-2), options={"window": 2**14}),
    "adafactor": Case(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "prodigy": Case(optax.contrib.prodigy(1.0)),
    "muon": Case(optax.contrib.muon(1e-2), rtol=1e-4),
    "schedule": Case(optax.nadam(optax.cosine_decay_schedule(1e-2, 10))),
    "MultiSteps": Case(MULTI),
    "MultiSteps, zero": Case(MULTI, "zero"),
    "ema of updates": Case(optax.chain(optax.adam(1e-2), optax.ema(0.9))),
    "means of columns": Case(optax.chain(optax.trace(0.9), COLUMNS, optax.scale(-1e-2))),
    "bfloat16": Case(options={"storage": "bfloat16"}),
    "int8": Case(options={"storage": INT8}, rtol=1e-4),
    "int8, whole": Case(by_rows=False, options={"storage": INT8}, rtol=1e-4),
    "int8, minor axes": Case(mesh="minor axes", by_rows=False, options={"storage": INT8}, rtol=1e-4),
    "masters": Case(**MASTERS),
    "masters, parameters kept": Case(**MASTERS, donate=(1,)),
    **{
        f"{mesh}, {axes.name}{'' if rows else ', whole'}": Case(mesh=mesh, axes=axes, by_rows=rows, exact=True)
        for mesh in SPECS
        for axes in (AxisType.Auto, AxisType.Explicit)
        for rows in (True, False)
    },
    "clipped, zero": Case(CLIPPED, "zero"),
    "lamb, rows": Case(optax.lamb(1e-2), "rows"),
    "adafactor, minor axes": Case(optax.adafactor(1e-2, min_dim_size_to_factor=8), "minor axes"),
}


def mesh_of(case):
    shape, devices = ((1, 1, 1), jax.devices()[1:2]) if case.mesh == "one device" else ((2, 2, 2), None)
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(case.axes,) * 3, devices=devices)


def network(case, seed):
    rng = np.random.default_rng(seed)
    values = {name: (rng.standard_normal(s, np.float32) / 4).astype(case.dtype) for name, s in SHAPES.items()}
    if case.mesh is None:
        return jax.device_put(values, jax.devices()[0])
    specs = SPECS[case.mesh] | {"odd": P()}
    return {k: jax.device_put(x, NamedSharding(mesh_of(case), specs[k])) for k, x in values.items()}


def trained(case, disk):
    """Parameters and state after three updates, and the transformation."""
    over = "data" if case.mesh == "zero" else None
    tx = jo.offload(case.inner, min_bytes=128, shard_over=over, disk=disk, **case.options)
    first, grads = network(case, 0), network(case, 100)
    before, params = read(first), first if case.donate == (0, 1) else jax.tree.map(jnp.copy, first)
    state = tx.init(params)
    step = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=case.donate)
    after = params
    for _ in range(3):
        after, state = step(after, state, grads)
    if 0 not in case.donate:
        assert_equal(read(params), before)
    return after, state, tx


@pytest.mark.parametrize("name", CASES)
def test_as_in_host_memory(name, disk, monkeypatch):
    """Values, types, shardings and kinds of memory after three donated updates."""
    case = CASES[name]
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    monkeypatch.setattr(by_rows, "PART_BYTES", 2 * ROW if case.by_rows else 2**30)
    with nullcontext() if case.mesh is None else jax.set_mesh(mesh_of(case)):
        want, host, _ = trained(case, None)
        got, state, tx = trained(case, disk)
        foretold = [] if "storage" in case.options else jax.tree.leaves(jo.abstract_state(tx, got))
    assert len(handles(state)) >= 4
    assert case.by_rows or all(len(disk.ends(x.place.name)) == 1 for x in handles(state))
    for x, y in zip(jax.tree.leaves(state, is_leaf=is_on_disk), foretold, strict=bool(foretold)):
        assert (x.shape, x.dtype, x.sharding.memory_kind) == (y.shape, y.dtype, y.sharding.memory_kind)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x, x.sharding, y.sharding)
        assert x.sharding.memory_kind == "pinned_host" or not is_on_disk(x)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.dtype == y.dtype
        assert x.sharding.memory_kind == y.sharding.memory_kind == "device"
    if case.exact:
        assert_equal(read(state), read(host))
    elif "storage" not in case.options:  # whose codes may be neighbours where a number is in the middle
        assert_close(read(state), read(host), case.rtol)
    assert_close(read(got), read(want), case.rtol)
    if "masters" in name:
        for x, master in zip(jax.tree.leaves(got), jax.tree.leaves(read(state.master)), strict=True):
            np.testing.assert_array_equal(np.float32(x), np.float32(master.astype(jnp.bfloat16)))
