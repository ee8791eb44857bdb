"""Training with its state on disk in processes of their own: killed at any moment, asked for their memory, or several
that train together."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import jax_offload as jo
from tests.support import on_disk, processes
from tests.support.processes import ROOT, ended

WIDTH, LAYERS, STEPS = 64, 4, 10**6
HOST_BYTES = 2 * WIDTH * WIDTH * 4


def child(what, folder, *arguments, stderr=subprocess.DEVNULL):
    command = [sys.executable, "-m", "tests.support.on_disk", what, str(folder), *map(str, arguments)]
    # the C library otherwise keeps what threads have freed, which is no state
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "131072"}
    env |= {"MALLOC_ARENA_MAX": "1"} if what.startswith("limited") else {}  # each reserves addresses
    devices = 1 if what.startswith("limited") else (*arguments, 1)[4]
    # else as here: programs that are compiled otherwise may round otherwise
    env |= {"XLA_FLAGS": re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=ROOT)


def resumed(folder, devices):
    """What is committed there: its step, and every number of it."""
    files = jo.disk(folder, host_bytes=HOST_BYTES)
    params = on_disk.model(WIDTH, LAYERS, devices)
    tx = jo.offload(on_disk.INNER, min_bytes=1024, disk=files)
    tree, step = files.resume({"params": params, "state": jo.abstract_state(tx, params)})
    found = on_disk.values(tree["params"], tree["state"])
    files.close()
    return step, found


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("devices", [1, 4])
def test_killed_at_any_moment_it_goes_on_bit_for_bit(devices, tmp_path, monkeypatch):
    """After each first commit a process kills itself before some call of the system's, of a few steps and commits."""
    on_disk.in_parts(monkeypatch.setattr)  # as the child: other programs may round otherwise
    at, chance = 0, random.Random(0)
    for _ in range(3):
        process = child("kill", tmp_path / "killed", HOST_BYTES, WIDTH, LAYERS, STEPS, devices, chance.randrange(400))
        said = [int(line) for line in process.communicate(timeout=600)[0].split()]
        assert process.returncode == -signal.SIGKILL
        step, found = resumed(tmp_path / "killed", devices)
        # the last that was said to be committed, of every second step and the first, or the next
        assert step - said[-1] in (0, 1 + (said[-1] > 1)) and step > at
        at = step
    undisturbed = jo.disk(tmp_path / "undisturbed", host_bytes=HOST_BYTES)
    want = on_disk.values(*on_disk.train(undisturbed, WIDTH, LAYERS, at, devices, commits=False))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long("trains 67 million parameters")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux limits the addresses of a process")
def test_under_a_limit_that_the_state_in_memory_does_not_fit(tmp_path):
    """768 MiB of state, 64 of them in host memory, in 800 MiB beyond what a process of jax takes: two steps run, which
    without ``disk=`` end for want of memory."""
    width, layers, host_bytes, limit = 1024, 64, 2**26, 800
    assert 12 * layers * width * width >= 10 * host_bytes
    ran = {}
    for what in ("limited", "limited_host"):
        process = child(what, tmp_path / what, host_bytes, width, layers, 2, limit, stderr=subprocess.STDOUT)
        ran[what] = process.communicate()[0], process.returncode
    said, code = ran["limited"]
    assert code == 0 and "step 1" in said and int(said.split("MiB")[-1]) <= limit, said
    said, code = ran["limited_host"]
    assert code != 0 and "step 1" not in said, said
    by_signal = code < 0  # an allocation that fails in a library without a word
    assert by_signal or "RESOURCE_EXHAUSTED" in said or "bad_alloc" in said or "MemoryError" in said, said


# ---- several processes -----------------------------------------------------------------------------------------------


def start(folder, what, *args, many=2):
    """Run this many processes of tests/support/disk_of_processes.py."""
    own = lambda i, port: ([what, folder, many, i, port, *args], {})  # noqa: E731
    return processes.start(folder, many, "disk_of_processes", own)


def found(said, word):
    """The numbers after a word, of each process."""
    return [[int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")] for text in said]


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("how", ["zero", "all"])
def test_as_in_host_memory(tmp_path, how):
    """Trained, committed and resumed, there bit for bit."""
    ended(tmp_path, start(tmp_path, "values", how))


@pytest.mark.long("starts a dozen pairs of processes")
def test_killed(tmp_path):
    """One process, before it prepares or swaps a commit, or before any call of the system's."""
    (folder := tmp_path / "undisturbed").mkdir()
    want = ended(folder, start(folder, "train"))
    assert found(want, "committed") == [[1, 2, 3, 4, 5, 6]] * 2
    chance = random.Random(0)
    cases = [  # the file, its number, the process; where both open then
        ("manifest.next.json", "3", "1", 2),
        ("manifest.json", "3", "1", 3),
        ("manifest.next.json", "1", "0", 0),
        ("manifest.json", "1", "0", 1),
        *(("any", str(chance.randrange(10, 200)), str(k), None) for k in range(2)),
    ]
    for k, (name, n, process, at) in enumerate(cases):
        (folder := tmp_path / str(k)).mkdir()
        children = start(folder, "train", name, n, process)
        said = ended(folder, children, killed=True)
        last = max([0, *itertools.chain(*found(said, "committed"))])
        assert children[int(process)].returncode == -signal.SIGKILL
        again = ended(folder, start(folder, "train"))
        first, second = found(again, "from")
        assert first == second and first[0] in ((last, last + 1) if at is None else (at,)), name
        assert found(again, "digest") == found(want, "digest")


@pytest.mark.long("starts processes")
def test_a_commit_that_fails_in_one(tmp_path):
    """An error in one process is an error in both, and it names directories that belong to different runs."""
    ended(tmp_path, start(tmp_path, "committing"))


@pytest.mark.long("starts processes")
def test_a_disk_that_fails_in_one(tmp_path):
    """Both stop in the same step, say why, and go on from the last commit."""
    said = ended(tmp_path, start(tmp_path, "failing"))
    assert found(said, "stopped")[0] == found(said, "stopped")[1] and len(found(said, "stopped")[0]) == 2


@pytest.mark.long("as with one process, and orbax")
def test_into_another_division_through_a_checkpoint(tmp_path):
    """Onto another disk of the two processes, into memory, and onto a disk of one process; which cannot open theirs."""
    ended(tmp_path, start(tmp_path, "into_a_checkpoint"))
    ended(tmp_path, start(tmp_path, "from_a_checkpoint", many=1))
    ended(tmp_path, start(tmp_path, "of_another_number", many=1))
