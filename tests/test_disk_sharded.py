"""State on disk of parameters on several devices: sharded like them, replicated, or divided further (ZeRO-1)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.on_disk import is_on_disk
from jax_offload._plan import transfers as by_rows
from tests.support.trees import assert_close, assert_equal, handles, read

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
SHAPES = {"embed": (32, 16), "layers": {"w": (6, 16, 24), "b": (6, 24)}, "head": (16, 32), "odd": (7, 9)}
LAYER = 2 * 16 * 24 * 4  # bytes of both moments of a layer
SHARDED = {  # on a mesh of data, fsdp and tensor
    "embed": P("tensor", "fsdp"),
    "layers": {"w": P(None, "fsdp", "tensor"), "b": P(None, "tensor")},
    "head": P("fsdp", "tensor"),
    "odd": P(),
}
OTHERWISE = {"embed": P("data"), "layers": {"w": P(None, None, "fsdp"), "b": P()}, "head": P("tensor"), "odd": P()}
REPLICATED = {"embed": P(), "layers": {"w": P(), "b": P()}, "head": P(), "odd": P()}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def mesh_of(axes=AxisType.Auto, shape=(2, 2, 2), devices=None):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(axes,) * 3, devices=devices)


def network(mesh, specs=SHARDED, seed=0, dtype=np.float32):
    """Parameters on the mesh; with ``None`` on one device."""
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    values = jax.tree.map(lambda s: rng.standard_normal(s, np.float32).astype(dtype), SHAPES, is_leaf=is_shape)
    if mesh is None:
        return jax.device_put(values, jax.devices()[0])
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)


def step_of(tx):
    def step(params, state, grads):
        return jo.update_params(tx, grads, state, params)

    return jo.jit(step, donate_argnums=(0, 1))


def run(tx, params, grads, n=3, state=None):
    params = jax.tree.map(jnp.copy, params)
    state, step = tx.init(params) if state is None else state, step_of(tx)
    for _ in range(n):
        params, state = step(params, state, grads)
    return params, state


def assert_as_in_abstract_state(tx, params, state):
    """What is on disk goes through host memory in the shardings of ``abstract_state``; the rest is there."""
    foretold = jax.tree.leaves(jo.abstract_state(tx, params))
    for x, want in zip(jax.tree.leaves(state, is_leaf=is_on_disk), foretold, strict=True):
        assert (x.shape, x.dtype) == (want.shape, want.dtype)
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (x, x.sharding, want.sharding)
        assert x.sharding.memory_kind == want.sharding.memory_kind
        assert x.sharding.memory_kind == "pinned_host" or not is_on_disk(x)


# ---- values and places ---------------------------------------------------------------------------------------------


def test_a_part_stays_in_host_memory(tmp_path):
    mesh, budget = mesh_of(), 5000
    params, grads = network(mesh), network(mesh, seed=100)
    tx = jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=jo.disk(tmp_path, host_bytes=budget))
    table = jo.placement(tx, params)
    _, state = run(tx, params, grads)
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.ndim]
    kept = [x for x in arrays if x.sharding.memory_kind == "pinned_host"]
    assert 0 < table.host_bytes == sum(x.nbytes for x in kept) <= budget
    assert table.disk_bytes == sum(x.dtype.itemsize * np.prod(x.shape) for x in handles(state)) > 0
    on_disk = [leaf for leaf in table.leaves if leaf.disk]
    assert {leaf.shard_bytes * 4 for leaf in on_disk} == {leaf.nbytes for leaf in on_disk}
    assert_as_in_abstract_state(tx, params, state)


def test_read_to_the_devices(disk):
    mesh = mesh_of()
    params = network(mesh)
    state = jo.offload(optax.adamw(1e-2), min_bytes=0, disk=disk).init(params)
    mu = jo.to_device(state[0].mu)
    for x, p in zip(jax.tree.leaves(mu), jax.tree.leaves(params), strict=True):
        assert x.sharding == p.sharding and x.sharding.memory_kind == "device"


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["zero", "mesh", "specs", "one device", "from one device"])
@pytest.mark.parametrize("part_bytes", [2 * LAYER, 2**30], ids=["rows", "whole"])
def test_a_commit_is_resumed_in_another_sharding(other, part_bytes, tmp_path, monkeypatch):
    """And goes on as it would have; a second commit from there is resumed in the first sharding again."""
    monkeypatch.setattr(by_rows, "PART_BYTES", part_bytes)
    mesh = mesh_of()
    eight = network(mesh), network(mesh, seed=100)
    one = network(None), network(None, seed=100)
    there = {
        "mesh": lambda m: (network(m), network(m, seed=100)),
        "specs": lambda m: (network(mesh, OTHERWISE), network(mesh, OTHERWISE, seed=100)),
        "zero": lambda m: eight,
    }
    a = one if other == "from one device" else eight
    b = (
        one
        if other == "one device"
        else eight
        if other == "from one device"
        else there[other](mesh_of(shape=(1, 2, 2), devices=jax.devices()[3:7]))
    )
    over = "data" if other == "zero" else None

    files = jo.disk(tmp_path)
    tx = jo.offload(CLIPPED, min_bytes=0, disk=files)
    params, state = run(tx, *a, 2)
    files.commit(2, {"params": params, "state": state})
    committed = read((params, state))
    undisturbed = read(run(tx, params, a[1], 2, state))
    files.close()

    for shards, (given, grads) in ((over, b), (None, a)):
        again = jo.disk(tmp_path)
        tx = jo.offload(CLIPPED, min_bytes=0, shard_over=shards, disk=again)
        tree, k = again.resume({"params": given, "state": jo.abstract_state(tx, given)})
        assert k == 2
        params, state = tree["params"], tree["state"]
        assert_equal(read((params, state)), committed)
        assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, given)
        assert_as_in_abstract_state(tx, given, state)
        again.commit(2, {"params": params, "state": state})
        params, state = run(tx, params, grads, 2, state)
        assert_close(read((params, state)), undisturbed, 2e-5)
        if given is a[0] and shards is None:
            assert_equal(read((params, state)), undisturbed)
        again.close()


def test_a_step_on_other_devices_than_the_state(disk):
    mesh = mesh_of(shape=(1, 2, 2), devices=jax.devices()[:4])
    params = network(mesh)
    tx = jo.offload(CLIPPED, min_bytes=0, disk=disk)
    state = tx.init(params)
    elsewhere = mesh_of(shape=(1, 2, 2), devices=jax.devices()[4:])
    arrays = NamedSharding(elsewhere, P())
    state = jax.tree.map(lambda x: jax.device_put(x, arrays) if isinstance(x, jax.Array) else x, state)
    with pytest.raises(ValueError, match=r"disk: the state is on .*, and the step runs on .* Fix: disk\.resume"):
        step_of(tx)(network(elsewhere), state, network(elsewhere))
