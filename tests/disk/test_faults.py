"""What disks, systems and people do wrong is an error that says what and where, and the last commit stays whole."""

import errno
import itertools
import json
import os
import subprocess
import sys
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.disk.faulty import FAILED, NO_SPACE, Faulty, PowerLoss, X, error, flipped, model, no_fault, short

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


# ---- ends at any moment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("first", range(4))
def test_at_any_call(run, first, loses):
    """Two steps and their commits end at each call of the system's: it opens at the last commit that ended, or at the
    one that did not, whole."""
    found = set()
    for at in itertools.count(first, 4):
        params, state = run.restart()
        run.files.fault, committed = PowerLoss(at, seed=at), 2
        with suppress(OSError, ValueError):
            for step in (3, 4):
                params, state = run.trained(params, state)
                run.commit(step, params, state)
                committed = step
        ended = not run.files.fault.dead
        assert committed == 4 or not ended
        run.disk.close()
        if loses:
            run.files.fault.lose()
        run.holds(committed, min(4, committed + 1))
        found.add(committed)
        if ended:
            break
    assert found == {2, 3, 4}


@pytest.mark.parametrize("every", [6, 1])
def test_files_that_were_begun(run, every, tmp_path):
    """However often the making of the first files has ended, and wherever, with or without power, they can be made."""
    disk, files = jo.disk(tmp_path / "begun"), Faulty(tmp_path)
    tx, ended = jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=disk), 0
    for at in range(0, 200, every):
        files.fault = PowerLoss(at, seed=at)
        with suppress(OSError, ValueError):
            disk.commit(0, {"params": model(), "state": tx.init(model())})
            break
        ended += 1
        disk.close()
        if at % 2:
            files.fault.lose()
        files.fault = no_fault
        assert disk.last_commit in (None, 0)
        if disk.last_commit == 0:
            break
    assert ended * every > 20
    disk.close()


# ---- what the disk does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["preadv", "pwritev"])
def test_short_calls_change_nothing(run, of):
    params, state = run.restart()
    run.files.fault = short(of)
    for step in (3, 4):
        params, state = run.trained(params, state)
        run.is_at(step, params, state)
        run.commit(step, params, state)
    run.holds(4)


NOTHING_MOVES = {
    f"{of} moves {moved} bytes": (lambda name, path, *_, of=of, moved=moved: moved if name == of else None, doing)
    for of, doing in (("preadv", "reading"), ("pwritev", "writing"))
    for moved in (0, 100)  # less than a page is nothing where the file bypasses the page cache
}
FAULTS = {
    "full": (error(NO_SPACE, "pwritev", 1, "state"), r"writing .* of the file.*No space left.*Free space there"),
    "failing write": (error(FAILED, "pwritev", 0, "state"), r"writing .*Input/output error.*The disk failed"),
    "failing read": (error(FAILED, "preadv", 3, "state"), r"reading .*Input/output error.*The disk failed"),
    "flipped bit": (flipped, r"\[0\]\.[mn]u\['layer.* of the file .* are damaged: their checksum is"),
    "failing sync": (error(FAILED, "sync", 0, "state"), r"bringing a file of a store to disk: Input/output error"),
    **{name: (fault, rf"{doing} .* only 0 of \d+ bytes") for name, (fault, doing) in NOTHING_MOVES.items()},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_and_the_last_commit_is_whole(run, name):
    params, state = run.restart()

    def trained_and_committed():
        run.commit(5, *run.trained(params, state, 3))

    run.files.fault, message = FAULTS[name]
    with pytest.raises((OSError, ValueError), match=message):
        trained_and_committed()
    assert run.disk.last_commit == 2
    run.holds(2)


@pytest.mark.parametrize(
    ("of", "file"),
    [
        ("pwritev", "beside"),
        ("allocate", "beside"),
        ("sync", "state"),
        ("sync", "beside"),
        ("sync", "manifest.next.json"),
        ("replace", "manifest.next.json"),
        ("replace", "manifest.json"),
        ("sync_directory", ""),
    ],
)
def test_a_commit_that_fails(run, of, file):
    """Wherever it does, what is opened is one of the two commits, whole; until then nothing is written."""
    params, state = run.trained(*run.restart())
    params, state = run.trained(params, state)
    run.commit(4, params, state) if of == "allocate" else None
    rest = {"more": np.zeros(9000)} if of == "allocate" else {}
    run.files.fault = error(NO_SPACE, of, 0, file)
    with pytest.raises(OSError, match="No space left"):
        run.disk.commit(4, {"params": params, "state": state, **rest})
    run.files.fault = no_fault
    with pytest.raises(ValueError, match=r"stopped when a commit failed: .*It is as of step \d: .*disk\.resume"):
        run.commit(6, params, state)  # the disk is well again, and the store does not go on
    run.values(params, state)  # the state can still be read
    with pytest.raises(ValueError, match="stopped when a commit failed"):
        run.trained(params, state)
    run.values(params, state)  # the step has deleted nothing that it was donated
    params, state, step = run.resumed()
    assert step == (4 if (of, file) in (("replace", "manifest.json"), ("allocate", "beside")) else 2)
    run.is_at(step, params, state)


def test_what_is_synced_before_what(run):
    """Blocks, then their files, then the manifest beside the last one, then it in the last one's place."""
    params, state = run.trained(*run.restart())
    run.commit(3, params, state)
    params, state = run.trained(params, state)  # both slots are there now
    run.disk.wait()
    run.files.calls.clear()
    run.commit(4, params, state)
    calls = run.files.calls
    order = [call for call in calls if call[0] in ("sync", "replace", "sync_directory")]
    new, folder = "manifest.next.json", ("sync_directory", "run")
    assert sorted(order[:2]) == [("sync", "beside.a"), ("sync", "state.a")]
    assert order[2:] == [("sync", f"{new}.new"), ("replace", new), folder, ("replace", "manifest.json"), folder]
    assert max(k for k, (name, _) in enumerate(calls) if name == "pwritev") < calls.index(order[0])


# ---- what happens to the files ---------------------------------------------------------------------------------------


def file_of(run, kind):
    """The file with the first array of the state, or beside it."""
    (file, *_), *_ = json.loads((run.kept / "manifest.json").read_text())["manifest"][kind].values()
    return file


def test_a_bit_that_flips_in_a_file(run):
    """The leaf is named, and the others are read; a step that returns no state, and the arrays beside it, are checked
    too."""
    for name in ("state", "beside"):
        params, state = run.restart()
        path = run.folder / file_of(run, name)
        data = bytearray(path.read_bytes())
        data[5] ^= 16
        path.write_bytes(data)
        if name == "state":
            with pytest.raises(ValueError, match=r"\[0\]\.mu\['layer_1'\].* are damaged: their checksum is"):
                np.asarray(state[0].mu["layer_1"])
            assert np.asarray(state[0].mu["layer_2"]).shape == (64, 64)
            with pytest.raises(ValueError, match=r"\[0\]\.mu\['layer_1'\].* are damaged: their checksum is"):
                jo.jit(lambda *args: run.step(*args)[0])(params, state, X)
        else:
            with pytest.raises(ValueError, match=r"\['params'\]\['layer_1'\].* are damaged: their checksum"):
                run.resumed()


@pytest.mark.parametrize("damage", ["removed", "cut off"])
def test_a_file_that_is_not_there_or_not_whole(run, damage):
    for name in ("state.a", "state.b", file_of(run, "beside")):
        run.restart()
        run.disk.close()
        path = run.folder / name
        path.unlink() if damage == "removed" else os.truncate(path, 4096)
        message = "has lost .*no such file. Is its disk mounted" if damage == "removed" else "holds 4096 bytes, and was"
        for _ in range(2):  # not: in use. The lock is let go
            with pytest.raises(ValueError, match=f"{message}|{name}"):
                run.resumed()


def test_a_file_that_vanishes_while_it_is_in_use(run):
    """And is there again, as on a drive that was not mounted."""
    params, state = run.trained(*run.restart())
    paths = [run.folder / f"state.{slot}" for slot in "ab"]
    for path in paths:
        path.rename(f"{path}.away")
    with pytest.raises(OSError, match=r"removed or replaced while in use: .*state.[ab]'"):
        run.commit(3, params, state)
    with pytest.raises(ValueError, match=r"has lost .*state.a': no such file. Is its disk mounted"):
        run.resumed()
    for path in paths:
        Path(f"{path}.away").rename(path)
    run.holds(2)


DAMAGES = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b'"state.a"', b'"state.b"')),
    "another step": lambda path: path.write_bytes(path.read_bytes().replace(b", 2]", b", 1]", 1)),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_manifest_that_is_damaged(run, damage):
    """The last one: there is no commit any more. One that was prepared and never counted is of no account."""
    run.restart()
    run.disk.close()
    path = run.folder / "manifest.json"
    before = path.read_bytes()
    DAMAGES[damage](path)
    assert path.read_bytes() != before
    for ask in (run.resumed, lambda: run.disk.last_commit, lambda: run.tx.init(model())):
        with pytest.raises(ValueError, match=r"manifest.*is damaged.*in two slots each.*Restore from a checkpoint"):
            ask()
    DAMAGES[damage](path.rename(run.folder / "manifest.next.json"))
    path.write_bytes(before)
    with pytest.warns(UserWarning, match=r"manifest.next.json' is damaged.*The commit before it is whole"):
        run.holds(2)


def test_a_manifest_of_another_format(run):
    run.restart()
    run.disk.close()
    path = run.folder / "manifest.json"
    body = json.loads(path.read_text())["manifest"] | {"format": 99}
    text = json.dumps({"manifest": body, "crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())})
    path.write_text(text)
    with pytest.raises(ValueError, match=r"has format 99, and this version reads .*save a checkpoint"):
        run.resumed()


def test_files_without_their_manifest(run):
    """They may hold a commit, so no new state takes their place, however few of them are left."""
    run.restart()
    run.disk.close()
    files = {path: path.read_bytes() for path in run.folder.iterdir() if path.name != "lock"}
    for name in ("manifest.json", "state.a", "state.b"):
        (run.folder / name).unlink()
        assert run.disk.last_commit is None
        with pytest.raises(ValueError, match=r"holds .*beside\.a of another .* Fix: with its manifest.*remove"):
            run.tx.init(model())
        assert all(path.read_bytes() == data for path, data in files.items() if path.exists())
    for path, data in files.items():
        path.write_bytes(data)
    run.holds(2)


# ---- what people do --------------------------------------------------------------------------------------------------


def test_a_directory_in_use_and_another_optimizer_or_model(run):
    run.restart()
    other = jo.disk(run.folder)
    assert other.last_commit == 2
    target = {"params": model(), "state": jo.abstract_state(run.tx, model())}
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*two would write over each other"):
        other.resume(target)
    code = f"import jax_offload as jo; jo.disk({str(run.folder)!r}).resume(0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"in use by process {os.getpid()}" in ran.stderr
    run.disk.close()
    with pytest.raises(ValueError, match=r"holds the state of another run.*step 2.*Fix: disk\.resume"):
        jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=other).init(model())
    for inner, width, message in [
        (optax.lion(1e-2), 64, "target: its leaves differ from those in the commit"),
        (optax.adamw(1e-2), 32, r"target: .* is float32\[32, 32\], and the commit in .* has float32\[64, 64\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            run.resumed(inner, width)
    numbers = {"params": dict.fromkeys(model(), 0.0), "state": jo.abstract_state(run.tx, model())}
    with pytest.raises(ValueError, match=r"target: .* is float64\[\], and the commit in .* has float32\["):
        other.resume(numbers)
    run.holds(2)


@pytest.mark.parametrize("why", ["another target", "open", "preadv"])
def test_a_resume_that_fails(run, why):
    """The state in use goes on, and its directory stays in use."""
    params, state = run.trained(*run.restart())
    run.files.fault = no_fault if why == "another target" else error(FAILED, why, 0, "beside")
    with pytest.raises((OSError, ValueError), match=r"its leaves differ from those in the commit|Input/output error"):
        run.resumed(optax.lion(1e-2))
    run.files.fault = no_fault
    with pytest.raises(ValueError, match=r"in use by process .*in which another jo\.disk has it"):
        jo.disk(run.folder).resume(0)
    params, state = run.trained(params, state)
    run.is_at(4, params, state)
    run.commit(4, params, state)
    run.holds(4)


@pytest.mark.parametrize("of", ["open", "preadv"])
def test_a_filesystem_without_direct_access_is_said_once(run, of):
    tried = set()

    def fault(name, path, *arguments):
        refused = arguments[0] & os.O_DIRECT if name == "open" else name == "preadv" and path not in tried
        if name == of and refused:
            tried.add(path)
            raise OSError(errno.EINVAL if of == "open" else errno.EOPNOTSUPP, "refused")

    run.restart()
    run.files.fault = fault
    with pytest.warns(UserWarning, match="has no O_DIRECT: the store goes through the page cache") as caught:
        params, state, _ = run.resumed()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.commit(4, *run.trained(params, state, 2))
    run.holds(4)
