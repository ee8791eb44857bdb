"""The options and the plan of an update, as values: what to load, when, how, and through which window.

Deciding makes the plan (``decide``), emitting follows it (``_emit``), and ``placement`` prints it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax.sharding import NamedSharding, Sharding

from jax_offload._program.arrays import leaves_with_paths, names_of, nbytes
from jax_offload._program.jaxprs import Aval, Var
from jax_offload._program.memory import Layouts, Shardings, is_host_aval, same_sharding, typed_sharding
from jax_offload._program.primitives import Home
from jax_offload._program.rules import Dependent, Dim, Partial, Rows, Where, chunked_dims, rows_like
from jax_offload._program.slices import Slice

# ---- the options of an ``offload`` about streaming, and the order of the leaves


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an ``offload`` about streaming, and the facts that it has seen.

    Attributes:
      window: its argument.
      shardings: the known shardings of parameters, by path.
      partitions: the gradients' shardings, by the parameters' paths, where the state is divided further (ZeRO-1).
      on_cores: the numbers of the state's leaves that are updated where they are, by the host's cores.
      on_disk: the numbers of the leaves that are read from disk for the update.
      remembered: the paths of the parameters whose sharding is known from an earlier ``init`` alone.
      unknown: the paths of the parameters that may be divided between devices in an unknown way.
      home: the facts about the state's memory.
    """

    window: int | None = None
    shardings: Shardings = dataclasses.field(default_factory=dict[str, Sharding])
    partitions: Layouts = dataclasses.field(default_factory=dict[str, NamedSharding])
    on_cores: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    remembered: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    home: Home | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def replicated(self) -> Shardings:
        """The shardings that parameters have themselves where their state is divided further."""
        return {path: self.shardings[path] for path in self.partitions}


def merged(options: Sequence[Options]) -> Options:
    """Merge the facts that several offloads know about the parameters."""
    return Options(
        shardings={path: s for each in options for path, s in each.shardings.items()},
        partitions={path: s for each in options for path, s in each.partitions.items()},
        remembered=frozenset[str]().union(*(each.remembered for each in options)),
        unknown=frozenset[str]().union(*(each.unknown for each in options)),
    )


def backward_ranks(params: Any, produced: Sequence[int] | None = None) -> list[int]:
    """Return the place of every parameter in the backward pass, as the trace shows it, or else as the paths suggest.

    The guess is the natural order of the paths, reversed. ``layers_10`` comes before ``layers_2``: the last layer's
    gradient appears first.

    Args:
      params: arrays or abstract values.
      produced: for every parameter the time at which its gradient was made, if the trace tells it.
    """
    names = names_of([path for path, _ in leaves_with_paths(params)])

    def natural(i: int) -> list[str | int]:
        return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", names[i]))]

    order = sorted(range(len(names)), key=natural, reverse=True)
    if produced and len(produced) == len(names):
        order.sort(key=produced.__getitem__)
    return sorted(range(len(names)), key=order.__getitem__)


SUBLANES = 8  # rows of a tile in a TPU's memory, of whatever dtype


def tiles(rows: int, axis: int, ndim: int) -> tuple[tuple[int, int], ...]:
    """The ranges of rows that are written into host memory at a time: whole tiles, and less than one.

    ``Updating the sublane dimension across multiple lane chunks is only supported ...``, libtpu 0.0.52 says of 12 rows.
    """
    full = rows - rows % SUBLANES if axis == ndim - 2 else rows
    return ((0, rows),) if full in (0, rows) else ((0, full), (full, rows))


@dataclasses.dataclass(frozen=True)
class RowWise:
    """How a slice runs on some rows of its operands: in a loop over chunks, in a scan, or on rows from disk.

    Attributes:
      shape: the shape of the leading leaf.
      axis: the axis of the rows in that leaf.
      dims: where the rows of each operand of the slice lie; ``None`` for an operand without rows, passed whole.
      out_dims: where the rows of each result lie; the chunks' results of a ``Partial`` are combined.
      buffers: the operand whose buffer each result overwrites row by row; ``None`` for a new buffer.
      shards: the number of parts into which devices divide the axis; a chunk takes the same rows of each part.
      rows: the number of rows of each shard in a chunk.
      scan: describes the step's scan that runs one row in each iteration; empty if the slice runs in chunks.
    """

    shape: tuple[int, ...]
    axis: int
    dims: tuple[Dim, ...]
    out_dims: tuple[Dim, ...]
    buffers: tuple[Var | None, ...]
    shards: int = 1
    rows: int = 1
    scan: str = ""

    @property
    def where(self) -> Where:
        """The axis, for the rules of equations."""
        return Where(self.shape[self.axis], self.shape, self.axis, self.shards)

    def __str__(self) -> str:
        size = self.shape[self.axis]
        if self.scan:
            return f"{size} rows, in the scan {self.scan}"
        return f"{math.ceil(size // self.shards / self.rows)} chunks of axis {self.axis}"


WHOLE, ON_CORES = "whole", "updated on the host's cores"
Transfer = RowWise | str  # how a slice's host leaves move; a string unless they move by rows


@dataclasses.dataclass(frozen=True)
class Window:
    """The number of bytes of the state on one device at a time while it streams, and the reason for it.

    Attributes:
      own_loop: why all slices run in a loop of their own, once the backward pass is over; empty where they do not.
      leaf: the path of the first leaf that streams through it, if known.
    """

    nbytes: int
    why: str
    own_loop: str = ""
    leaf: str = ""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A slice, how its host leaves move, and the window of the ``offload`` that they belong to.

    Attributes:
      token: its completion token: results that exist once it has run.
      exposed: why nothing hides its transfers, where that is known.
    """

    slice: Slice
    transfer: Transfer
    window: Window
    token: tuple[Var, ...] = ()
    exposed: str = ""

    @property
    def in_chunks(self) -> bool:
        return isinstance(self.transfer, RowWise) and not self.transfer.scan

    @property
    def on_cores(self) -> bool:
        return self.transfer == ON_CORES

    @property
    def how(self) -> RowWise:
        """How it runs on rows, if it does."""
        assert isinstance(self.transfer, RowWise), self.transfer
        return self.transfer

    @property
    def bytes_at_once(self) -> int:
        """Bytes of host leaves on one device while it runs."""
        by_rows = isinstance(self.transfer, RowWise)
        return self.window.nbytes if by_rows else 0 if self.on_cores else self.slice.loaded_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Gate:
    """A point where ``held`` (host leaves, or the value with which a pass continues) waits for ``waits_for``."""

    held: tuple[Var, ...]
    waits_for: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule: slices and gates in the order in which they run.

    Attributes:
      prelude: the equations that run first and load nothing, as one slice.
      first: the prelude in parts, and the gates by which gradients take turns.
      order: the slices with their transfers, and the gates that hold their loads.
      carried: where ``order`` runs in a loop of its own, out of sight of XLA's scheduler: result -> the operand whose
        buffer it takes in that loop.
    """

    prelude: Slice
    first: tuple[Slice | Gate, ...]
    order: tuple[Planned | Gate, ...]
    carried: Mapping[Var, Var] | None = None

    @property
    def slices(self) -> list[Planned]:
        """The slices, in the order of loading."""
        return [p for p in self.order if isinstance(p, Planned)]

    @property
    def in_turn(self) -> str:
        """How the gradients that the prelude uses take turns, in words; empty if they do not."""
        waiting = sum(isinstance(part, Gate) for part in self.first)
        return f"uses gradients in turn, {waiting} of them once the one before has been" if waiting else ""


# ---- whether a slice streams in chunks, along which axis and of how many rows, and in which groups from disk
#
# A leaf on disk is divided when its files are made, before there is a plan: into as many rows as make a group,
# whatever the optimizer. A slice whose rows stay apart is then read, updated and written group by group; any other
# takes all rows.

# Bytes of one parameter's leaves that are a part, at least, and less than twice that: a group (see `_host/stages`).
PART_BYTES = 2**26
_OTHER_SHAPES = "leaves of different shapes depend on each other"


def transfer_of(s: Slice, reuse: Mapping[Var, Var], window: int) -> Transfer:
    """Plan a slice in chunks, or say why it moves whole; ``in_chunks`` describes the arguments."""
    try:
        return in_chunks(s, reuse, window)
    except Dependent as why:
        return f"{WHOLE}: {why}"


def in_chunks(s: Slice, reuse: Mapping[Var, Var], window: int) -> RowWise:
    """Find the axis along which a slice goes in chunks, with at most ``window`` bytes of host leaves in flight.

    Args:
      s: the slice.
      reuse: result -> operand of the same type whose buffer it may take, because it is that operand's next value.
      window: bytes on one device.

    Raises:
      Dependent: its leaves are loaded whole; the message says why.
    """
    if not all(v in reuse for v in s.stores):
        raise Dependent("it makes a leaf that was not in the state before")
    if not all(is_host_aval(reuse[v].aval) for v in s.stores):
        raise Dependent("it moves to the host in this step")  # it has no host buffer yet to write rows into
    into = buffers(s, reuse)
    if any(old is None and is_host_aval(v.aval) for v, old in zip(s.outputs, into, strict=True)):
        raise Dependent("its next value is of another type or sharding, or not its own")
    lead, why = max((v.aval for v in s.loads), key=nbytes), Dependent("it is smaller than a tile")
    for axis in range(max(1, lead.ndim - 1)):
        try:
            if found := _along(axis, lead, s, into, window):
                return found
        except Dependent as dependent:
            why = dependent
    raise why


def _along(axis: int, lead: Aval, s: Slice, into: Sequence[Var | None], window: int) -> RowWise | None:
    """Plan chunks along an axis of the leading leaf; return ``None`` if one chunk of whole tiles takes all rows.

    A chunk of a sharded axis is the same rows of every shard, so no device needs another's rows.
    """
    size = lead.shape[axis]
    dims = [rows_like(v.aval, lead.shape, axis) for v in s.inputs]
    parts = [s.shards[v][d.dim] for v, d in zip(s.inputs, dims, strict=True) if d is not None and v in s.shards]
    shards = max(parts, default=1)
    if size % shards or any(shards % n for n in parts):
        raise Dependent(f"the shards of axis {axis} do not match")
    rows = _rows(s, lead.ndim - 1 - axis, size // shards, window)
    if rows == size // shards:
        return None
    if any(d is None and is_host_aval(v.aval) for v, d in zip(s.inputs, dims, strict=True)):
        raise Dependent(_OTHER_SHAPES)
    made = chunked_dims(s.core.jaxpr, dims, Where(size, lead.shape, axis, shards))
    for v, d in zip(s.outputs, made, strict=True):
        if d is None or (d.per_row > 1 if isinstance(d, Rows) else v in s.stores):
            raise Dependent("a result has no such axis")
    into = [None if isinstance(d, Partial) else old for old, d in zip(into, made, strict=True)]
    return RowWise(lead.shape, axis, tuple(dims), tuple(made), tuple(into), shards, rows)


def _rows(s: Slice, minor_dims: int, size: int, window: int) -> int:
    """The number of rows in a chunk: two fit the window, all are about equal, and each ends where a tile ends."""
    tile, pins = tile_of(minor_dims), s.pins
    total = max(s.decoded_bytes, sum(nbytes(v.aval) for v in s.outputs if v in pins))
    fitting = max(1, window // 2 * size // total)
    chunks = math.ceil(size / fitting)
    rows = math.ceil(size / chunks)
    return min(size, max(1, rows // tile) * tile)


def tile_of(minor_dims: int) -> int:
    """The number of rows that make a tile of the accelerator: a TPU tiles an array's last two dimensions."""
    return {0: 1024, 1: 32}.get(minor_dims, 1)


def buffers(s: Slice, reuse: Mapping[Var, Var]) -> list[Var | None]:
    """The operand whose buffer each result overwrites, row by row as the rows are used; ``None``: a new buffer."""
    found, free = list[Var | None](), {*s.inputs}
    for v in s.outputs:
        old = reuse.get(v)
        found.append(old if old in free and same_type(old.aval, v.aval) else None)
        free.discard(found[-1])
    return found


def same_type(a: Aval, b: Aval) -> bool:
    """Whether a result of one type can take the buffer of an operand of the other."""
    if (a.shape, a.dtype, is_host_aval(a)) != (b.shape, b.dtype, is_host_aval(b)):
        return False
    ours, theirs = typed_sharding(a), typed_sharding(b)
    return ours is theirs if ours is None or theirs is None else same_sharding(ours, theirs)


# ---- groups of rows from disk


def rows_in_part(row_bytes: int, ndim: int, size: int) -> int:
    """The number of rows in a part of leaves with ``size`` rows of ``row_bytes`` bytes together; 0: all of them.

    A power of two, so that parts of leaves with longer rows end where those with shorter ones do.
    """
    rows = tile_of(ndim - 1)
    while rows * row_bytes < PART_BYTES and rows < size:
        rows *= 2
    return rows if rows < size else 0


def from_disk(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> str:
    """Describe how a slice comes from files made for it; ``in_parts`` describes the arguments."""
    loads, said = p.slice.loads, str(p.transfer)
    size, ndim = loads[0].aval.shape[0] if loads else 1, max((v.aval.ndim for v in loads), default=1)
    try:
        if any(v.aval.shape[:1] != (size,) for v in loads):
            raise Dependent(_OTHER_SHAPES)
        rows = rows_in_part(sum(nbytes(v.aval) // size for v in loads), ndim, size)
        if not rows:
            return said
        how = in_parts(p, reuse, there)
    except Dependent as why:
        return f"{said}, from disk as a whole{' too' if said.endswith(str(why)) else f': {why}'}"
    rows = max(1, rows // how.shards) * how.shards
    return f"from disk in {math.ceil(size / rows)} parts of {min(rows, size)} rows"


def in_parts(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> RowWise:
    """Plan how a slice runs on some rows of its leaves, which are all on disk.

    Args:
      p: the slice.
      reuse: result -> the operand whose next value it is.
      there: the operands on disk.

    Raises:
      Dependent: it takes its leaves whole; the message says why.
    """
    s = p.slice
    if s.jaxpr.effects:
        raise Dependent("it has an effect")
    if any(v not in there for v in [*s.loads, *(reuse[v] for v in s.stores if v in reuse)]):
        raise Dependent("not all of its leaves are on disk")
    how = in_chunks(s, reuse, 1)
    if how.axis or any(d != Rows(0) for v, d in zip(s.outputs, how.out_dims, strict=True) if v in s.stores):
        raise Dependent("rows of its first axis depend on each other")
    return dataclasses.replace(how, rows=_rows(s, len(how.shape) - 1, how.shape[0] // how.shards, p.window.nbytes))
