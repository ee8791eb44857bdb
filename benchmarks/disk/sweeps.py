"""Sweeps over a state on disk as a driven step makes them, with checksums and a commit; a delay is the update."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jax_offload as jo
from jax_offload._disk.leaves import OnDisk, Place
from jax_offload._host.driver import DEPTH
from jax_offload._program.memory import HOST_KIND


class Counted:
    """The bytes of the state that were read and written, and the begin and end of each system call."""

    def __init__(self) -> None:
        self.bytes = {"read": 0, "write": 0}
        self.calls: list[tuple[float, float]] = []
        self._lock = Lock()
        self._system = os.preadv, os.pwritev
        os.preadv, os.pwritev = map(self._counted, self.bytes, self._system)

    def close(self) -> None:
        os.preadv, os.pwritev = self._system

    def _counted(self, kind: str, call: Callable[..., int]) -> Callable[..., int]:
        def counted(descriptor: int, *args: Any) -> int:
            of_state = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith("state")
            begin = time.perf_counter()
            moved = call(descriptor, *args)
            with self._lock:
                self.bytes[kind] += moved if of_state else 0
                self.calls.append((begin, time.perf_counter()))
            return moved

        return counted


def in_flight(calls: Sequence[tuple[float, float]], seconds: float) -> dict[str, float]:
    """Return how many calls are under way on average over some seconds, and the share of the time without any."""
    busy, until = 0.0, 0.0
    for begin, end in sorted(calls):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return {"calls": sum(end - begin for begin, end in calls) / seconds, "none": 1 - busy / seconds}


class Sweeps:
    """A state of ``nbytes`` in leaves of ``leaf`` bytes, ``group`` bytes of them read and written together.

    What is written was made by a program of XLA's, and lies where that puts it.
    """

    def __init__(self, folder: Path, nbytes: int, group: int, leaf: int) -> None:
        self.files = Counted()
        self.disk = jo.disk(folder)
        self.where = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=HOST_KIND)
        names = [str(k) for k in range(nbytes // leaf)]
        self.groups = [names[k : k + group // leaf] for k in range(0, len(names), group // leaf)]
        self.count = len(self.groups)
        made = jax.jit(lambda k: jax.random.normal(k, (leaf // 4,), jnp.float32), out_shardings=self.where)
        self.results = [made(jax.random.key(k)) for k in range(group // leaf)]
        of_one = self.results[0]
        self.places = [Place(self.disk, name, of_one.shape, of_one.dtype, self.where) for name in names]
        self.disk.fill(self.places, ([of_one] for _ in names))
        self.step = 0
        for _ in range(2):  # both slots, because space that is only reserved is written at another speed
            self.write()
        self.sweep()

    def sweep(self, *, writes: bool = True, delay: float = 0.0) -> tuple[float, dict[str, int]]:
        """Return the seconds until everything is on disk, and the bytes moved.

        As ``_host.driver`` asks: before the gradients, which take a ``delay`` too, reads of the first groups
        begin; at last everything is written, and committed.
        """
        before = dict(self.files.bytes)
        self.files.calls.clear()
        begin = time.perf_counter()
        reading: dict[str, Future[jax.Array]] = {}
        writing: deque[list[Future[None]]] = deque()
        tasks: list[list[str]] = [[], *self.groups]
        for k, group in enumerate(tasks):
            for name in (name for names in tasks[k + (k > 0) * DEPTH : k + 1 + DEPTH] for name in names):
                reading[name] = self.disk.fetch(name, self.where)
            while len(writing) > DEPTH:
                for future in writing.popleft():
                    future.result()
            values = [reading.pop(name).result() for name in group]
            if delay:
                time.sleep(delay)
            del values
            if writes:
                writing.append(self._put(group))
        if writes:
            self._commit()
        taken = time.perf_counter() - begin
        return taken, {kind: self.files.bytes[kind] - before[kind] for kind in before}

    def write(self) -> tuple[float, dict[str, int]]:
        """Do the same for writes alone."""
        before = dict(self.files.bytes)
        self.files.calls.clear()
        begin = time.perf_counter()
        for group in self.groups:
            self._put(group)
        self._commit()
        taken = time.perf_counter() - begin
        return taken, {kind: self.files.bytes[kind] - before[kind] for kind in before}

    def _put(self, group: list[str]) -> list[Future[None]]:
        return [self.disk.put(name, x) for name, x in zip(group, self.results, strict=False)]

    def _commit(self) -> None:
        token = self.disk.advance()
        self.disk.commit(self.step, {place.name: OnDisk(token, place) for place in self.places})
        self.step += 1

    def close(self) -> None:
        self.disk.close()
        self.files.close()
