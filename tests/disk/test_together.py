"""Stores of two processes, here threads, that commit together: never a mixture, wherever one of them is killed."""

import contextlib
import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_offload._disk import disk, processes
from jax_offload._disk.store import NEXT, Entry
from tests.disk.faulty import NO_SPACE, Faulty, error, no_fault

ENTRIES = [Entry("a/mu", (40,), "float32"), Entry("b/mu", (20, 3), "float32")]
NOW = threading.local()


class Killed(BaseException):
    """A process is no more: nothing that it asked for happens."""


class Processes:
    """Threads that are told what each other says; all that wait are told when one is no more."""

    def __init__(self, n=2):
        self.n, self.said, self.barrier = n, [None] * n, threading.Barrier(n, timeout=120)

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
            NOW.process, NOW.broken = k, self.barrier.abort
            try:
                results[k] = do(k)
            except BaseException as raised:
                results[k] = raised

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
    for module in (processes, disk):
        monkeypatch.setattr(module, "allgathered", found.allgathered)
    return found


def folder(place, process):
    return place / f"process-{process}-of-2"


def mortal(at):
    """Ends at call number ``at``: that one is not made, and none after it."""
    calls = itertools.count()

    def fault(*_):
        if next(calls) >= at:
            raise Killed

    return fault


def mine(process, step):
    rng = np.random.default_rng(10 * step + process)
    return {k: rng.normal(size=entry.shape).astype(entry.dtype) for k, entry in enumerate(ENTRIES)}


def beside(step):
    return {"w": np.full(5000, step, np.uint8)}


def commit(store, process, step, run="first"):
    store.write(mine(process, step))
    disk.committed(store, step, lambda: beside(step), run)


def run(place, process, steps, store=None, run="first"):
    """Makes a store, or goes on with it, and commits these steps; gives those that ended."""
    ended = []
    try:
        store = store or disk.created(place, ENTRIES)
        for step in steps:
            commit(store, process, step, run)
            ended.append(step)
    except Killed:
        NOW.broken()  # the other process waits in vain
    if store is not None:
        store.close()
    for each in Path("/proc/self/fd").iterdir():  # a process that is no more has no files
        with contextlib.suppress(OSError):
            if each.readlink().is_relative_to(folder(place, process)):
                os.close(int(each.name))
    return ended


def opened(place, process):
    """The step that a process opens at, whole; 0 where there is no commit."""
    if disk.last_of_all(place) is None:
        return 0
    store = disk.open_last(place)
    found = store.read([0, 1])
    for x, want in zip(found, mine(process, store.step).values(), strict=True):
        np.testing.assert_array_equal(x, want)
    assert {*store.beside()["w"]} == {store.step}
    store.close()
    return store.step


@pytest.mark.parametrize("every", [9, 1])
@pytest.mark.parametrize("killed", [0, 1])
def test_one_is_killed_at_any_call(two, tmp_path, every, killed):
    """Both open at one commit, the last that ended or the one after it, and go on from there."""
    counted = Faulty(folder(tmp_path / "all", killed))
    assert two.run(lambda k: run(tmp_path / "all", k, [1, 2, 3])) == [[1, 2, 3]] * 2
    found = []
    count = len(counted.calls)
    for at in (*range(1 + killed, count - 1, every), count - 1):  # and the last one, which syncs the third commit
        place = tmp_path / str(at)
        faulty = Faulty(folder(place, killed), mortal(at))
        ended = two.run(lambda k, p=place: run(p, k, [1, 2, 3]))
        faulty.fault = no_fault
        steps = two.run(lambda k, p=place: opened(p, k))
        last = max((step for steps in ended for step in steps), default=0)
        assert steps[0] == steps[1] and steps[0] in (last, last + 1), (at, steps, ended)
        found.append(begin := steps[0])

        def on(k, place=place, begin=begin):
            store = disk.open_last(place) if begin else None
            return run(place, k, [begin + 1, begin + 2], store, "second")

        assert two.run(on) == [[begin + 1, begin + 2]] * 2
        assert two.run(lambda k, p=place: opened(p, k)) == [begin + 2] * 2
        shutil.rmtree(place)
    assert {*found} == {0, 1, 2, 3} and found == sorted(found)


@pytest.mark.parametrize("apart", [NEXT, "manifest.json"])
def test_one_has_swapped_and_the_other_not(two, tmp_path, apart):
    """Process 1 ends before this file of the second commit, process 0 goes on as far as it can."""

    def fault(name, path, *_):
        if name == "replace" and path.name == apart and (tmp_path / "second").exists():
            raise Killed

    faulty = Faulty(folder(tmp_path, 1), fault)

    def one(k):
        store = disk.created(tmp_path, ENTRIES)
        commit(store, k, 1)
        (tmp_path / "second").touch()
        return run(tmp_path, k, [2], store)

    two.run(one)
    faulty.fault = no_fault
    assert two.run(lambda k: opened(tmp_path, k)) == ([1, 1] if apart == NEXT else [2, 2])


def test_a_full_disk_in_one_is_an_error_in_all(two, tmp_path):
    files = Faulty(folder(tmp_path, 1))

    def one(k):
        store = disk.created(tmp_path, ENTRIES)
        commit(store, k, 1)
        files.fault = error(NO_SPACE, "sync", file=NEXT)
        with pytest.raises((OSError, ValueError)) as raised:
            commit(store, k, 2)
        files.fault = no_fault
        with pytest.raises(ValueError, match="stopped when a commit failed"):
            store.check()
        store.close()
        return raised.value

    first, second = two.run(one)
    assert isinstance(first, ValueError) and "failed in 1 of 2 processes. Process 1: OSError" in str(first)
    assert isinstance(second, OSError)
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]


def test_what_is_wrong_with_the_tree_stops_nothing(two, tmp_path):
    def one(k):
        store = disk.created(tmp_path, ENTRIES)
        store.write(mine(k, 1))

        def wrong():
            if k == 0:
                raise TypeError("tree: no array")
            return beside(1)

        with pytest.raises((TypeError, ValueError), match="tree: no array"):
            disk.committed(store, 1, wrong, "first")
        return run(tmp_path, k, [1], store)

    assert two.run(one) == [[1], [1]]
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]


def test_directories_that_are_not_of_one_run(two, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    two.run(lambda k: run(here, k, [1, 2]))
    two.run(lambda k: run(there, k, [1, 2], run="another"))
    look = lambda place: [str(each) for each in two.run(lambda k: disk.last_of_all(place))]  # noqa: E731

    shutil.move(here / "process-1-of-2", tmp_path / "away")
    assert all("process 0 has step 2, process 1 has none. Is a disk mounted" in each for each in look(here))
    assert all("process 1 has none" in str(each) for each in two.run(lambda k: run(here, k, [1])))

    shutil.copytree(there / "process-1-of-2", here / "process-1-of-2")
    assert all("no commit of the same run" in each for each in look(here))

    two.n = 1
    monkeypatch.setattr(NOW, "process", 0, raising=False)
    for ask in (disk.open_last, disk.last_of_all):
        with pytest.raises(ValueError, match=r"has the commit of 2 processes, .* now there are 1\. Fix: .*save_args"):
            ask(there)


def test_two_runs_on_one_directory(two, tmp_path):
    two.run(lambda k: run(tmp_path, k, [1]))
    stores = two.run(lambda k: disk.open_last(tmp_path))
    for each in two.run(lambda k: disk.open_last(tmp_path)):
        assert isinstance(each, ValueError) and "in use by process" in str(each)
    for store in stores:
        store.close()
    assert two.run(lambda k: opened(tmp_path, k)) == [1, 1]
