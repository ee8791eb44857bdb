"""A state on disk and what else keeps one: memory, other disks, orbax's checkpoints, each way, leaf by leaf."""

import copy
import mmap
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jax_offload as jo
from tests.disk.faulty import NO_SPACE, Faulty, error, no_fault
from tests.support import processes
from tests.support.sizes import set_sizes
from tests.support.steps import CLIPPED, apart
from tests.support.trees import assert_equal, handles, kinds, read

LEAF = 64 * 64 * 4
GRADS = {name: np.sin(9 * np.asarray(x)) for name, x in apart().items()}


@pytest.fixture
def disks(tmp_path):
    opened = []

    def make(name="state", **options):
        opened.append(jo.disk(tmp_path / name, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def offload(disk=None, **options):
    return jo.offload(CLIPPED, min_bytes=1024, disk=disk, **options)


def step_of(tx):
    return jo.jit(lambda params, state, grads: jo.update_params(tx, grads, state, params))


def trained(tx):
    return step_of(tx)(apart(), tx.init(apart()), GRADS)


def target_of(tx):
    return {"params": apart(), "state": jo.abstract_state(tx, apart())}


def by_name(tree):
    """Its leaves; a named tuple and the dict that orbax makes of it agree."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def same(got, wanted):
    assert_equal(read(got), read(wanted))


def near(got, wanted):
    """Results of programs that XLA may compile otherwise: parameters to the last bits; moments follow in any format."""
    for x, y in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)


def types(tree):
    return [(x.dtype, x.sharding, jax.typeof(x)) for x in jax.tree.leaves(tree)]


# formats, and host_bytes that hold the moments of one parameter
STORED = [(None, 2 * LEAF), ("bfloat16", LEAF), ({"mu": "int8", "nu": "uint8"}, LEAF // 2)]


@pytest.mark.parametrize(("storage", "host_bytes"), STORED)
def test_to_host_moves_a_running_job_there_and_back(disks, storage, host_bytes):
    files, memory = disks(host_bytes=host_bytes), offload(storage=storage)
    tx = offload(files, storage=storage)
    weights, state = trained(memory)
    moved = jo.to_host(tx, state, weights)
    assert len(handles(moved)) == 6
    same(moved, state)
    same(jo.to_host(tx, moved, weights), state)  # where it is already
    back = jo.to_host(memory, moved, weights)
    assert types(back) == types(state)
    same(back, state)
    trained_on = step_of(tx)(weights, moved, GRADS)
    near(trained_on, step_of(memory)(weights, state, GRADS))
    if storage is None:
        same(jo.to_host(memory, trained_on[1]), trained_on[1])  # reads the parameters off what is on disk


@pytest.mark.parametrize(("storage", "host_bytes"), STORED)
def test_a_state_is_restored_anywhere(disks, tmp_path, storage, host_bytes):
    """From the last commit, open or closed, or from orbax, while the state is updated; into memory and onto a disk."""
    files, memory = disks(host_bytes=host_bytes), offload(storage=storage)
    tx = offload(files, storage=storage)
    weights, state = trained(tx)
    files.commit(7, {"params": weights, "state": state})
    wanted = {"params": weights, "state": jo.to_host(memory, state, weights)}
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(7, args=jo.save_args({"params": weights, "state": state}))
        after = step_of(tx)(weights, state, GRADS)  # training goes on while orbax writes
        files.close()

        def committed(tx):
            """The last commit, wherever it was."""
            tree, step = files.resume(target_of(tx))
            assert step == 7
            return tree | {"state": jo.to_host(tx, tree["state"], tree["params"])}

        for k, get in enumerate((committed, lambda tx: jo.restore(manager, target_of(tx), step=7))):
            got = get(memory)
            same(got, wanted)
            assert types(got["state"]) == types(memory.init(apart()))
            near(step_of(memory)(*got.values(), GRADS), after)
            other = disks(f"other-{k}", host_bytes=LEAF // 4)
            onto = offload(other, storage=storage)
            got = get(onto)
            same(got, wanted)
            assert len(handles(state)) == 6 and {x.place.home for x in handles(got)} == {other}
            assert len(handles(got["state"])) == 8
            near(step_of(onto)(*got.values(), GRADS), after)
        same(by_name(jo.restore(manager)), by_name(wanted))
        with ocp.StandardCheckpointer() as plain:  # as anyone else reads it
            found = plain.restore(tmp_path / "orbax" / "7" / "default")
        assert [x.dtype for x in jax.tree.leaves(found["params"])] == [np.float32] * 4
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    got, _ = files.resume(shapes)
    same(got, wanted)
    assert {*kinds(got["params"])} == {"device"}
    got, _ = files.resume(shapes | {"params": jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), wanted["params"])})
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(got["params"]))
    same(got, wanted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's threads, after an error
def test_save_args_without_a_copy_reads_leaves_when_orbax_writes_them(disks, tmp_path, monkeypatch):
    memory, tx = offload(), offload(disks())
    weights, state = trained(tx)

    def save(number, saved):
        with ocp.CheckpointManager(tmp_path / "orbax") as manager:
            manager.save(number, args=saved)
            manager.wait_until_finished()

    save(0, jo.save_args({"state": state}, copy=False))
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        same(jo.restore(manager, {"state": jo.abstract_state(memory, apart())})["state"], state)
    late = jo.save_args({"state": state}, copy=False)
    _, state = step_of(tx)(weights, state, GRADS)
    with pytest.raises(ValueError, match="it is of an earlier step, which has been overwritten"):
        save(1, late)
    whole = copy.deepcopy  # an orbax that makes none fails, and writes no other values
    monkeypatch.setattr(copy, "deepcopy", lambda x, *memo: x if isinstance(x, np.ndarray) else whole(x, *memo))
    with pytest.raises(ValueError, match="mismatch"):
        save(2, jo.save_args({"state": state}, copy=False))


def test_a_checkpoint_that_is_damaged_leaves_no_files_and_the_one_before_is_used(disks, tmp_path):
    memory = offload()
    _, state = trained(memory)
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(0, args=jo.save_args({"state": state}))
        manager.save(1, args=jo.save_args({"state": jax.tree.map(lambda x: x * 2, state)}))
        manager.wait_until_finished()
        record = tmp_path / "orbax" / "1" / "default" / "_METADATA"
        sums = re.findall(rb'"state/1/0/nu/layer_3": (\d+)', record.read_bytes().replace(b'\\"', b'"'))
        assert len(sums) == 1
        record.write_bytes(record.read_bytes().replace(sums[0], b"1" + b"0" * (len(sums[0]) - 1)))
        files = disks()
        target = {"state": jo.abstract_state(offload(files), apart())}
        with pytest.raises(ValueError, match=r"is damaged: other values than were saved in 1 of .*nu/layer_3"):
            jo.restore(manager, target)
        assert files.last_commit is None
        with pytest.warns(UserWarning, match="Using step 0 instead"):
            got = jo.restore(manager, target, fallback=True)
        same(got["state"], state)


def test_what_is_wrong_says_so(disks):
    files = disks()
    tx = offload(files)
    with pytest.raises(ValueError, match=r"there is no commit in .*Fix: the directory of the run"):
        files.resume(target_of(tx))
    weights, state = trained(tx)
    files.commit(3, {"params": weights, "state": state})
    with pytest.raises(TypeError, match=r"manager: expected .*of a jo\.disk, disk\.resume"):
        jo.restore(files, target_of(tx))
    for message, wrong in [
        ("target: its leaves differ from those in the commit", lambda: files.resume({"params": apart()})),
        (r"holds a state already.*Fix: .*disk.resume\(target\)", lambda: jo.to_host(tx, trained(offload())[1])),
        (
            "state: is on disk, or goes there, and no program can move it",
            lambda: jax.jit(lambda s: jo.to_host(tx, s))(state),
        ),
        ("state: its tree is not the one", lambda: jo.to_host(offload(), state[1], weights)),
        (r"state: .* has the shape .*gives", lambda: jo.to_host(offload(), state, {n: jnp.ones(3) for n in GRADS})),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_a_move_that_fails_leaves_nothing(disks):
    files = disks()
    tx, memory = offload(files), offload()
    _, state = trained(memory)
    faulty = Faulty(files.directory, error(NO_SPACE, "pwritev", 5))
    with pytest.raises(OSError, match="No space left"):
        jo.to_host(tx, state)
    faulty.fault = no_fault
    same(jo.to_host(tx, state), state)


class Mapped(mmap.mmap):
    """Memory for leaves; that for blocks is larger."""

    now, most, lock = 0, 0, threading.RLock()

    def __new__(cls, descriptor, nbytes):
        with cls.lock:
            Mapped.now += nbytes * (nbytes < 2**20)
            Mapped.most = max(cls.most, cls.now)
        return super().__new__(cls, descriptor, nbytes)

    def __del__(self):
        with self.lock:
            Mapped.now -= len(self) * (len(self) < 2**20)


def test_host_bytes_are_those_of_what_is_under_way(tmp_path, monkeypatch):
    """Of 24 groups at most nine, as ``jo.disk`` says."""
    set_sizes(monkeypatch.setattr, group=1)
    monkeypatch.setattr(mmap, "mmap", Mapped)
    files = jo.disk(tmp_path)
    tx = offload(files)
    weights = apart(24)
    step, state = step_of(tx), tx.init(weights)
    for k in range(4):
        weights, state = step(weights, state, weights)
        files.commit(k, {"params": weights, "state": state})
    assert 2 * LEAF <= Mapped.most <= 9 * 2 * LEAF
    files.close()


@pytest.mark.long("600 MiB in a process of its own")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says how much memory a process has had")
def test_some_leaves_are_in_memory_and_not_the_state(tmp_path):
    """While it is made, updated beside parameters and gradients of a sixth of it, and restored onto another disk."""
    # the C library otherwise keeps what threads have freed
    arguments = lambda i, port: ([tmp_path / "run", 1024, 50], {"MALLOC_MMAP_THRESHOLD_": "131072"})  # noqa: E731
    [said] = processes.ended(tmp_path, processes.start(tmp_path, 1, "on_disk", arguments))
    made, trained, _, restored = [int(line.split()[1]) for line in said.splitlines() if line.startswith("MiB")]
    assert max(made, trained, restored) < 250, said  # orbax may read ahead of the files that it writes
