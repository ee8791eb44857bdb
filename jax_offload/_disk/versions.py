"""Which of its two slots is a group's newest, and which is the last commit's. Any thread may ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from jax_offload._disk.manifest import Version


class Versions:
    """Those of all groups.

    Args:
        committed: of each group, or None where there is no commit.
        named: a group, for messages.
    """

    def __init__(self, committed: Sequence[Version | None], named: Callable[[int], str]) -> None:
        self._committed = list(committed)
        self._newest: list[Version | BaseException | None] = list(committed)
        self._named = named
        self._lock = Lock()

    def newest(self, group: int) -> Version:
        """The newest of a group. Raises what writing it raised, and ``ValueError`` where there is none."""
        with self._lock:
            return self._readable(group)

    def all_newest(self) -> list[Version]:
        """That of all groups, of one moment."""
        with self._lock:
            return [self._readable(group) for group in range(len(self._newest))]

    def committed(self, group: int) -> Version:
        """That of the last commit."""
        with self._lock:
            version = self._committed[group]
        if version is None:
            raise ValueError(f"{self._named(group)} is in no commit, as there was none. Commit before reading it.")
        return version

    def begin(self, group: int) -> int:
        """The slot that is written now: not the last commit's."""
        with self._lock:
            committed = self._committed[group]
            self._newest[group] = ValueError(f"{self._named(group)} is being written")
        return 1 - committed.slot if committed else 0

    def end(self, group: int, version: Version | BaseException) -> None:
        """What was written, or why not."""
        with self._lock:
            self._newest[group] = version

    def commit(self, versions: Sequence[Version]) -> None:
        """These are the last commit's."""
        with self._lock:
            self._committed[:] = versions

    def _readable(self, group: int) -> Version:
        version = self._newest[group]
        if isinstance(version, BaseException):
            raise version
        if version is None:
            raise ValueError(
                f"{self._named(group)} was never written. Write every group before reading or committing it."
            )
        return version
