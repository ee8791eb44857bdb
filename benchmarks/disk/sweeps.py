"""Sweeps over a store, with checksums and commits, in which a delay stands for the device's work."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jax_offload._disk.buffers import aligned
from jax_offload._disk.files import Files
from jax_offload._disk.layout import Entry, arrays_in, laid_out
from jax_offload._disk.pipeline import Pipeline
from jax_offload._disk.store import Store


class Counted(Files):
    """Bytes that were read and written in blocks."""

    def __init__(self) -> None:
        self.bytes = {"read": 0, "write": 0}
        self._lock = Lock()

    def preadv(self, descriptor: int, buffer: Any, offset: int) -> int:
        return self._count("read", super().preadv(descriptor, buffer, offset))

    def pwritev(self, descriptor: int, buffer: Any, offset: int) -> int:
        return self._count("write", super().pwritev(descriptor, buffer, offset))

    def _count(self, kind: str, moved: int) -> int:
        with self._lock:
            self.bytes[kind] += moved
        return moved


class Sweeps:
    """A store of ``nbytes`` in groups of ``group`` bytes, each of two arrays, and sweeps over it."""

    def __init__(self, folder: Path, nbytes: int, group: int, depth: int) -> None:
        shape = (group // 8,)
        groups = [
            [Entry(f"{k}/mu", shape, "float32"), Entry(f"{k}/nu", shape, "float32")] for k in range(nbytes // group)
        ]
        self.files = Counted()
        self.store = Store.create([folder], groups, about={}, files=self.files)
        # What the device would have made: in memory that pages begin, as pinned memory is.
        (layout, *_), _ = laid_out(groups, 1)
        self.results = arrays_in(layout, aligned(layout.nbytes))
        for array in self.results:
            array[...] = np.random.default_rng(0).normal(size=array.shape)
        self.count = len(groups)
        self.step = 0
        for _ in range(2):  # both slots: space that was only reserved is written at another speed
            for k in range(self.count):
                self.store.write(k, self.results).result()
            self._commit()
        self.pipeline = Pipeline(self.store, depth=depth)
        self.sweep()

    def _commit(self) -> None:
        self.store.commit(self.step, {}).result()
        self.step += 1

    def sweep(self, *, writes: bool = True, delay: float = 0.0) -> tuple[float, dict[str, int]]:
        """Seconds until all is on disk and nothing under way, and the bytes moved.

        The first groups were read ahead in the sweep before, and those of the next are read in this one.
        """
        before = dict(self.files.bytes)
        begin = time.perf_counter()
        for group, _ in self.pipeline.sweep():
            if delay:
                time.sleep(delay)
            self.pipeline.put(group, self.results) if writes else self.pipeline.keep(group)
        if writes:
            self._commit()
        self.pipeline.settle()
        taken = time.perf_counter() - begin
        return taken, {kind: self.files.bytes[kind] - before[kind] for kind in before}

    def write(self) -> tuple[float, dict[str, int]]:
        """The same for writes alone."""
        before = dict(self.files.bytes)
        begin = time.perf_counter()
        for future in [self.store.write(group, self.results) for group in range(self.count)]:
            future.result()
        self._commit()
        taken = time.perf_counter() - begin
        return taken, {kind: self.files.bytes[kind] - before[kind] for kind in before}

    def close(self) -> None:
        self.pipeline.close()
        self.store.close()
