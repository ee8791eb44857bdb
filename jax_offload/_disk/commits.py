"""Commits: what makes the newest values of all groups, and arrays beside them, what a store opens with."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from jax_offload._disk import manifest as _manifest
from jax_offload._disk.buffers import aligned
from jax_offload._disk.directories import Directories
from jax_offload._disk.late import Late, LateSource
from jax_offload._disk.layout import Entry, arrays_in, laid_out
from jax_offload._disk.manifest import Manifest, Together, Version
from jax_offload._disk.transfers import Striped, Transfers

_EXTRA = "the arrays beside the groups"


def slot_name(of: str, slot: int) -> str:
    """The name of a slot's files."""
    return f"{of}.{'ab'[slot]}"


class Commits:
    """The last commit of a store, and how the next is made. The arrays beside the groups have two slots as well."""

    def __init__(
        self, directories: Directories, transfers: Transfers, pool: Executor, manifest: Manifest, committed: bool
    ) -> None:
        self._directories = directories
        self._transfers = transfers
        self._pool = pool
        self._manifest = manifest
        self._files: dict[int, tuple[Sequence[int], Striped]] = {}  # by slot: lengths, and those opened
        self.step = manifest.step if committed else None
        if committed:
            self._opened(
                manifest.extra_version.slot, laid_out([manifest.extra], manifest.directories, manifest.block)[1]
            )

    def prepare(
        self,
        step: int,
        versions: Sequence[Version],
        data: Sequence[Striped],
        extra: tuple[Entry, ...],
        arrays: Sequence[Late],
        together: Together | None = None,
    ) -> Manifest:
        """Syncs the files of ``versions``, of those of both slots: the commit, which ``swap`` makes the last one.

        With ``together`` it stands beside the last one until then.
        """
        slot = 1 - self._manifest.extra_version.slot
        (layout,), lengths = laid_out([extra], self._manifest.directories, self._manifest.block)
        files = self._created(slot, lengths)
        checksums = self._transfers.write(files, layout, LateSource(layout, arrays), _EXTRA).result()
        before = self._manifest.versions or [None] * len(versions)
        changed = {new.slot for new, old in zip(versions, before, strict=True) if new != old}
        list(self._pool.map(self._directories.sync, [*files, *(file for used in changed for file in data[used])]))
        manifest = replace(
            self._manifest,
            step=step,
            versions=tuple(versions),
            extra=extra,
            extra_version=Version(slot, tuple(checksums)),
            together=together,
        )
        if together is not None:
            _manifest.save_next(self._directories.files, self._directories.paths, manifest)
        return manifest

    def swap(self, manifest: Manifest) -> None:
        """Makes it the last one. An error leaves the one before, or this."""
        _manifest.save_both(self._directories.files, self._directories.paths, manifest)
        self._manifest, self.step = manifest, manifest.step

    def extra(self) -> dict[str, np.ndarray]:
        """The arrays beside the groups."""
        manifest = self._manifest
        (layout,), lengths = laid_out([manifest.extra], manifest.directories, manifest.block)
        buffer = aligned(layout.nbytes)
        version = manifest.extra_version
        files = self._opened(version.slot, lengths)
        self._transfers.read(files, layout, buffer, version.checksums, _EXTRA).result()
        return {entry.path: array for entry, array in zip(layout.entries, arrays_in(layout, buffer), strict=True)}

    def _created(self, slot: int, lengths: Sequence[int]) -> Striped:
        if slot in self._files and self._files[slot][0] == lengths:
            return self._files[slot][1]
        self._directories.shut(self._files.pop(slot, ((), ()))[1])
        self._directories.allocate(slot_name("extra", slot), lengths, sum(lengths))
        return self._opened(slot, lengths)

    def _opened(self, slot: int, lengths: Sequence[int]) -> Striped:
        if slot not in self._files:
            self._files[slot] = lengths, self._directories.open(slot_name("extra", slot), lengths)
        return self._files[slot][1]
