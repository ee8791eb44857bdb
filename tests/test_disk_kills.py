"""Training with its state on disk in processes of their own: killed at any moment, and asked for their memory."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jax_offload as jo
from tests.support import on_disk

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
    pipe, root = subprocess.PIPE, Path(__file__).parent.parent
    return subprocess.Popen(command, stdout=pipe, stderr=stderr, text=True, env=env, cwd=root)


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
    assert "RESOURCE_EXHAUSTED" in said or "bad_alloc" in said or "MemoryError" in said, said
