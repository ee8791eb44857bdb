"""A store gives back what was written, as of its last commit."""

import gc
import json
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jax_offload._disk.late import Late
from jax_offload._disk.layout import ALIGNED, Entry, laid_out
from jax_offload._disk.store import Store
from tests.disk.faulty import (
    ABOUT,
    BLOCK,
    GROUPS,
    Faulty,
    created,
    delays,
    extra_of,
    held,
    holds,
    same,
    values,
    write_all,
)


@pytest.fixture(params=[1, 3], ids=["one directory", "striped"])
def directories(request, tmp_path):
    return [tmp_path / f"disk{k}" for k in range(request.param)]


def test_opens_at_its_last_commit(directories):
    with created(directories) as store:
        for step in (1, 2, 3):
            write_all(store, step)
            store.commit(step, extra_of(step)).result()
            holds_now(store, step)
        write_all(store, 4)
        holds_now(store, 4, committed=3)
    holds(directories, 3)


def holds_now(store, step, committed=None):
    assert store.step == step if committed is None else committed
    for group, arrays in enumerate(values(step)):
        found = store.read(group).result()
        same(found, arrays)


def test_continues_after_it_is_opened(directories):
    created(directories).close()
    for step in (1, 2):
        with Store.open(directories) as store:
            write_all(store, step)
            store.commit(step, extra_of(step))
        holds(directories, step)


def test_groups_of_several_steps_are_committed_together(directories):
    with created(directories) as store:
        store.write(1, values(1)[1])
        store.commit(1, extra_of(1))
        store.write(0, values(2)[0])
        store.write(0, values(3)[0])  # twice between commits: to the same slot
        store.write(2, values(3)[2])
        store.commit(3, extra_of(3)).result()
    with Store.open(directories) as store:
        assert store.step == 3
        for group, step in enumerate((3, 1, 3)):
            same(store.read(group).result(), values(step)[group])


def test_a_read_gives_what_was_asked_to_be_written_before(tmp_path):
    with created([tmp_path], files=Faulty(delays(0.01, "pwritev"))) as store:
        for step in (1, 2):
            store.write(0, values(step)[0])
            found = store.read(0)
            store.write(0, values(step + 10)[0])
            same(found.result(), values(step)[0])


def test_what_is_written_after_a_commit_was_asked_for_is_not_in_it(tmp_path):
    files = Faulty()
    store = created([tmp_path], files=files)
    write_all(store, 1)
    goes_on = threading.Event()
    files.fault = held("sync", goes_on)
    first = store.commit(1, extra_of(1))
    late = write_all(store, 2)
    assert not any(future.done() for future in late)  # they would go to the slots of the commit before
    goes_on.set()
    holds_now(store, 2, committed=1)
    assert first.done()
    store.close()
    holds(tmp_path_list(tmp_path), 1)


def tmp_path_list(path):
    return [path]


def test_arrays_that_lie_anywhere_are_written(tmp_path):
    """Unaligned, reversed, of other strides."""
    groups = [[Entry("x", (3000, 5), "float32"), Entry("y", (5000,), "int8")]]
    plain = [np.random.default_rng(0).normal(size=(3000, 5)).astype(np.float32), np.arange(5000, dtype=np.int8)]
    with Store.create([tmp_path], groups, about={}, block=BLOCK) as store:
        room = np.zeros(60001, np.uint8)
        shifted = room[1:].view(np.float32).reshape(3000, 5)
        shifted[...] = plain[0]
        for x in (shifted, np.asfortranarray(plain[0]), plain[0][::-1][::-1]):
            store.write(0, [x, plain[1]]).result()
            same(store.read(0).result(), plain)
        assert 0 < store.staging.most <= store.most_staging


def test_arrays_are_held_until_they_are_written_and_no_longer(tmp_path):
    """Also those that waited for a commit, whose future is kept."""
    files = Faulty()
    with created([tmp_path], files=files) as store:
        goes_on = threading.Event()
        files.fault = held("sync", goes_on)
        commit = store.commit(1, {})
        written = []
        for step, group in enumerate([0, 1, 2, 0]):
            arrays = values(step)[group]
            written.append((weakref.ref(arrays[0]), store.write(group, arrays)))
            del arrays
        assert not commit.done() and all(array() is not None for array, _ in written)
        goes_on.set()
        for _, future in written:
            future.result()
        end = time.monotonic() + 300
        while any(array() is not None for array, _ in written) and time.monotonic() < end:
            time.sleep(0.01)  # until the thread that wrote it has let it go
            gc.collect()
        assert [array() for array, _ in written] == [None] * 4


def test_buffers_are_used_again(tmp_path):
    """When the last view of one is gone, and not before."""
    with created([tmp_path]) as store:
        for _ in range(3):
            for group in range(len(GROUPS)):
                store.read(group).result()
        assert store.buffers.nbytes == store.buffers.most == max(store.nbytes(group) for group in range(len(GROUPS)))
        kept = [store.read(0).result()[0][1:, :3].T for _ in range(4)]
        for one in kept:
            same([one], [values(0)[0][0][1:, :3].T])
        assert store.buffers.nbytes == 4 * store.nbytes(0)
        del kept, one
        same(store.read(0).result(), values(0)[0])
        assert store.buffers.nbytes == 4 * store.nbytes(0)


def test_any_thread_may_ask(tmp_path):
    """Each commit is of one moment: what a thread has written before it asked for one is in it."""
    with created([tmp_path], files=Faulty(delays(0.001, "pwritev"))) as store:

        def run(group):
            for step in range(1, 30):
                store.write(group, values(step)[group])
                same(store.read(group).result(), values(step)[group])
                store.commit(step, {}).result()
                same(store.read(group, committed=True).result(), values(step)[group])

        threads = ThreadPoolExecutor(len(GROUPS))
        for future in [threads.submit(run, group) for group in range(len(GROUPS))]:
            future.result()
    with Store.open([tmp_path]) as store:
        for group in range(len(GROUPS)):
            same(store.read(group).result(), values(29)[group])


def test_the_last_commit_is_there_while_the_next_is_written(tmp_path):
    with created([tmp_path]) as store:
        for _ in range(2):
            write_all(store, 1)
            same(store.read(1, committed=True).result(), values(0)[1])
            same(store.read(1).result(), values(1)[1])
        store.commit(1, {})
        write_all(store, 2)
        same(store.read(1, committed=True).result(), values(1)[1])


@pytest.mark.parametrize("block", [ALIGNED, 3 * ALIGNED, 2**20])
@pytest.mark.parametrize("directories", [1, 2, 5])
def test_blocks_cover_each_group_once_and_do_not_meet(block, directories):
    groups, lengths = laid_out(GROUPS, directories, block)
    taken = set()
    for group in groups:
        assert [block.begin for block in group.blocks] == [
            sum(block.nbytes for block in group.blocks[:k]) for k in range(len(group.blocks))
        ]
        assert sum(block.nbytes for block in group.blocks) == group.nbytes
        for one in group.blocks:
            assert one.nbytes <= block and one.offset % ALIGNED == one.nbytes % ALIGNED == 0
            here = {(one.directory, one.offset + k) for k in range(0, one.nbytes, ALIGNED)}
            assert not here & taken
            taken |= here
    assert len(taken) * ALIGNED == sum(lengths)
    assert max(lengths) - min(lengths) <= block


def test_a_commit_may_be_of_other_arrays_beside_the_groups(tmp_path):
    with created([tmp_path]) as store:
        for step, extra in enumerate([{}, {"w": np.ones(100000)}, {}, {"x": np.float32(3) * np.ones(())}], start=1):
            store.commit(step, extra).result()
            same(list(store.extra().values()), list(extra.values()))
    with Store.open([tmp_path]) as store:
        assert store.extra() == {"x": np.float32(3)}


def test_arrays_that_are_not_those_of_the_group(tmp_path):
    with created([tmp_path]) as store:
        good = values(1)[0]
        with pytest.raises(ValueError, match=r"group 0 \('a/mu', 'a/nu'\) has 2 arrays, and 1 are given"):
            store.write(0, good[:1])
        with pytest.raises(ValueError, match=r"'a/mu' of group 0 is float32\[1000, 7\] in the store, and float64"):
            store.write(0, [good[0].astype(np.float64), good[1]])


def test_nothing_is_there_before_the_first_commit(tmp_path):
    with Store.create([tmp_path], GROUPS, about=ABOUT) as store:
        assert store.step is None and not Store.exists([tmp_path])
        with pytest.raises(ValueError, match=r"group 1 \('b/mu', 'b/none' and 1 more\) was never written"):
            store.read(1).result()
        with pytest.raises(ValueError, match=r"group 0 .* was never written"):
            store.commit(0, {}).result()
        with pytest.raises(ValueError, match="stopped when a commit failed"):
            store.commit(0, {})
        with pytest.raises(ValueError, match="stopped when a commit failed"):
            store.close()
    with pytest.raises(ValueError, match="ended before its first commit"):
        Store.open([tmp_path])
    created([tmp_path]).close()  # takes over what the first left
    holds([tmp_path], 0)


def test_the_manifest_is_json(tmp_path):
    created([tmp_path]).close()
    body = json.loads((tmp_path / "manifest.json").read_text())["manifest"]
    assert body["step"] == 0 and body["about"] == ABOUT and body["groups"][1][0] == ["b/mu", [5000], "float32", []]


def test_late_arrays_are_there_a_few_at_a_time(tmp_path):
    """Of forty, each of several blocks, no more than the threads write of; and none when all is written."""
    there, most, lock = set(), [0], threading.Lock()

    def late(name, nbytes):
        def make():
            values = np.full(nbytes, len(name), np.uint8)
            with lock:
                there.add(name)
                most[0] = max(most[0], len(there))
            weakref.finalize(values, there.discard, name)
            return values

        return Late(nbytes, make)

    extra = {f"a{k}": late(f"a{k}", 5 * BLOCK + 77) for k in range(40)}
    extra |= {f"small{k}": late(f"small{k}", k) for k in range(9)}
    with Store.create([tmp_path / "x"], GROUPS, about=ABOUT, block=BLOCK) as store:
        write_all(store, 0)
        store.commit(0, extra).result()
        assert not there and 1 <= most[0] <= 2 * 8 + 9
        found = store.extra()
    assert {name: (len(x), {*x.tolist()}) for name, x in found.items()} == {
        name: (each.nbytes, {len(name)} if each.nbytes else set()) for name, each in extra.items()
    }
