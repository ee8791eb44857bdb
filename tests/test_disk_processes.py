"""Training with its state on disk in processes of their own: asked for their memory, or several that train together;
killed at any moment."""

import itertools
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support import processes
from tests.support.processes import ROOT, ended


def child(what, folder, *arguments, stderr=subprocess.DEVNULL):
    command = [sys.executable, "-m", "tests.support.on_disk", what, str(folder), *map(str, arguments)]
    # the C library otherwise keeps what threads have freed, which is no state
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "131072"}
    env |= {"MALLOC_ARENA_MAX": "1"} if what.startswith("limited") else {}  # each reserves addresses
    env |= {"XLA_FLAGS": re.sub(r"(?<=device_count=)\d+", "1", os.environ["XLA_FLAGS"])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=ROOT)


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
    # Which allocation fails first differs from run to run, and some libraries end the process without a word.
    assert code < 0 or any(word in said.lower() for word in ("out of memory", "bad_alloc", "memoryerror")), said


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


KILLS = {  # of one process and of two: the file, its number, the process; where all open then
    1: [("any", "150", "0", None), ("any", "260", "0", None), ("manifest.json", "4", "0", 4)],
    2: [
        ("manifest.next.json", "3", "1", 2),
        ("manifest.json", "3", "1", 3),
        ("manifest.next.json", "1", "0", 0),
        ("manifest.json", "1", "0", 1),
        ("any", "107", "0", None),
        ("any", "164", "1", None),
    ],
}


@pytest.mark.long("starts a dozen pairs of processes")
@pytest.mark.parametrize("many", KILLS)
def test_killed(tmp_path, many):
    """One process, before it prepares or swaps a commit, or before a call of the system's: all goes on bit for bit."""
    (folder := tmp_path / "undisturbed").mkdir()
    want = ended(folder, start(folder, "train", many=many))
    assert found(want, "committed") == [[1, 2, 3, 4, 5, 6]] * many
    for k, (name, n, process, at) in enumerate(KILLS[many]):
        (folder := tmp_path / str(k)).mkdir()
        children = start(folder, "train", name, n, process, many=many)
        said = ended(folder, children, killed=True)
        last = max([0, *itertools.chain(*found(said, "committed"))])
        assert children[int(process)].returncode == -signal.SIGKILL
        again = ended(folder, start(folder, "train", many=many))
        first, *others = found(again, "from")
        assert others in ([], [first]) and first[0] in ((last, last + 1) if at is None else (at,)), name
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
