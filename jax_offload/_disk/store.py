"""A store: groups of arrays in files, as of a commit.

Each group has two slots. The last commit is in one of them, and what is written since goes to the other; a commit
syncs the files and swaps the manifest, which says of every group which slot it is. So whatever happens at any moment,
the store opens at its last commit, whole. It takes twice the disk, however often commits are.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_offload._disk import manifest as _manifest
from jax_offload._disk.buffers import Buffers
from jax_offload._disk.commits import Commits, slot_name
from jax_offload._disk.committer import Committer
from jax_offload._disk.directories import Directories, make
from jax_offload._disk.files import Files
from jax_offload._disk.late import Late
from jax_offload._disk.layout import BLOCK, Entry, arrays_in, check, laid_out, named
from jax_offload._disk.manifest import Manifest, Together, Version
from jax_offload._disk.queues import Queues
from jax_offload._disk.transfers import Source, Transfers
from jax_offload._disk.versions import Versions

# For each directory and direction: four hide a disk's latency. Where reads queued behind writes, in one pool of eight,
# both at once were 1.02 to 1.09 times slower (docs/notebook.md).
THREADS = 8


class Store:
    """Groups of arrays in files; made by ``create`` or ``open``.

    Reads, writes and commits take effect in the order in which they are asked for: a read gives the newest values that
    were written to its group, and a commit holds all that was written before it was asked for. They run in threads, and
    any thread may ask.
    """

    def __init__(self, directories: Directories, manifest: Manifest, committed: bool) -> None:
        self._directories = directories
        self.groups = manifest.groups
        self._layouts, lengths = laid_out(manifest.groups, manifest.directories, manifest.block)
        self._data = [directories.open(slot_name("groups", slot), lengths) for slot in (0, 1)]
        before = manifest.versions if committed else [None] * len(self.groups)
        self._versions, self._queues = Versions(before, self._what), Queues()
        self._closed = False
        self._reads = ThreadPoolExecutor(THREADS * manifest.directories, "disk reads")
        self._pool = ThreadPoolExecutor(THREADS * manifest.directories, "disk")
        self.buffers, self.staging = Buffers(), Buffers()
        self._transfers = Transfers(directories.files, self._reads, self._pool, self.staging)
        self._committer = Committer(
            Commits(directories, self._transfers, self._pool, manifest, committed),
            self._versions,
            self._data,
            manifest.together if committed else None,
            str(directories.paths[0]),
        )
        self.most_staging = THREADS * manifest.directories * manifest.block  # one block for each thread that writes

    @classmethod
    def create(
        cls,
        directories: Sequence[Path],
        groups: Sequence[Sequence[Entry]],
        *,
        about: Mapping[str, Any],
        files: Files | None = None,
        block: int = BLOCK,
    ) -> Store:
        """An empty store. Write all groups, then ``commit``: before that there is nothing to open.

        Args:
            directories: where; several are striped, and are best on disks of their own. Made where they are not.
            groups: what is read and written together.
            about: what this is the state of, in values that JSON has. ``open`` compares it.
            files: the system's calls.
            block: bytes of one call of the system, a multiple of 4096.

        Raises:
            ValueError: there is a store with a commit, or another process has it.
            OSError: the directories or the space cannot be had. Nothing is left of it.
        """
        files = files or Files()
        make(directories, files)
        places = Directories(directories, files)
        places.lock()
        try:
            places.check_unused()
            if cls.exists(directories, files=files):
                raise ValueError(
                    f"{str(directories[0])!r} holds a store. Open it, or remove it, or give a directory of its own."
                )
            _manifest.remove_next(files, places.paths)
            entries = tuple(tuple(group) for group in groups)
            none = Version(0, ())
            manifest = Manifest(
                uuid.uuid4().hex, -1, _manifest.plain(about), len(places.paths), block, entries, (), (), none
            )
            _, lengths = laid_out(entries, len(places.paths), block)
            names = [slot_name("groups", slot) for slot in (0, 1)]
            try:
                for name in names:
                    places.allocate(name, lengths, 2 * sum(lengths))
            except OSError:
                for name in names:
                    places.remove(name)
                raise
            places.identify(manifest.store)
            return cls(places, manifest, committed=False)
        except BaseException:
            places.close()
            raise

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        about: Mapping[str, Any] | None = None,
        files: Files | None = None,
        together: Together | None = None,
    ) -> Store:
        """The store at its last commit; at ``together``, one of ``commits``, where processes have agreed on that.

        Raises:
            ValueError: there is none, it is about something else, another process has it, or files are missing or
                damaged. What is in the groups is checked as it is read.
        """
        files = files or Files()
        places = Directories(directories, files)
        if together is None and not cls.exists(directories, files=files):
            _manifest.load(files, places.paths)  # raises, without making a lock where nothing is
        places.lock()
        try:
            manifest = (
                _manifest.load(files, places.paths)
                if together is None
                else _manifest.load_together(files, places.paths, together)
            )
            places.check_identity(manifest.store)
            if about is not None:
                _manifest.check_about(manifest, about, places.paths[0])
            if together is not None:
                _manifest.save_both(files, places.paths, manifest)
                _manifest.remove_next(files, places.paths)
            _manifest.mend(files, places.paths, manifest)
            return cls(places, manifest, committed=True)
        except BaseException:
            places.close()
            raise

    @staticmethod
    def exists(directories: Sequence[Path], *, files: Files | None = None) -> bool:
        """Whether there is a store with a commit, whole or not."""
        return _manifest.exists(files or Files(), directories)

    @staticmethod
    def commits(directories: Sequence[Path], *, files: Files | None = None) -> list[tuple[Together, int]]:
        """The commits made together with other processes that are whole here, with their steps: two at most."""
        found = _manifest.undamaged(files or Files(), directories)
        return [(each.together, each.step) for each in found if each.together is not None]

    @property
    def step(self) -> int | None:
        """Of the last commit; None before the first."""
        return self._committer.step

    @property
    def together(self) -> Together | None:
        """The last commit, where it is one of several processes."""
        return self._committer.together

    def nbytes(self, group: int) -> int:
        """Bytes of a group, in memory or in a slot."""
        return self._layouts[group].nbytes

    def read(self, group: int, into: np.ndarray | None = None, *, committed: bool = False) -> Future[list[np.ndarray]]:
        """The newest values of a group, or those of the last commit, as views of a buffer of the pool, or of ``into``.

        The buffer is the pool's again when nothing has a view of it any more. The future raises ``ValueError`` where
        bytes are damaged, and ``OSError`` where they cannot be read.
        """
        layout = self._layouts[group]
        buffer = self.buffers.take(layout.nbytes) if into is None else into

        def start() -> Future[list[None]]:
            version = self._versions.committed(group) if committed else self._versions.newest(group)
            files = self._data[version.slot]
            return self._transfers.read(files, layout, buffer, version.checksums, self._what(group))

        return self._queues.after(group, start, lambda _: arrays_in(layout, buffer), lambda error: None, writes=False)

    def write(self, group: int, arrays: Sequence[np.ndarray]) -> Future[None]:
        """Writes new values of a group beside those of the last commit.

        ``arrays`` are held, and must stay as they are, until the future is done. It raises ``OSError`` where they
        cannot be written, and so does the commit then.
        """
        layout = self._layouts[group]
        check(group, self.groups[group], arrays)
        source = Source.of(layout, arrays)
        slot = 0

        def start() -> Future[list[int]]:
            nonlocal slot
            self._committer.check()
            slot = self._versions.begin(group)
            return self._transfers.write(self._data[slot], layout, source, self._what(group))

        def finish(checksums: list[int]) -> None:
            self._versions.end(group, Version(slot, tuple(checksums)))

        return self._queues.after(group, start, finish, lambda error: self._versions.end(group, error), writes=True)

    def commit(self, step: int, extra: Mapping[str, np.ndarray | Late]) -> Future[None]:
        """Makes all that was written, and ``extra``, what the store opens with: in a thread, after the writes. A late
        array of it is made in threads that write, and given up before this is done.

        Done means that it survives a loss of power. Reads go on beside it; later writes wait for it, as they go to the
        slots of the commit before. An error is raised by the future and by the next call of ``commit`` or ``close``;
        the store on disk is then as it was.
        """
        return self._queues.commit(self._committer.commit(step, extra))

    def prepare(self, step: int, extra: Mapping[str, np.ndarray | Late], together: Together) -> Future[None]:
        """The first half of a commit of several processes: all of it is on disk, beside the one before.

        When all processes have done so it is the commit, whatever happens: ``swap`` it before anything is written.
        """
        return self._queues.commit(self._committer.prepare(step, extra, together))

    def swap(self) -> Future[None]:
        """The second half: what was prepared is the last commit."""
        return self._queues.commit(self._committer.swap)

    def stop(self, error: BaseException) -> None:
        """Nothing is written any more, as another process's half of a commit has failed."""
        self._committer.stop(error)

    def check(self) -> None:
        """Raises ``ValueError`` where a commit failed."""
        self._committer.check()

    def extra(self) -> dict[str, np.ndarray]:
        """The arrays beside the groups, of the last commit."""
        return self._committer.extra()

    def close(self) -> None:
        """Waits for what is under way, and lets the directories go. What was not committed is lost.

        ``ValueError`` where a commit failed, once.
        """
        if self._closed:
            return
        self._closed = True
        for future in self._queues.under_way():
            future.result()
        self._committer.shutdown()
        self._reads.shutdown()
        self._pool.shutdown()
        self._directories.close()
        self._committer.check()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except (OSError, ValueError):
            if kind is None:  # else the block ends with an error of its own, which says more
                raise

    def _what(self, group: int) -> str:
        return named(group, self.groups[group])
