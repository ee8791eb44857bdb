"""Sweeps: right values, reads that are made ahead and no more of them than needed, and bounded memory."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from jax_offload._disk.layout import Entry
from jax_offload._disk.pipeline import Pipeline, residents
from jax_offload._disk.store import Store
from tests.disk.faulty import FAILED, Faulty, delays, error

COUNT = 6
GROUPS = [[Entry(f"{k}/x", (5000 + 300 * (k % 3),), "float32"), Entry(f"{k}/y", (10,), "int32")] for k in range(COUNT)]
NBYTES = [24576 + 4096 * (k % 3 > 0) for k in range(COUNT)]  # in whole pages
BLOCK = 8192


def value(group, step):
    entries = GROUPS[group]
    return [np.full(entry.shape, 100 * group + step, entry.dtype) for entry in entries]


@pytest.fixture
def made(tmp_path):
    def make(files=None, groups=GROUPS):
        store = Store.create([tmp_path], groups, about={}, files=files, block=BLOCK)
        for group in range(len(groups)):
            store.write(group, value(group, 0))
        store.commit(0, {}).result()
        if files:
            files.calls.clear()
        return store

    stores = []
    yield lambda *args, **kwargs: stores.append(make(*args, **kwargs)) or stores[-1]
    for store in stores:
        with suppress(ValueError):
            store.close()


def step_of(pipeline, step, *, lag=0, commits=True, then=None):
    """Each group must hold the step before; groups come back ``lag`` later than they were given out."""
    waiting = []
    for group, arrays in pipeline.sweep():
        for array, wanted in zip(arrays, value(group, step - 1), strict=True):
            np.testing.assert_array_equal(array, wanted)
        waiting.append(group)
        if len(waiting) > lag:
            pipeline.put(waiting[0], value(waiting.pop(0), step), commits=commits)
        if then:
            then(group)
    for group in waiting:
        pipeline.put(group, value(group, step), commits=commits)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("depth", "lag"), [(1, 0), (2, 0), (2, 1), (3, 2), (10, 3)])
@pytest.mark.parametrize("host_bytes", [0, 30000, 90000, 10**6])
def test_each_sweep_sees_the_one_before(made, tmp_path, host_bytes, depth, lag, every):
    store = made()
    pipeline = Pipeline(store, host_bytes=host_bytes, depth=depth)
    for step in range(1, 6):
        pipeline.prefetch()
        step_of(pipeline, step, lag=lag, commits=step % every == 0)
        if step % every == 0:
            pipeline.commit(step, {"step": np.array(step)})
    assert sum(NBYTES[group] for group in pipeline.resident) <= host_bytes
    assert store.buffers.most + store.staging.most <= pipeline.most_bytes
    assert pipeline.most_bytes <= host_bytes + 3 * depth * max(NBYTES) + store.most_staging
    pipeline.close()
    assert store.buffers.nbytes == 0
    store.close()
    with Store.open([tmp_path]) as store:
        last = 5 // every * every
        assert store.step == last == store.extra()["step"]
        for group in range(COUNT):
            np.testing.assert_array_equal(store.read(group).result()[0], value(group, last)[0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_groups_fewer_than_are_read_ahead(made, count):
    """None is read for the next sweep before it was given back in this one."""
    pipeline = Pipeline(made(Faulty(delays(0.005, "pwritev")), GROUPS[:count]), depth=4)
    for step in range(1, 5):
        step_of(pipeline, step, lag=1)
        pipeline.commit(step, {})
        pipeline.prefetch()


def calls(files, name):
    return sum(call == (name, file) for call in files.calls for file in ("groups.a", "groups.b"))


def blocks(groups):
    return sum(-(-NBYTES[group] // BLOCK) for group in groups)


def test_what_stays_is_read_once_and_the_rest_once_in_each_sweep(made):
    files = Faulty()
    pipeline = Pipeline(made(files), host_bytes=60000, depth=1)
    assert len(pipeline.resident) == 2
    rest = {*range(COUNT)} - pipeline.resident
    for step in range(1, 5):
        step_of(pipeline, step)
        pipeline.commit(step, {}).result()
    pipeline.close()  # one group was read ahead
    assert calls(files, "preadv") - blocks([min(rest)]) == blocks(pipeline.resident) + 4 * blocks(rest)
    assert calls(files, "pwritev") == 4 * blocks(range(COUNT))


def test_what_stays_is_written_for_commits_only(made):
    files = Faulty()
    pipeline = Pipeline(made(files), host_bytes=10**6)
    for step in range(1, 4):
        step_of(pipeline, step, commits=False)
    assert calls(files, "pwritev") == 0
    pipeline.commit(3, {}).result()
    assert calls(files, "pwritev") == blocks(range(COUNT))
    pipeline.commit(4, {}).result()  # nothing has changed
    assert calls(files, "pwritev") == blocks(range(COUNT))


def test_what_is_kept_is_not_written(made):
    files = Faulty()
    pipeline = Pipeline(made(files), host_bytes=60000)
    for _ in range(2):
        for group, arrays in pipeline.sweep():
            assert not arrays[0].flags.writeable
            np.testing.assert_array_equal(arrays[0], value(group, 0)[0])
            pipeline.keep(group)
        pipeline.commit(1, {}).result()
    assert calls(files, "pwritev") == 0


def test_reads_are_ahead_of_the_sweep(made):
    """Those of the first groups before it begins; those of the next sweep while this one's last is updated."""
    files = Faulty()
    pipeline = Pipeline(made(files), depth=2)
    pipeline.prefetch()
    wait_for(lambda: calls(files, "preadv") == blocks([0, 1]))
    seen = []
    step_of(pipeline, 1, then=lambda group: seen.append(wait_for_reads(files, group)))
    assert all(seen)


def test_reads_begin_when_a_group_comes_back(made):
    """Where all groups are under way, the next sweep's reads wait for nothing else."""
    files = Faulty()
    pipeline = Pipeline(made(files, GROUPS[:2]), depth=3)
    step_of(pipeline, 1)
    assert wait_for(lambda: calls(files, "preadv") == 2 * blocks([0, 1]))


def wait_for_reads(files, group):
    wanted = blocks(k % COUNT for k in range(group + 3))
    return wait_for(lambda: calls(files, "preadv") >= wanted)


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
    return True


def test_no_more_are_written_at_a_time_than_depth(made):
    gate = threading.Event()
    files = Faulty()
    store = made(files)
    files.fault = lambda name, *_: gate.wait(10) and None if name == "pwritev" else None
    pipeline = Pipeline(store, depth=2)
    sweep = pipeline.sweep()
    for _ in range(2):
        group, _ = next(sweep)
        pipeline.put(group, value(group, 1))
    group, _ = next(sweep)
    third = threading.Thread(target=pipeline.put, args=(group, value(group, 1)))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    gate.set()
    third.join(10)
    assert not third.is_alive()


def test_disk_and_updates_overlap(made):
    """Reads, updates and writes of 20 ms each take little more than the longest, not their sum."""
    each, files = 0.02, Faulty()
    store = made(files)
    begins = np.cumsum([0, *NBYTES])[:-1]

    def slow(name, path, *arguments):
        if name in ("preadv", "pwritev") and "groups" in str(path) and arguments[1] in begins:
            time.sleep(each)  # once for a group

    files.fault = slow
    pipeline = Pipeline(store, depth=2)
    begin = time.monotonic()
    for step in range(1, 4):
        step_of(pipeline, step, then=lambda _: time.sleep(each))
        pipeline.commit(step, {})
    taken = time.monotonic() - begin
    store.close()
    assert 3 * COUNT * each < taken < 0.75 * 3 * 3 * COUNT * each


def test_misuse_is_an_error(made):
    store = made()
    for given, message in [
        ({"host_bytes": -1}, "host_bytes must be 0"),
        ({"depth": 0}, "depth must be 1 group or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            Pipeline(store, **given)
    pipeline = Pipeline(store, depth=2)
    sweep = pipeline.sweep()
    next(sweep), next(sweep)
    with pytest.raises(ValueError, match="groups 0, 1 are held, and depth=2"):
        next(sweep)
    pipeline.put(1, value(1, 1))
    with pytest.raises(ValueError, match="groups 0, 2, 3, 4, 5 are still as of the step before"):
        pipeline.commit(1, {})
    with pytest.raises(
        ValueError, match="the sweep before ended early, without groups 0, 2, 3, 4, 5: the state is of two"
    ):
        next(pipeline.sweep())


@pytest.mark.parametrize("of", ["preadv", "pwritev"])
def test_errors_of_the_disk_come_out_of_the_sweep(made, of):
    files = Faulty()
    store = made(files)
    files.fault = error(FAILED, of, 4, "groups")
    pipeline = Pipeline(store)
    with pytest.raises(OSError, match="The disk failed"):
        step_of(pipeline, 1)


def test_which_groups_stay():
    assert residents([1] * 10, 0) == frozenset()
    assert residents([1] * 10, 10) == frozenset(range(10))
    assert residents([1] * 9, 3) == {2, 5, 8}
    assert residents([5, 1, 1, 1], 3) == {1, 2, 3}
    assert residents([], 3) == frozenset()
    rng = np.random.default_rng(0)
    for _ in range(100):
        nbytes = rng.integers(1, 100, 20).tolist()
        host_bytes = int(rng.integers(0, sum(nbytes) + 50))
        chosen = residents(nbytes, host_bytes)
        left = host_bytes - sum(nbytes[group] for group in chosen)
        assert left >= 0 and all(nbytes[group] > left for group in {*range(20)} - chosen)
