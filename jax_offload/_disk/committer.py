"""Commits in a thread of their own, one after the other; where one fails, nothing is written any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_offload._disk.commits import Commits
from jax_offload._disk.late import Late
from jax_offload._disk.layout import Entry
from jax_offload._disk.manifest import Manifest, Together
from jax_offload._disk.transfers import Striped
from jax_offload._disk.versions import Versions


class Committer:
    """Makes the newest values of a store's groups its last commit, and stops the store where that fails.

    Attributes:
      together: of several processes' commits the one that is the last here; ``None`` where it is of no others.
    """

    def __init__(
        self, commits: Commits, versions: Versions, data: Sequence[Striped], together: Together | None, where: str
    ) -> None:
        self._commits, self._versions, self._data = commits, versions, data
        self.together, self._where = together, where
        self._stopped: BaseException | None = None
        self._next: Manifest | None = None
        self._thread = ThreadPoolExecutor(1, "commit")

    @property
    def step(self) -> int | None:
        """Of the last commit; ``None`` before the first."""
        return self._commits.step

    def commit(self, step: int, extra: Mapping[str, np.ndarray | Late]) -> Callable[[], Future[None]]:
        """What begins a commit, of these arrays too."""
        begin = self._preparing(step, extra, None)

        def now() -> None:
            begin()
            self._stopping(self._swap)

        return lambda: self._thread.submit(now)

    def prepare(
        self, step: int, extra: Mapping[str, np.ndarray | Late], together: Together
    ) -> Callable[[], Future[None]]:
        """What begins the first half of a commit of several processes."""
        begin = self._preparing(step, extra, together)
        return lambda: self._thread.submit(begin)

    def swap(self) -> Future[None]:
        """The second half."""
        return self._thread.submit(self._stopping, self._swap)

    def extra(self) -> dict[str, np.ndarray]:
        """The arrays beside the groups, of the last commit."""
        return self._thread.submit(self._commits.extra).result()

    def stop(self, error: BaseException) -> None:
        """Nothing is written any more."""
        self._stopped = self._stopped or error

    def check(self) -> None:
        """Raises ``ValueError`` where the store has stopped."""
        if self._stopped is not None:
            raise ValueError(
                f"the store in {self._where!r} stopped when a commit failed: {self._stopped} "
                f"It is as of {'nothing' if self.step is None else f'step {self.step}'}: see to the cause and open it "
                "again, by disk.resume(target)."
            ) from self._stopped

    def shutdown(self) -> None:
        self._thread.shutdown()

    def _preparing(
        self, step: int, extra: Mapping[str, np.ndarray | Late], together: Together | None
    ) -> Callable[[], None]:
        self.check()
        entries = tuple(Entry(name, array.shape, array.dtype.name) for name, array in extra.items())
        arrays = [array if isinstance(array, Late) else _now(array) for array in extra.values()]

        def prepare() -> None:
            newest = self._versions.all_newest()
            self._next = self._commits.prepare(step, newest, self._data, entries, arrays, together)

        return lambda: self._stopping(prepare)

    def _swap(self) -> None:
        assert self._next is not None
        manifest, self._next = self._next, None
        self._commits.swap(manifest)
        self._versions.commit(manifest.versions)
        self.together = manifest.together

    def _stopping(self, do: Callable[[], Any]) -> None:
        try:
            self.check()
            do()
        except BaseException as error:
            # The files are not known any more: a manifest may have been swapped that is not known to be on disk. So
            # nothing may be written, to either slot.
            self.stop(error)
            raise


def _now(array: np.ndarray) -> Late:
    """An array that is there."""
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Late(values.nbytes, lambda: values)
