"""Stores of two processes, here threads, that commit together: never a mixture, wherever one of them is killed."""

import json
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jax_offload._base import processes
from jax_offload._disk import manifest
from jax_offload._disk.layout import Entry
from jax_offload._files import together
from jax_offload._files.under_way import UnderWay
from tests.disk.faulty import FAILED, NO_SPACE, Faulty, error, extra_of, same, values

GROUPS = [[Entry("a/mu", (40,), "float32")], [Entry("b/mu", (20, 3), "float32")]]
NOW = threading.local()


class Killed(BaseException):
    """A process is no more: nothing that it asked for happens."""


class Processes:
    """Threads that are told what each other says; all that wait are told when one is no more."""

    def __init__(self, n=2):
        self.n, self.said, self.barrier = n, [None] * n, threading.Barrier(n)

    def allgathered(self, mine):
        try:
            self.said[NOW.process] = json.dumps(mine)
            self.barrier.wait()
            found = [json.loads(each) for each in self.said]
            self.barrier.wait()
            return found
        except threading.BrokenBarrierError:
            raise Killed from None

    def run(self, do):
        """What ``do(process)`` gives in each, or raises."""
        results = [None] * self.n

        def one(k):
            NOW.process = k
            try:
                results[k] = do(k)
            except BaseException as raised:
                results[k] = raised
                if isinstance(raised, Killed):
                    self.barrier.abort()

        threads = [threading.Thread(target=one, args=(k,)) for k in range(self.n)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.barrier.reset()
        return results


@pytest.fixture
def two(monkeypatch):
    found = Processes()
    monkeypatch.setattr(jax, "process_count", lambda: found.n)
    monkeypatch.setattr(jax, "process_index", lambda: NOW.process)
    for module in (processes, together):
        monkeypatch.setattr(module, "allgathered", found.allgathered)
    return found


class Mortal(Faulty):
    """Ends at call number ``at``: that one is not made, and none after it."""

    def __init__(self, at=10**9):
        super().__init__(self._count)
        self.left, self.opened = at, set()

    def _count(self, name, path, *_):
        self.left -= 1
        if self.left < 0:
            raise Killed

    def open(self, path, **how):
        descriptor = super().open(path, **how)
        self.opened.add(descriptor)
        return descriptor

    def close(self, descriptor):
        self.opened.discard(descriptor)
        super().close(descriptor)

    def bury(self):
        for descriptor in [*self.opened]:
            self.close(descriptor)


def mine(process, step):
    return values(10 * step + process, GROUPS)


def write(store, process, step):
    for group, arrays in enumerate(mine(process, step)):
        store.write(group, arrays).result()


def run(place, files, process, steps, store=None, run="first"):
    """Makes a store, or goes on with it, and commits these steps; says which ended."""
    store = store or together.created([place], GROUPS, files)
    ended = []
    for step in steps:
        write(store, process, step)
        together.committed(store, step, lambda step=step: extra_of(step), run)
        ended.append(step)
    store.close()
    return ended


def opened(place, process):
    """The step that a process opens at, whole; 0 where there is no commit."""
    if (store := together.opened([place], None)) is None:
        return 0
    with store:
        for group, arrays in enumerate(mine(process, store.step)):
            same(store.read(group).result(), arrays)
        same(list(store.extra().values()), list(extra_of(store.step).values()))
        return store.step


def calls_of_a_run(two, place):
    files = [Mortal(), Mortal()]
    assert two.run(lambda k: run(place, files[k], k, [1, 2, 3])) == [[1, 2, 3]] * 2
    assert two.run(lambda k: opened(place, k)) == [3, 3]
    return [len(each.calls) for each in files]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long("more calls"))])
@pytest.mark.parametrize("killed", [0, 1])
def test_one_is_killed_at_any_call(two, tmp_path, killed, every):
    """Both open at one commit, the last that ended or the one after it, and go on from there."""
    count, found = calls_of_a_run(two, tmp_path / "all")[killed], []
    for at in range(1 + killed, count, every):
        place = tmp_path / str(at)
        files = [Mortal(at if k == killed else 10**9) for k in range(2)]
        ended, stores = [0, 0], []

        def one(k, place=place, files=files, ended=ended, stores=stores):
            stores.append(store := together.created([place], GROUPS, files[k]))
            for step in (1, 2, 3):
                write(store, k, step)
                together.committed(store, step, lambda step=step: extra_of(step), "first")
                ended[k] = step

        assert isinstance(two.run(one)[killed], Killed)
        for each in stores:
            each._reads.shutdown()
            each._pool.shutdown()
            each._committer.shutdown()
        for each in files:
            each.bury()
        steps = two.run(lambda k, place=place: opened(place, k))
        assert steps[0] == steps[1], (at, steps)
        assert steps[0] in (max(ended), max(ended) + 1), (at, steps, ended)
        found.append(steps[0])
        begin = found[-1]

        def on(k, place=place, begin=begin):
            store = together.opened([place], None) if begin else None
            return run(place, None, k, [begin + 1, begin + 2], store, "second")

        assert two.run(on) == [[begin + 1, begin + 2]] * 2
        assert two.run(lambda k, place=place: opened(place, k)) == [begin + 2] * 2
        shutil.rmtree(place)
    assert {*found} == {0, 1, 2, 3} and found == sorted(found)


@pytest.mark.parametrize("apart", ["manifest.next.json", "manifest.json", "manifest.copy.json"])
def test_one_has_swapped_and_the_other_not(two, tmp_path, apart):
    """Process 1 ends before this file of the second commit, process 0 goes on as far as it can."""

    def fault(name, path, *_):
        if name == "replace" and path.name == apart and NOW_SECOND[0]:
            raise Killed

    NOW_SECOND = [False]
    files = [Faulty(), Faulty(fault)]

    def one(k):
        store = together.created([tmp_path], GROUPS, files[k])
        write(store, k, 1)
        together.committed(store, 1, lambda: extra_of(1), "first")
        NOW_SECOND[0] = True
        write(store, k, 2)
        try:
            together.committed(store, 2, lambda: extra_of(2), "first")
        finally:
            store._directories.close()

    assert all(isinstance(each, Killed) for each in two.run(one))
    assert two.run(lambda k: opened(tmp_path, k)) == ([1, 1] if apart == "manifest.next.json" else [2, 2])


def test_a_full_disk_in_one_is_an_error_in_all(two, tmp_path):
    files = [Faulty(), Faulty()]

    def one(k):
        store = together.created([tmp_path], GROUPS, files[k])
        write(store, k, 1)
        together.committed(store, 1, lambda: extra_of(1), "first")
        files[1].fault = error(NO_SPACE, "write", file=manifest.NEXT)
        write(store, k, 2)
        try:
            together.committed(store, 2, lambda: extra_of(2), "first")
        except Exception as raised:
            with pytest.raises(ValueError, match="stopped when a commit failed"):
                store.prepare(2, extra_of(2), manifest.Together(3, "first"))
            with suppress(ValueError):
                store.close()
            return raised

    first, second = two.run(one)
    assert isinstance(first, ValueError) and "failed in 1 of 2 processes. Process 1: OSError" in str(first)
    assert isinstance(second, OSError)
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]


@pytest.mark.parametrize("of", ["preadv", "pwritev"])
def test_what_fails_in_one_is_an_error_in_both_when_the_step_ends(two, tmp_path, of):
    """Not before, where the other would wait for its part in the step: it has zeros for what it could not read."""
    where = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    leaves = [[replace(entry, begin=(0,) * len(entry.shape)) for entry in group] for group in GROUPS]

    def one(k):
        files = Faulty()
        store = together.created([tmp_path], leaves, files)
        write(store, k, 1)
        under_way = UnderWay(store, str(tmp_path))
        if k == 1:
            files.fault = error(FAILED, of)
        x = under_way.fetch("a/mu", where, None).result()
        under_way.check()  # the next step begins in both, before the other knows
        under_way.put("a/mu", x, None).exception()
        with pytest.raises(ValueError, match=r"Nothing of the last commit is lost. Fix: disk.resume") as raised:
            under_way.advance("run", 7)
        with pytest.raises(ValueError, match="did not end, in process 1"):
            under_way.check()
        return str(raised.value), np.array(x)

    (first, mine_of_0), (second, of_1) = two.run(one)
    doing = "reading" if of == "preadv" else "writing"
    assert f"in process 1 {doing} a/mu raised OSError" in first and "Input/output error" in first
    assert second == first
    same([mine_of_0], mine(0, 1)[0])
    same([of_1], [np.zeros(40, np.float32)] if of == "preadv" else mine(1, 1)[0])


def test_what_is_wrong_with_the_tree_stops_nothing(two, tmp_path):
    def one(k):
        store = together.created([tmp_path], GROUPS, None)
        write(store, k, 1)

        def beside():
            if k == 0:
                raise TypeError("tree: no array")
            return extra_of(1)

        with pytest.raises((TypeError, ValueError), match="tree: no array"):
            together.committed(store, 1, beside, "first")
        together.committed(store, 1, lambda: extra_of(1), "first")
        store.close()

    assert two.run(one) == [None, None]
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]


def test_directories_that_are_not_of_one_run(two, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    two.run(lambda k: run(here, None, k, [1, 2]))
    two.run(lambda k: run(there, None, k, [1, 2], run="another"))
    look = lambda place: [str(each) for each in two.run(lambda k: together.last_of_all([place], None))]  # noqa: E731

    shutil.move(here / "process-1-of-2", tmp_path / "away")
    assert all("process 1 has no commit" in each and "process 0 that of step 2" in each for each in look(here))
    assert all("process 1 has no commit" in str(each) for each in two.run(lambda k: run(here, None, k, [1])))

    shutil.copytree(there / "process-1-of-2", here / "process-1-of-2")
    assert all("no commit of one run" in each for each in look(here))

    two.n = 1
    monkeypatch.setattr(NOW, "process", 0, raising=False)
    for asked in (lambda: together.opened([there], None), lambda: together.created([there], GROUPS, None)):
        with pytest.raises(ValueError, match=r"has the commit of 2 processes, .* now there are 1\. Fix: .*save_args"):
            asked()


def test_two_runs_on_one_directory(two, tmp_path):
    two.run(lambda k: run(tmp_path, None, k, [1]))
    stores = two.run(lambda k: together.opened([tmp_path], None))
    for each in two.run(lambda k: together.opened([tmp_path], None)):
        assert isinstance(each, ValueError) and "in use by process" in str(each)
    for store in stores:
        store.close()
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]
