"""A disk with faults under a step: each is an error that says what and where, and the last commit is there, whole."""

import os
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._drive import stages
from tests.disk.faulty import FAILED, NO_SPACE, Faulty, delays, error
from tests.disk.test_faults_of_disks import short

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
NAMES = ["layer_1", "layer_2", "layer_3"]


def model(width=64):
    w = {name: jax.random.normal(jax.random.key(k), (64, width)) / 8 for k, name in enumerate(NAMES)}
    return jax.device_put(w, jax.devices()[0])


class Run:
    """Two steps, a commit, and what two more give; from there on faults."""

    def __init__(self, folders):
        self.files = Faulty()
        self.disk = jo.disk(*folders)
        self.disk.files = self.files
        self.tx = jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=self.disk)
        self.step = jo.jit(self._step, donate_argnums=(0, 1))
        params = model()
        params, state = self.trained(params, self.tx.init(params), 2)
        self.disk.commit(2, {"params": params, "state": state})
        self.want = self.values(*self.trained(params, state, 2))

    def _step(self, params, state, x):
        def loss(params):
            y = x
            for name in NAMES:
                y = jnp.tanh(y @ params[name])
            return (y**2).mean()

        return jo.update_params(self.tx, jax.grad(loss)(params), state, params)

    def trained(self, params, state, steps):
        for _ in range(steps):
            params, state = self.step(params, state, X)
        return params, state

    def resumed(self):
        params = model()
        tree, step = self.disk.resume({"params": params, "state": jo.abstract_state(self.tx, params)})
        assert step == 2
        return tree["params"], tree["state"]

    @staticmethod
    def values(params, state):
        return [np.asarray(x) for x in jax.tree.leaves((params, jo.to_device(state)))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "GROUP_BYTES", 1)
        found = Run([tmp_path_factory.mktemp("x"), tmp_path_factory.mktemp("y")])
        yield found
        found.disk.close()


def goes_on(run):
    """From the last commit, bit for bit as it went undisturbed."""
    for a, b in zip(run.values(*run.trained(*run.resumed(), 2)), run.want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_reads_and_writes_each_byte_once(run, monkeypatch):
    moved = Counter()

    def count(name, path, *arguments):
        if name in ("preadv", "pwritev") and "groups" in str(path):
            moved[name] += len(arguments[0])

    params, state = run.resumed()
    monkeypatch.setattr(run.files, "fault", count)
    run.trained(params, state, 1)
    run.disk.wait()
    assert moved == dict.fromkeys(("preadv", "pwritev"), 2 * len(NAMES) * 64 * 64 * 4)


@pytest.mark.parametrize("fault", [short("preadv"), short("pwritev"), delays(0.01, "preadv"), delays(0.01, "pwritev")])
def test_short_calls_and_a_slow_disk_change_nothing(run, fault, monkeypatch):
    monkeypatch.setattr(run.files, "fault", fault)
    goes_on(run)


def flipped(name, path, *arguments):
    if name == "preadv" and "groups" in str(path):
        buffer, offset = arguments
        descriptor = os.open(path, os.O_RDWR)
        moved = os.preadv(descriptor, [buffer], offset)
        os.close(descriptor)
        buffer[moved // 2] ^= 4
        return moved


FAULTS = {
    "full": (error(NO_SPACE, "pwritev", 1, "groups"), r"writing group .* of the file.*No space left.*Free space there"),
    "failing write": (error(FAILED, "pwritev", 0, "groups"), r"writing group .*Input/output error.*The disk failed"),
    "failing read": (error(FAILED, "preadv", 3, "groups"), r"reading group .*Input/output error.*The disk failed"),
    "flipped bit": (flipped, r"group .* of the file .* are damaged: their checksum is"),
    "failing sync": (error(FAILED, "sync"), r"bringing a file of a store to disk: Input/output error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_and_the_last_commit_is_whole(run, name, monkeypatch):
    params, state = run.resumed()

    def trained_and_committed():
        after = run.trained(params, state, 3)
        run.disk.commit(5, dict(zip(("params", "state"), after, strict=True)))

    with monkeypatch.context() as patch:
        patch.setattr(run.files, "fault", FAULTS[name][0])
        with pytest.raises((OSError, ValueError), match=FAULTS[name][1]):
            trained_and_committed()
    assert run.disk.last_commit == 2
    goes_on(run)


def test_a_file_that_vanishes(run):
    """And is there again, as those of a drive that was not mounted."""
    params, state = run.trained(*run.resumed(), 1)
    paths = [run.disk.directories[1] / f"groups.{slot}" for slot in "ab"]
    for path in paths:
        path.rename(f"{path}.away")
    with pytest.raises(OSError, match=r"removed or replaced while in use: .*groups.[ab]'"):
        run.disk.commit(3, {"params": params, "state": state})
    with pytest.raises(ValueError, match=r"has lost .*groups.a': no such file. Is its disk mounted"):
        run.resumed()
    for path in paths:
        Path(f"{path}.away").rename(path)
    goes_on(run)


def test_two_runs_on_one_directory_and_another_optimizer_or_model(tmp_path):
    disk, params = jo.disk(tmp_path), model()
    tx = jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=disk)
    disk.commit(0, {"params": params, "state": tx.init(params)})
    other = jo.disk(tmp_path)
    for asked in (lambda: other.last_commit, lambda: jo.offload(optax.adamw(1e-2), disk=other).init(params)):
        with pytest.raises(ValueError, match=r"in use by process .*End the other|holds the state of another run"):
            asked()
    disk.close()
    for inner, width, message in [
        (optax.lion(1e-2), 64, "target: its leaves are not those of the commit"),
        (optax.adamw(1e-2), 32, r"target: .* is float32\[64, 32\], and the commit has float32\[64, 64\]"),
    ]:
        tx = jo.offload(inner, min_bytes=1024, disk=other)
        with pytest.raises(ValueError, match=message):
            other.resume({"params": model(width), "state": jo.abstract_state(tx, model(width))})
    other.close()
    tx = jo.offload(optax.adamw(1e-2), min_bytes=1024, disk=disk)
    assert disk.resume({"params": params, "state": jo.abstract_state(tx, params)})[1] == 0
    disk.close()
