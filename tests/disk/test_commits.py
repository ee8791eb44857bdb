"""Which steps are committed, and what a run meets that is not as in the book: Ctrl-C, a fork, odd leaves, odd paths."""

import contextlib
import errno
import multiprocessing
import signal
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_offload as jo
from tests.disk.faulty import Faulty, error, model, no_fault
from tests.support.steps import ADAMW, apart
from tests.support.trees import assert_equal, handles, read

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


def offload(disk):
    return jo.offload(ADAMW, min_bytes=0, disk=disk)


def stepping(tx):
    return jo.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))


# ---- the numbers of steps --------------------------------------------------------------------------------------------


def test_steps_are_counted_on(run):
    params, state = run.trained(*run.restart())
    run.commit(jnp.int32(3), params, state)
    with pytest.raises(ValueError, match=r"step: the last commit in .* is of step 3, .*; got 2\. Fix: count on"):
        run.commit(2, params, state)
    run.commit(np.int64(3), params, state)
    assert run.disk.last_commit == 3
    run.holds(3)


@pytest.mark.parametrize("step", [-1, True, 2.0, "2", None, np.float32(2), {"w": np.zeros(2)}])
def test_what_is_no_step(run, step):
    with pytest.raises(ValueError, match=r"step: expected an int >= 0; got .*order is disk\.commit\(step, tree\)"):
        run.disk.commit(step, {})


# ---- what interrupts a run -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(run, during, error=KeyboardInterrupt):
    """A signal interrupts the main thread while other threads read the last group, have written one leaf, or sync."""
    came, wrote = threading.Event(), threading.Event()

    def fault(name, path, *arguments):
        if name == "pwritev":
            wrote.set()
        last = name != "preadv" or arguments[1] == 0  # the first layer's, which is updated last, begins the file
        if name == during and last and threading.current_thread() is not threading.main_thread():
            assert wrote.wait(300)
            run.files.fault = no_fault
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert came.wait(300)

    def handle(*_):
        came.set()
        raise error

    run.files.fault = fault
    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(error):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_commit_that_is_interrupted_ends_first(run):
    """As what is written lies in the caller's arrays, which the next step may be given."""
    params, state = run.trained(*run.restart())
    with interrupted(run, "sync"):
        run.commit(3, params, state)
    assert run.disk.last_commit == 3
    run.commit(4, *run.trained(params, state))
    run.holds(4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_is_interrupted_is_no_state(run, error):
    """It says so, and the last commit is there."""
    params, state = run.restart()
    with interrupted(run, "preadv", error):
        run.trained(params, state)
    with pytest.raises(ValueError, match=r"an update of the state in .* did not end.*Fix: disk\.resume"):
        run.commit(3, model(), state)
    run.holds(2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_child_does_not_keep_the_files(run):
    """Forked while they were open, it lives on when its parent has let them go."""
    run.restart()
    other = jo.disk(run.folder)
    target = {"params": model(), "state": jo.abstract_state(run.tx, model())}
    fork = multiprocessing.get_context("fork")
    begun, ends = fork.Event(), fork.Event()
    child = fork.Process(target=lambda: (begun.set(), ends.wait(300)))
    child.start()
    assert begun.wait(300)  # what runs after a fork has run in the child
    try:
        with pytest.raises(ValueError, match=r"in use by .* this one, in which another jo\.disk has it"):
            other.resume(target)  # the child has not unlocked its parent's
        run.disk.close()
        assert other.resume(target)[1] == 2
        other.close()
        assert child.is_alive()
    finally:
        ends.set()
        child.join()


# ---- what is in a tree -----------------------------------------------------------------------------------------------


def test_what_would_not_come_back(run):
    params, state = run.restart()
    given, tree = jax.tree.map(jnp.copy, params), {"params": params, "state": state}
    for wrong in (np.array(["text"]), np.array([{}], object), np.zeros(2, ">f4"), np.zeros(2, "i4,f4")):
        with pytest.raises(TypeError, match=r"tree: \['more'\] is an array of .* Fix: "):
            run.disk.commit(3, tree | {"more": wrong})
    for wrong in (jax.ShapeDtypeStruct((2,), "float32"), jnp.float32, print):
        with pytest.raises(TypeError, match=r"tree: \['more'\] is a .*; a commit holds arrays, numbers and strings"):
            run.disk.commit(3, tree | {"more": wrong})
    with pytest.raises(TypeError, match=r"tree: \['more'\] is traced\. Fix: call disk\.commit outside any jit"):
        jax.eval_shape(lambda x: run.disk.commit(3, tree | {"more": x}), np.float32(1))
    run.step(given, state, np.zeros((8, 64), np.float32))
    with pytest.raises(ValueError, match=r"tree: \['params'\]\['layer_1'\] is float32\[64, 64\] that was donated"):
        run.commit(3, given, state)


def odd():
    return {
        "complex": jnp.ones((4, 4), jnp.complex64) * 1j,
        "half": jnp.ones((3, 5), jnp.bfloat16),
        "empty": jnp.ones((0, 4)),
        "no_columns": jnp.ones((4, 0)),
        "scalar": jnp.float32(2),
        "long": jnp.ones((7,)),
    }


def test_odd_leaves(disk):
    """Complex, of two bytes, empty, of rank 0, with whatever lies beside the state: the step is that of plain optax,
    and comes back from a commit bit for bit."""
    tx, params = offload(disk), jax.device_put(odd(), jax.devices()[0])
    state = tx.init(params)
    assert len(handles(state)) >= 2 * 3
    want = jax.jit(lambda p, s: jo.update_params(ADAMW, p, s, p))(params, jo.to_device(state))
    params, state = stepping(tx)(params, state)
    got = params, jo.to_device(state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=1e-6)
    beside = {"flags": np.array([True, False]), "four": np.ones(3, ml_dtypes.int4), "none": None, "nan": float("nan"),
              "number": np.int64(2**40), "empty": np.zeros((0, 2)), "text": "x", "key": jax.random.key(3)}  # fmt: skip
    disk.commit(1, {"params": params, "state": state, **beside})
    kept = read((params, state))
    tree, _ = disk.resume({"params": params, "state": jo.abstract_state(tx, params), **beside})
    assert_equal(read((tree["params"], tree["state"])), kept)
    assert jax.random.key_data(tree.pop("key")).tolist() == jax.random.key_data(beside.pop("key")).tolist()
    assert_equal({name: tree[name] for name in beside}, beside)
    assert tree["four"].dtype == ml_dtypes.int4 and tree["flags"].dtype == bool
    assert tree["number"].dtype == np.int64
    beside |= {"key": jax.random.key(3), "number": jax.ShapeDtypeStruct((), np.int64)}
    tree, _ = disk.resume({"params": params, "state": tree["state"], **beside})
    assert tree["number"].dtype == np.int32  # as jax.device_put makes it


# ---- where it is -----------------------------------------------------------------------------------------------------


def test_the_process_may_go_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert jo.disk("~/state").directory == tmp_path / "home" / "state"
    with contextlib.closing(jo.disk("state")) as disk:
        tx = offload(disk)
        state = tx.init(model())
        monkeypatch.chdir(tmp_path / "elsewhere")
        params, state = stepping(tx)(model(), state)
        disk.commit(1, (params, state))
        assert disk.resume((params, jo.abstract_state(tx, params)))[1] == 1
    assert not any((tmp_path / "elsewhere").iterdir())


def test_what_is_no_disk(tmp_path):
    for wrong in (["/a", "/b"], 2**30, b"/a", None):
        with pytest.raises(TypeError, match=r"directory: expected a path, jo\.disk\('/nvme/run'\).*; got .*Fix: "):
            jo.disk(wrong)
    no_paths = {
        "": "got an empty path. Fix",
        "~nobody-of-that-name/x": "is in no home: .*Fix",
        "gs://a/b": "local drive",
    }
    for wrong, says in no_paths.items():
        with pytest.raises(ValueError, match=f"directory: .*{says}"):
            jo.disk(wrong)
    for given in (-1, "16GiB", 1e9):
        with pytest.raises(ValueError, match=r"host_bytes: expected .*; got .*Fix: "):
            jo.disk(tmp_path, host_bytes=given)
    assert repr(jo.disk(tmp_path, host_bytes=5)) == f"disk('{tmp_path}', host_bytes=5)"


CANNOT_BE_MADE = {  # what is wrong, and what it says
    "a file there": (None, r"making the directory of a store: .*There is a file of that name: give a directory"),
    "a file above": (None, r"making the directory of a store: .*A part of that path is a file: give a directory"),
    "read-only": (error(errno.EROFS, "make_directory"), r"making the directory of a store: .*filesystem is read-only"),
    "no right": (error(errno.EACCES, "make_directory"), r"making the directory of a store: .*may not write"),
    "full": (
        error(errno.ENOSPC, "allocate", 1),
        r"making \d+ bytes of space \(\d+ are free\) for \d+ bytes in all: No sp",
    ),
}


@pytest.mark.parametrize("name", CANNOT_BE_MADE)
def test_a_directory_that_cannot_be_made(tmp_path, name):
    """An error that says the fix, and no file; once the cause is gone, the same disk is made."""
    fault, message = CANNOT_BE_MADE[name]
    path = tmp_path / "file"
    path.write_text("") if fault is None else None
    with contextlib.closing(jo.disk(path / "state" if name == "a file above" else path)) as disk:
        files, tx = Faulty(disk.directory, fault), offload(disk)
        assert disk.last_commit is None
        with pytest.raises(OSError, match=message):
            tx.init(model())
        assert not [*path.glob("**/state.*")]
        path.unlink() if fault is None else None
        files.fault = no_fault
        tx.init(model())


# ---- how it is made --------------------------------------------------------------------------------------------------


def test_leaves_that_are_alike_are_made_by_one_program(disk, caplog):
    """One for moments, one for masters, one for the count: a program for each leaf took minutes for a thousand."""
    params = apart(12, 8, jnp.bfloat16)
    tx = jo.offload(jo.with_master_params(ADAMW), min_bytes=0, disk=disk)
    with jax.log_compiles():
        state = tx.init(params)
    assert 1 <= caplog.text.count("Finished XLA compilation") <= 4
    assert_equal(read(state.master), {name: x.astype(jnp.float32) for name, x in params.items()})
