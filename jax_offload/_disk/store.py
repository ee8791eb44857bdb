"""A store: bytes in the files of a directory, found by keys, as of a commit.

The keys of the *state* are fixed when a store is made. Each has its place in two files of the same layout, ``state.a``
and ``state.b``. The file that a commit counts on is never overwritten: new values go to the other one. Whatever else
belongs to a commit is *beside* the state, in ``beside.a`` or ``beside.b`` in turn. The manifest says in which file each
key is, with its checksums.

``prepare`` writes a commit: it brings all bytes to the disk, and then a manifest beside the last one. ``swap`` renames
that manifest over the last one. So a process that dies leaves one commit or the other, whole. The first manifest has no
commit: files without any manifest have lost it, and are not overwritten.

Any number of threads read and write, in blocks, each with its checksum, and past the system's page cache where the
filesystem can do that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import socket
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
PAGE = 4096  # O_DIRECT wants addresses, lengths and offsets that are multiples of this on today's disks
BLOCK = 8 * 2**20  # bytes that one system call moves, with one checksum
NAME, NEXT = "manifest.json", "manifest.next.json"
_FORMAT = 3
_OTHER = {"state.a": "state.b", "state.b": "state.a"}
_BESIDE = "beside.b", "beside.a"  # of commits with even and odd numbers
_AT_ONCE = 4  # arrays beside the state that are written, and have a copy in memory, at once
_THREADS = 8  # blocks under way in each direction; a fast disk takes several at once
_KEPT = 2**29  # bytes of memory that wait for the next reads
_TRIES = 8  # how many calls in a row may move nothing before the file counts as broken
_SUMMED = 64 * PAGE  # stays in a core's cache, so that its second sum costs little
_FIXES = {
    errno.ENOSPC: "Free space there, or give a directory on a larger disk.",
    errno.EDQUOT: "The quota is used up: raise it, or give a directory on another disk.",
    errno.EIO: "The disk failed; the system's log says how. Replace it, and restore what it lost from a checkpoint.",
    errno.EROFS: "The filesystem is read-only: mounted so, or become so after errors, as the system's log says.",
    errno.EACCES: "This process may not write there: give a directory in which it may.",
    errno.EEXIST: "There is a file of that name: give a directory.",
    errno.ENOTDIR: "A part of that path is a file: give a directory.",
}


@contextlib.contextmanager
def saying(doing: str, path: Path) -> Iterator[None]:
    """Name the operation, and the fix, in an ``OSError``."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        text = f"{doing}: {os.strerror(number)}. {_FIXES.get(number, '')}".rstrip()
        raise OSError(number, text, str(path)) from error


def padded(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def checksum_of(memory: np.ndarray) -> int:
    """Compute a checksum of whole pages: the CRC-32 of the sums of their 64-bit words along rows and columns.

    A row is a page, and 64 of them are summed at a time. Up to three flipped bits change the sums for certain, as does
    a page in another's place; then the CRC misses one change in 2^32. This takes a third of the time of a CRC-32 of
    the bytes, which matters because the processor is busier than the disk.
    """
    checksum = 0
    for begin in range(0, memory.nbytes, _SUMMED):
        rows = memory[begin : begin + _SUMMED].view(np.uint64).reshape(-1, PAGE // 8)
        checksum = zlib.crc32(np.add.reduce(rows, axis=1), checksum)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum


class Memory:
    """Memory that begins on a page, as ``O_DIRECT`` wants it, and is used again when its last view is gone.

    New memory for each read would take several times as long as the read.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def lent(self, nbytes: int) -> np.ndarray:
        """Lend whole pages to any thread."""
        size = padded(max(nbytes, 1))
        with self._lock:
            free = sorted(self._free, key=len)
            found = next((each for each in free if len(each) >= size), free[-1] if free else None)
            if found is not None:
                self._free.remove(found)
        if found is None or len(found) < size:  # the largest is too small, and is replaced
            found = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2**21:
                found.madvise(mmap.MADV_HUGEPAGE)  # so that a disk has 512 times fewer pages to pin
        lent = np.frombuffer(found, np.uint8)  # the base of every view
        weakref.finalize(lent, self._returned, found).atexit = False
        return lent[: padded(nbytes)]

    def _returned(self, memory: mmap.mmap) -> None:  # takes no lock, as this thread may hold it
        if sum(map(len, [*self._free, memory])) <= _KEPT:
            self._free.append(memory)


# ---- manifests -------------------------------------------------------------------------------------------------------


class Extent(NamedTuple):
    """The place of a key's bytes: the file, the offset, their number, and the checksums of their blocks."""

    file: str
    offset: int
    nbytes: int
    checksums: tuple[int, ...] = ()


def laid_out(sizes: Mapping[str, int], file: str) -> tuple[dict[str, Extent], int]:
    """Give each key of so many bytes a place in a file; return the file's length too."""
    found, length = dict[str, Extent](), 0
    for key, nbytes in sizes.items():
        found[key] = Extent(file, length, nbytes)
        length += padded(nbytes)
    return found, length


class Commit(NamedTuple):
    """The identity of a commit: its number in the store, a name, as two runs may make the same number, and its step."""

    number: int
    name: str
    step: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a store at a commit, or before the first one: where the bytes of each key are.

    ``about`` is what the user of the store says about them, as JSON.
    """

    commit: Commit | None
    state: dict[str, Extent]
    beside: dict[str, Extent]
    about: Any = None

    def save(self, path: Path) -> None:
        """Write the manifest, then give it the name."""
        body, new = {"format": _FORMAT, **vars(self)}, path.with_name(f"{path.name}.new")
        with open(new, "wb") as file:
            file.write(json.dumps({"manifest": body, "crc32": _crc32(body)}).encode())
            file.flush()
            os.fsync(file.fileno())
        renamed(new, path)

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """Read a manifest; ``None`` where there is none. ``ValueError`` where it is damaged, or of another format."""
        if not path.exists():
            return None
        data, body = path.read_bytes(), None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(data)
            body = document["manifest"] if document["crc32"] == _crc32(document["manifest"]) else None
        if body is None:
            raise ValueError(
                f"the manifest {str(path)!r} is damaged, {len(data)} bytes long. The arrays' bytes are there, in two "
                "slots each, and nothing says any more which of them the last commit is. Restore from a checkpoint "
                "into a new store."
            )
        if body["format"] != _FORMAT:
            raise ValueError(
                f"the store of {str(path)!r} has format {body['format']}, and this version reads {_FORMAT}. Read it "
                "with the version of jax_offload that wrote it, and save a checkpoint."
            )
        state, beside = ({key: Extent(*row) for key, row in body[kind].items()} for kind in ("state", "beside"))
        return cls(body["commit"] and Commit(*body["commit"]), state, beside, body["about"])


def manifests(directory: Path) -> dict[str, Manifest]:
    """Return the last commit of a store and the prepared one, by their names. Warn if the latter is damaged."""
    found = {NAME: Manifest.load(directory / NAME)}
    try:
        found[NEXT] = Manifest.load(directory / NEXT)
    except ValueError as error:  # nothing depends on it yet
        warnings.warn(f"{error} The commit before it is whole.", stacklevel=2)
    return {name: each for name, each in found.items() if each is not None and each.commit is not None}


def renamed(path: Path, to: Path) -> None:
    """Rename a file durably: after a power loss, the name belongs to the old file or to this one."""
    os.replace(path, to)
    descriptor = os.open(to.parents[0], os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# ---- stores ----------------------------------------------------------------------------------------------------------


class Store:
    """A directory that is locked until ``close``. First ``make`` its files, or ``open`` them at a commit.

    Args:
      directory: where the files are.
      live: another store of this process in the same directory; the two share the lock.
    """

    def __init__(self, directory: Path, live: Store | None = None) -> None:
        with saying("making the directory of a store", directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._lock = directory, _locked(directory, live and live._lock)
        self.manifest = self._prepared = Manifest(None, {}, {})
        self._state = dict[str, Extent]()  # the newest values
        self._descriptors = dict[str, int]()  # the open files, by their names
        self._written = set[str]()  # the files with changes that are not synced
        self._direct = getattr(os, "O_DIRECT", 0)  # opens a file past the page cache; 0 where the filesystem cannot
        self._memory = Memory()
        self._reads, self._writes = (ThreadPoolExecutor(_THREADS, f"jax_offload {way}") for way in ("read", "written"))

    @property
    def step(self) -> int | None:
        """The step of the last commit; ``None`` before the first."""
        return self.manifest.commit and self.manifest.commit.step

    def make(self, sizes: Mapping[str, int]) -> None:
        """Make files for keys of so many bytes. Write all of them, then commit: before that nothing can be opened.

        ``ValueError`` if there are files that may hold a commit.
        """
        at = self._directory
        left = [name for name in (NAME, NEXT, *_OTHER, *_BESIDE[::-1]) if (at / name).exists()]
        begun = Manifest.load(at / NAME)
        if left and (begun is None or begun.commit is not None):
            raise ValueError(
                f"disk: {at} holds {', '.join(left)} of another run, or of an earlier one. Fix: with its {NAME} there, "
                "disk.resume(target) goes on with it; for a new run give a directory of its own, or remove these files."
            )
        state, length = laid_out(sizes, "state.b")
        first = Manifest(None, state, {})
        with saying("making the first manifest of a store", at):
            first.save(at / NAME)
            (at / NEXT).unlink(missing_ok=True)  # another process has not prepared it, so it is no commit
        for name in _OTHER:
            (at / name).unlink(missing_ok=True)
        try:
            for name in _OTHER:
                self._allocate(at / name, length, 2 * length)
        except BaseException:
            for name in _OTHER:
                (at / name).unlink(missing_ok=True)
            raise
        self._begin(first)

    def open(self, commit: Commit) -> None:
        """Open the files at a commit of one of the ``manifests``, which is the last one from now on.

        ``ValueError`` if the commit is gone, or a file of it is missing or not whole.
        """
        found = {each.commit: (name, each) for name, each in manifests(self._directory).items()}
        if commit not in found:
            raise ValueError(
                f"the store in {str(self._directory)!r} has lost its commit number {commit.number} since it was looked "
                "for: another run is in its directory. End that, or give this one a directory of its own."
            )
        name, self._prepared = found[commit]
        if name == NEXT:
            self.swap()
        self._begin(self._prepared)

    def _begin(self, manifest: Manifest) -> None:
        self.manifest, self._state = manifest, dict(manifest.state)
        others = [each._replace(file=_OTHER[each.file]) for each in manifest.state.values()]
        for extent in (*manifest.state.values(), *others, *manifest.beside.values()):
            self._open(extent.file, extent.offset + padded(extent.nbytes))

    def read(self, key: str) -> np.ndarray:
        """Read the newest bytes of a key of the state. ``ValueError`` where they are damaged."""
        return self._read(self._state[key], key)

    def read_beside(self, key: str) -> np.ndarray:
        """Read bytes beside the state, as of the last commit."""
        return self._read(self.manifest.beside[key], key)

    def write(self, key: str, x: np.ndarray) -> None:
        """Write new values of a key beside the committed ones."""
        last = self.manifest.state[key]
        self._state[key] = self._write(last._replace(file=_OTHER[last.file]), x, key)

    def prepare(self, step: int, name: str, beside: dict[str, Any], about: Any) -> None:
        """Bring all that was written, and ``beside``, to the disk: a commit that ``swap`` makes the last one.

        The arrays ``beside`` may be on devices. Each is taken out of the dict when it is copied to the host.
        """
        number = 1 if self.manifest.commit is None else self.manifest.commit.number + 1
        path, new = self._directory / _BESIDE[number % 2], self._directory / NEXT
        extents, length = laid_out({key: x.nbytes for key, x in beside.items()}, path.name)
        try:
            if not path.exists() or path.stat().st_size < length:
                self._allocate(path, length, length)
            self._open(path.name, length)
            with ThreadPoolExecutor(_AT_ONCE, "jax_offload commit") as pool:
                write = lambda key: self._write(extents[key], np.asarray(beside.pop(key)), key)  # noqa: E731
                written = dict(zip(extents, pool.map(write, [*extents]), strict=True))
            self._sync()
            self._prepared = Manifest(Commit(number, name, step), dict(self._state), written, about)
            with saying("writing the manifest of a commit", new):
                self._prepared.save(new)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def swap(self) -> None:
        """Make the prepared commit the last one. After an error the disk has the one before or this one."""
        with saying("putting a commit in the place of the last one", self._directory / NAME):
            renamed(self._directory / NEXT, self._directory / NAME)
        self.manifest = self._prepared

    def close(self) -> None:
        """Let the files and the directory go. What was not committed is lost."""
        for pool in self._reads, self._writes:
            pool.shutdown()  # a file opened later may take a descriptor's number
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        _unlock(self._lock)

    # ---- one file ----------------------------------------------------------------------------------------------------

    def _allocate(self, path: Path, nbytes: int, need: int) -> None:
        """Make a file ``nbytes`` long in space of its own: a full disk shows now and not in the thousandth step."""
        doing = f"making {nbytes} bytes of space ({shutil.disk_usage(self._directory).free} are free)"
        with saying(f"{doing} for {need} bytes in all", path), open(path, "ab") as file:
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)

    def _open(self, name: str, length: int) -> None:
        """Open a file of at least this length, past the page cache if the filesystem can; some refuse a first read."""
        path = self._directory / name
        if not path.exists():
            raise ValueError(
                f"the store has lost {str(path)!r}: no such file. Is its disk mounted? Otherwise restore from a "
                "checkpoint into a new store."
            )
        if (found := path.stat().st_size) < length:
            raise ValueError(
                f"{str(path)!r} holds {found} bytes, and was made with {length}. Restore from a checkpoint into a new "
                "store."
            )
        if name in self._descriptors:
            return
        with saying("opening a file of a store", path):
            try:
                self._descriptors[name] = os.open(path, os.O_RDWR | self._direct)
                os.preadv(self._descriptors[name], [self._memory.lent(PAGE)], 0)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            if name in self._descriptors:
                os.close(self._descriptors.pop(name))
            self._descriptors[name] = os.open(path, os.O_RDWR)
        if self._direct:
            self._direct = 0
            warnings.warn(
                f"the filesystem of {str(self._directory)!r} has no O_DIRECT: the store goes through the page cache, "
                "which is slower and takes memory that the system counts as cache. A directory on a local disk has it.",
                stacklevel=2,
            )

    def _read(self, extent: Extent, what: str) -> np.ndarray:
        memory = self._memory.lent(extent.nbytes)

        def one(begin: int, checksum: int) -> None:
            block = memory[begin : begin + BLOCK]
            place = self._move(os.preadv, extent.file, block, extent.offset + begin, f"reading {what}")
            if (found := checksum_of(block)) != checksum:
                raise ValueError(
                    f"{what}, {place} {str(self._directory / extent.file)!r} are damaged: their checksum is "
                    f"{found:08x}, and was {checksum:08x} when they were written. Check the disk and restore from a "
                    "checkpoint."
                )

        _each(self._reads, one, range(0, extent.nbytes, BLOCK), extent.checksums)
        return memory[: extent.nbytes]

    def _write(self, extent: Extent, x: np.ndarray, what: str) -> Extent:
        values = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        self._written.add(extent.file)

        def one(begin: int) -> int:
            block = values[begin : begin + BLOCK]
            if block.nbytes % PAGE or block.__array_interface__["data"][0] % PAGE:
                pages = self._memory.lent(block.nbytes)
                pages[: block.nbytes], pages[block.nbytes :] = block, 0
                block = pages
            self._move(os.pwritev, extent.file, block, extent.offset + begin, f"writing {what}")
            return checksum_of(block)

        return extent._replace(checksums=tuple(_each(self._writes, one, range(0, extent.nbytes, BLOCK))))

    def _move(self, call: Callable[..., int], name: str, block: np.ndarray, offset: int, doing: str) -> str:
        """Read or write a block in as many calls as it takes, and return a description of its place in the file."""
        place, path = f"bytes {offset} to {offset + block.nbytes} of the file", self._directory / name
        done = idle = 0
        while done < block.nbytes:
            with saying(f"{doing}, {place}", path):
                moved = call(self._descriptors[name], [block[done:]], offset + done) // PAGE * PAGE
            done, idle = done + moved, 0 if moved else idle + 1  # direct access goes on at a page
            if idle == _TRIES:
                raise OSError(
                    errno.EIO,
                    f"{doing}, {place}: only {done} of {block.nbytes} bytes. Is it shorter than it was? Then restore "
                    "from a checkpoint.",
                    str(path),
                )
        return place

    def _sync(self) -> None:
        """Bring what was written to the disk. ``OSError`` also where a file no longer has its name."""
        for name in sorted(self._written):
            path, descriptor = self._directory / name, self._descriptors[name]
            with saying("bringing a file of a store to disk", path):
                getattr(os, "fdatasync", os.fsync)(descriptor)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(descriptor)):
                text = "the file of a store was removed or replaced while in use"
                raise OSError(errno.ENOENT, text, str(path))
        self._written.clear()


# ---- the lock --------------------------------------------------------------------------------------------------------


_locks = set[int]()  # the open files by which this process has locked directories


def _each(pool: ThreadPoolExecutor, run: Callable[..., T], *columns: Sequence[int]) -> list[T]:
    """Run a function in a pool for each row of its arguments. Raise the first error when none runs any more."""
    if len(columns[0]) == 1:
        return [run(*(column[0] for column in columns))]
    futures = [pool.submit(run, *row) for row in zip(*columns, strict=True)]
    wait(futures)
    return [future.result() for future in futures]


def _locked(directory: Path, held: int | None) -> int:
    """Lock a directory until the process ends, however it does, and return the open file that holds the lock.

    ``held``: an open file of this process that holds it; the lock ends when both are closed. ``ValueError`` if anyone
    else has the lock.
    """
    path, me = directory / "lock", f"process {os.getpid()} on {socket.gethostname()}"
    with saying("opening the lock of a store", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if held is None else os.dup(held)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        holder = path.read_text(errors="replace").strip() or "a process"
        holder += ", this one, in which another jo.disk has it" if holder == me else ""
        raise ValueError(
            f"the store in {str(directory)!r} is in use by {holder}: two would write over each other. End the "
            "other, close its store (disk.close(), in a notebook before the cell is run again), or give this "
            "one a directory of its own."
        ) from None
    os.pwrite(descriptor, me.encode().ljust(256), 0)
    _locks.add(descriptor)
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _locks:
        _locks.remove(descriptor)
        os.close(descriptor)


# A child, such as a data loader's process, would keep the locks when this one has ended.
os.register_at_fork(after_in_child=lambda: [_unlock(each) for each in list(_locks)])
