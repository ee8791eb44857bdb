"""Several processes train: with a state on disk while one is killed at any moment, pipelined, or on their cores."""

import itertools
import signal

import pytest

from tests.support import processes
from tests.support.processes import ended

pytestmark = pytest.mark.long("starts processes")


def start(folder, what, *args, many=2):
    """Run this many processes of tests/support/steps_of_processes.py."""
    own = lambda i, port: ([what, folder, many, i, port, *args], {})  # noqa: E731
    return processes.start(folder, many, "steps_of_processes", own)


def found(said, word):
    """The numbers after a word, of each process."""
    return [[int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")] for text in said]


WHAT = [
    *("values zero", "values all", "committing", "damaged", "pipelined device", "pipelined host"),
    *("cores fsdp", "cores zero", "whole_leaves"),
]


@pytest.mark.parametrize("what", WHAT)
def test_two_processes(tmp_path, what):
    """Functions of tests/support/steps_of_processes.py, which say what they check."""
    if what.startswith("cores"):
        pytest.importorskip("numba")
    ended(tmp_path, start(tmp_path, *what.split()))


KILLS = [  # the file, its number (the first manifest.json has no commit), the process; where all open then
    ("manifest.next.json", "3", "1", 2),
    ("manifest.json", "4", "1", 3),
    ("manifest.next.json", "1", "0", 0),
    ("manifest.json", "2", "0", 1),
    ("any", "107", "0", None),
    ("any", "164", "1", None),
]


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


def test_a_disk_that_fails_in_one(tmp_path):
    """Both stop in the same step, say why, and go on from the last commit."""
    said = ended(tmp_path, start(tmp_path, "failing"))
    assert found(said, "stopped")[0] == found(said, "stopped")[1] and len(found(said, "stopped")[0]) == 2


def test_into_another_division_through_a_checkpoint(tmp_path):
    """Onto another disk of the two processes, into memory, and onto a disk of one process; which cannot open theirs."""
    ended(tmp_path, start(tmp_path, "into_a_checkpoint"))
    ended(tmp_path, start(tmp_path, "from_a_checkpoint", many=1))
    ended(tmp_path, start(tmp_path, "of_another_number", many=1))
