"""The plan of an update, as a value: what to load, when, how, and through which window. Deciding makes it
(``decide``), emitting follows it (``_emit``), and ``placement`` prints it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax_offload._program.jaxprs import Var
from jax_offload._program.rules import Dim, Where
from jax_offload._program.slices import Slice

SUBLANES = 8  # rows of a tile in a TPU's memory, of whatever dtype


def tiles(rows: int, axis: int, ndim: int) -> tuple[tuple[int, int], ...]:
    """The ranges of rows that are written into host memory at a time: whole tiles, and less than one.

    ``Updating the sublane dimension across multiple lane chunks is only supported ...``, libtpu 0.0.52 says of 12 rows.
    """
    full = rows - rows % SUBLANES if axis == ndim - 2 else rows
    return ((0, rows),) if full in (0, rows) else ((0, full), (full, rows))


@dataclasses.dataclass(frozen=True)
class Whole:
    """A slice whose host leaves are loaded whole; ``reason`` says why, if chunks would have been smaller."""

    reason: str = ""

    def __str__(self) -> str:
        return f"whole: {self.reason}" if self.reason else "whole"


@dataclasses.dataclass(frozen=True)
class RowWise:
    """How a slice runs on some rows of its operands: in a loop over chunks, in a scan, or on rows from disk.

    Attributes:
      shape: the shape of the leaf that leads.
      axis: the axis of that leaf along which the rows lie.
      dims: where the rows of each operand of the slice are; ``None``: it has none, and is passed as a whole.
      out_dims: where the rows of each result are; a ``Partial`` is added up.
      buffers: for every result the operand whose buffer it overwrites, row by row; ``None``: a new one.
      shards: into how many parts the axis is divided between devices; the same rows are taken from each.
    """

    shape: tuple[int, ...]
    axis: int
    dims: tuple[Dim, ...]
    out_dims: tuple[Dim, ...]
    buffers: tuple[Var | None, ...]
    shards: int = 1

    @property
    def where(self) -> Where:
        """The axis, for the rules of equations."""
        return Where(self.shape[self.axis], self.shape, self.axis, self.shards)


@dataclasses.dataclass(frozen=True)
class Chunked(RowWise):
    """A slice that runs in a loop over chunks of its leaves; ``rows`` of each shard are a chunk."""

    rows: int = 1

    @property
    def count(self) -> int:
        """The number of chunks."""
        return math.ceil(self.shape[self.axis] // self.shards / self.rows)

    def __str__(self) -> str:
        return f"{self.count} chunks of axis {self.axis}"


@dataclasses.dataclass(frozen=True)
class InIterations(RowWise):
    """A slice that runs inside a scan of the step, a row in each iteration.

    ``ahead``: whether the scan reads the new parameters, or makes the gradients.
    """

    ahead: bool = False

    def __str__(self) -> str:
        where = "that reads the parameters" if self.ahead else "that makes their gradients"
        return f"{self.shape[self.axis]} rows, in the scan {where}"


@dataclasses.dataclass(frozen=True)
class OnCores:
    """A slice whose host leaves stay where they are: the host's cores update them."""

    def __str__(self) -> str:
        return "updated on the host's cores"


Transfer = Whole | Chunked | InIterations | OnCores


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
    """

    slice: Slice
    transfer: Transfer
    window: Window
    token: tuple[Var, ...] = ()

    @property
    def in_chunks(self) -> bool:
        return isinstance(self.transfer, Chunked)

    @property
    def on_cores(self) -> bool:
        return isinstance(self.transfer, OnCores)

    @property
    def how(self) -> RowWise:
        """How it runs on rows, where it does."""
        assert isinstance(self.transfer, RowWise), self.transfer
        return self.transfer

    @property
    def bytes_at_once(self) -> int:
        """Bytes of host leaves on one device while it runs."""
        return self.window.nbytes if self.in_chunks else 0 if self.on_cores else self.slice.loaded_bytes


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
    def in_own_loop(self) -> bool:
        return self.carried is not None

    @property
    def in_turn(self) -> str:
        """How the gradients that the prelude uses take turns, in words; empty where they do not."""
        waiting = sum(isinstance(part, Gate) for part in self.first)
        return f"uses gradients in turn, {waiting} of them once the one before has been" if waiting else ""
