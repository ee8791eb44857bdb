"""``Disk``: the leaves of a state that live in files, the reads and writes under way, and commits.

Threads read and write leaves, and wait for their values, so that the thread that drives the step does not. A read waits
for pending writes of its bytes. A failure is remembered, as the files then hold parts of two steps: the step goes on,
with zeros for values that could not be read, and ``advance`` raises at its end. So one of several processes never stops
in the middle of a step, in which the others would wait for it.

Each process has a store of its own, and a commit succeeds in all of them or in none. First each process prepares the
commit: all of its part is on disk, beside the previous commit. When all processes have done so, the commit is valid.
Then each swaps it in, and only after that overwrites the previous one; a process that was killed in between finds the
prepared commit. So each process has one or two commits, and the newest one that all processes have is the last.
"""

import contextlib
import dataclasses
import functools
import json
import operator
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._disk.leaves import TOKEN, VERSIONS, Ends, OnDisk, Place, Range, Stored, on_disk, packed, unpacked
from jax_offload._disk.store import NAME, Commit, Store, manifests
from jax_offload._program import memory
from jax_offload._program.arrays import check_integer

_BYTES = 4096  # the size of each process's message: one size, so that one program sends all
_LETTERS = 600  # the longest error in a message; a letter takes six bytes at most
_THREADS = 8  # in each direction
T = TypeVar("T")


class Disk:
    """Keep in files the part of a state that does not fit into host memory.

    Use it as ``jo.offload(inner, disk=jo.disk(folder))``. Each step of ``jax_offload.jit`` reads that part group by
    group. While the device updates one group, the step reads the next two and writes the previous two. The numbers are
    the same as in host memory (docs/disk.md).

    Only ``commit`` saves anything: after a crash the files hold the whole last commit. They take twice the bytes of
    their leaves, because new values never overwrite committed ones.

    A disk serves one ``offload``. Its attributes are its arguments; ``directory`` is an absolute path.

    Args:
      directory: the directory for the files, made if missing. A local NVMe drive is best, or a RAID, which is as fast
        as all of its drives together. ``~`` is your home, and a relative path starts at the current directory.
      host_bytes: how many bytes of the state stay in pinned host memory, over all devices, with replicated bytes
        counted once. They hold whole parameters' states, starting with the parameters whose gradients come last.
        Everything else that ``offload`` would keep there is on disk. Buffers need more: at most nine groups of 64 to
        128 MiB, or of one row, or of one parameter's leaves if the update does not keep their rows apart.

    Raises:
      TypeError: ``directory`` is not a path.
      ValueError: the path is empty, its ``~`` has no home, or ``host_bytes`` is not an integer in its range.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), disk=(disk := jo.disk(tempfile.mkdtemp())))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> step = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
      >>> params, state = step(params, state, grads)
      >>> disk.commit(1, {"params": params, "state": state})
      >>> tree, step = disk.resume({"params": params, "state": jo.abstract_state(tx, params)})
      >>> step, tree["state"][0].mu["w"]
      (1, OnDisk([0].mu['w']: float32[256, 256]))
    """

    def __init__(self, directory: str | os.PathLike[str], *, host_bytes: int = 0) -> None:
        check_integer("host_bytes", host_bytes, 0, "a number of bytes >= 0, an int", "Fix: 16 * 2**30 is 16 GiB.")
        self.directory, self.host_bytes = _path(directory), int(host_bytes)
        self._opened: Store | None = None
        self._leaves, self._version = dict[str, Stored](), 0

    def __repr__(self) -> str:
        return f"disk({str(self.directory)!r}, host_bytes={self.host_bytes})"

    def __reduce__(self) -> Any:
        """A copy is another ``disk`` for the same directory, which has no state until ``init`` or ``resume``."""
        return functools.partial(type(self), host_bytes=self.host_bytes), (str(self.directory),)

    # ---- commits ---------------------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> int | None:
        """The step of the last commit in the directory, or ``None``. With several processes, all must ask."""
        if self._opened is not None:
            return self._opened.step
        last = last_of_all(self.directory)
        return None if last is None else last.step

    def commit(self, step: int, tree: Any) -> None:
        """Save the current state and everything else that the run needs to continue.

        After a commit, everything is written. A commit that fails for any reason changes nothing. With several
        processes all must call it, and the commit belongs to all or to none.

        Args:
          step: the number of the step, at least the last commit's.
          tree: the whole state, with the parameters of the same step and whatever else the run needs: ``{"params":
            params, "opt_state": state, "rng": key}``. Leaves that are not on disk are written with it.

        Raises:
          TypeError: a leaf of the tree is not an array, a number or a string.
          ValueError: the state is not the one on disk, or only a part of it; the step comes before the last commit's;
            or another process failed.
        """
        number, store = _number_of(step), self.store
        self.check_commits()
        if store.step is not None and number < store.step:
            raise ValueError(
                f"step: the last commit in {self.directory} is of step {store.step}, and a run that is resumed goes on "
                f"from there; got {number}. Fix: count on from the step that disk.resume(target) gave."
            )

        def save() -> None:
            about, arrays = everywhere(lambda: self._described(tree), "disk.commit")
            try:
                name = allgathered(secrets.token_hex(8))[0]
                everywhere(lambda: store.prepare(number, name, arrays, about), "disk.commit")
                everywhere(store.swap, "disk.commit, its last part,")
            except BaseException as error:  # which commit the disk has is unknown, so nothing more may be written
                self._commit_failed = error
                raise

        with ThreadPoolExecutor(1, "disk commit") as thread:  # Ctrl-C lets it end, as it reads the caller's arrays
            thread.submit(save).result()

    def _described(self, tree: Any) -> tuple[Any, dict[str, Any]]:
        """Wait for writes, describe a tree, and return its arrays that are not on disk."""
        self._check_whole()

        def stored(leaf: OnDisk) -> Stored:
            if leaf.place.home is not self:
                raise ValueError(f"tree: {leaf!r} is in {leaf.place.home!r}, and not in {self!r}.")
            self.check(leaf.token)
            return self._leaves[leaf.place.name]

        rows, arrays = packed(tree, stored)
        if lost := self._leaves.keys() - on_disk(rows).keys():
            raise ValueError(f"tree: lacks a part of the state; {min(lost)} is on disk and not in the tree.")
        self.wait()
        return rows, arrays

    def resume(self, target: Any) -> tuple[Any, int]:
        """Return the tree of the last commit and its step. Everything written since is discarded.

        If it raises, in one process or in all, the state in use is unchanged.

        Args:
          target: a tree like the committed one, abstract or not, which says where arrays go: ``{"params": shapes,
            "opt_state": jo.abstract_state(tx, shapes)}``. Leaves on disk stay there. With several processes, all of
            which must call it, each gets what its devices had.

        Raises:
          ValueError: there is no commit, it is damaged, or the target belongs to another run.
        """
        if (last := last_of_all(self.directory)) is None:
            raise ValueError(
                f"disk: there is no commit in {self.directory}. Fix: the directory of the run that is to go on; or "
                "tx.init(params) for a new one."
            )
        with contextlib.ExitStack() as failed:

            def read() -> tuple[Store, Any]:
                store = Store(own(self.directory), self._opened)
                failed.callback(store.close)
                store.open(last)
                return store, unpacked(store.manifest.about, target, self._next, store.read_beside, self.directory)

            store, tree = everywhere(read, "disk.resume")
            self.close()
            failed.pop_all()
        self._begin(store, on_disk(store.manifest.about))
        return tree, last.step

    # ---- open and close --------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store of the files; ``ValueError`` where none is open."""
        if self._opened is None:
            raise ValueError(
                f"disk: {self!r} has no state yet, or is closed. Fix: tx.init(params), or disk.resume(target)."
            )
        return self._opened

    def fill(self, leaves: Sequence[Place], batches: Iterable[Iterable[Any]]) -> list[OnDisk]:
        """Make files for these leaves from their values, with one batch in memory at a time.

        If the iterator raises, the files hold nothing.
        """
        if self._opened is not None:
            raise ValueError(
                f"disk: {self!r} holds a state already. Fix: one jo.disk(...) for each offload and each run; "
                "disk.resume(target) goes on with the state of the last commit."
            )
        _check_leaves(leaves)
        if (last := last_of_all(self.directory)) is not None:
            raise ValueError(
                f"disk: {self.directory} holds the state of another run, or of an earlier one, as of step {last.step}. "
                "Fix: disk.resume(target) goes on with it; for a new run give a directory of its own."
            )
        stored = {leaf.name: Stored.new(leaf) for leaf in leaves}

        def make() -> None:
            self._begin(Store(own(self.directory)), stored)
            self.store.make({key: n for each in stored.values() for key, n in each.sizes.items()})

        def write() -> None:
            names = iter(stored)
            for batch in batches:
                for x in batch:
                    self.put(next(names), x)
                self.wait()

        try:
            everywhere(make, "disk: making files")
            everywhere(write, "disk: making the files of a state")
        except BaseException:
            self.close()
            raise
        found = [self._next(stored[each.name], each.sharding) for each in leaves]
        self.advance()
        return found

    def _begin(self, store: Store, leaves: dict[str, Stored]) -> None:
        self._opened, self._leaves = store, leaves
        self._writing: dict[str, Future[None]] = {}  # key in the store -> the task that writes it
        self._updating = False
        self._failed, self._known = "", ""  # the failure here, and the failure that all processes know
        self._commit_failed: BaseException | None = None
        self._reads, self._writes = (ThreadPoolExecutor(_THREADS, f"jax_offload {way}") for way in ("reads", "writes"))
        self._version = (self._version + 1) % VERSIONS

    def wait(self) -> None:
        """Wait until everything is written, and raise any error from writing."""
        if self._opened is not None:
            for future in list(self._writing.values()):
                future.result()

    def close(self) -> None:
        """End all reading and writing, and close the files. What was not committed is lost."""
        if self._opened is not None:
            self._reads.shutdown()
            self._writes.shutdown()
            self._opened.close()
            self._opened = None

    # ---- during a step --------------------------------------------------------------------------------------------

    def _next(self, leaf: Stored, sharding: Sharding) -> OnDisk:
        """Return the placeholder of a leaf in the next version of the state. ``sharding``: its place in host memory."""
        boxes = memory.boxes_of(sharding, shape := tuple(leaf.shape))
        leaf.check_covers(boxes)  # this process can read it
        dataclasses.replace(leaf, boxes=boxes).check_covers(leaf.boxes)  # and write all of its part
        place = Place(self, leaf.name, shape, np.dtype(leaf.dtype), sharding)
        return OnDisk((self._version + 1) % VERSIONS, place)

    def ends(self, name: str) -> Ends:
        """The row after each range of a leaf's rows that the files keep together."""
        return self._leaves[name].ends if name in self._leaves else ()  # ``check`` reports a state of another disk

    def check(self, token: Any) -> None:
        """Raise ``ValueError`` if the token belongs to another version than the files."""
        self._check_whole()
        if int(getattr(token, "version", token)) != self._version:
            step = self.store.step
            back = "" if step is None else f"; disk.resume(target) goes back to the last commit, step {step}"
            raise ValueError(
                f"disk: the state is not the one that is in {self.directory}: it is of an earlier step, which has been "
                "overwritten, or something has computed with it. Fix: hand on the state that the last step returned"
                f"{back}."
            )

    def fetch(self, name: str, sharding: Sharding, rows: Range | None = None) -> Future[jax.Array]:
        """Start to read a leaf, or ranges of it, into host memory, once pending writes of it have finished."""
        leaf = self._leaves[name]

        def read() -> jax.Array:
            try:
                return self._read(leaf, sharding, rows)
            except Exception as error:
                self._fails(f"reading {name}", error)
                shape, _ = leaf.within(rows)
                return memory.assembled([(memory.box_of_shape(shape), np.zeros(shape, leaf.dtype))], sharding, shape)

        return self._reads.submit(read)

    def _read(self, leaf: Stored, sharding: Sharding, rows: Range | None = None) -> jax.Array:
        """Read a leaf, or some ranges of its rows, now."""

        def read(key: str) -> np.ndarray[Any, Any]:
            if (writing := self._writing.get(key)) is not None:
                writing.result()
            return self.store.read(key)

        shape, _ = leaf.within(rows)
        return jax.block_until_ready(memory.assembled(leaf.read(read, rows), sharding, shape))

    def put(self, name: str, x: jax.Array, rows: Range | None = None) -> Future[None]:
        """Start to write a leaf's next value, or some ranges of it, once it has been computed."""
        _, boxes = self._leaves[name].within(rows)
        before = [self._writing[key] for key, _ in boxes if key in self._writing]  # of a leaf that no update reads
        value = [x]  # the task would keep the array alive for a moment after its end

        def write() -> None:
            wait(before)
            try:
                parts = memory.parts_of(value.pop())
                for key, box in boxes:
                    self.store.write(key, memory.gathered(parts, box))
            except BaseException as error:
                self._fails(f"writing {name}", error)
                raise

        self._updating = True
        future = self._writes.submit(write)
        self._writing |= dict.fromkeys((key for key, _ in boxes), future)
        return future

    def _fails(self, doing: str, error: BaseException) -> None:
        self._failed = self._failed or f"{doing} raised {type(error).__name__}: {error}"

    def advance(self) -> Any:
        """Return the token of the next version, whose leaves have been put. Raise any failure, in all processes."""
        self.check_moves()
        self._version = (self._version + 1) % VERSIONS
        return np.asarray(self._version, TOKEN)  # the type that a program returns

    def check_moves(self) -> None:
        """Raise any failure of a read or a write so far, in all processes."""
        said = allgathered(self._failed[:_LETTERS])
        if failed := [(k, why) for k, why in enumerate(said) if why]:
            self._known = "; ".join(f"in process {k} {why}" if len(said) > 1 else why for k, why in failed)
        else:
            self._updating = False
        self._check_whole()

    def _check_whole(self) -> None:
        """Raise ``ValueError`` where an update did not end.

        A failure counts when ``advance`` has told all processes; otherwise they would wait for this one in a step.
        """
        self.store  # noqa: B018
        if self._known or self._updating:
            why = self._known.rstrip(".") or "something raised in it"
            raise ValueError(
                f"disk: an update of the state in {self.directory} did not end, {why}, and the files hold values of "
                "two steps. Nothing of the last commit is lost. Fix: disk.resume(target), which goes back to it."
            )

    def check_commits(self) -> None:
        """Raise ``ValueError`` where a commit has failed, as it does in all processes or in none.

        Nothing may be written then. Values written before can still be read.
        """
        if self._commit_failed is not None:
            step = self.store.step
            raise ValueError(
                f"the store in {str(self.directory)!r} stopped when a commit failed: {self._commit_failed} It is as of "
                f"{'nothing' if step is None else f'step {step}'}: see to the cause and open it again, by "
                "disk.resume(target)."
            ) from self._commit_failed

    def array(self, place: Place, token: Any) -> jax.Array:
        """Read a leaf now, between two steps, to its place in host memory."""
        self.check(token)
        found = self._read(self._leaves[place.name], place.sharding)
        self.check(token)  # an update may have begun meanwhile
        return found


def _path(given: Any) -> Path:
    """Make a path absolute, as the process may change its directory while the files are in use."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(
            f"directory: expected a path, jo.disk('/nvme/run'); got {given!r}, a {type(given).__name__}. Fix: one "
            "directory, on a RAID for several drives; a number of bytes is host_bytes=."
        )
    if not path:
        raise ValueError("directory: got an empty path. Fix: '.' is where the process is; is a variable not set?")
    if "://" in path:
        raise ValueError(f"directory: {path!r} is not on this machine. Fix: a directory on a local drive, '/nvme/run'.")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # there is no such user
        raise ValueError(f"directory: {path!r} is in no home: {error} Fix: a path without ~.") from error


def _number_of(step: Any) -> int:
    """Return the number of a step, given as an integer of Python, NumPy or jax; ``ValueError`` for anything else."""
    found = -1
    with contextlib.suppress(TypeError):
        found = -1 if isinstance(step, bool) else operator.index(step)
    if found < 0:
        said = repr(step) if isinstance(step, (int, float, str)) else f"a {type(step).__name__}"
        raise ValueError(f"step: expected an int >= 0; got {said}. The order is disk.commit(step, tree).")
    return found


def _check_leaves(leaves: Sequence[Place]) -> None:
    """Raise ``ValueError`` where two leaves have one name, or a leaf is not on devices of all processes."""
    everyone, times = {*range(jax.process_count())}, Counter(leaf.name for leaf in leaves)
    for leaf in leaves:
        if times[leaf.name] > 1:
            raise ValueError(
                f"disk: {times[leaf.name]} leaves of the state have the path {leaf.name}, and files find a leaf by its "
                "path. Fix: give the children of each pytree node keys of their own "
                "(jax.tree_util.register_pytree_with_keys)."
            )
        if (on := {d.process_index for d in leaf.sharding.device_set}) != everyone:
            raise ValueError(
                f"disk: {leaf.name} is on devices of {len(on)} of the {len(everyone)} processes, {sorted(on)}, and "
                "their files hold one state. Fix: parameters on a mesh of all devices, jax.make_mesh(...)."
            )


# ---- several processes: all of them ask, in the same order -----------------------------------------------------------


def allgathered(mine: Any) -> list[Any]:
    """Return each process's message, by its number. ``mine``: this process's message, a few KiB of JSON."""
    if jax.process_count() == 1:
        return [mine]
    from jax.experimental import multihost_utils

    said = json.dumps(mine).encode().ljust(_BYTES)
    if len(said) > _BYTES:
        raise ValueError(f"a message of {len(said)} bytes is too long, {_BYTES} at most: {said[:200]!r}")
    rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(said, np.uint8)))
    return [json.loads(row.tobytes()) for row in rows.reshape(-1, _BYTES)]


def everywhere(do: Callable[[], T], doing: str) -> T:
    """Return the result of ``do`` if it succeeds in every process; otherwise raise its error here, or another's."""
    error = None
    try:
        result = do()
    except Exception as raised:
        error, result = raised, None
    said = allgathered(None if error is None else f"{type(error).__name__}: {error}"[:_LETTERS])
    if error is not None:
        raise error
    if failed := [(k, text) for k, text in enumerate(said) if text is not None]:
        raise ValueError(
            f"{doing} failed in {len(failed)} of {len(said)} processes. Process {failed[0][0]}: {failed[0][1]}"
        )
    return cast(T, result)


def own(directory: Path) -> Path:
    """Return the directory of this process within the given one."""
    now = jax.process_count()
    return directory / f"process-{jax.process_index()}-of-{now}" if now > 1 else directory


def last_of_all(directory: Path) -> Commit | None:
    """Find the newest commit that each process has; ``None`` where none has any."""

    def look() -> tuple[bool, list[Commit | None]]:
        now, found = jax.process_count(), manifests(own(directory))
        made = [path for path in directory.glob("process-*-of-*") if manifests(path)]
        counts = {int(path.name.rpartition("-")[2]) for path in made} | ({1} if manifests(directory) else set())
        if counts and now not in counts:
            raise ValueError(
                f"disk: {directory} has the commit of {min(counts)} processes, each with its part, and now there "
                f"are {now}. Fix: go on with {min(counts)}; or save a checkpoint there, jo.save_args(tree), and here "
                "jo.restore(manager, target)."
            )
        return NAME in found, [each.commit for each in found.values()]

    said = allgathered(everywhere(look, "disk: looking for the last commit"))
    found = [[Commit(*each) for each in mine] for _, mine in said]
    if common := set[Commit].intersection(*map(set, found)):
        return max(common)
    if not any(swapped for swapped, _ in said):
        return None  # the first commit did not end
    each = [f"process {k} has " + (f"step {max(mine).step}" if mine else "none") for k, mine in enumerate(found)]
    raise ValueError(
        f"disk: the processes have no commit of the same run in {directory}: {', '.join(each)}. Is a disk mounted, is "
        "each process on the host that it was on? Fix: give the directory of one run; or restore from a checkpoint "
        "into a directory that is empty."
    )
