"""Files with faults, and a store of a few small groups to have them in."""

import errno
import os
import threading
import time

import numpy as np

from jax_offload._disk.files import Files
from jax_offload._disk.layout import Entry, dtype_of
from jax_offload._disk.store import Store

BLOCK = 8192
GROUPS = [
    [Entry("a/mu", (1000, 7), "float32"), Entry("a/nu", (33,), "bfloat16")],
    [Entry("b/mu", (5000,), "float32"), Entry("b/none", (0, 3), "int8"), Entry("b/count", (), "int32")],
    [Entry("c/mu", (2048,), "float32")],
]
ABOUT = {"optimizer": "adam", "process": [0, 1]}


class Faulty(Files):
    """``fault(name, path, arguments)`` is called before each call, and may raise, wait, or return what is returned."""

    def __init__(self, fault=None):
        self.fault = fault or (lambda name, path, *arguments: None)
        self.paths = {}
        self.calls = []
        self._lock = threading.Lock()

    def open(self, path, *, create=False, direct=False):
        self._before("open", path, create, direct)
        descriptor = super().open(path, create=create, direct=direct)
        self.paths[descriptor] = path
        return descriptor

    def _before(self, name, path, *arguments):
        with self._lock:
            self.calls.append((name, getattr(path, "name", path)))
        return self.fault(name, path, *arguments)

    def preadv(self, descriptor, buffer, offset):
        given = self._before("preadv", self.paths[descriptor], buffer, offset)
        return super().preadv(descriptor, buffer, offset) if given is None else given

    def pwritev(self, descriptor, buffer, offset):
        given = self._before("pwritev", self.paths[descriptor], buffer, offset)
        return super().pwritev(descriptor, buffer, offset) if given is None else given

    def sync(self, descriptor):
        self._before("sync", self.paths[descriptor])
        super().sync(descriptor)

    def sync_directory(self, path):
        self._before("sync_directory", path)
        super().sync_directory(path)

    def allocate(self, descriptor, nbytes):
        self._before("allocate", self.paths[descriptor], nbytes)
        super().allocate(descriptor, nbytes)

    def write(self, path, data):
        self._before("write", path, data)
        super().write(path, data)

    def replace(self, source, target):
        self._before("replace", target)
        super().replace(source, target)


def error(number, of, at=0, file=""):
    """From the call number ``at`` of this name on, to files whose names have ``file`` in them, the system's error."""
    count = 0

    def fault(name, path, *_):
        nonlocal count
        if name == of and file in str(path):
            count += 1
            if count > at:
                raise OSError(number, os.strerror(number))

    return fault


def delays(seconds, of):
    def fault(name, *_):
        if name == of:
            time.sleep(seconds)

    return fault


def held(of, until):
    """Calls of this name wait for an event."""

    def fault(name, *_):
        if name == of:
            assert until.wait(300)

    return fault


def values(step, groups=GROUPS):
    """Arrays of all groups as of a step, each unlike the others."""
    rng = np.random.default_rng(step)
    return [[(rng.normal(size=entry.shape) * 100).astype(dtype_of(entry.dtype)) for entry in group] for group in groups]


def extra_of(step):
    return {"w": np.arange(3000.0) + step, "key": np.array([step, 7], np.uint32)}


def write_all(store, step):
    return [store.write(group, arrays) for group, arrays in enumerate(values(step, store.groups))]


def created(directories, step=0, files=None, groups=GROUPS, block=BLOCK):
    """A store with a commit."""
    store = Store.create(directories, groups, about=ABOUT, files=files, block=block)
    write_all(store, step)
    store.commit(step, extra_of(step)).result()
    return store


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def holds(directories, step, groups=GROUPS):
    """Opened anew, the store is as of this step, whole."""
    with Store.open(directories, about=ABOUT) as store:
        assert store.step == step
        for group, arrays in enumerate(values(step, groups)):
            same(store.read(group).result(), arrays)
        found = store.extra()
        assert found.keys() == extra_of(step).keys()
        same(list(found.values()), list(extra_of(step).values()))


NO_SPACE, FAILED = errno.ENOSPC, errno.EIO
