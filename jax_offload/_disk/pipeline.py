"""Sweeps over a store: each group read ahead, updated, and written behind; a share of them kept in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from jax_offload._disk.store import Store


def residents(nbytes: Sequence[int], host_bytes: int) -> frozenset[int]:
    """Which groups stay in host memory: as many as ``host_bytes`` hold, evenly spread over the sweep.

    Sweeps are cyclic, so a least-recently-used cache would always have dropped what comes next; a fixed share of k
    groups of n saves k reads of n in every sweep. Sweeping back and forth saves no more of them: the k that were last
    are the k that come next, and that share is the same. It would save the few groups that are in the pipeline's
    buffers at the turn; but those are the very buffers into which the next sweep's first groups are read ahead, while
    gradients are computed, which then has nothing to read. So the direction does not change. Evenly spread, because the
    disk reads on while a group that stays is updated: were they the last, it would be idle then, the buffers full.
    """
    total = sum(nbytes)
    chosen, left, credit = set(), host_bytes, 0.0
    for group, length in enumerate(nbytes):
        credit += length * min(1.0, host_bytes / max(total, 1))
        if length <= min(credit * (1 + 1e-9), left):
            chosen.add(group)
            credit -= length
            left -= length
    for group, length in enumerate(nbytes):  # what groups of unlike lengths leave over
        if group not in chosen and length <= left:
            chosen.add(group)
            left -= length
    return frozenset(chosen)


class Pipeline:
    """Sweeps over the groups of a store: at most ``depth`` are being read, as many updated, as many written.

    Args:
        store: with a commit, or with all groups written.
        host_bytes: of host memory for groups that stay there. They are read once, in the first sweep, and written only
            for commits.
        depth: groups read ahead of the one that is updated. Two hide reads behind updates that take as long.

    Raises:
        ValueError: ``host_bytes`` is negative, or ``depth`` less than one.
    """

    def __init__(self, store: Store, *, host_bytes: int = 0, depth: int = 2) -> None:
        if host_bytes < 0:
            raise ValueError(f"host_bytes must be 0 or more bytes, not {host_bytes}")
        if depth < 1:
            raise ValueError(f"depth must be 1 group or more, not {depth}: nothing could be read")
        self.store = store
        self.depth = depth
        self._lengths = [store.nbytes(group) for group in range(len(store.groups))]
        self.resident = residents(self._lengths, host_bytes)
        self._on_disk = [group for group in range(len(self._lengths)) if group not in self.resident]
        self._cache: dict[int, Future[list[np.ndarray]]] = {}
        self._changed: set[int] = set()  # of those that stay, since they were last written
        self._written: dict[int, Future[None]] = {}  # of those that stay, the last write
        self._reads: deque[tuple[int, Future[list[np.ndarray]]]] = deque()  # ahead, in the order of the sweep
        self._held: dict[int, list[np.ndarray]] = {}  # given out by a sweep
        self._writes: deque[Future[None]] = deque()
        self._turn = 0  # groups that were asked of the disk so far, in all sweeps
        self._returned = [0] * len(self._lengths)  # how often a group was given back
        self._due: set[int] = set()  # groups that this sweep must be given back yet

    @property
    def most_bytes(self) -> int:
        """Host memory that sweeps take at most: groups that stay, those under way, and blocks put together."""
        stay = sum(self._lengths[group] for group in self.resident)
        under_way = 3 * self.depth * max((self._lengths[group] for group in self._on_disk), default=0)
        return stay + under_way + self.store.most_staging

    def prefetch(self) -> None:
        """Starts reading the first groups of the next sweep, as far as they are written, and returns at once."""
        for group in sorted(self.resident - self._cache.keys()):
            buffer = self.store.buffers.take_new(self._lengths[group])
            self._cache[group] = self.store.read(group, buffer)
        while self._on_disk and len(self._reads) < self.depth and len(self._reads) + len(self._held) < 2 * self.depth:
            sweeps, place = divmod(self._turn, len(self._on_disk))
            group = self._on_disk[place]
            if self._returned[group] < sweeps:
                return  # its values of the sweep before are not there yet
            self._reads.append((group, self.store.read(group)))
            self._turn += 1

    def sweep(self) -> Iterator[tuple[int, list[np.ndarray]]]:
        """All groups in turn, each with its arrays. They must not be changed, and come back by ``put`` or ``keep``.

        Of those that do not stay in host memory ``depth`` can be held at a time.

        Raises:
            ValueError: the sweep before was not finished; more are held; or bytes on disk are damaged.
            OSError: the disk failed.
        """
        if self._due:
            raise ValueError(
                f"the sweep before ended early, without groups {_some(self._due)}: the state is of two steps now. Open "
                "the store again, at its last commit."
            )
        self._due = set(range(len(self._lengths)))
        for group in range(len(self._lengths)):
            self.prefetch()
            if group in self.resident:
                arrays = self._cache[group].result()
            else:
                if len(self._held) >= self.depth:
                    raise ValueError(
                        f"groups {_some(self._held)} are held, and depth={self.depth} lets a sweep give out that many. "
                        "Give one back, or raise depth."
                    )
                _, future = self._reads.popleft()
                self._held[group] = []
                self.prefetch()
                self._held[group] = arrays = future.result()
            for array in arrays:
                array.flags.writeable = False
            yield group, arrays

    def put(self, group: int, arrays: Sequence[np.ndarray], *, commits: bool = True) -> None:
        """New values of a group that the sweep gave out. Waits while ``depth`` groups are being written.

        ``arrays`` must stay as they are until they are written; those of a group that stays are copied. ``commits``
        says that a commit follows this sweep: groups that stay are written now, rather than all at the commit.
        """
        if group in self.resident:
            if group in self._written:
                self._written.pop(group).result()  # it reads what is overwritten now
            for old, new in zip(self._cached(group), arrays, strict=True):
                np.copyto(old, new, casting="no")
            self._changed.add(group)
            if commits:
                self._write_resident(group)
        else:
            while len(self._writes) >= self.depth:
                self._writes.popleft().result()
            self._writes.append(self.store.write(group, arrays))
        self.keep(group)

    def keep(self, group: int) -> None:
        """Gives a group back as it was."""
        self._due.remove(group)
        self._returned[group] += 1
        if group not in self.resident:
            self.store.release(self._held.pop(group))
        self.prefetch()

    def commit(self, step: int, extra: Mapping[str, np.ndarray]) -> Future[None]:
        """Writes what has changed of the groups that stay, and commits; ``Store.commit`` says how.

        Raises:
            ValueError: in the midst of a sweep, when the groups are of two steps.
        """
        if self._due:
            raise ValueError(
                f"groups {_some(self._due)} are still as of the step before: give them back before a commit"
            )
        for group in sorted(self._changed):
            self._write_resident(group)
        return self.store.commit(step, extra)

    def settle(self) -> None:
        """Waits until nothing is being read or written, reads of the next sweep's first groups included."""
        for future in [*self._writes, *self._written.values(), *self._cache.values()]:
            future.result()
        for _, future in self._reads:
            future.result()

    def close(self) -> None:
        """Waits for reads and writes, and gives the memory back. The store stays open, and what stayed is written."""
        for group in sorted(self._changed):
            self._write_resident(group)
        self.settle()
        for _, future in self._reads:
            self.store.release(future.result())
        for arrays in self._held.values():
            self.store.release(arrays)
        for future in self._cache.values():
            self.store.release(future.result())
        self._reads, self._writes, self._cache, self._held = deque(), deque(), {}, {}
        self.store.buffers.drop_free()

    def _cached(self, group: int) -> list[np.ndarray]:
        arrays = self._cache[group].result()
        for array in arrays:
            array.flags.writeable = True
        return arrays

    def _write_resident(self, group: int) -> None:
        self._written[group] = self.store.write(group, self._cache[group].result())
        self._changed.discard(group)


def _some(groups: Iterable[int]) -> str:
    groups = sorted(groups)
    return ", ".join(map(str, groups[:5])) + (f" and {len(groups) - 5} more" if len(groups) > 5 else "")
