"""Which slices of a state on disk go through in parts, some rows of their leaves at a time.

A leaf is divided when its files are made, before there is a plan: into as many rows as make a group, whatever the
optimizer. A slice whose rows stay apart is then read, updated and written part by part; any other takes all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from jax_offload._base.jaxprs import Var
from jax_offload._plan.chunk_rules import Rows
from jax_offload._plan.plan import Chunked, Planned, Whole
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
