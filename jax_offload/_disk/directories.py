"""The directories of a store, which may be on several disks: their locks, their identity, their open files."""

from __future__ import annotations

import errno
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

from jax_offload._disk.blocks import Opened, failed
from jax_offload._disk.buffers import aligned
from jax_offload._disk.files import Files
from jax_offload._disk.layout import ALIGNED
from jax_offload._disk.manifest import save

_LOCK = "lock"
_IDENTITY = "directory.json"
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


_open: weakref.WeakSet[Directories] = weakref.WeakSet()


def _left_in_a_child() -> None:
    """A child, a loader's process say, would keep the locks when this one has ended."""
    for each in list(_open):
        each.unlock()


os.register_at_fork(after_in_child=_left_in_a_child)


def make(paths: Sequence[Path], files: Files) -> None:
    """Makes directories where there are none."""
    for path in paths:
        try:
            files.make_directory(Path(path))
        except OSError as error:
            raise failed(error, "making the directory of a store", Path(path)) from error


class Directories:
    """Directories that are locked until ``close``. Files of a name are one in each: a file striped over them."""

    def __init__(self, paths: Sequence[Path], files: Files) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self.files = files
        self._locks: list[int] = []
        self._opened: list[Opened] = []
        self._warned = False
        _open.add(self)
        if not self.paths:
            raise ValueError("a store needs a directory: directories is empty")
        if len({path.resolve() for path in self.paths}) < len(self.paths):
            raise ValueError(f"a directory is given twice: {[str(path) for path in self.paths]}. Give each once.")

    def lock(self) -> None:
        """``ValueError`` where another process, or another store of this one, has them."""
        for path in self.paths:
            try:
                descriptor = self.files.open(path / _LOCK, create=True)
            except FileNotFoundError:
                self.close()
                raise ValueError(
                    f"a store has lost its directory {str(path)!r}. Is its disk mounted? Else restore from a "
                    "checkpoint into a new store."
                ) from None
            except OSError as error:
                self.close()
                raise failed(error, "opening the lock of a store", path / _LOCK) from error
            if not self.files.lock(descriptor):
                self.files.close(descriptor)
                holder = self.files.read(path / _LOCK).decode(errors="replace").strip() or "a process"
                holder += ", this one, in which another jo.disk has it" if holder == self.files.process() else ""
                self.close()
                raise ValueError(
                    f"the store in {str(path)!r} is in use by {holder}: two would write over each other. End the "
                    "other, close its store (disk.close(), in a notebook before the cell is run again), or give this "
                    "one a directory of its own."
                )
            self._locks.append(descriptor)
            text = self.files.process().encode().ljust(256)
            self.files.pwritev(descriptor, text, 0)

    def identify(self, store: str) -> None:
        """Says in each directory which of which store it is.

        What one of no commit had said before goes first, the last directory's first of all: whenever this ends, no
        directory is of another store than the first one is.
        """
        for path in reversed(self.paths):
            self.files.remove(path / _IDENTITY)
            self.files.sync_directory(path)
        for k, path in enumerate(self.paths):
            save(self.files, path, _IDENTITY, json.dumps([store, k]).encode())

    def check_unused(self) -> None:
        """``ValueError`` where a directory is of a store that is not wholly in these."""
        first = self._identity(self.paths[0])
        for path in self.paths[1:]:
            found = self._identity(path)
            if found[0] is not None and (found[0] != first[0] or found[1] == 0):
                raise ValueError(f"{str(path)!r} is part of another store. Remove that, or give an empty directory.")

    def _identity(self, path: Path) -> list:
        try:
            store, part = json.loads(self.files.read(path / _IDENTITY))
            return [store, part]
        except (FileNotFoundError, ValueError):
            return [None, None]

    def check_identity(self, store: str) -> None:
        """``ValueError`` where a directory is another store's, or not in its place."""
        for k, path in enumerate(self.paths):
            found = self._identity(path)
            if found != [store, k]:
                what = (
                    f"part {found[1]} of it"
                    if found[0] == store
                    else "none of its"
                    if found[0] is None
                    else "another's"
                )
                raise ValueError(
                    f"{str(path)!r} should be part {k} of the store in {str(self.paths[0])!r}, and is {what}. Give the "
                    "directories that it was made with, in their order."
                )

    def allocate(self, name: str, lengths: Sequence[int], need: int) -> None:
        """Makes the files, of space that is theirs. ``need`` is what the whole store takes in all, for the error."""
        for path, length in zip(self.paths, lengths, strict=True):
            descriptor = self.files.open(path / name, create=True)
            try:
                self.files.allocate(descriptor, length)
            except OSError as error:
                free = self.files.free(path)
                doing = f"making {length} bytes of space ({free} are free) for a store of {need} bytes in all"
                raise failed(error, doing, path / name) from error
            finally:
                self.files.close(descriptor)
            self.files.sync_directory(path)

    def remove(self, name: str) -> None:
        """Removes the files of a name, as far as there are any."""
        for path in self.paths:
            self.files.remove(path / name)

    def open(self, name: str, lengths: Sequence[int]) -> tuple[Opened, ...]:
        """The files of a name. ``ValueError`` where one is missing, or is not as long as it was made."""
        for path, length in zip(self.paths, lengths, strict=True):
            try:
                found = self.files.size(path / name)
            except FileNotFoundError:
                raise ValueError(
                    f"the store has lost {str(path / name)!r}: no such file. Is its disk mounted? Else restore from a "
                    "checkpoint into a new store."
                ) from None
            if found != length:
                raise ValueError(
                    f"{str(path / name)!r} holds {found} bytes, and was made with {length}. Restore from a checkpoint "
                    "into a new store."
                )
        opened = tuple(self._open(path / name) for path in self.paths)
        self._opened += opened
        return opened

    def _open(self, path: Path) -> Opened:
        try:
            descriptor = self.files.open(path, direct=True)
            try:
                self.files.preadv(descriptor, aligned(ALIGNED), 0)  # some filesystems refuse only here
                return Opened(path, descriptor, direct=True)
            except OSError as error:
                self.files.close(descriptor)
                raise error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise failed(error, "opening a file of a store", path) from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the filesystem of {str(path.parents[0])!r} has no O_DIRECT: the store goes through the page cache, "
                "which is slower and takes memory that the system counts as cache. A directory on a local disk has it.",
                stacklevel=2,
            )
        return Opened(path, self.files.open(path), direct=False)

    def sync(self, file: Opened) -> None:
        """The file's bytes are on disk when this returns. ``OSError`` also where the file is no longer there."""
        try:
            self.files.sync(file.descriptor)
        except OSError as error:
            raise failed(error, "bringing a file of a store to disk", file.path) from error
        if not self.files.same(file.descriptor, file.path):
            raise OSError(errno.ENOENT, "the file of a store was removed or replaced while in use", str(file.path))

    def shut(self, opened: Sequence[Opened]) -> None:
        """Closes these."""
        for file in opened:
            self._opened.remove(file)
            self.files.close(file.descriptor)

    def close(self) -> None:
        """Closes everything, and ends the locks."""
        self.shut(tuple(self._opened))
        self.unlock()

    def unlock(self) -> None:
        """Lets the locks go; those of a child are its parent's too, which has them until it does."""
        locks, self._locks = self._locks, []
        for descriptor in locks:
            self.files.close(descriptor)
