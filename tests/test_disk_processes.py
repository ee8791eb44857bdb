"""A state on disk in several processes: values, kills, checkpoints. tests/disk/test_together.py has the protocol."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed, wait

import pytest

from tests.test_multihost import LAUNCHERS, ROOT, free_port

DEVICES = 4


def start(folder, what, *args, processes=2):
    """As many processes of tests/support/disk_of_processes.py, which say what they do in files."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and "_proxy" not in k.lower()}
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes} --xla_backend_optimization_level=0"
    env = inherited | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.support.disk_of_processes", what, str(folder), str(processes)]
    port, children = str(free_port()), []
    for i in range(processes):
        with (folder / f"{i}.log").open("w") as log:
            children.append(
                subprocess.Popen([*command, str(i), port, *args], env=env, stdout=log, stderr=log, cwd=ROOT)
            )
    return children


def ended(folder, children, *, killed=False):
    """What each has said. Where one fails the others wait for it in vain, and are killed after a while."""
    with ThreadPoolExecutor(len(children)) as pool:
        waits = [pool.submit(child.wait) for child in children]
        try:
            for done in as_completed(waits, timeout=600):
                if done.result():
                    break
            wait(waits, timeout=5)
            codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
    said = [(folder / f"{i}.log").read_text() for i in range(len(children))]
    assert killed or not any(codes), "\n---\n".join(
        f"{code}: {text[-3000:]}" for code, text in zip(codes, said, strict=True)
    )
    return said


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
    """One process before it prepares or swaps a commit."""
    (folder := tmp_path / "undisturbed").mkdir()
    want = ended(folder, start(folder, "train"))
    assert found(want, "committed") == [[1, 2, 3, 4, 5, 6]] * 2
    cases = [  # the file, its number, the process; where both open then
        ("manifest.next.json", "3", "1", 2),
        ("manifest.json", "3", "1", 3),
        ("manifest.next.json", "1", "0", 0),
        ("manifest.json", "1", "0", 1),
    ]
    for k, (name, n, process, at) in enumerate(cases):
        (folder := tmp_path / str(k)).mkdir()
        children = start(folder, "train", name, n, process)
        ended(folder, children, killed=True)
        assert children[int(process)].returncode == -signal.SIGKILL
        again = ended(folder, start(folder, "train"))
        assert found(again, "from") == [[at]] * 2, name
        assert found(again, "digest") == found(want, "digest")


@pytest.mark.long("starts processes")
def test_a_disk_that_fails_in_one(tmp_path):
    """Both stop in the same step, say why, and go on from the last commit."""
    said = ended(tmp_path, start(tmp_path, "failing"))
    assert found(said, "stopped")[0] == found(said, "stopped")[1] and len(found(said, "stopped")[0]) == 2


@pytest.mark.long("as with one process, and orbax")
def test_into_another_division_through_a_checkpoint(tmp_path):
    """Onto another disk of the two processes, into memory, and onto a disk of one process; which cannot open theirs."""
    ended(tmp_path, start(tmp_path, "into_a_checkpoint"))
    ended(tmp_path, start(tmp_path, "from_a_checkpoint", processes=1))
    ended(tmp_path, start(tmp_path, "of_another_number", processes=1))
