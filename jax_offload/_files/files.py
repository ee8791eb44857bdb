"""The third tier: leaves of a state in files. ``jax_offload.disk`` is the files, their commits, and the version of the
state that is in them; ``under_way`` is what is being read and written.

A leaf is one group of the store, or several of a range of its rows each; entries are what several devices have of it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jax_offload._base.on_disk import TOKEN, VERSIONS, Ends, OnDisk, Place, Range, Token
from jax_offload._base.processes import allgathered, everywhere, several
from jax_offload._disk.buffers import aligned
from jax_offload._disk.files import Files
from jax_offload._disk.store import Store
from jax_offload._drive.moving import DEPTH
from jax_offload._files.committed import Extra, packed, unpacked
from jax_offload._files.due import is_due, number_of
from jax_offload._files.extents import Parts, assembled, box_of_shape, boxes_of, check_covered, covered, gathered
from jax_offload._files.ranges import groups_of, leaves_in
from jax_offload._files.together import check_shared, committed, created, last_of_all, opened, opened_at_last
from jax_offload._files.under_way import UnderWay, of_commit, written_in_turn


class Disk:
    """Files with leaves of a state; what ``jax_offload.disk`` returns.

    Attributes:
      directories: where they are.
      host_bytes: of the state that stay in host memory.
      files: the system's calls, where they are counted or faults are put in their place.
      depth: how many groups are read ahead, and written behind.
      commit_every: of how many steps one is due.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> disk = jo.disk(tempfile.mkdtemp())
      >>> tx = jo.offload(optax.adamw(1e-3), disk=disk)
      >>> disk.commit(0, {"params": params, "state": tx.init(params)})
      True
      >>> tree, step = disk.resume({"params": params, "state": jo.abstract_state(tx, params)})
      >>> step, tree["state"][0].mu["w"]
      (0, OnDisk([0].mu['w']: float32[256, 256]))
    """

    def __init__(
        self, directories: Sequence[Path], host_bytes: int, files: Files | None = None,
        *, depth: int = DEPTH, commit_every: int = 1,
    ) -> None:  # fmt: skip
        self.directories, self.host_bytes = tuple(directories), host_bytes
        self.depth, self.commit_every = depth, commit_every
        self.files = files
        self._state: UnderWay | None = None
        self._version, self._run = 0, ""
        self._committed: int | None = None  # the version of the last commit

    def __repr__(self) -> str:
        said = [*(repr(str(each)) for each in self.directories), f"host_bytes={self.host_bytes}"]
        said += [f"depth={self.depth}"] if self.depth != DEPTH else []
        said += [f"commit_every={self.commit_every}"] if self.commit_every != 1 else []
        return f"disk({', '.join(said)})"

    def __reduce__(self) -> Any:
        raise TypeError(f"disk: {self!r} has open files, and cannot be pickled or copied.")

    # ---- commits ---------------------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> int | None:
        """The step of the last commit in the directory, or ``None``; with several processes all must ask."""
        if self._state is not None:
            return self._state.store.step
        if several():
            last = last_of_all(self.directories, self.files)
            return None if last is None else last[1]
        if (store := opened(self.directories, self.files)) is None:
            return None
        with store:
            return store.step

    def commit(self, step: int, tree: Any, force: bool = False) -> bool:
        """Save the state as it is now, with everything else that a run continues from, if the step is due.

        A step is due if it is a multiple of ``commit_every``, and if there is no commit yet. Otherwise nothing is done
        or waited for. When this returns, everything is written. A commit that does not complete, for whatever reason,
        changes nothing. With several processes all must call it, and the commit belongs to all or to none.

        Args:
          step: the number of the step, not below that of the last commit.
          tree: the whole state, with the parameters of the same step and whatever else the run needs: ``{"params":
            params, "opt_state": state, "rng": key}``. Leaves that are not on disk are written with it.
          force: whether to save whatever the step, for example at the end of a run.

        Returns:
          Whether it saved.

        Raises:
          TypeError: a leaf of the tree is not an array, a number or a string.
          ValueError: the state is not the one on disk, or not the whole of it; the step is below that of the last
            commit; or another process failed.
        """
        number, store = number_of(step), self.opened
        store.check()  # else: of processes in one of which a commit failed, one may think so and another otherwise
        if not (force or is_due(number, store.step, self.commit_every, self.directories[0])):
            return False
        committed(store, number, lambda: self._beside(tree), self._run)
        self._committed = self._version
        return True

    def _beside(self, tree: Any) -> Extra:
        """What a commit of the tree has beside its groups, when these are written."""
        self.under_way.check()
        extra, found = packed(tree)
        for leaf in found.values():
            if leaf.place.home is not self:
                raise ValueError(f"tree: {leaf!r} is in {leaf.place.home!r}, and not in {self!r}.")
            self.check(leaf.token)
        if lost := self.under_way.leaves.keys() - found.keys():
            raise ValueError(f"tree: has not the whole state; {min(lost)} is on disk and not in it.")
        self.wait()
        self._committed = None  # a leaf that is being read as of the last commit is then of neither
        return extra

    def resume(self, target: Any) -> tuple[Any, int]:
        """Return the tree of the last commit and its step. Everything written since is forgotten.

        Args:
          target: a tree like the committed one, abstract or not, which says where arrays go: ``{"params": shapes,
            "opt_state": jo.abstract_state(tx, shapes)}``. Leaves on disk stay there. With several processes, all of
            which must call it, each gets what its devices had.

        Raises:
          ValueError: there is no commit, it is damaged, or the target belongs to another run.
        """
        self._let_go()
        self._began(store := opened_at_last(self.directories, self.files))
        return unpacked(store.extra(), target, self.handle), cast(int, store.step)

    def restored(self, target: Any, step: int | None) -> Any:
        """The tree of the last commit where ``target`` says, in any memory or on another disk: ``jo.restore``."""
        with contextlib.ExitStack() as stack:
            if self._state is None:
                store = stack.enter_context(opened_at_last(self.directories, self.files))
            else:
                store = self._state.store
            if store.step is None or (step is not None and step != store.step):
                raise ValueError(f"step: the one commit of {self!r} is of step {store.step}; got step={step!r}.")
            leaves = leaves_in(store)

            def found(name: str, sharding: Sharding) -> Any:
                return of_commit(store, name, leaves[name], sharding)

            return unpacked(store.extra(), target, found, lands=True)

    def _let_go(self) -> None:
        """Closes the files, whatever is under way: what was written since the last commit is void."""
        if self._state is not None:
            with contextlib.suppress(Exception):
                self.wait()
            with contextlib.suppress(OSError, ValueError):
                self.close()

    # ---- what init and a driven step ask ---------------------------------------------------------------------------

    def create(self, leaves: Sequence[Place]) -> None:
        """New files for these leaves, divided as they are between devices."""
        if self._state is not None:
            raise ValueError(
                f"disk: {self!r} holds a state already. Fix: one jo.disk(...) for each offload and each run; "
                "disk.resume(target) goes on with the state of the last commit."
            )
        check_shared(leaves)
        groups = [group for leaf in leaves for group in groups_of(leaf)]
        self._began(created(self.directories, groups, self.files))

    def fill(self, leaves: Sequence[Place], values: Iterable[Any]) -> list[OnDisk]:
        """New files with these leaves, of values that come one after the other: few of them are in memory at a time.

        Nothing is left of it where one does not come.
        """
        self.create(leaves)
        try:
            everywhere(lambda: written_in_turn(self.put, leaves, values), "disk: making the files of a state")
        except BaseException:
            self._let_go()
            raise
        self.advance()
        return [self.handle(each.name, each.on_its_way) for each in leaves]

    def _began(self, store: Store) -> None:
        self._state = UnderWay(store, str(self.directories[0]))
        self._version, self._run = allgathered([secrets.randbelow(VERSIONS), secrets.token_hex(8)])[
            0
        ]  # no state of before
        self._committed = None if store.step is None else self._version

    @property
    def under_way(self) -> UnderWay:
        """The state that is in the files."""
        if self._state is None:
            raise ValueError(
                f"disk: {self!r} has no state yet, or is closed. Fix: tx.init(params), or disk.resume(target)."
            )
        return self._state

    @property
    def opened(self) -> Store:
        """The store of the files."""
        return self.under_way.store

    def handle(self, name: str, sharding: Sharding) -> OnDisk:
        """What stands for a leaf in a state of this version, which is to be so in host memory on its way."""
        leaf = self.under_way.leaf(name)
        own = boxes_of(sharding, leaf.shape)
        check_covered(name, own, leaf.all_boxes)  # so that it is read,
        check_covered(name, leaf.all_boxes, own)  # and written, in this process
        return OnDisk(self._token(), Place(self, name, leaf.shape, leaf.dtype, sharding))

    def ends(self, name: str) -> Ends:
        """Where the ranges of a leaf's rows end that are together in the files."""
        return self.under_way.leaf(name).ends

    def _token(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._version, TOKEN)  # what a program returns in the place of a token

    def check(self, token: Any) -> None:
        """Raises ``ValueError`` where the token is of another version than what is on disk."""
        self.under_way.check()
        if _version(token) != self._version:
            raise self.under_way.stale()

    def fetch(self, name: str, sharding: Sharding, rows: Range | None = None) -> Future[jax.Array]:
        """The leaf in host memory, or some ranges of it, being read, once what is being written of it is there."""
        return self.under_way.fetch(name, sharding, rows)

    def put(self, name: str, x: jax.Array, rows: Range | None = None) -> Future[None]:
        """Its next value, or that of some ranges, being written once it is there."""
        return self.under_way.put(name, x, rows)

    def advance(self) -> Any:
        """The token of the next version, all of whose leaves have been put; an error in all processes where something
        failed in one."""
        self.under_way.advance(self._run, self._version)
        self._version = (self._version + 1) % VERSIONS
        return self._token()

    def array(self, name: str, token: Any) -> np.ndarray[Any, Any]:
        """A leaf's values, which are read now; raises for a token of another version."""
        if isinstance(token, Tracer):
            raise TypeError("disk: a leaf on disk cannot be read in a trace.")
        parts = self._as_of(name, token)
        all_of_it = box_of_shape(self.under_way.leaf(name).shape)
        if not covered(all_of_it, [box for box, _ in parts]):
            raise ValueError(
                f"disk: {name} is divided between processes, and this one has a part of it. Fix: jo.to_device(leaf), "
                "in all processes, gives the leaf divided."
            )
        return gathered(parts, all_of_it)

    def sharded(self, name: str, token: Any, sharding: Sharding) -> jax.Array:
        """The same, divided between processes; all must ask."""
        return assembled(self._as_of(name, token), sharding, self.under_way.leaf(name).shape)

    def _as_of(self, name: str, token: Any) -> Parts:
        of_commit = _version(token) == self._committed
        if not of_commit:
            self.check(token)
        found = self.under_way.parts(name, aligned, of_commit)  # whoever asks may keep it
        if not of_commit or _version(token) != self._committed:  # else an update or a commit began meanwhile
            self.check(token)
        return found

    def wait(self) -> None:
        """Until all is written; raises what writing has raised."""
        if self._state is not None:
            self._state.wait()

    def close(self) -> None:
        """End all reading and writing, and close the files. What was not committed is lost."""
        state, self._state = self._state, None
        if state is not None:
            state.close()


def _version(token: Any) -> int:
    return token.version if isinstance(token, Token) else int(token)
