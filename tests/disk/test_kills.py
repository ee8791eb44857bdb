"""A store survives the end of its process, and of power, at any moment."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from jax_offload._disk.store import Store
from tests.disk.faulty import Faulty, created, extra_of, holds, write_all


def test_kills_at_random_moments():
    ran = subprocess.run([sys.executable, "-m", "tests.disk.kills", "6"], capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("6 kills: each time whole")


@pytest.mark.long("a hundred processes")
def test_a_hundred_kills():
    ran = subprocess.run([sys.executable, "-m", "tests.disk.kills", "100", "1"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


class PowerLoss(Faulty):
    """Ends at call number ``at``: from then on nothing goes. What was not synced may be there, or not.

    ``lose`` undoes each block that was written since its file's last sync, and a swap whose directory was not synced,
    with even odds.
    """

    def __init__(self, at, seed):
        super().__init__(self._count)
        self.at, self.rng, self.calls_left = at, np.random.default_rng(seed), at
        self.blocks, self.swaps, self.dead = [], [], False

    def _count(self, name, path, *arguments):
        if self.dead:
            raise OSError(5, "no power")
        self.calls_left -= 1
        self.dead = self.calls_left <= 0
        if name == "pwritev" and "lock" not in str(path):
            buffer, offset = arguments
            with open(path, "rb") as file:
                file.seek(offset)
                self.blocks.append((path, offset, file.read(len(buffer))))
        if name == "replace":
            self.swaps.append((path, path.read_bytes() if path.exists() else None))

    def sync(self, descriptor):
        super().sync(descriptor)
        self.blocks = [block for block in self.blocks if block[0] != self.paths[descriptor]]

    def sync_directory(self, path):
        super().sync_directory(path)
        self.swaps = [swap for swap in self.swaps if swap[0].parent != path]

    def lose(self):
        for path, offset, before in self.blocks:
            if self.rng.random() < 0.5 and path.exists():
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(before)
        for path, before in self.swaps:
            if self.rng.random() < 0.5:
                path.unlink() if before is None else path.write_bytes(before)


def run(store, files):
    for step in (1, 2):
        write_all(store, step)
        store.commit(step, extra_of(step)).result()
        files.committed = step


@pytest.mark.parametrize("seed", range(3))
def test_power_is_lost_at_any_call(tmp_path, seed):
    """Three stores of each length: what a sync did not confirm is there or not, and the commit before is."""
    count = len(calls_of_a_run(tmp_path / "all"))
    steps = set()
    for at in range(1 + seed, count + 4, 3):
        place = [tmp_path / f"{at}"]
        created(place).close()
        files = PowerLoss(10**9, seed)
        store = Store.open(place, files=files)
        files.calls_left, files.committed = at, 0
        try:
            run(store, files)
        except (OSError, ValueError):
            assert files.dead
        with pytest.raises(ValueError, match="stopped") if files.dead and files.committed < 2 else nullcontext():
            store.close()
        files.lose()
        with Store.open(place) as opened:
            step = opened.step
        assert step in (files.committed, files.committed + 1)
        steps.add(step)
        holds(place, step)
    assert steps == {0, 1, 2}


def calls_of_a_run(place):
    created([place]).close()
    files = Faulty()
    with Store.open([place], files=files) as store:
        files.calls.clear()
        run(store, files)
        return list(files.calls)


@pytest.mark.long("starts processes", but=["0"])
@pytest.mark.parametrize("first", range(4))
def test_killed_at_any_call(tmp_path, first):
    """From the first call of ``create`` on, by the system's own hand."""
    code = f"""
import os, sys
sys.path.insert(0, {str(os.getcwd())!r})
from tests.disk.faulty import *
from tests.disk.test_kills import run
import pathlib

def child(place, at):
    left = [at]
    def fault(name, path, *_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
    files = Faulty(fault)
    with created([place], files=files) as store:
        run(store, files)

for at in range({first}, 1000, 4):
    pid = os.fork()
    if not pid:
        child(pathlib.Path({str(tmp_path)!r}) / str(at), at)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print(os.WTERMSIG(status), flush=True)
    if not status:
        break
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ended = [int(line) for line in ran.stdout.split()]
    assert ended[-1] == 0 and {*ended[:-1]} == {signal.SIGKILL}, ran.stderr
    steps = []
    for k in range(len(ended)):
        place = [tmp_path / str(first + 4 * k)]
        if not Store.exists(place):
            steps.append(None)
            continue
        with Store.open(place) as store:
            steps.append(store.step)
        holds(place, steps[-1])
    order = [-1 if step is None else step for step in steps]
    assert {*steps} == {None, 0, 1, 2} and order == sorted(order)
