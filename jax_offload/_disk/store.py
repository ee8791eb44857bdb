"""A store: arrays in files, as of a commit.

Each array has two slots. One holds the last commit, and later writes go to the other; a commit syncs
the files and swaps the manifest, which says which slot holds each array. So whatever happens at any moment, the store
opens at its last commit, whole. It takes twice the disk, however often commits are made.

A commit is made in two halves: ``prepare`` puts its manifest beside the last one, and ``swap`` puts it in the last
one's place. Of several processes, each with a store of its own, a commit counts when all have prepared it. Until the
first commit a mark lies beside the files: files with neither a mark nor a manifest have lost their manifest.

Nothing here runs ahead: each call returns when it is done. Several threads, four or more to hide a disk's latency, may
read and write different arrays at once.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import shutil
import socket
import threading
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401, so that NumPy knows the names of its dtypes
import numpy as np

# ---- the files: the operating system's calls, page-aligned memory, and whole blocks with a checksum each

T = TypeVar("T")

PAGE = 4096  # O_DIRECT wants addresses, lengths and offsets that are multiples of this on today's disks
BLOCK = 8 * 2**20  # bytes that one system call moves, with one checksum
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


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory will outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocate(path: Path, nbytes: int, need: int) -> None:
    """Make a file ``nbytes`` long in space of its own: a full disk shows now and not in the thousandth step.

    ``need``: the bytes of the whole store, for the error.
    """
    free = shutil.disk_usage(path.parents[0]).free
    doing = f"making {nbytes} bytes of space ({free} are free) for {need} bytes in all"
    with saying(doing, path), open(path, "wb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        file.truncate(nbytes)
    sync_directory(path.parents[0])


def swap_in(path: Path, data: bytes) -> None:
    """Write a small file: after a loss of power at any moment there is the file before or this one, whole."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parents[0])


# ---- memory ----------------------------------------------------------------------------------------------------------


def padded(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def pages(nbytes: int) -> np.ndarray:
    """Allocate bytes that begin on a page, as ``O_DIRECT`` wants them; the last view frees them."""
    return np.frombuffer(_mapped(nbytes), np.uint8)[:nbytes]


def _mapped(nbytes: int) -> mmap.mmap:
    found = mmap.mmap(-1, padded(max(nbytes, 1)))
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2**21:
        found.madvise(mmap.MADV_HUGEPAGE)  # so that a disk has 512 times fewer pages to pin
    return found


class Buffers:
    """A pool of page-aligned buffers, each taken back when its last view, a jax array for example, is gone.

    Any thread may take one. New memory for each read would take several times as long as the read.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()  # needs no lock, as an array may end in a thread that holds it
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """Lend a buffer of at least ``nbytes``: the smallest free one that is large enough, else a new one."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            self._free.sort(key=len)
            k = bisect.bisect_left(self._free, nbytes, key=len)
            found = self._free.pop(min(k, len(self._free) - 1)) if self._free else None
        if found is None or len(found) < nbytes:
            found = _mapped(nbytes)  # instead of the largest of those that are too small
        lent = np.frombuffer(found, np.uint8)  # NumPy makes this array the base of every view
        weakref.finalize(lent, self._returned.append, found).atexit = False
        return lent


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """An open file of a store. ``direct``: it bypasses the page cache, and so takes whole pages only."""

    path: Path
    descriptor: int
    direct: bool

    @classmethod
    def at(cls, path: Path) -> File:
        """Open a file for blocks, directly where the filesystem can.

        State is read once per step, in turn: a page cache would cost a copy and the memory that the state was moved
        out of.
        """
        with saying("opening a file of a store", path):
            direct, descriptor = getattr(os, "O_DIRECT", 0), -1
            try:
                descriptor = os.open(path, os.O_RDWR | direct)
                os.preadv(descriptor, [pages(PAGE)], 0)  # some filesystems refuse only here
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                descriptor, direct = os.open(path, os.O_RDWR), 0
            return cls(path, descriptor, bool(direct))

    def read(self, memory: np.ndarray, offset: int, checksums: Sequence[int], what: str, pool: Executor) -> None:
        """Fill ``memory``, whole pages, with blocks that ``pool`` reads.

        Raises:
          OSError: the system cannot read a block.
          ValueError: its checksum is not the one in ``checksums``.
        """

        def one(begin: int, checksum: int) -> None:
            block = memory[begin : begin + BLOCK]
            place = self._move(os.preadv, block, offset + begin, f"reading {what}")
            if (found := checksum_of(block)) != checksum:
                raise ValueError(
                    f"{what}, {place} {str(self.path)!r} are damaged: their checksum is {found:08x}, and was "
                    f"{checksum:08x} when they were written. Check the disk and restore from a checkpoint."
                )

        _all(pool, one, range(0, memory.nbytes, BLOCK), checksums)

    def write(self, x: np.ndarray, offset: int, what: str, staging: Buffers, pool: Executor) -> tuple[int, ...]:
        """Write an array by blocks in ``pool``, and return their checksums. ``OSError`` where the system cannot.

        ``staging``: buffers for blocks that are not whole pages.
        """
        values = np.ascontiguousarray(x).reshape(-1).view(np.uint8)

        def one(begin: int) -> int:
            block = values[begin : begin + BLOCK]
            if block.nbytes % PAGE or (self.direct and block.__array_interface__["data"][0] % PAGE):
                whole = staging.take(BLOCK)[: padded(block.nbytes)]
                whole[: block.nbytes] = block
                whole[block.nbytes :] = 0
                block = whole
            checksum = checksum_of(block)
            self._move(os.pwritev, block, offset + begin, f"writing {what}")
            return checksum

        return tuple(_all(pool, one, range(0, values.nbytes, BLOCK)))

    def sync(self) -> None:
        """Bring the file's bytes to the disk. ``OSError`` also where the file no longer has its name."""
        with saying("bringing a file of a store to disk", self.path):
            os.fsync(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.descriptor), os.stat(self.path)):
                return
        raise OSError(errno.ENOENT, "the file of a store was removed or replaced while in use", str(self.path))

    def _move(self, call: Callable[[int, Any, int], int], memory: np.ndarray, offset: int, doing: str) -> str:
        """Read or write a block by as many calls as it takes; return the words for its place in the file."""
        place, done, stuck = f"bytes {offset} to {offset + memory.nbytes} of the file", 0, 0
        while done < memory.nbytes:
            with saying(f"{doing}, {place}", self.path):
                moved = call(self.descriptor, [memory[done:]], offset + done)
            now = done + moved
            if self.direct and now < memory.nbytes:
                now -= now % PAGE  # the rest must begin on a page
            stuck = 0 if now > done else stuck + 1
            if moved == 0 or stuck == _TRIES:
                raise OSError(
                    errno.EIO,
                    f"{doing}, {place}: only {now} of {memory.nbytes} bytes. Is it shorter than it was? "
                    "Then restore from a checkpoint.",
                    str(self.path),
                )
            done = now
        return place


def _all(pool: Executor, run: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """Run a function in a pool for each row of its arguments. Raise the first error when none runs any more."""
    futures = [pool.submit(run, *row) for row in zip(*columns, strict=True)]
    wait(futures)
    return [future.result() for future in futures]


def checksum_of(memory: np.ndarray) -> int:
    """Compute a checksum of whole pages: the CRC-32 of the sums of their 64-bit words along rows and columns.

    A row is a page, and 64 of them are summed at a time. Up to three flipped bits change the sums for certain, as does
    a page in another's place; then the CRC misses one change in 2^32. This takes a third of the time of a CRC-32 of
    the bytes, which matters as the processor is busier than the disk.
    """
    checksum = 0
    for begin in range(0, memory.nbytes, _SUMMED):
        rows = memory[begin : begin + _SUMMED].view(np.uint64).reshape(-1, PAGE // 8)
        checksum = zlib.crc32(np.add.reduce(rows, axis=1), checksum)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum


NAME, NEXT, BEGUN = "manifest.json", "manifest.next.json", "begun"
Room = Callable[[int], np.ndarray]
_FORMAT = 2
_SLOTS = "ab"
_THREADS = 8  # in each direction
_AT_ONCE = 4  # arrays beside the state that are moved, and are in memory, at once


@dataclass(frozen=True)
class Entry:
    """An array in the store: one device's part of a range of a leaf's rows, or an array beside the state.

    Attributes:
      path: the leaf's name.
      shape: the array's.
      dtype: its name.
      begin: where the array begins in the leaf.
      leaf_shape: the leaf's shape, over all devices and processes.
      rows: how many rows of the leaf each device has.
      slot: which of the two slots holds its values.
      checksums: of the blocks of its values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    begin: tuple[int, ...] = ()
    leaf_shape: tuple[int, ...] = ()
    rows: int = 0
    slot: int = 0
    checksums: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Commit(NamedTuple):
    """The identity of a commit: its number in the store, the run that made it (two may share a number), its step."""

    number: int
    run: str
    step: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a store at a commit: the state, and arrays beside it such as parameters."""

    commit: Commit
    state: tuple[Entry, ...]
    beside: tuple[Entry, ...]
    slot: int  # of the arrays beside the state


class Store:
    """Arrays in the files of a directory; made by ``create`` or ``open``, and locked until ``close``."""

    def __init__(
        self, directory: Path, entries: Sequence[Entry], last: Manifest | None, lock: int, closing: ExitStack
    ) -> None:
        self.directory, self.entries, self._last, self.lock = directory, [*entries], last, lock
        self._reads, self._writes = (ThreadPoolExecutor(_THREADS, f"disk {way}") for way in ("reads", "writes"))
        self.buffers, self._staging, self._closing = Buffers(), Buffers(), closing
        self._next: Manifest | None = None
        self._files: dict[str, File] = {}
        self._offsets, length = _laid_out(entries)
        for slot in _SLOTS:
            self._open_file(f"state.{slot}", length)
        if last is not None:  # so that a lost file shows now
            self._open_file(f"beside.{_SLOTS[last.slot]}", _laid_out(last.beside)[1])
        self._closing = closing.pop_all()

    # ---- make, open, close -----------------------------------------------------------------------------------------

    @classmethod
    def create(cls, directory: Path, entries: Sequence[Entry]) -> Store:
        """Make an empty store. Write all entries, then commit: before that there is nothing to open.

        Raises:
          ValueError: there is a store with a commit, or what is left of one, or another process has it.
          OSError: the system refuses the directory or the space. Nothing is left of it.
        """
        with saying("making the directory of a store", directory):
            directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as closing:
            lock = _lock(directory, closing)
            names = [NAME, NEXT, *(f"{kind}.{slot}" for kind in ("state", "beside") for slot in _SLOTS)]
            left = [name for name in names if (directory / name).exists()]
            if NAME in left or (left and not (directory / BEGUN).exists()):
                raise ValueError(
                    f"disk: {directory} holds {', '.join(left)} of another run, or of an earlier one. Fix: with its "
                    f"{NAME} there, disk.resume(target) goes on with it; for a new run give a directory of its own, or "
                    "remove these files."
                )
            with saying("marking a store that has no commit yet", directory):
                swap_in(directory / BEGUN, b"")
            (directory / NEXT).unlink(missing_ok=True)  # no commit, as another process has not prepared it
            length = _laid_out(entries)[1]
            paths = [directory / f"state.{slot}" for slot in _SLOTS]
            try:
                for path in paths:
                    allocate(path, length, 2 * length)
            except OSError:
                for path in paths:
                    path.unlink(missing_ok=True)
                raise
            return cls(directory, entries, None, lock, closing)

    @classmethod
    def open(cls, directory: Path, commit: Commit, live: Store | None = None) -> Store:
        """Open a store at a commit of one of its ``manifests``, which is its last one from now on.

        ``live``: the same store, open already. Both share its lock, and one is closed before the other writes.

        Raises:
          ValueError: another process has it, or files are missing or damaged. Arrays are checked when they are read.
        """
        with ExitStack() as closing:
            lock = _lock(directory, closing, live)
            prepared, last = manifests(directory)
            if last is not None and last.commit == commit:
                (directory / NEXT).unlink(missing_ok=True)
            elif prepared is not None and prepared.commit == commit:
                os.replace(directory / NEXT, directory / NAME)
                last = prepared
            else:
                raise ValueError(
                    f"the store in {str(directory)!r} has lost its commit number {commit.number} since it was looked "
                    "for: another run is in its directory. End that, or give this one a directory of its own."
                )
            sync_directory(directory)
            (directory / BEGUN).unlink(missing_ok=True)
            return cls(directory, last.state, last, lock, closing)

    def close(self) -> None:
        """Let the files and the directory go. What was not committed is lost."""
        self._reads.shutdown()
        self._writes.shutdown()
        self._closing.close()

    # ---- read and write --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """The step of the last commit; ``None`` before the first."""
        return None if self._last is None else self._last.commit.step

    def read(self, keys: Sequence[int], room: Room = pages) -> list[np.ndarray]:
        """Read the newest values of entries, one after the other into one buffer.

        Args:
          keys: the numbers of the entries.
          room: makes a buffer of so many bytes.

        Returns:
          The arrays, as views of the buffer. Each begins on a page.

        Raises:
          ValueError: bytes are damaged.
          OSError: the system cannot read them.
        """
        entries = [self.entries[k] for k in keys]
        starts, length = _laid_out(entries)
        buffer = room(length)
        each = zip(keys, entries, starts, strict=True)
        return [self._read("state", entry, self._offsets[k], buffer[start:]) for k, entry, start in each]

    def write(self, arrays: Mapping[int, np.ndarray]) -> None:
        """Write new values of entries beside the committed ones. Raise ``OSError`` if the system cannot."""
        for k, x in arrays.items():
            slot = 1 - self._last.state[k].slot if self._last else 0
            self.entries[k] = self._write("state", replace(self.entries[k], slot=slot), self._offsets[k], x)

    def beside(self) -> dict[str, np.ndarray]:
        """Read the arrays beside the state, of the last commit."""
        entries = self._last.beside if self._last else ()
        offsets, length = _laid_out(entries)
        buffer = pages(length)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            arrays = pool.map(lambda entry, at: self._read("beside", entry, at, buffer[at:]), entries, offsets)
            return {entry.path: x for entry, x in zip(entries, arrays, strict=True)}

    def _read(self, kind: str, entry: Entry, offset: int, buffer: np.ndarray) -> np.ndarray:
        whole, file = buffer[: padded(entry.nbytes)], self._files[f"{kind}.{_SLOTS[entry.slot]}"]
        file.read(whole, offset, entry.checksums, repr(entry.path), self._reads)
        return whole[: entry.nbytes].view(np.dtype(entry.dtype)).reshape(entry.shape)

    def _write(self, kind: str, entry: Entry, offset: int, x: np.ndarray) -> Entry:
        file = self._files[f"{kind}.{_SLOTS[entry.slot]}"]
        return replace(entry, checksums=file.write(x, offset, repr(entry.path), self._staging, self._writes))

    # ---- commits ---------------------------------------------------------------------------------------------------

    def prepare(self, step: int, beside: dict[str, Any], run: str) -> None:
        """Bring all that was written, and ``beside``, to the disk: a commit that ``swap`` makes the last one.

        An error leaves the last commit untouched.

        Args:
          step: the step of the commit.
          beside: arrays, whose bytes are stored. A few at a time are copied to the host; each is removed when it is
            written.
          run: identifies the run.
        """
        slot = 1 - self._last.slot if self._last else 0
        stored = self._write_beside(slot, beside)
        changed = {*self.entries}.difference(self._last.state if self._last else ())
        for name in (f"beside.{_SLOTS[slot]}", *sorted({f"state.{_SLOTS[entry.slot]}" for entry in changed})):
            self._files[name].sync()
        number = self._last.commit.number + 1 if self._last else 1
        self._next = Manifest(Commit(number, run, step), tuple(self.entries), tuple(stored), slot)
        _save(self._next, self.directory / NEXT)

    def swap(self) -> None:
        """Make the prepared commit the last one. After an error the disk has the one before or this one."""
        os.replace(self.directory / NEXT, self.directory / NAME)
        sync_directory(self.directory)
        (self.directory / BEGUN).unlink(missing_ok=True)  # now that the commit outlives a loss of power
        self._last, self._next = self._next, None

    def _write_beside(self, slot: int, beside: dict[str, Any]) -> list[Entry]:
        entries = [Entry(name, (x.nbytes,), "uint8", slot=slot) for name, x in beside.items()]
        offsets, length = _laid_out(entries)
        path = self.directory / f"beside.{_SLOTS[slot]}"
        if not path.exists() or path.stat().st_size != length:
            allocate(path, length, length)
        if path.name not in self._files:
            self._open_file(path.name, length)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            of = pool.map(lambda e, at: self._write("beside", e, at, np.asarray(beside.pop(e.path))), entries, offsets)
            return [*of]

    # ---- files -----------------------------------------------------------------------------------------------------

    def _open_file(self, name: str, length: int) -> None:
        """Open a file. ``ValueError`` where it is missing, or not as long as it was made."""
        path = self.directory / name
        if not path.exists():
            raise ValueError(
                f"the store has lost {str(path)!r}: no such file. Is its disk mounted? Otherwise restore from a "
                "checkpoint into a new store."
            )
        if (found := path.stat().st_size) != length:
            raise ValueError(
                f"{str(path)!r} holds {found} bytes, and was made with {length}. Restore from a checkpoint into a new "
                "store."
            )
        file = self._files[name] = File.at(path)
        self._closing.callback(os.close, file.descriptor)
        if not file.direct and name == "state.a":  # warn once
            warnings.warn(
                f"the filesystem of {str(self.directory)!r} has no O_DIRECT: the store goes through the page cache, "
                "which is slower and takes memory that the system counts as cache. A directory on a local disk has it.",
                stacklevel=2,
            )


def _laid_out(entries: Iterable[Entry]) -> tuple[list[int], int]:
    """Return the offset of each entry in a file, and the file's length."""
    offsets, length = list[int](), 0
    for entry in entries:
        offsets.append(length)
        length += padded(entry.nbytes)
    return offsets, length


# ---- the manifest, a small file that is swapped whole ----------------------------------------------------------------


def _save(manifest: Manifest, path: Path) -> None:
    state, beside = ([*map(astuple, entries)] for entries in (manifest.state, manifest.beside))
    body = {"format": _FORMAT, "commit": manifest.commit, "slot": manifest.slot, "state": state, "beside": beside}
    swap_in(path, json.dumps({"manifest": body, "crc32": _checksum(body)}).encode())


def _load(path: Path) -> Manifest | None:
    """Read a manifest; ``None`` where there is none. ``ValueError`` where it is damaged, or of another format."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        document = json.loads(data)
        body, intact = document["manifest"], document["crc32"] == _checksum(document["manifest"])
    except (ValueError, KeyError, TypeError):
        body, intact = {}, False
    if not intact:
        raise ValueError(
            f"the manifest {str(path)!r} is damaged, {len(data)} bytes long. The arrays' bytes are there, in two slots "
            "each, and nothing says any more which of them the last commit is. Restore from a checkpoint into a new "
            "store."
        )
    if body["format"] != _FORMAT:
        raise ValueError(
            f"the store of {str(path)!r} has format {body['format']}, and this version reads {_FORMAT}. Read it with "
            "the version of jax_offload that wrote it, and save a checkpoint."
        )
    state, beside = (tuple(map(_entry, body[name])) for name in ("state", "beside"))
    return Manifest(Commit(*body["commit"]), state, beside, body["slot"])


def _entry(row: Sequence[Any]) -> Entry:
    path, shape, dtype, begin, leaf_shape, rows, slot, checksums = row
    return Entry(path, tuple(shape), dtype, tuple(begin), tuple(leaf_shape), rows, slot, tuple(checksums))


def manifests(directory: Path) -> tuple[Manifest | None, Manifest | None]:
    """Read a prepared commit if it is whole, and the last one.

    The former comes first: if its process swaps it meanwhile, it is found twice instead of not at all.

    Raises:
      ValueError: the manifest of the last one is damaged.
    """
    prepared = None
    try:
        prepared = _load(directory / NEXT)
    except ValueError as error:
        warnings.warn(f"{error} The commit before it is whole.", stacklevel=2)
    return prepared, _load(directory / NAME)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


# ---- the lock --------------------------------------------------------------------------------------------------------


_locked = set[int]()  # the open files by which this process has locked directories


def _lock(directory: Path, closing: ExitStack, live: Store | None = None) -> int:
    """Lock a directory until ``closing`` or the process ends, however that ends, and return the lock's file.

    Raises:
      ValueError: another process, or another store of this one, has the lock.
      OSError: the system refuses the file.
    """
    path, me = directory / "lock", f"process {os.getpid()} on {socket.gethostname()}"
    with saying("opening the lock of a store", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if live is not None and os.path.samestat(os.fstat(live.lock), os.fstat(descriptor)):
        os.dup2(live.lock, descriptor, inheritable=False)  # the same lock, which ends when both are closed
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
    _locked.add(descriptor)
    closing.callback(_unlock, descriptor)
    os.pwrite(descriptor, me.encode().ljust(256), 0)
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _locked:
        _locked.remove(descriptor)
        os.close(descriptor)


# A child, such as a data loader's process, would keep the locks when this one has ended.
os.register_at_fork(after_in_child=lambda: [_unlock(each) for each in list(_locked)])
