"""``Disk``: the leaves of a state that live in files, the reads and writes under way, and commits.

Threads read and write leaves, and wait for their values, so that the thread that drives the step does not. A read waits
for pending writes of its leaf, and an error in writing is remembered: the files then hold parts of two steps.

One of several processes never stops in the middle of a step, because the others would wait for it. It goes on, with
zeros for values that it could not read, and ``advance`` raises in all processes at the end of the step.

Each process has a store of its own, and a commit succeeds in all of them or in none. First each process prepares the
commit: all of its part is on disk, beside the previous commit. When all processes have done so, the commit is valid.
Then each swaps it in, and only after that overwrites the previous one; a process that was killed in between finds the
prepared commit. So each process has one or two commits, and the newest one that all processes have is the last.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._disk import leaves as on_disk
from jax_offload._disk.leaves import TOKEN, VERSIONS, Ends, OnDisk, Place, Range, Stored, Token
from jax_offload._disk.store import NAME, Commit, Room, Store, manifests, pages
from jax_offload._program import memory
from jax_offload._program.arrays import check_integer
from jax_offload._program.memory import Parts

_BYTES = 4096  # the size of each process's message: one size, so that one program sends all
_LETTERS = 600  # the longest error in a message; a letter takes six bytes at most
T = TypeVar("T")
_READERS, _WRITERS = 2, 4  # more threads write small leaves faster, but do not read them faster


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
        self._run, self._version = "", 0

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
            arrays = everywhere(lambda: self._beside(tree), "disk.commit")
            try:
                everywhere(lambda: store.prepare(number, arrays, self._run), "disk.commit")
                everywhere(store.swap, "disk.commit, its last part,")
            except BaseException as error:  # which commit the disk has is unknown, so nothing more may be written
                self._commit_failed = error
                raise

        with ThreadPoolExecutor(1, "disk commit") as thread:  # Ctrl-C lets it end, as it reads the caller's arrays
            thread.submit(save).result()

    def _beside(self, tree: Any) -> dict[str, Any]:
        """Return the arrays of a commit that are not on disk, after the leaves on disk have been written."""
        self._check_whole()
        beside, found = on_disk.packed(tree)
        for leaf in found.values():
            if leaf.place.home is not self:
                raise ValueError(f"tree: {leaf!r} is in {leaf.place.home!r}, and not in {self!r}.")
            self.check(leaf.token)
        if lost := self._leaves.keys() - found.keys():
            raise ValueError(f"tree: lacks a part of the state; {min(lost)} is on disk and not in the tree.")
        self.wait()
        return beside

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
        begin = _beginning()
        with contextlib.ExitStack() as failed:

            def read() -> tuple[Store, Any]:
                store = Store.open(own(self.directory), last, self._opened)
                failed.callback(store.close)
                leaves = on_disk.stored_in(store.entries)
                handle = lambda name, place: self._handle(leaves[name], begin[0], place)  # noqa: E731
                return store, on_disk.unpacked(store.beside(), target, leaves, handle, self.directory)

            store, tree = everywhere(read, "disk.resume")
            self._let_go()
            failed.pop_all()
        self._began(store, begin)
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

    def fill(self, leaves: Sequence[Place], values: Iterable[Any]) -> list[OnDisk]:
        """Make files for these leaves from an iterator of values, so that few are in memory at a time.

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
        begin, entries = _beginning(), [entry for leaf in leaves for entry in on_disk.entries_of(leaf)]

        def write() -> None:
            for leaf, x in zip(leaves, values, strict=True):
                self.put(leaf.name, x).result()

        try:
            everywhere(lambda: self._began(Store.create(own(self.directory), entries), begin), "disk: making files")
            everywhere(write, "disk: making the files of a state")
        except BaseException:
            self._let_go()
            raise
        self.advance()
        return [self._handle(self._leaf(each.name), self._version, each.sharding) for each in leaves]

    def _began(self, store: Store, begin: tuple[int, str]) -> None:
        self._opened, self._leaves = store, on_disk.stored_in(store.entries)
        self._writing: dict[int, Future[None]] = {}  # entry of the store -> the task that writes it
        self._updating = False
        self._failed, self._known = "", ""  # the failure here, and the failure that all processes know
        self._commit_failed: BaseException | None = None
        self._readers = ThreadPoolExecutor(_READERS, "jax_offload reads")
        self._writers = ThreadPoolExecutor(_WRITERS, "jax_offload writes")
        self._version, self._run = begin

    def wait(self) -> None:
        """Wait until everything is written, and raise any error from writing."""
        if self._opened is not None:
            for future in list(self._writing.values()):
                future.result()

    def close(self) -> None:
        """End all reading and writing, and close the files. What was not committed is lost."""
        if self._opened is not None:
            self._readers.shutdown()
            self._writers.shutdown()
            store, self._opened = self._opened, None
            store.close()

    def _let_go(self) -> None:
        """Close the files, whatever fails. Writes since the last commit are lost."""
        with contextlib.suppress(OSError, ValueError):
            self.close()

    # ---- during a step --------------------------------------------------------------------------------------------

    def _handle(self, leaf: Stored, version: int, sharding: Sharding) -> OnDisk:
        """Return the placeholder of a leaf in a state of a version. ``sharding``: its place in host memory."""
        own = memory.boxes_of(sharding, leaf.shape)
        on_disk.check_covered(leaf.name, own, leaf.boxes)  # so that this process can read it,
        on_disk.check_covered(leaf.name, leaf.boxes, own)  # and writes all of its part
        return OnDisk(version, Place(self, leaf.name, leaf.shape, leaf.dtype, sharding))

    def ends(self, name: str) -> Ends:
        """The row after each range of a leaf's rows that the files keep together."""
        return self._leaf(name).ends

    def check(self, token: Any) -> None:
        """Raise ``ValueError`` if the token belongs to another version than the files."""
        self._check_whole()
        if _version(token) != self._version:
            step = self.store.step
            back = "" if step is None else f"; disk.resume(target) goes back to the last commit, step {step}"
            raise ValueError(
                f"disk: the state is not the one that is in {self.directory}: it is of an earlier step, which has been "
                "overwritten, or something has computed with it. Fix: hand on the state that the last step returned"
                f"{back}."
            )

    def fetch(self, name: str, sharding: Sharding, rows: Range | None = None) -> Future[jax.Array]:
        """Start to read a leaf, or ranges of it, into host memory, once pending writes of it have finished."""
        leaf = self._leaf(name)

        def read() -> jax.Array:
            try:
                parts = self._parts(leaf, rows, self.store.buffers.take)
            except Exception as error:
                if not several():
                    raise
                self._fails(f"reading {name}", error)
                parts = [(box, np.zeros(memory.shape_of(box), leaf.dtype)) for _, box in leaf.within(rows)]
            return jax.block_until_ready(memory.assembled(parts, sharding, leaf.shape_of(rows)))

        return self._readers.submit(read)

    def _parts(self, leaf: Stored, rows: Range | None = None, room: Room = pages) -> Parts:
        """Read a leaf's values, or some ranges of them, now."""
        found = leaf.within(rows)
        for k, _ in found:
            if (writing := self._writing.get(k)) is not None:
                writing.result()
        arrays = self.store.read([k for k, _ in found], room)
        return [(box, x) for (_, box), x in zip(found, arrays, strict=True)]

    def put(self, name: str, x: jax.Array, rows: Range | None = None) -> Future[None]:
        """Start to write a leaf's next value, or some ranges of it, once it has been computed."""
        found = self._leaf(name).within(rows)
        self._updating = True
        before = [self._writing[k] for k, _ in found if k in self._writing]  # of a leaf that no update reads
        value = [x]  # the task would keep the array alive for a moment after its end

        def write() -> None:
            wait(before)
            try:
                parts = memory.parts_of(value.pop())
                self.store.write({k: memory.gathered(parts, box) for k, box in found})
            except BaseException as error:
                self._fails(f"writing {name}", error)
                raise

        future = self._writers.submit(write)
        self._writing |= dict.fromkeys((k for k, _ in found), future)
        return future

    def _fails(self, doing: str, error: BaseException) -> None:
        self._failed = self._failed or f"{doing} raised {type(error).__name__}: {error}"

    def advance(self) -> Any:
        """Return the token of the next version, all of whose leaves have been put.

        Raises:
          ValueError: something has failed until now, in this process or another.
        """
        said = allgathered(self._failed[:_LETTERS])
        if failed := [(k, why) for k, why in enumerate(said) if why]:
            self._known = "; ".join(f"in process {k} {why}" if several() else why for k, why in failed)
        else:
            self._updating = False
        self._check_whole()
        self._version = (self._version + 1) % VERSIONS
        return np.asarray(self._version, TOKEN)  # as a program returns it

    def _check_whole(self) -> None:
        """Raise ``ValueError`` where an update did not end.

        A failure in one of several processes counts only when all of them know it; otherwise the others would wait for
        this one in the next step.
        """
        self.store  # noqa: B018
        why = self._known if several() else self._failed
        if why or self._updating:
            raise ValueError(
                f"disk: an update of the state in {self.directory} did not end, {why or 'something raised in it'}, "
                "and the files hold values of two steps. Nothing of the last commit is lost. Fix: disk.resume(target), "
                "which goes back to it."
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

    def _leaf(self, name: str) -> Stored:
        self.store  # noqa: B018
        if name not in self._leaves:
            raise ValueError(
                f"disk: there is no {name} in {self.directory}, the state is another's. Fix: disk.resume(target), "
                "which gives the state of the last commit."
            )
        return self._leaves[name]

    # ---- reads between steps --------------------------------------------------------------------------------------

    def array(self, name: str, token: Any, sharding: Sharding | None = None) -> np.ndarray[Any, Any] | jax.Array:
        """Read a leaf's values now: whole, or as an array of a sharding that divides it between processes, if all ask.

        ``ValueError`` for a token of another version, or where this process has only a part of the leaf.
        """
        leaf = self._leaf(name)
        self.check(token)
        parts = self._parts(leaf)
        self.check(token)  # an update may have begun meanwhile
        if sharding is not None and not sharding.is_fully_addressable:
            return memory.assembled(parts, sharding, leaf.shape)
        if not memory.covered(whole := memory.box_of_shape(leaf.shape), [box for box, _ in parts]):
            raise ValueError(
                f"disk: {leaf.name} is divided between processes, and this one has a part of it. Fix: "
                "jo.to_device(leaf), in all processes, gives the leaf divided."
            )
        return memory.gathered(parts, whole)


def _beginning() -> tuple[int, str]:
    """Choose, for all processes, the first version of a state, which no run before has had, and a name for the run."""
    version, run = allgathered([secrets.randbelow(VERSIONS), secrets.token_hex(8)])[0]
    return version, run


def _version(token: Any) -> int:
    return token.version if isinstance(token, Token) else int(token)


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
    """Return the number of a step, given as a Python integer, a NumPy integer or a jax array.

    Raises:
      ValueError: it is something else, or below 0.
    """
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


# ---- agreement between the processes of a run: all of them ask, in the same order ------------------------------------


def several() -> bool:
    return jax.process_count() > 1


def allgathered(mine: Any) -> list[Any]:
    """Return each process's message, by its number. ``mine``: this process's message, a few KiB of JSON."""
    if not several():
        return [mine]
    from jax.experimental import multihost_utils

    said = json.dumps(mine).encode().ljust(_BYTES)
    if len(said) > _BYTES:
        raise ValueError(f"a message of {len(said)} bytes is too long, {_BYTES} at most: {said[:200]!r}")
    rows = np.asarray(multihost_utils.process_allgather(np.frombuffer(said, np.uint8)))
    return [json.loads(row.tobytes()) for row in rows.reshape(-1, _BYTES)]


def everywhere(do: Callable[[], T], doing: str) -> T:
    """Return the result of ``do`` if it succeeds in every process; otherwise raise in all of them.

    Raises:
      Exception: the error of ``do`` in this process.
      ValueError: ``do`` failed in another process.
    """
    if not several():
        return do()
    result, error = None, None
    try:
        result = do()
    except Exception as raised:
        error = raised
    said = allgathered(None if error is None else f"{type(error).__name__}: {error}"[:_LETTERS])
    if error is not None:
        raise error
    if failed := [(k, text) for k, text in enumerate(said) if text is not None]:
        raise ValueError(
            f"{doing} failed in {len(failed)} of {len(said)} processes. Process {failed[0][0]}: {failed[0][1]}"
        )
    return result  # pyright: ignore[reportReturnType]


# ---- commits of several processes ------------------------------------------------------------------------------------


def own(directory: Path) -> Path:
    """Return the directory of this process within the given one."""
    return directory / f"process-{jax.process_index()}-of-{jax.process_count()}" if several() else directory


def last_of_all(directory: Path) -> Commit | None:
    """Find the newest commit that each process has; ``None`` where there is none. All processes must ask.

    Raises:
      ValueError: some have one and others none, or another number of processes made them.
    """

    def look() -> list[Any]:
        now = jax.process_count()
        counts = {int(each.parts[-2].rpartition("-")[2]) for each in directory.glob(f"process-*-of-*/{NAME}")}
        counts |= {1} if (directory / NAME).exists() else set()
        if counts and now not in counts:
            raise ValueError(
                f"disk: {directory} has the commit of {min(counts)} processes, each with its part, and now there "
                f"are {now}. Fix: go on with {min(counts)}; or save a checkpoint there, jo.save_args(tree), and here "
                "jo.restore(manager, target)."
            )
        mine = own(directory)
        return [(mine / NAME).exists(), [each.commit for each in manifests(mine) if each is not None]]

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
