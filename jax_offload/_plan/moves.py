"""What a move is: equations that keep rows apart, and so can run inside a scan, on one row in each iteration.

The results of a scan are stacked: row i is from iteration i. An update that keeps rows apart needs no more of a stacked
gradient than the row of the layer that it updates, so it can run where that row is made (``behind``); then the stack
never exists. Or where the new row is first read (``ahead``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Literal, Scan, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program, Var
from jax_offload._ir.slices import Slice, core, slice_of
from jax_offload._plan.rules import Dependent, Dim, Rows, changes_only_shapes, chunked_dims, rule_of
from jax_offload._plan.transfers import same_type

_NONE: Mapping[Var, Var] = {}


@dataclasses.dataclass(frozen=True)
class Move:
    """Equations that move into a scan: those of the leaves whose gradients are some of its stacked results.

    Attributes:
      slice: its operands are stacked results of the scan, leaves of the state and the parameters, and what is known
        before the scan; its results what the rest of the step reads.
      shape, axis: of a leaf, and the axis of it that counts the iterations.
      dims: for each operand where its rows are.
      out_dims: for each result; a ``Partial`` is summed up.
      buffers: for each result the operand that it is the next value of, and whose rows it overwrites.
      feeds: results that are read, by rows, by the scan itself.
    """

    slice: Slice
    shape: tuple[int, ...]
    axis: int
    dims: tuple[Dim, ...]
    out_dims: tuple[Dim, ...]
    buffers: tuple[Var | None, ...]
    feeds: frozenset[Var] = frozenset()


@dataclasses.dataclass(frozen=True)
class Moves:
    """All that moves into one scan.

    Attributes:
      moves: it, apart where nothing is shared.
      kept: the stacked results that something still needs as a whole.
      eqns: the equations that are gone from where they were, by identity.
    """

    moves: tuple[Move, ...]
    kept: frozenset[Var]
    eqns: frozenset[int]


class Stays(Exception):
    """Why an update does not move."""


def closure(
    eqns: Sequence[Equation],
    wanted: Mapping[Var, Rows | None],
    dims_of: Callable[[Equation, Mapping[Var, Rows | None]], list[Rows | None] | None],
) -> tuple[list[Equation], dict[Var, Rows | None]]:
    """The equations that make the rows of some variables, and of each variable that they need where its rows are.

    Args:
      eqns: of the program.
      wanted: variables, and where their rows are.
      dims_of: of an equation and what is needed so far, where the rows of its operands are; ``None``: it is not taken.
    """
    needed, taken = dict(wanted), list[Equation]()
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars) and (dims := dims_of(eqn, needed)) is not None:
            taken.append(eqn)
            for v, d in zip(eqn.invars, dims, strict=True):
                if not isinstance(v, Literal) and needed.setdefault(v, d) != d:
                    raise Stays("an array is used with its rows in two places")
    return taken[::-1], needed


def move_of(
    program: Program,
    eqns: list[Equation],
    targets: Sequence[Var],
    needed: Mapping[Var, Rows | None],
    scan: Scan,
    next_of: Mapping[Var, Var],
    waiting: Mapping[Var, Var] = _NONE,
) -> Move:
    """The move of some equations, which keep rows apart. ``waiting``: as ``moves_of`` has it.

    Raises:
      Stays, Dependent: they do not.
    """
    s = slice_of(eqns, list(targets), program.debug_info, program.shards)
    dims = tuple(needed[v] for v in s.inputs)
    if any(needed[v] is None for v in s.loads):
        raise Stays("a leaf on the host that has no such rows is needed")
    if not core(s).loads.issuperset(s.loads):
        raise Stays("a branch of its update loads or stores it, and the other does not")
    rows = [(v, d) for v, d in needed.items() if isinstance(d, Rows) and v in program.shards]
    if any(program.shards[v][d.dim] > 1 for v, d in rows):
        raise Stays("its layers are divided between devices, each of which has other ones")
    leaves = [v for v in s.inputs if isinstance(needed[v], Rows) and v not in scan.ys] or list(s.inputs)
    lead = max(leaves, key=lambda v: nbytes(v.aval))
    shape, axis = lead.aval.shape, rows_of(needed[lead]).dim
    out_dims = tuple(chunked_dims(core(s).jaxpr, list(dims), scan.length, shape, axis))
    if any(d is None or (isinstance(d, Rows) and d.per_row > 1) for d in out_dims):
        raise Stays("its rows are merged")
    results, of = {*variables(program.outputs)}, dict(zip(s.inputs, dims, strict=True))
    buffers = _buffers(s, of, out_dims, next_of, results, scan, waiting)
    return Move(s, shape, axis, dims, out_dims, buffers)


def pulled(
    eqn: Equation, needed: Mapping[Var, Rows | None], size: int, own: Set[int] = frozenset()
) -> list[Rows | None] | None:
    """Where the rows of its operands are, if an equation can make the rows that are needed of its results, cheaply.

    Those of ``own`` are not made twice, and may be dear.
    """
    wanted = {v: needed[v] for v in eqn.outvars if v in needed}
    dims = {*wanted.values()}
    cheap = is_cheap(eqn) or id(eqn) in own
    if len(dims) != 1 or None in dims or not cheap or eqn.effects:
        return None
    (dim,) = dims
    assert dim is not None
    shape = next(iter(wanted)).aval.shape
    if eqn.primitive.name == "transpose":
        guess: list[Rows | None] = [Rows(eqn.params["permutation"][dim.dim])]
    else:
        guess = [None if isinstance(v, Literal) else rows_like(v, shape, dim.dim) for v in eqn.invars]
    try:
        out, _ = rule_of(eqn, guess, size, shape, dim.dim)
    except Dependent:
        return None
    return guess if all(d == dim for v, d in zip(eqn.outvars, out, strict=True) if v in wanted) else None


def is_cheap(eqn: Equation) -> bool:
    """Whether an equation may be run twice."""
    name = eqn.primitive.name
    return name in ELEMENTWISE or name == "cond" or changes_only_shapes(name)


def rows_of(dim: Dim) -> Rows:
    assert isinstance(dim, Rows)
    return dim


def rows_like(v: Var, shape: tuple[int, ...], dim: int) -> Rows | None:
    """A guess: that an array which begins like one with rows along ``dim`` has them there too."""
    return Rows(dim) if v.aval.shape[: dim + 1] == shape[: dim + 1] else None


def _buffers(
    s: Slice,
    dims: Mapping[Var, Dim],
    out_dims: Sequence[Dim],
    next_of: Mapping[Var, Var],
    results: Set[Var],
    scan: Scan,
    waiting: Mapping[Var, Var],
) -> tuple[Var | None, ...]:
    """Where each result is written: over the operand that it is the next value of, or what waited in its place."""
    taken = {*scan.ys, *variables(scan.consts)}  # what the scan reads whole is read until its end
    free = [v for v in s.inputs if v not in taken and v not in {*next_of.values()}]
    found: list[Var | None] = []
    for v, d in zip(s.outputs, out_dims, strict=True):
        old = next_of.get(v, waiting.get(v))
        if old is not None and v not in waiting and (old not in dims or dims[old] != d):
            old = None
        if old is not None and (old in taken or not same_type(old.aval, v.aval)):
            old = None
        if old is None and isinstance(d, Rows) and v in results and not is_host_aval(v.aval):
            # new parameters that are made of an update after it: in place of the operand that is like them, and of a
            # gradient that is divided further (ZeRO-1) rather the parameter
            like_it = [x for x in free if x not in taken and dims[x] == d and same_type(x.aval, v.aval)]
            old = min(like_it, key=lambda x: math.prod(s.shards.get(x, ())), default=None)
        if old is None and is_host_aval(v.aval):
            raise Stays("it moves to the host in this step, or its next value is of another type")
        found.append(old)
        taken |= {old} if old is not None else set()
    return tuple(found)
