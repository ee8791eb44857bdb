"""What a state on disk takes, as ``_drive/files.py`` moves it: bytes, and a model of the time.

Gradients first; then the state comes group by group, from disk over host memory to the device and back. While
gradients are made the first groups are read, and the last ones of the step before are written. All else is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax_offload._analysis.drives import Drive
from jax_offload._analysis.on_cores import grouped
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._drive.files import DEPTH
from jax_offload._drive.stages import GROUP_BYTES
from jax_offload._emit.region import Update
from jax_offload._placement import Leaf
from jax_offload._plan.plan import Planned

# Whoever drives the step goes on to the next group until it waits for the first that is written, which waits for the
# gradients: with so many groups being written, and so many more being read.
AHEAD = 2 * DEPTH + 1
# Groups in host memory at a time: one more, which jax lets go in its next call.
HELD = AHEAD + 1
# Groups that are still being written when a step has been driven.
BEHIND = DEPTH + 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Bytes of one program's part of the state: read from disk, written to it, and on the device at a time."""

    read: int
    written: int
    window: int


@dataclasses.dataclass(frozen=True)
class Files:
    """What a step reads and writes, in its order."""

    groups: tuple[Group, ...] = ()

    @property
    def read(self) -> int:
        return sum(group.read for group in self.groups)

    @property
    def written(self) -> int:
        return sum(group.written for group in self.groups)

    @property
    def window(self) -> int:
        """Of state on the device at a time: programs run one after the other."""
        return max((group.window for group in self.groups), default=0)

    @property
    def buffers(self) -> int:
        """Of host memory for what is under way, at most: as many groups are being read, or wait, or are written."""
        sizes = [max(group.read, group.written) for group in self.groups]
        return max((sum(sizes[k : k + HELD]) for k in range(len(sizes))), default=0)

    def seconds(self, drive: Drive, drives: int) -> float:
        """Of reading and writing all of it."""
        return drive.seconds(self.read, self.written) / drives

    def hidden(self, drive: Drive, drives: int, compute: float) -> float:
        """Of that, what goes on while gradients are made, in ``compute`` seconds."""
        ahead = sum(group.read for group in self.groups[:AHEAD])
        behind = sum(group.written for group in self.groups[-BEHIND:])
        return min(compute, drive.seconds(ahead, behind) / drives)


NO_FILES = Files()


def files_in(updates: Iterable[Update]) -> Files:
    """Of a step's updates, by their plans."""
    return Files(tuple(
        _group(group, update)
        for update in updates if update.on_disk for each in update.plan.passes for group in grouped(each.slices)
    ))  # fmt: skip


def _group(planned: Sequence[Planned], update: Update) -> Group:
    there, old = update.on_disk, update.next_values
    shards = {v: n for p in planned for v, n in p.slice.shards.items()}
    read = {v for p in planned for v in p.slice.loads if v in there}
    # what is handed on as it was is not written
    written = {v: old[v] for p in planned for v in p.slice.stores if old.get(v) in there and v not in read}

    def own(v: Var, divided_as: Var) -> int:
        return nbytes(v.aval) // math.prod(shards.get(divided_as, ()))

    window = sum(p.bytes_at_once for p in planned)
    return Group(sum(own(v, v) for v in read), sum(own(v, of) for v, of in written.items()), window)


def files_by_leaves(leaves: Iterable[Leaf]) -> Files:
    """The same of a placement alone: parameter by parameter, each with all of its leaves."""
    sizes: dict[object, int] = {}
    for leaf in sorted((leaf for leaf in leaves if leaf.disk), key=lambda leaf: leaf.rank):
        key = leaf.path if leaf.owner is None else leaf.owner
        sizes[key] = sizes.get(key, 0) + leaf.shard_bytes
    groups: list[int] = []
    for size in sizes.values():
        if groups and groups[-1] < GROUP_BYTES:
            groups[-1] += size
        else:
            groups.append(size)
    return Files(tuple(Group(size, size, size) for size in groups))
