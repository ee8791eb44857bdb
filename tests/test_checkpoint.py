"""Checkpoints: any placement into any other, saving beside donated steps, damage, and loading the weights alone."""

import asyncio
import contextlib
import gc
import shutil
import sys
import threading
import types
import warnings
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.serialization import serialization

import jax_offload as jo
from tests.support import steps
from tests.support.trees import kinds_of

HOST, DEVICE = "pinned_host", "device"
P = PartitionSpec


PLACEMENTS = [(0.0, 1, False), (0.0, 8, False), (0.5, 4, True), (0.5, 8, False), (1.0, 4, False), (1.0, 8, True)]

SHAPES = {"embed": (16, 8), "layers": (2, 8, 8), "bias": (8,), "half": (8, 16)}
SPECS = {"embed": P("data"), "layers": P(), "bias": P(), "half": P(None, "data")}


def mesh(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))


def abstract(fraction, devices, zero):
    """Everything that a run of this placement keeps, as descriptions."""
    over, dtypes = "data" if zero else None, {"half": jnp.bfloat16}
    tx = jo.offload(optax.adamw(1e-3, mu_dtype=jnp.float32), fraction=fraction, min_bytes=0, shard_over=over)

    def described(shape, dtype, spec=P()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(devices), spec))

    params = {k: described(shape, dtypes.get(k, jnp.float32), SPECS[k]) for k, shape in SHAPES.items()}
    key = described((), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return {"params": params, "opt_state": jo.abstract_state(tx, params), "key": key}


def filled(target, seed):
    """The described arrays with random bits, that no two share."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(seed), x.sharding)
        return jax.device_put(rng.normal(size=x.shape, scale=100).astype(x.dtype), x.sharding)

    return jax.tree.map(fill, target)


def bits(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def assert_same(got, expected):
    """The same trees, types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b))


def is_in_host_memory(x):
    """As a program that is traced with it is told."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def assert_placed(got, target):
    """Assert that every leaf has the sharding and the memory of the target."""
    steps.assert_placed(got, target)
    assert all(is_in_host_memory(x) == (x.sharding.memory_kind == HOST) for x in jax.tree.leaves(got))


def stored(folder, tree, step=1):
    """Save a checkpoint of one step, and return its manager."""
    manager = ocp.CheckpointManager(folder)
    manager.save(step, args=tree if isinstance(tree, ocp.args.CheckpointArgs) else jo.save_args(tree))
    manager.wait_until_finished()
    return contextlib.closing(manager)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of every placement, each with values of its own: its folder and its values."""
    found = []
    for seed, placement in enumerate(PLACEMENTS):
        tree, folder = filled(abstract(*placement), seed), tmp_path_factory.mktemp("placement")
        with stored(folder, tree, seed):
            found.append((folder, tree))
    return found


@pytest.mark.oldest("restores into every placement")
@pytest.mark.parametrize(("fraction", "devices", "zero"), PLACEMENTS)
def test_every_placement_restores_into_every_other(saved, fraction, devices, zero):
    target = abstract(fraction, devices, zero)
    assert (HOST in jax.tree.leaves(kinds_of(target["opt_state"]))) == (fraction > 0)
    for folder, tree in saved:
        with ocp.CheckpointManager(folder) as manager:
            back = jo.restore(manager, target)
        assert_same(back, tree)
        assert_placed(back, target)


# Steps and saves


def small(**options):
    """A step, and what it starts from: parameters on the device, the state of adamw in host memory."""
    params = jax.device_put({"w": jnp.arange(4096.0).reshape(64, 64) / 4096, "b": jnp.ones(64)}, jax.devices()[0])
    tx = jo.offload(optax.adamw(1e-2), min_bytes=0, **options)

    @partial(jax.jit if options.get("update_on", "device") == "device" else jo.jit, donate_argnums=0)
    def step(tree, i):
        grads = jax.tree.map(lambda p: jnp.sin(p * (i + 1)), tree["params"])
        updates, state = tx.update(grads, tree["opt_state"], tree["params"])
        return {"params": optax.apply_updates(tree["params"], updates), "opt_state": state}

    return tx, {"params": params, "opt_state": tx.init(params)}, step


def target_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture
def writer(monkeypatch):
    """Lets no array be read for writing before it is set. What orbax does before is what ``save`` waits for."""
    go, waiting = threading.Event(), threading.Event()
    write = serialization.async_serialize_from_host

    async def delayed(*args, **kwargs):
        waiting.set()
        # not for ever: closing a manager, as a failing test does, waits for its writer
        await asyncio.get_running_loop().run_in_executor(None, go.wait, 300)
        return await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", delayed)
    go.waiting = waiting
    yield go
    go.set()


def addresses(tree):
    return [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def host_leaves(tree):
    return [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == HOST]


@pytest.mark.parametrize("update_on", ["device", "host", 0.3])
def test_saving_beside_donated_steps(tmp_path, writer, update_on):
    """A save whose writer waits while training goes on in the same memory holds the values of its own step.

    It is restored into an optimizer whose state the device updates, too, and training goes on alike.
    """
    tx, tree, step = small(**{"fraction": 0.5} if update_on == "device" else {"update_on": update_on})
    for i in range(3):
        tree = step(tree, i)
    expected = as_numpy(tree)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=jo.save_args(tree))
        assert writer.waiting.wait(300)
        for i in range(3, 6):
            hosted, before = host_leaves(tree), addresses(host_leaves(tree))
            tree = step(tree, i)
            if update_on == "device":
                assert all(x.is_deleted() for x in hosted)  # truly donated: no writer holds on to this memory,
                assert addresses(host_leaves(tree)) == before  # and the new values are written over the old
        assert manager.is_saving_in_progress()
        writer.set()
        manager.wait_until_finished()
        for tx in small()[0], tx:  # noqa: B020
            target = {"params": target_of(tree["params"]), "opt_state": jo.abstract_state(tx, tree["params"])}
            back = jo.restore(manager, target)
            assert_placed(back, target)
            assert_same(as_numpy(back), expected)
    for i in range(3, 6):
        back = step(back, i)
    assert_same(back, tree)


def test_without_copies_the_save_holds_the_states_own_memory():
    _, tree, _ = small()
    for copy in (True, False):
        saved = jo.save_args(tree, copy=copy).item
        assert (addresses(host_leaves(saved)) == addresses(host_leaves(tree))) == (not copy)
        assert_placed(saved, tree)


class Pair(types.SimpleNamespace):
    """A node whose children have no names."""


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.left, pair.right), None), lambda _, children: Pair(left=children[0], right=children[1])
)


def nnx_state():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    model = nnx.merge(nnx.graphdef(model), jax.device_put(nnx.state(model), jax.devices()[0]))
    return nnx.state(nnx.Optimizer(model, jo.offload(optax.adam(1e-3), min_bytes=0), wrt=nnx.Param))


@pytest.mark.parametrize(
    "make",
    [
        nnx_state,
        lambda: {"pair": Pair(left=jnp.ones(3), right=jnp.zeros(2)), "none": None, "empty": {}, "nothing": ()},
        lambda: {1: jnp.ones(3), 10: [jnp.ones(2), (jnp.zeros(3),)]},
        lambda: {"a/b": jnp.ones(3), "a": {"c": jnp.ones(2)}, "d.e": jnp.zeros(2)},
    ],
    ids=["nnx", "unnamed", "numbered", "slashes"],
)
def test_trees_of_other_kinds(tmp_path, make):
    tree = make()
    with stored(tmp_path, tree) as manager:
        back = jo.restore(manager, target_of(tree))
    assert_same(back, tree)
    assert_placed(back, tree)


# Where a restore lands


@pytest.mark.parametrize("machine", ["this one", "another", "another, on a mesh"])
def test_without_a_target(saved, monkeypatch, machine):
    """Arrays land on the host, sharded as they were if those devices exist, else as jax places arrays."""
    from orbax.checkpoint._src.metadata import sharding

    if machine != "this one":
        absent = mock.Mock(side_effect=ValueError("The available devices are different"))
        monkeypatch.setattr(sharding.NamedShardingMetadata, "to_jax_sharding", absent)
    places = {"another": SingleDeviceSharding(jax.devices()[0]), "another, on a mesh": NamedSharding(mesh(2), P())}
    folder, tree = saved[PLACEMENTS.index((0.5, 8, False))]
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ocp.CheckpointManager(folder))
        if machine == "another, on a mesh":
            stack.enter_context(jax.set_mesh(mesh(2)))
        back = jo.restore(manager)
    for x, original in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert bits(x) == bits(original)
        place = places.get(machine, original.sharding)
        assert x.sharding == place.with_memory_kind(HOST if x.ndim else DEVICE)
        assert is_in_host_memory(x) == (x.ndim > 0)


@pytest.mark.oldest("arrays as a checkpoint gives them")
def test_without_a_target_numbers_and_numpy_arrays_stay_what_they_are(tmp_path):
    tree = {
        "step": 7,
        "rate": 0.5,
        "table": np.arange(6).reshape(2, 3),
        "x": jnp.ones((2, 2), jnp.bfloat16),
        "no": None,
        "scalars": [np.float32(2.1), np.int32(3), np.float16(0.5), np.asarray(0.1, np.float32)],
    }
    with stored(tmp_path, tree) as manager:
        back = jo.restore(manager)
    assert back["step"] == 7 and back["rate"] == 0.5 and back["no"] is None
    assert isinstance(back["table"], np.ndarray) and np.array_equal(back["table"], tree["table"])
    assert back["x"].dtype == jnp.bfloat16 and back["x"].sharding.memory_kind == HOST
    assert [np.float32(x) for x in back["scalars"]] == [np.float32(x) for x in tree["scalars"]]


def test_items_of_a_composite(tmp_path):
    tx, tree, _ = small()
    args = {k: jo.save_args(v) for k, v in tree.items()}
    with stored(tmp_path, ocp.args.Composite(**args, data=ocp.args.JsonSave({"epoch": 3}))):
        pass
    with ocp.CheckpointManager(tmp_path) as manager:
        target = jo.abstract_state(tx, tree["params"])
        state = jo.restore(manager, target, item="opt_state")
        assert_same(state, tree["opt_state"])
        assert_placed(state, target)
        with pytest.raises(ValueError, match=r"item: .*opt_state.* no 'state'"):
            jo.restore(manager, target, item="state")


# Damage


@pytest.fixture
def three_steps(tmp_path):
    """Checkpoints of steps 1, 2 and 3, their values, and where they should land."""
    _, tree, step = small()
    folder, values = tmp_path / "run", {}
    with ocp.CheckpointManager(folder) as manager:
        for i in (1, 2, 3):
            tree = step(tree, i)
            values[i] = as_numpy(tree)
            manager.save(i, args=jo.save_args(tree))
    with mock.patch.object(sys, "unraisablehook"):
        yield folder, values, target_of(tree)
        gc.collect()  # where one read fails orbax leaves the others behind, and Python says so


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_falling_back(three_steps):
    folder, values, target = three_steps
    path = max(files(folder / "3"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16  # plain orbax restores it without an error unless it lies between two leaves
    path.write_bytes(data)
    with ocp.CheckpointManager(folder) as manager:
        with pytest.raises(ValueError, match=r"step 3 in .* is damaged: "):
            jo.restore(manager, target)
        with pytest.warns(UserWarning, match=r"step 3 .*\n.*Using step 2 instead"):
            back = jo.restore(manager, target, fallback=True)
        jax.tree.map(np.testing.assert_array_equal, back, values[2])
        assert_placed(back, target)
        manager.delete(3)
        manager.save(3, args=jo.save_args(back))
        manager.wait_until_finished()
        assert_same(jo.restore(manager, target), back)
        (folder / "2" / "default" / "_METADATA").write_text("{")
        with pytest.warns(UserWarning, match="Using step 1"):  # and not 3, which is later
            back = jo.restore(manager, target, step=2, fallback=True)
        jax.tree.map(np.testing.assert_array_equal, back, values[1])
        shutil.rmtree(folder / "3")  # a manager remembers which steps there were
        with pytest.raises(ValueError, match=r"step 3 in .*3 is damaged"):
            jo.restore(manager, target)
        with pytest.warns(UserWarning, match="Using step 2"), pytest.warns(UserWarning, match="Using step 1"):
            back = jo.restore(manager, target, fallback=True)
        jax.tree.map(np.testing.assert_array_equal, back, values[1])
        shutil.rmtree(folder / "1" / "default")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=r"step 1 .*damaged.*\nNo earlier checkpoint is left"):
                jo.restore(manager, target, fallback=True)


def test_what_is_wrong_with_the_call_is_no_damage(three_steps):
    folder, _, target = three_steps
    params, state = target["params"], target["opt_state"]
    placeless = jax.eval_shape(lambda tree: tree, target)
    assert jax.tree.leaves(placeless)[0].sharding is None
    fewer = jo.offload(optax.adamw(1e-3), storage="bfloat16", min_bytes=0)
    wrong = {
        r"target: leaf 'opt_state/0/count' is int32\[2\], and .* has int32\[\]": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=x.sharding), target
        ),
        r"'params/b' is bfloat16\[64\], and .* has float32\[64\]. Restore it as": target
        | {"params": jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), params)},
        "only in the checkpoint opt_state": {"params": params},
        "only in the target     b": target | {"b": 1},
        r"target: leaf 'opt_state/0/count' is int64\[\], and .* has int32\[\]": target
        | {"opt_state": jax.tree.map(lambda x: x if x.ndim else 0, state)},
        "target: leaf 'opt_state/0/count' has no sharding": placeless,
        r"in fewer bits \(storage=\): .*jo.from_plain\(tx, jo.to_plain\(saved_tx": target
        | {"opt_state": jo.abstract_state(fewer, params)},
    }
    with ocp.CheckpointManager(folder) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, given in wrong.items():
            with pytest.raises(ValueError, match=message):
                jo.restore(manager, given, fallback=True)
        with pytest.raises(ValueError, match=r"no complete checkpoint of step 7 in .*\[1, 2, 3\]"):
            jo.restore(manager, target, step=7, fallback=True)
        with pytest.raises(TypeError, match=r"manager: expected an orbax.*Fix: jo.restore\(ocp.CheckpointManager\("):
            jo.restore(folder, target)


@pytest.mark.parametrize("flat", ["a/b", "a.b"])
def test_two_leaves_of_one_name(flat):
    """The first tree could not be restored; of the second, orbax keeps one leaf and raises no error."""
    tree = {flat: jnp.zeros(4), "a": {"b": jnp.ones(4)}}
    with pytest.raises(ValueError, match=rf"\['a'\]\['b'\] and \['{flat}'\] have the same name .*Fix: rename a key"):
        jo.save_args(tree)


def test_two_leaves_of_one_name_after_damage(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in 0, 1:
            manager.save(step, args=jo.save_args({"a.c": jnp.zeros(4), "a": {"b": jnp.ones(4)}}))
        manager.wait_until_finished()
        path = tmp_path / "1" / "default" / "_METADATA"
        path.write_text(path.read_text().replace("a.c", "a.b"))
        with pytest.warns(UserWarning, match=r"step 1 .* is damaged: ValueError: tree: .* same name(.|\n)*step 0"):
            assert "a.c" in jo.restore(manager, fallback=True)


def test_a_pool_that_is_too_small_for_the_copy(monkeypatch):
    """It has room for the state alone. Only the GPU's pool is capped."""
    _, tree, _ = small()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(tree["opt_state"]))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(1.5 * nbytes / 2**30))
    jo.save_args(tree)
    monkeypatch.setattr(type(jax.devices()[0]), "platform", "gpu")
    with pytest.raises(ValueError, match=r"save_args\(\): the state with its copy .*copy=False"):
        jo.save_args(tree)
    jo.save_args(tree, copy=False)


@pytest.mark.oldest("arrays as a checkpoint gives them")
def test_a_checkpoint_that_is_being_written_is_not_damaged(tmp_path):
    tx, tree, step = small()
    target = {"params": target_of(tree["params"]), "opt_state": jo.abstract_state(tx, tree["params"])}
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="no complete checkpoint in"):
            jo.restore(manager)
        for i in range(2):
            tree = step(tree, i)
            manager.save(i, args=jo.save_args(tree))
        assert_same(jo.restore(manager, target, fallback=True), tree)
