"""Processes that train are killed at any moment: from what was saved they go on, bit for bit."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support import killed


def child(way, folder):
    command = [sys.executable, "-m", "tests.support.killed", way, str(folder), str(10**6)]
    pipe, root = subprocess.PIPE, Path(__file__).parent.parent
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env, cwd=root)


@pytest.mark.long("starts processes, and kills them")
@pytest.mark.parametrize("way", killed.WAYS)
def test_killed_at_any_moment_it_goes_on_bit_for_bit(way, tmp_path):
    at, chance, folder = 0, random.Random(way), tmp_path / "killed"
    for _ in range(2):
        process = child(way, folder)
        assert process.stdout is not None
        said = [int(process.stdout.readline())]
        while said[-1] <= at:  # it has saved something of its own
            said.append(int(process.stdout.readline()))
        with contextlib.suppress(subprocess.TimeoutExpired):  # at any moment: every one must be right
            process.wait(chance.random() * 0.2)
        process.kill()
        said += [int(line) for line in process.stdout if line.endswith("\n")]
        assert process.wait() == -9
        with ocp.CheckpointManager(folder) as manager:
            saved = manager.latest_step() or 0
        assert saved - said[-1] in (0, killed.EVERY) and saved > at  # nothing that was saved is lost
        at = saved
    steps = at + 2 * killed.EVERY + (way != "finished")
    resumed, undisturbed = (killed.train(way, each, steps) for each in (folder, tmp_path / "undisturbed"))
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(undisturbed), strict=True):
        assert a.sharding == b.sharding and np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    assert "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(resumed)}
