"""What disks and systems do wrong is an error that says what and where, and leaves the last commit whole."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from jax_offload._disk import manifest
from jax_offload._disk.layout import ALIGNED
from jax_offload._disk.store import Store
from tests.disk.faulty import (
    ABOUT,
    FAILED,
    GROUPS,
    NO_SPACE,
    Faulty,
    created,
    delays,
    error,
    extra_of,
    held,
    holds,
    same,
    values,
    write_all,
)


@pytest.fixture
def place(tmp_path):
    return [tmp_path / "x", tmp_path / "y"]


def short(of):
    """Every second call moves a part only: an aligned one, one that is not, or less than is aligned."""
    calls = 0

    def fault(name, path, *arguments):
        nonlocal calls
        if name != of or "groups" not in str(path):
            return None
        buffer, offset = arguments
        calls += 1
        if calls % 2:
            return None
        part = buffer[: min(len(buffer), (ALIGNED, 5000, 100)[calls // 2 % 3])]
        descriptor = os.open(path, os.O_RDWR)
        try:
            return (os.preadv if of == "preadv" else os.pwritev)(descriptor, [part], offset)
        finally:
            os.close(descriptor)

    return fault


@pytest.mark.parametrize("of", ["preadv", "pwritev"])
def test_short_reads_and_writes_are_continued(place, of):
    files = Faulty()
    with created(place, files=files) as store:
        files.fault = short(of)
        for step in (1, 2):
            write_all(store, step)
            for group, arrays in enumerate(values(step)):
                same(store.read(group).result(), arrays)
            store.commit(step, extra_of(step)).result()
    holds(place, 2)


@pytest.mark.parametrize("moved", [0, 100])
@pytest.mark.parametrize("of", ["preadv", "pwritev"])
def test_calls_that_move_nothing_end(place, of, moved):
    """As a read does behind the end of a file that was cut off; 100 bytes are none, where O_DIRECT goes on."""
    files = Faulty()
    store = created(place, files=files)
    files.fault = lambda name, path, *_: moved if name == of else None
    doing = "reading" if of == "preadv" else "writing"
    with pytest.raises(
        OSError, match=rf"{doing} group 2 \('c/mu'\), bytes \d+ to \d+ of the file: only 0 of \d+ bytes"
    ):
        (store.read(2) if of == "preadv" else store.write(2, values(1)[2])).result()
    store.close()
    holds(place, 0)


def test_a_read_that_fails(place):
    files = Faulty()
    with created(place, files=files) as store:
        files.fault = error(FAILED, "preadv")
        with pytest.raises(OSError, match=r"reading group 1 .*Input/output error. The disk failed") as caught:
            store.read(1).result()
        assert caught.value.errno == errno.EIO and Path(caught.value.filename).parent in place
        del caught  # whose traceback has a view of the buffer
        files.fault = lambda *_: None
        same(store.read(1).result(), values(0)[1])  # the disk is well again
        assert store.buffers.most == store.nbytes(1)
    holds(place, 0)


@pytest.mark.parametrize(("number", "fix"), [(NO_SPACE, "Free space there"), (FAILED, "The disk failed")])
@pytest.mark.parametrize("at", [0, 2])
def test_a_write_that_fails(place, number, fix, at):
    files = Faulty()
    store = created(place, files=files)
    files.fault = error(number, "pwritev", at, "groups")
    futures = write_all(store, 1)
    assert any(isinstance(future.exception(), OSError) for future in futures)
    with pytest.raises(OSError, match=f"writing group . .*{fix}") as caught:
        store.commit(1, extra_of(1)).result()
    assert caught.value.errno == number
    failed = next(group for group, future in enumerate(futures) if future.exception())
    with pytest.raises(OSError, match="writing group"):
        store.read(failed).result()  # never the values before
    with pytest.raises(ValueError, match=r"stopped when a commit failed: .*It is as of step 0"):
        store.write(0, values(2)[0]).result()
    with pytest.raises(ValueError, match="stopped when a commit failed"):
        store.close()
    holds(place, 0)


@pytest.mark.parametrize(
    ("of", "file"),
    [
        ("pwritev", "extra"),
        ("allocate", "extra"),
        ("sync", "groups.b"),
        ("sync", "extra"),
        ("write", "manifest"),
        ("replace", "manifest"),
        ("sync_directory", ""),
    ],
)
def test_a_commit_that_fails(place, of, file):
    """Wherever it does, what is opened is one of the two commits, whole: after the swap, the one that failed."""
    files = Faulty()
    store = created(place, files=files)
    write_all(store, 1)
    files.fault = error(NO_SPACE, of, 0, file)
    with pytest.raises(OSError, match="No space left"):
        store.commit(1, {**extra_of(1)}).result()
    files.fault = lambda *_: None
    with pytest.raises(ValueError, match="stopped when a commit failed"):
        store.commit(2, extra_of(2))  # the disk is well again, and the store does not go on
    late = store.write(0, values(2)[0])
    assert isinstance(late.exception(), ValueError)
    with pytest.raises(ValueError, match="stopped"):
        store.close()
    holds(place, 1 if of == "sync_directory" and "manifest.json" in swapped(files) else 0)


def swapped(files):
    return [file for name, file in files.calls[-8:] if name == "replace"]


def test_a_commit_that_fails_stops_writes_that_wait_for_it(place):
    files = Faulty()
    store = created(place, files=files)
    write_all(store, 1)

    asked = threading.Event()

    def fault(name, path, *arguments):
        held("sync", asked)(name)
        error(FAILED, "sync")(name, path)

    files.fault = fault
    commit = store.commit(1, extra_of(1))
    late = write_all(store, 2)  # these go to the slots of step 0
    asked.set()
    assert isinstance(commit.exception(), OSError)
    assert all(isinstance(future.exception(), ValueError) for future in late)
    with pytest.raises(ValueError, match="stopped"):
        store.close()
    holds(place, 0)


def test_data_is_synced_before_the_manifest_is_swapped_and_the_directory_after(place):
    files = Faulty()
    with created(place, files=files) as store:
        write_all(store, 1)
        files.calls.clear()
        store.commit(1, extra_of(1)).result()
    names = [name for name, _ in files.calls if name in ("sync", "write", "replace", "sync_directory")]
    # once for each directory: new space for the arrays beside the groups; then their files and the groups'
    assert names == ["sync_directory"] * 2 + ["sync"] * 4 + ["write", "replace", "sync_directory"] * 2
    last = max(k for k, (name, _) in enumerate(files.calls) if name == "pwritev")
    assert last < next(k for k, (name, _) in enumerate(files.calls) if name == "sync")


def test_a_slow_disk_is_waited_for(place):
    with created(place, files=Faulty(delays(0.02, "pwritev"))) as store:
        write_all(store, 1)
        store.commit(1, extra_of(1))
    holds(place, 1)


@pytest.mark.parametrize("file", ["groups.a", "extra.b"])
def test_a_flipped_bit(place, file):
    created(place).close()
    path = place[1] / file
    data = bytearray(path.read_bytes())
    data[5] ^= 16
    path.write_bytes(data)
    with Store.open(place) as store:
        what = "group 0" if "groups" in file else "the arrays beside the groups"
        with pytest.raises(
            ValueError, match=rf"{what}.* of the file .*{file}' are damaged: their checksum is [0-9a-f]"
        ):
            store.read(0).result() if "groups" in file else store.extra()
        same(store.read(2).result(), values(0)[2])  # the rest is well


@pytest.mark.parametrize("name", ["groups.a", "groups.b", "extra.b"])
@pytest.mark.parametrize("damage", ["removed", "cut off"])
def test_a_file_that_is_not_there_or_not_whole(place, name, damage):
    created(place).close()
    path = place[1] / name
    path.unlink() if damage == "removed" else os.truncate(path, ALIGNED)
    message = "has lost" if damage == "removed" else f"holds {ALIGNED} bytes, and was made with"
    with pytest.raises(ValueError, match=message):
        Store.open(place)
    with pytest.raises(ValueError, match=name):  # not: in use. The locks are let go
        Store.open(place)


def test_a_file_that_vanishes_while_it_is_in_use(place):
    store = created(place)
    (place[0] / "groups.b").unlink()
    write_all(store, 1)
    with pytest.raises(OSError, match=r"removed or replaced while in use: .*groups.b"):
        store.commit(1, extra_of(1)).result()
    with pytest.raises(ValueError, match="stopped"):
        store.close()


MANIFESTS = [(0, "manifest.json"), (1, "manifest.copy.json")]
DAMAGES = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 0', b'"step": 1')),
    "empty": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_manifest_that_is_damaged_or_lost(place, damage, which):
    """The other is read, and this one written anew."""
    created(place).close()
    number, name = MANIFESTS[which]
    path = place[number] / name
    data = path.read_bytes()
    DAMAGES[damage](path)
    with pytest.warns(UserWarning, match=rf"{name}' is .*The other one is whole: step 0"):
        holds(place, 0)
    assert path.read_bytes() == data
    holds(place, 0)


@pytest.mark.parametrize("damages", [("torn", "flipped"), ("lost", "empty"), ("empty", "lost")])
def test_both_manifests_that_are_damaged(place, damages):
    created(place).close()
    for (number, name), damage in zip(MANIFESTS, damages, strict=True):
        DAMAGES[damage](place[number] / name)
    with pytest.raises(ValueError, match=r"manifest.*is damaged.*in two slots each, and nothing says any more which"):
        Store.open(place)
    with pytest.raises(ValueError, match="holds a store"):
        Store.create(place, GROUPS, about=ABOUT)


def test_a_manifest_of_another_format(place, monkeypatch):
    created(place).close()
    path = place[0] / "manifest.json"
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 99)
        path.write_bytes(manifest.to_bytes(manifest.Manifest("s", 0, {}, 2, 4096, (), (), (), manifest.Version(0, ()))))
    with pytest.raises(ValueError, match="has format 99"):
        Store.open(place)


@pytest.mark.parametrize("until", ["replace", "write"])
def test_the_second_manifest_never_says_what_was_written_over(place, until):
    """Killed between the two, it is of the commit before, and whole; and the next to open brings it up."""
    files = Faulty()
    store = created(place, files=files)
    write_all(store, 1)
    files.fault = error(FAILED, until, 0, "copy")
    with pytest.raises(OSError, match="Input/output"):
        store.commit(1, extra_of(1)).result()
    with pytest.raises(ValueError, match="stopped"):
        store.close()
    first, second = (place[number] / name for number, name in MANIFESTS)
    kept, old = first.read_bytes(), second.read_bytes()
    first.unlink()
    with pytest.warns(UserWarning, match="is not there"):
        holds(place, 0)
    first.write_bytes(kept)  # as it was when it was killed
    assert second.read_bytes() == old != kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holds(place, 1)
    assert first.read_bytes() == second.read_bytes() == kept


def test_a_manifest_that_was_being_written(place):
    created(place).close()
    (place[0] / "manifest.json.new").write_bytes(b'{"manifest": {"fo')
    holds(place, 0)


def test_another_optimizer(place):
    created(place).close()
    with pytest.raises(
        ValueError, match=r"is another's: optimizer is 'adam' there and 'lion' here; shards is None there"
    ):
        Store.open(place, about={**ABOUT, "optimizer": "lion", "shards": 2})
    with pytest.raises(TypeError):
        Store.create([place[0] / "z"], GROUPS, about={"optimizer": object()})
    holds(place, 0)


def test_other_directories(place, tmp_path):
    created(place).close()
    other = [tmp_path / "a", tmp_path / "b"]
    created(other).close()
    for given, message in [
        (place[:1], "is striped over 2 directories, and 1 are given"),
        ([place[0], tmp_path / "empty"], "should be part 1 .*, and is none of its"),
        ([place[0], other[1]], "should be part 1 .*, and is another's"),
        (place[::-1], "has a store's commit, as the first .* in their order"),
        ([place[0], place[0]], "a directory is given twice"),
        ([], "directories is empty"),
    ]:
        Path(tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=message):
            Store.open(given)
    with pytest.raises(ValueError, match="holds a store"):
        Store.create(place, GROUPS, about=ABOUT)
    for taken in (place[0], place[1]):
        with pytest.raises(ValueError, match="is part of another store"):
            Store.create([tmp_path / "new", taken], GROUPS, about=ABOUT)
    holds(place, 0)


def test_a_store_that_was_begun_several_times(place):
    """However often its making has ended before the first commit, and wherever, it can be made. Three directories."""
    place = [*place, place[0].parent / "z"]
    interrupted = 0
    for ends in range(1, 40):
        calls = iter(range(ends))

        def fault(name, path, *_, calls=calls):
            if name in ("replace", "sync_directory") and next(calls, None) is None:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            Store.create(place, GROUPS, about=ABOUT, files=Faulty(fault)).close()
            break
        interrupted = ends
        Store.create(place, GROUPS, about=ABOUT).close()
    assert interrupted > 8  # of each directory its name, and the sync of it, were interrupted
    created(place).close()
    holds(place, 0)


def test_a_store_in_use(place):
    with created(place):
        for way in (lambda: Store.open(place), lambda: Store.create(place, GROUPS, about=ABOUT)):
            with pytest.raises(
                ValueError, match=f"in use by process {os.getpid()} on .*two would write over each other"
            ):
                way()
        code = f"from jax_offload._disk.store import Store; Store.open({[str(path) for path in place]})"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"in use by process {os.getpid()}" in ran.stderr
    holds(place, 0)


def test_a_disk_too_full_to_begin_with(place):
    files = Faulty(error(NO_SPACE, "allocate", 2))
    with pytest.raises(
        OSError, match=r"making \d+ bytes of space \(\d+ are free\) for a store of \d+ bytes in all: No sp"
    ):
        Store.create(place, GROUPS, about=ABOUT, files=files)
    assert sum(path.stat().st_size for folder in place for path in folder.glob("groups.*")) == 0
    created(place).close()
    holds(place, 0)


@pytest.mark.parametrize("of", ["open", "preadv"])
def test_a_filesystem_without_direct_access_is_said_once(place, of):
    def fault(name, path, *arguments):
        refused = arguments[1] if name == "open" else name == "preadv" and probing
        if name == of and refused:
            raise OSError(errno.EINVAL, "Invalid argument")

    probing = True
    with pytest.warns(UserWarning, match="has no O_DIRECT: the store goes through the page cache") as caught:
        store = Store.create(place, GROUPS, about=ABOUT, files=Faulty(fault), block=8192)
    assert len(caught) == 1
    probing = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_all(store, 0)
        same(store.read(0).result(), values(0)[0])
    store.close()


def test_a_directory_that_is_not_there(place):
    created(place).close()
    shutil.rmtree(place[1])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has lost its directory .*y'. Is its disk mounted"):
            Store.open(place)


def test_the_identity_is_json(place):
    created(place).close()
    found = [json.loads((path / "directory.json").read_text()) for path in place]
    assert found[0][0] == found[1][0] and [part for _, part in found] == [0, 1]
