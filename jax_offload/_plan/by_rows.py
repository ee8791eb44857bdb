"""Which slices of a state on disk go through in parts, some rows of their leaves at a time.

A leaf is divided when its files are made, before there is a plan: into as many rows as make a group, whatever the
optimizer. A slice whose rows stay apart is then read, updated and written part by part; any other takes all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._plan.plan import Chunked, Planned, Whole
from jax_offload._plan.rules import Rows
from jax_offload._plan.transfers import tile_of, transfer_of

# Bytes of one parameter's leaves that are a part, at least, and less than twice that: a group (see `_drive/stages`).
PART_BYTES = 2**26


def rows_in_part(row_bytes: int, ndim: int, size: int) -> int:
    """How many rows are a part, of leaves of which a row has so many bytes together: of ``size`` rows; 0: all of them.

    A power of two, so that parts of leaves with longer rows end where those with shorter ones do.
    """
    rows = tile_of(ndim - 1)
    while rows * row_bytes < PART_BYTES and rows < size:
        rows *= 2
    return rows if rows < size else 0


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a slice comes from disk: so many rows at a time.

    Attributes:
      sizes: rows of the parts; one of all rows, where it comes as a whole.
      why: it does, though a part would be smaller.
    """

    sizes: tuple[int, ...]
    why: str = ""

    def __str__(self) -> str:
        if len(self.sizes) > 1:
            return f"from disk in {len(self.sizes)} parts of {self.sizes[0]} rows"
        return f"from disk as a whole: {self.why}" if self.why else ""


def parts_of(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> Parts:
    """The parts of a slice from files that are made for it; arguments as those of ``in_parts``."""
    loads = p.slice.loads
    size = loads[0].aval.shape[0] if loads else 1
    if any(v.aval.shape[:1] != (size,) for v in loads):
        return Parts((size,), "leaves of different shapes depend on each other")
    rows = rows_in_part(sum(nbytes(v.aval) // size for v in loads), max((v.aval.ndim for v in loads), default=1), size)
    how = in_parts(p, reuse, there) if rows else None
    if isinstance(how, Chunked):
        rows = max(1, rows // how.shards) * how.shards
        return Parts(tuple(min(rows, size - begin) for begin in range(0, size, rows)))
    return Parts((size,), "" if how is None else how.reason)


def in_parts(p: Planned, reuse: Mapping[Var, Var], there: Set[Var]) -> Chunked | Whole:
    """How a slice would run on some rows of its leaves, all of which are on disk; or why it takes them whole.

    Args:
      p: the slice.
      reuse: result -> operand that it is the next value of.
      there: operands that are on disk.
    """
    s = p.slice
    if s.jaxpr.effects:
        return Whole("it has an effect")
    if any(v not in there for v in [*s.loads, *(reuse[v] for v in s.stores if v in reuse)]):
        return Whole("not all of its leaves are on disk")
    how = transfer_of(s, reuse, 1)
    if not isinstance(how, Chunked):
        return how if isinstance(how, Whole) else Whole()
    if how.axis or any(d != Rows(0) for v, d in zip(s.outputs, how.out_dims, strict=True) if v in s.stores):
        return Whole("rows of its first axis depend on each other")
    return how
