"""Several processes train: with a state on disk while one is killed at any moment, pipelined, or on their cores."""

import itertools
import signal
from importlib.util import find_spec

import pytest

from tests.support import processes
from tests.support.processes import ended


def start(folder, what, *args, many=2):
    """Run this many processes of tests/support/steps_of_processes.py."""
    own = lambda i, port: ([what, folder, many, i, port, *args], {})  # noqa: E731
    return processes.start(folder, many, "steps_of_processes", own)


def found(said, word):
    """The numbers after a word, of each process."""
    return [[int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")] for text in said]


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("how", ["zero", "all"])
def test_as_in_host_memory(tmp_path, how):
    """Trained, committed and resumed, there bit for bit."""
    ended(tmp_path, start(tmp_path, "values", how))


KILLS = [  # the file, its number, the process; where all open then
    ("manifest.next.json", "3", "1", 2),
    ("manifest.json", "3", "1", 3),
    ("manifest.next.json", "1", "0", 0),
    ("manifest.json", "1", "0", 1),
    ("any", "107", "0", None),
    ("any", "164", "1", None),
]


@pytest.mark.long("starts a dozen pairs of processes")
def test_killed(tmp_path):
    """One process, before it prepares or swaps a commit, or before a call of the system's: all goes on bit for bit."""
    (folder := tmp_path / "undisturbed").mkdir()
    want = ended(folder, start(folder, "train"))
    assert found(want, "committed") == [[1, 2, 3, 4, 5, 6]] * 2
    for k, (name, n, process, at) in enumerate(KILLS):
        (folder := tmp_path / str(k)).mkdir()
        children = start(folder, "train", name, n, process)
        said = ended(folder, children, killed=True)
        last = max([0, *itertools.chain(*found(said, "committed"))])
        assert children[int(process)].returncode == -signal.SIGKILL
        again = ended(folder, start(folder, "train"))
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


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_pipelined(tmp_path, gradients):
    ended(tmp_path, start(tmp_path, "pipelined", gradients))


@pytest.mark.long("starts processes")
@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed (extra cores)")
@pytest.mark.parametrize("how", ["fsdp", "zero"])
def test_each_process_updates_its_own_part_on_its_cores(tmp_path, how):
    ended(tmp_path, start(tmp_path, "cores", how))


@pytest.mark.long("starts processes")
def test_an_update_that_needs_whole_leaves_is_an_error(tmp_path):
    ended(tmp_path, start(tmp_path, "whole_leaves"))
