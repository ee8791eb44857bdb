"""What a state on disk takes, as ``_drive/moving.py`` moves it: bytes, and a model of the time.

Gradients first; then the state comes group by group, from disk over host memory to the device and back. While
gradients are made the first groups are read, and the last ones of the step before are written; beside later programs of
the pass, where it has several, the next ones. All else is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence, Set

from jax_offload._analysis.drives import Drive
from jax_offload._analysis.programs import ONE, Programs
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.moving import DEPTH, beside
from jax_offload._drive.stages import GROUP_BYTES
from jax_offload._emit.region import Update
from jax_offload._placement.placement import Leaf
from jax_offload._plan.by_rows import parts_of, rows_in_part
from jax_offload._plan.plan import Planned

# Whoever drives the step goes on to the next group until it waits for the first that is written, which waits for the
# gradients: with so many groups being written, and so many more being read; large ones are fewer (`moving.beside`).
# These are those of a disk that says no other depth.
AHEAD = 2 * DEPTH + 1
# Groups in host memory at a time: one more, which jax lets go in its next call.
HELD = AHEAD + 1
# Groups that are still being written when a step has been driven.
BEHIND = DEPTH + 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Bytes of one program's part of the state, of one device: read from disk, written to it, and on the device at a
    time.

    ``loaded``: that it reads in all, from host memory too. ``all_loaded``: that all devices do.
    """

    read: int
    written: int
    window: int
    loaded: int
    all_loaded: int

    def __add__(self, other: Group) -> Group:
        return Group(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def of_all(self, nbytes: int) -> int:
        """Of bytes of one device those of all."""
        return nbytes * self.all_loaded // max(1, self.loaded)

    def split(self, sizes: Sequence[int], window: int) -> list[Group]:
        """Of so many rows each, all or a window of which are on the device at a time."""
        if len(sizes) == 1:
            return [self]
        shares = ([n * k // sum(sizes) for k in sizes] for n in (self.read, self.written, self.loaded, self.all_loaded))
        return [Group(a, b, min(c, window), c, d) for a, b, c, d in zip(*shares, strict=True)]


@dataclasses.dataclass(frozen=True)
class Files:
    """What a step reads and writes of one device, in its order.

    ``per_host``: how many times as much the files of its host are, whose drives its devices share: a part that several
    have is there once. ``depth``: that of the disk.
    """

    groups: tuple[Group, ...] = ()
    per_host: float = 1.0
    depth: int = DEPTH

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
        return max((sum(sizes[max(0, k - 1) : self._ahead_of(k)]) for k in range(len(sizes))), default=0)

    def _ahead_of(self, first: int) -> int:
        """Up to which group all are read, or have been, while none is written from this one on."""
        last = first
        while last + 1 < len(self.groups) and self._behind(last + 1) <= first:
            last += 1
        following = self.groups[last + 1 : last + 1 + self.depth]
        return last + 1 + beside((group.of_all(group.read) for group in following), self.depth)

    def _behind(self, number: int) -> int:
        """The first of the groups that are still being written when this one runs."""
        before = self.groups[max(0, number - self.depth) : number]
        return number - beside((group.of_all(group.written) for group in before[::-1]), self.depth)

    def seconds(self, drive: Drive, drives: int) -> float:
        """Of reading and writing all of it."""
        return self.per_host * drive.seconds(self.read, self.written) / drives

    def hidden(self, drive: Drive, drives: int, compute: float, cut: Programs = ONE) -> float:
        """Of that, what goes on while gradients are made, in ``compute`` seconds: beside each program of the pass the
        next groups are read, and then those written that are through, at first the last ones of the step before."""
        of_all = self.per_host / drives
        reads = [of_all * drive.seconds(group.read, 0) for group in self.groups]
        writes = [of_all * drive.seconds(0, group.written) for group in self.groups]
        hidden = read = written = 0.0
        through, to_write = 0, sum(writes[self._behind(len(self.groups) - 1) :])
        for share, groups in zip(cut.shares, cut.behind(len(self.groups)), strict=True):
            reading = min(share * compute, sum(reads[: self._ahead_of(through)]) - read)
            writing = min(share * compute - reading, min(to_write, sum(writes)) - written)
            hidden, written = hidden + reading + writing, written + writing
            to_write += sum(writes[through : through + groups])
            through += groups
            read = max(read + reading, sum(reads[:through]))  # what has to be there is waited for
        return hidden


NO_FILES = Files()


def depth_of(leaves: Iterable[Leaf]) -> int:
    """That of the disk on which some of the leaves are."""
    return max((getattr(leaf.place.home, "depth", DEPTH) for leaf in leaves if leaf.place is not None), default=DEPTH)


def files_in(updates: Iterable[Update], on_a_host: int = 1, *, all_away: bool = False) -> Files:
    """Of a step's updates, by their plans. ``on_a_host``: how many devices are. ``all_away``: as if all that is in host
    memory were on disk."""
    found: list[Group] = []
    parts: list[tuple[int, int]] = []
    for update in updates:
        there = {v for v in update.operands if is_host_aval(v.aval)} if all_away else update.on_disk
        if there:
            passes = update.plan.passes
            found += (g for each in passes for g in _grouped(_pieces(p, update, there) for p in each.slices))
            shards = {v: math.prod(p.slice.shards.get(v, ())) for p in update.planned for v in p.slice.loads}
            parts += ((nbytes(v.aval) // n, n) for v, n in shards.items() if v in there)
    return Files(tuple(found), _per_host(parts, on_a_host))


def _per_host(parts: Sequence[tuple[int, int]], on_a_host: int) -> float:
    """Of leaves, by the bytes of a shard and how many shards there are: what a host's devices have, by what one has."""
    own = sum(nbytes for nbytes, _ in parts)
    return of_a_host(parts, on_a_host) / own if own else 1.0


def of_a_host(parts: Iterable[tuple[int, int]], on_a_host: int) -> int:
    """Bytes that a host has of arrays, each part once, by the bytes of a shard and how many shards there are."""
    return sum(nbytes * min(shards, on_a_host) for nbytes, shards in parts)


def _grouped(slices: Iterable[Iterable[Group]]) -> Iterator[Group]:
    """Pieces as the programs that they are, see `_drive/stages`."""
    last: Group | None = None
    for piece in (piece for pieces in slices for piece in pieces):
        last = piece if last is None else last + piece
        if last.all_loaded >= GROUP_BYTES:
            yield last
            last = None
    yield from [] if last is None else [last]


def _pieces(p: Planned, update: Update, there: Set[Var]) -> list[Group]:
    """A slice, or where its rows stay apart some rows of it each."""
    old, s = update.next_values, p.slice
    read = {v for v in s.loads if v in there}
    # what is handed on as it was is not written
    written = {v: old[v] for v in s.stores if old.get(v) in there and v not in read}

    def own(v: Var, divided_as: Var) -> int:
        return nbytes(v.aval) // math.prod(s.shards.get(divided_as, ()))

    undivided = Group(
        sum(own(v, v) for v in read),
        sum(own(v, of) for v, of in written.items()),
        p.bytes_at_once,
        s.loaded_bytes,
        sum(nbytes(v.aval) for v in s.loads),
    )
    return undivided.split(parts_of(p, old, there).sizes, p.window.nbytes)


def files_by_leaves(leaves: Iterable[Leaf], on_a_host: int = 1) -> Files:
    """The same of a placement alone: parameter by parameter, each with all of its leaves, as if rows stayed apart."""
    together: dict[object, list[Leaf]] = {}
    there = sorted((leaf for leaf in leaves if leaf.disk), key=lambda leaf: leaf.rank)
    for leaf in there:
        together.setdefault(leaf.path if leaf.owner is None else leaf.owner, []).append(leaf)
    parts = [(leaf.shard_bytes, leaf.nbytes // max(1, leaf.shard_bytes)) for leaf in there]
    groups = tuple(_grouped(map(_by_leaves, together.values())))
    return Files(groups, _per_host(parts, on_a_host), depth_of(there))


def _by_leaves(leaves: Sequence[Leaf]) -> list[Group]:
    nbytes, of_all = (sum(sizes) for sizes in zip(*((leaf.shard_bytes, leaf.nbytes) for leaf in leaves), strict=True))
    sizes = {leaf.shape[0] for leaf in leaves}
    undivided, size = Group(nbytes, nbytes, nbytes, nbytes, of_all), max(sizes)
    rows = rows_in_part(of_all // size, len(leaves[0].shape), size)
    parts = [min(rows, size - begin) for begin in range(0, size, rows)] if rows and len(sizes) == 1 else [size]
    return undivided.split(parts, nbytes)
