"""A state in the files of a store, and what of it is being read and written.

Two threads read and four write; each waits for what it needs, so that whoever drives the step does not. A read waits
for what is being written of its leaf, and what writing has raised is remembered: what is on disk is then of two steps.

Of several processes none stops in the middle of a step, where the others would wait for its part: it goes on, with
zeros for what it could not read, and ``advance``, at the end, is an error in all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._base.on_disk import Place, Range
from jax_offload._base.processes import failed_anywhere, several
from jax_offload._disk.buffers import aligned
from jax_offload._disk.store import Store
from jax_offload._files.extents import Parts, all_of, assembled, boxes_of, check_covered, gathered, parts_of, shape_of
from jax_offload._files.ranges import InFiles, Room, leaves_in, read

_AT_A_TIME, _BYTES_AT_A_TIME = 4, 2**28  # leaves that are being written while files are filled


class UnderWay:
    """The leaves of an opened store, read and written in threads.

    Attributes:
      store: theirs.
      leaves: by their names.
      writing: what writes a group of the store, by the group.
    """

    def __init__(self, store: Store, where: str) -> None:
        self.store, self.leaves = store, leaves_in(store)
        self.writing: dict[int, Future[None]] = {}
        self._where, self._updating = where, False
        self._failed, self._known = "", ""  # what has failed here, and what all processes know of
        # A leaf each: of leaves of 2 and 8 MiB four wrote 1.3 times as fast as two (a loaded machine, interleaved), and
        # read no faster. They start when there is something to do.
        self._reads = ThreadPoolExecutor(2, "jax_offload reads")
        self._writes = ThreadPoolExecutor(4, "jax_offload writes")

    def leaf(self, name: str) -> InFiles:
        if name not in self.leaves:
            raise ValueError(
                f"disk: there is no {name} in {self._where}, the state is another's. Fix: disk.resume(target), "
                "which gives that of the last commit."
            )
        return self.leaves[name]

    def fetch(self, name: str, sharding: Sharding, rows: Range | None) -> Future[jax.Array]:
        """The leaf in host memory, or some ranges of it, being read, once what is being written of it is there."""
        return self._reads.submit(self._read, name, sharding, rows)

    def _read(self, name: str, sharding: Sharding, rows: Range | None) -> jax.Array:
        try:
            parts = self.parts(name, self.store.buffers.take, rows=rows)
        except Exception as error:
            if not several():
                raise
            self._fails(f"reading {name}", error)
            boxes = [box for _, boxes in self.leaf(name).within(rows) for box in boxes]
            parts = [(box, np.zeros(shape_of(box), self.leaf(name).dtype)) for box in boxes]
        return jax.block_until_ready(assembled(parts, sharding, self.leaf(name).shape_of(rows)))

    def parts(self, name: str, room: Room, of_commit: bool = False, rows: Range | None = None) -> Parts:
        """The leaf's values, or those of some ranges, which are read now; ``of_commit``: those of the last commit."""
        leaf = self.leaf(name)
        found = leaf.within(rows)
        for k, _ in found:
            if not of_commit and (writing := self.writing.get(k)) is not None:
                writing.result()
        return read(self.store, found, leaf.dtype, room, of_commit)

    def put(self, name: str, x: jax.Array, rows: Range | None) -> Future[None]:
        """Its next value, or that of some ranges, being written once it is there."""
        self._updating = True
        future = self._writes.submit(self._write, name, [x], rows)
        self.writing |= dict.fromkeys((k for k, _ in self.leaf(name).within(rows)), future)
        return future

    def _write(self, name: str, value: list[jax.Array], rows: Range | None) -> None:
        try:
            # out of the list, which its thread holds a moment longer than whoever waits for it
            parts = parts_of(value.pop())
            groups = self.leaf(name).within(rows)
            for writing in [self.store.write(k, [gathered(parts, box) for box in boxes]) for k, boxes in groups]:
                writing.result()
        except BaseException as error:
            self._fails(f"writing {name}", error)
            raise

    def _fails(self, doing: str, error: BaseException) -> None:
        self._failed = self._failed or f"{doing} raised {type(error).__name__}: {error}"

    def advance(self, run: str, number: int) -> None:
        """All leaves of version ``number`` of the run have been put.

        Raises:
          ValueError: something has failed until now, in this process or another.
        """
        if failed := failed_anywhere(self._failed, run, number):
            self._known = "; ".join(f"in process {k} {why}" if several() else why for k, why in sorted(failed.items()))
        else:
            self._updating = False
        self.check()

    def check(self) -> None:
        """Raises ``ValueError`` where an update did not end. Of several processes what failed in one is of no account
        until all know it: else this one would leave the next step to the others."""
        why = self._known if several() else self._failed
        if why or self._updating:
            raise ValueError(
                f"disk: an update of the state in {self._where} did not end, {why or 'something raised in it'}, and "
                "what is on disk is of two steps. Nothing of the last commit is lost. Fix: disk.resume(target), which "
                "goes back to it."
            )

    def stale(self) -> ValueError:
        """What is wrong with a state of another version than what is on disk."""
        step = self.store.step
        back = "" if step is None else f"; disk.resume(target) goes back to the last commit, step {step}"
        return ValueError(
            f"disk: the state is not the one that is in {self._where}: it is of an earlier step, which has been "
            "written over, or something has computed with it. Fix: hand on the state that the last step returned"
            f"{back}."
        )

    def wait(self) -> None:
        """Until all is written; raises what writing has raised."""
        for future in list(self.writing.values()):
            future.result()

    def close(self) -> None:
        """Ends all reading and writing, and closes the files. What was not committed is lost."""
        self._reads.shutdown()
        self._writes.shutdown()
        self.store.close()


def written_in_turn(
    put: Callable[[str, Any], Future[None]], leaves: Sequence[Place], values: Iterable[Any]
) -> None:  # fmt: skip
    """Leaves of new files, of values that come one after the other: few of them are in memory at a time."""
    writing: deque[tuple[int, Future[None]]] = deque()
    for leaf, x in zip(leaves, values, strict=True):
        writing.append((x.nbytes, put(leaf.name, x)))
        del x
        while len(writing) >= _AT_A_TIME or sum(nbytes for nbytes, _ in writing) > _BYTES_AT_A_TIME:
            writing.popleft()[1].result()
    for _, each in writing:
        each.result()


def of_commit(store: Store, name: str, leaf: InFiles, sharding: Sharding) -> Any:
    """A leaf of the last commit where the sharding says, in memory of its own."""
    check_covered(name, boxes_of(sharding, leaf.shape), leaf.all_boxes)
    parts = read(store, leaf.within(), leaf.dtype, aligned, True)
    return all_of(parts) if sharding.is_fully_addressable else assembled(parts, sharding, leaf.shape)
