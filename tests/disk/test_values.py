"""Leaves on disk that go whole or by their rows, and commits that are resumed in another division.

Values of every optimizer and sharding: tests/test_equivalence.py.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.disk.faulty import Faulty
from tests.support.sizes import set_sizes
from tests.support.trees import assert_close, assert_equal, is_on_disk, read, shardings_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
SHAPES = {"layers": (7, 32, 32), "bias": (6, 32), "embed": (160, 32), "odd": (7, 9)}
ROW = 2 * 32 * 32 * 4  # bytes of both moments of a layer
WHOLE = 2**30
SPECS = {  # on a mesh of data, fsdp and tensor
    "minor axes": {"layers": P(None, "fsdp", "tensor"), "bias": P(None, "tensor"), "embed": P(None, "fsdp")},
    "rows": {"layers": P(None, "tensor"), "bias": P("tensor"), "embed": P(("data", "fsdp"), "tensor")},
    "replicated": {},
}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
ADAMW = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two layers are a group."""
    set_sizes(monkeypatch.setattr, group=1, part=2 * ROW)


COLUMNS = optax.stateless(lambda g, _: jax.tree.map(lambda x: x - x.mean(axis=0, keepdims=True), g))
MEANS = optax.chain(optax.trace(0.9), COLUMNS, optax.scale(-1e-2))


def mesh_of(shape=(2, 2, 2), devices=None):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def network(seed=0, mesh=None, specs="replicated"):
    """Parameters on the mesh; with ``None`` on one device."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(s, np.float32) / 4 for name, s in SHAPES.items()}
    if mesh is None:
        return jax.device_put(values, jax.devices()[0])
    return {k: jax.device_put(x, NamedSharding(mesh, SPECS[specs].get(k, P()))) for k, x in values.items()}


def step_of(tx):
    return jo.jit(lambda params, state, grads: jo.update_params(tx, grads, state, params), donate_argnums=(0, 1))


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


def test_a_leaf_is_written_while_its_last_rows_are_not_read(disk, monkeypatch):
    """Of seven groups, one for each layer; else all of a leaf would be in host memory."""
    set_sizes(monkeypatch.setattr, part=ROW)
    log = []
    tx, params = jo.offload(ADAMW, min_bytes=256, select="layers", disk=disk), network()
    step, state = step_of(tx), tx.init(params)
    Faulty(disk.directory, lambda name, path, *_: log.append(name) if "state" in path.name else None)
    step(params, state, network(100))
    disk.wait()
    assert log.count("preadv") == log.count("pwritev") == 14
    assert log.index("pwritev") < len(log) - 1 - log[::-1].index("preadv")


def test_the_table_says_how(disk):
    tx = jo.offload(ADAMW, min_bytes=256, disk=disk)
    said = str(jo.placement(tx, network()))
    for words in (
        "from disk in 4 parts of 2 rows, 2 leaves together",
        "from disk in 3 parts of 64 rows, 2 leaves together",
        "whole, 2 leaves together\n",
    ):
        assert words in said.replace("\n    ", " "), said
    why = "broadcast_in_dim of a reduction over all rows"
    for window, words in (
        (None, f"whole, from disk as a whole: {why}"),
        (2**12, f"whole: {why}, from disk as a whole too"),
    ):
        other = jo.offload(MEANS, min_bytes=256, window=window, disk=jo.disk("unused"))
        said = str(jo.placement(other, network())).replace("\n    ", " ")
        assert words in said, said


# ---- resumed in another division -------------------------------------------------------------------------------------


def at(on_mesh, specs="minor axes", **how):
    """What makes parameters and gradients there."""
    return lambda: [network(seed, mesh_of(**how) if on_mesh else None, specs) for seed in (0, 100)]


EIGHT, ALONE, FOUR = at(True), at(False), {"shape": (1, 2, 2), "devices": jax.devices()[3:7]}
DIVISIONS = {  # where it is committed and resumed, over what the state is divided there, PART_BYTES then
    "zero": (at(True, "replicated"), at(True, "replicated"), "data", 4 * ROW),
    "another mesh": (EIGHT, at(True, **FOUR), None, 2 * ROW),
    "another mesh, whole": (EIGHT, at(True, **FOUR), None, WHOLE),
    "other specs": (EIGHT, at(True, "rows"), None, 2 * ROW),
    "one device": (EIGHT, ALONE, None, 2 * ROW),
    "from one device": (ALONE, EIGHT, None, 2 * ROW),
    "as before": (ALONE, ALONE, None, 2 * ROW),
    "larger groups": (ALONE, ALONE, None, 4 * ROW),
    "one group": (ALONE, ALONE, None, WHOLE),
}


@pytest.mark.parametrize("then", DIVISIONS)
def test_a_commit_is_resumed_in_another_division(then, tmp_path, monkeypatch):
    """Its values are the same, bit for bit, the files stay as they were made, and training goes on as it would have;
    a second commit from there is resumed as it was at first. A new disk has the ranges of now."""
    begun, resumed, over, part_bytes = DIVISIONS[then]
    with contextlib.closing(jo.disk(tmp_path / "run")) as files:
        tx, (params, grads) = jo.offload(CLIPPED, min_bytes=256, disk=files), begun()
        params, state = run(tx, params, grads, 2)
        files.commit(2, {"params": params, "state": state})
        committed, ends = read((params, state)), files.ends("[1][0].mu['layers']")
        undisturbed = read(run(tx, params, grads, 2, state))
    set_sizes(monkeypatch.setattr, part=part_bytes)
    for k, (shards, place) in enumerate([(over, resumed), (None, begun)]):
        with (
            contextlib.closing(jo.disk(tmp_path / "run")) as again,
            contextlib.closing(jo.disk(tmp_path / f"{k}")) as new,
        ):
            tx, onto = (jo.offload(CLIPPED, min_bytes=256, shard_over=shards, disk=disk) for disk in (again, new))
            given, grads = place()
            tree, step = again.resume({"params": given, "state": jo.abstract_state(tx, given)})
            params, state = tree["params"], tree["state"]
            assert step == 2 and again.ends("[1][0].mu['layers']") == ends == (2, 4, 6, 7)
            assert_equal(read((params, state)), committed)
            assert shardings_in(params) == shardings_in(given)
            assert_as_in_abstract_state(tx, given, state)
            again.commit(2, {"params": params, "state": state})
            params, state = run(tx, params, grads, 2, state)
            assert_close(read((params, state)), undisturbed, 2e-5)
            if place is begun and shards is None:
                assert_equal(read((params, state)), undisturbed)
            assert_equal(read(jo.to_host(onto, state, params)), read(state))
            assert len(new.ends("[1][0].mu['layers']")) == {2 * ROW: 4, 4 * ROW: 2, WHOLE: 1}[part_bytes]


def test_a_step_on_other_devices_than_the_state(disk):
    params, grads = at(True, shape=(1, 2, 2), devices=jax.devices()[:4])()
    tx = jo.offload(CLIPPED, min_bytes=256, disk=disk)
    state = tx.init(params)
    elsewhere, grads = at(True, shape=(1, 2, 2), devices=jax.devices()[4:])()
    arrays = NamedSharding(elsewhere["odd"].sharding.mesh, P())
    state = jax.tree.map(lambda x: jax.device_put(x, arrays) if isinstance(x, jax.Array) else x, state)
    with pytest.raises(ValueError, match=r"disk: the state is on .*, and the step runs on .* Fix: disk\.resume"):
        step_of(tx)(elsewhere, state, grads)
