"""A state in the files of a store, and what of it is being read and written.

Two threads read and four write; each waits for what it needs, so that whoever drives the step does not. A read waits
for what is being written of its leaf, and what writing has raised is remembered: what is on disk is then of two steps.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Sharding

from jax_offload._base.on_disk import Range
from jax_offload._disk.buffers import aligned
from jax_offload._disk.store import Store
from jax_offload._files.extents import Parts, all_of, assembled, boxes_of, check_covered, gathered, parts_of
from jax_offload._files.ranges import InFiles, Room, leaves_in, read


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
        self._where, self._updating, self._failed = where, False, ""
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
        parts = self.parts(name, self.store.buffers.take, rows=rows)
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
            self._failed = f"writing {name} raised {type(error).__name__}: {error}"
            raise

    def advance(self) -> None:
        """All leaves of the next version have been put."""
        self._updating = False

    @property
    def broken_off(self) -> str:
        """Why an update did not end; empty where each has."""
        return self._failed or ("something raised in it" if self._updating else "")

    def wait(self) -> None:
        """Until all is written; raises what writing has raised."""
        for future in list(self.writing.values()):
            future.result()

    def close(self) -> None:
        """Ends all reading and writing, and closes the files. What was not committed is lost."""
        self._reads.shutdown()
        self._writes.shutdown()
        self.store.close()


def of_commit(store: Store, name: str, leaf: InFiles, sharding: Sharding) -> Any:
    """A leaf of the last commit where the sharding says, in memory of its own."""
    check_covered(name, boxes_of(sharding, leaf.shape), leaf.all_boxes)
    parts = read(store, leaf.within(), leaf.dtype, aligned, True)
    return all_of(parts) if sharding.is_fully_addressable else assembled(parts, sharding, leaf.shape)
