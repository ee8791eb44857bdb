"""Files with faults, and a small training run whose state is on disk to have them in."""

import errno
import itertools
import os
import shutil
import stat
import threading
from pathlib import Path

import jax
import numpy as np

import jax_offload as jo
from tests.support.steps import ADAMW, apart, loss_apart

X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
NO_SPACE, FAILED = errno.ENOSPC, errno.EIO
CALLS = {  # the system's calls, by the names that faults know
    "open": "open", "preadv": "preadv", "pwritev": "pwritev", "fdatasync": "sync", "fsync": "sync",
    "posix_fallocate": "allocate", "mkdir": "make_directory", "replace": "replace", "unlink": "remove",
}  # fmt: skip
_FAULTY = []  # the newest first


class Faulty:
    """Record system calls on files in a folder, and call ``fault(name, path, *arguments)`` before each of them.

    A fault may raise, wait, or return the call's result. For ``replace``, ``path`` is the target.
    """

    def __init__(self, folder, fault=None):
        self.folder, self.fault, self.calls, self.lock = Path(folder), fault or no_fault, [], threading.Lock()
        _FAULTY.insert(0, self)

    def before(self, name, path, *arguments):
        with self.lock:
            self.calls.append((name, path.name))
        return self.fault(name, path, *arguments)


def told(name, call):
    def called(first, *arguments, **how):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first)
        except (OSError, TypeError):  # closed, or bytes
            return call(first, *arguments, **how)
        path = Path(arguments[0]) if name == "replace" else path
        faulty = next((each for each in _FAULTY if path.is_relative_to(each.folder)), None)
        if faulty is None:
            return call(first, *arguments, **how)
        said, given = name, arguments
        if name == "sync" and stat.S_ISDIR(os.fstat(first).st_mode):
            said = "sync_directory"
        elif name in ("preadv", "pwritev"):
            (buffer,), offset = arguments
            given = buffer, offset
        returned = faulty.before(said, path, *given)
        return call(first, *arguments, **how) if returned is None else returned

    return called


SYSTEM = {call: getattr(os, call) for call in CALLS}  # without faults
for _call, _name in CALLS.items():
    setattr(os, _call, told(_name, SYSTEM[_call]))


def no_fault(name, path, *arguments):
    pass


def error(number, of, at=0, file=""):
    """From the call number ``at`` of this name on, to files whose names have ``file`` in them, the system's error."""
    calls = itertools.count()

    def fault(name, path, *_):
        if name == of and file in path.name and next(calls) >= at:
            raise OSError(number, os.strerror(number))

    return fault


def moved(of, path, buffer, offset):
    descriptor = SYSTEM["open"](path, os.O_RDWR)
    try:
        return SYSTEM[of](descriptor, [buffer], offset)
    finally:
        os.close(descriptor)


def short(of):
    """Every second call moves a part only: whole pages, some bytes more, or less than a page."""
    most = itertools.cycle([None, 5000, None, 100, None, 4096])

    def fault(name, path, *arguments):
        if name != of or "state" not in path.name or (n := next(most)) is None:
            return None
        buffer, offset = arguments
        return moved(of, path, buffer[:n], offset)

    return fault


def flipped(name, path, *arguments):
    """A bit of what is read is another."""
    if name != "preadv" or "state" not in path.name:
        return None
    n = moved("preadv", path, *arguments)
    arguments[0][n // 2] ^= 4
    return n


class PowerLoss:
    """A fault that ends everything at call number ``at``: no call goes through from then on.

    ``lose`` undoes each write since its file's last sync, and each renaming whose directory was not synced, with even
    odds: what is left is what a loss of power may leave. Without ``lose`` it is what a killed process leaves.
    """

    def __init__(self, at, seed=0):
        self.left, self.rng = at, np.random.default_rng(seed)
        self.blocks, self.swaps = [], []
        self._lock = threading.Lock()

    @property
    def dead(self):
        return self.left < 0

    def __call__(self, name, path, *arguments):
        with self._lock:
            self.left -= 1
            if self.dead:
                raise OSError(FAILED, "no power")
            if name == "pwritev":
                buffer, offset = arguments
                with open(path, "rb") as file:
                    file.seek(offset)
                    self.blocks.append((path, offset, file.read(len(buffer))))
            if name == "replace":
                self.swaps.append((path, path.read_bytes() if path.exists() else None))
            if name == "sync":
                self.blocks = [block for block in self.blocks if block[0] != path]
            if name == "sync_directory":
                self.swaps = [swap for swap in self.swaps if swap[0].parent != path]

    def lose(self):
        for path, offset, before in self.blocks:
            if self.rng.random() < 0.5 and path.exists():
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(before)
        for path, before in reversed(self.swaps):
            if self.rng.random() < 0.5:
                SYSTEM["unlink"](path) if before is None else path.write_bytes(before)


def model(width=64):
    return apart(3, width)


class Run:
    """Training whose state is on disk: two steps, a commit, and what each of two more steps gives from there on.

    Every test begins with ``restart``, which puts the files of that commit back.
    """

    def __init__(self, folder):
        self.folder, self.kept = folder / "run", folder / "kept"
        self.files = Faulty(folder)
        self.disk = jo.disk(self.folder)
        self.tx = jo.offload(ADAMW, min_bytes=1024, disk=self.disk)
        self.step = jo.jit(self._step, donate_argnums=(0, 1))
        params, state = self.trained(model(), self.tx.init(model()), 2)
        self.commit(2, params, state)
        self.want = {2: self.values(params, state)}
        for step in (3, 4):
            params, state = self.trained(params, state)
            self.want[step] = self.values(params, state)
        self.disk.close()
        shutil.copytree(self.folder, self.kept)

    def _step(self, params, state, x):
        return jo.update_params(self.tx, jax.grad(loss_apart)(params, x), state, params)

    def trained(self, params, state, steps=1):
        for _ in range(steps):
            params, state = self.step(params, state, X)
        return params, state

    def commit(self, step, params, state):
        return self.disk.commit(step, {"params": params, "state": state})

    def restart(self):
        """The files and the state as of the commit of step 2, on a disk that is well."""
        self.files.fault = no_fault
        self.disk.close()
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)
        params, state, step = self.resumed()
        assert step == 2
        return params, state

    def resumed(self, inner=None, width=64):
        tx = self.tx if inner is None else jo.offload(inner, min_bytes=1024, disk=self.disk)
        tree, step = self.disk.resume({"params": model(width), "state": jo.abstract_state(tx, model(width))})
        return tree["params"], tree["state"], step

    @staticmethod
    def values(params, state):
        return [np.asarray(x) for x in jax.tree.leaves((params, jo.to_device(state)))]

    def is_at(self, step, params, state):
        """Check that parameters and state equal this step's, bit for bit."""
        for a, b in zip(self.values(params, state), self.want[step], strict=True):
            np.testing.assert_array_equal(a, b)

    def holds(self, *steps):
        """Opened again on a disk that is well, it is at one of these steps, whole, and goes on bit for bit."""
        self.files.fault = no_fault
        params, state, step = self.resumed()
        assert step in steps
        while True:
            self.is_at(step, params, state)
            if step == 4:
                return
            params, state = self.trained(params, state)
            step += 1
