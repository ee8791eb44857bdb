"""What of a step can run inside the scan that makes its gradients, on one row at a time, as it makes them.

The results of a scan are stacked: row i is from iteration i. An update that keeps rows apart needs no more of a stacked
gradient than the row of the layer that it updates, so it can run where that row is made; then the stack never exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Atom, DropVar, Equation, Literal, Scan
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.core import core
from jax_offload._ir.masks import Mask, groups, union
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program, Var
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.chunk_rules import Dependent, Dim, Partial, Rows, chunked_dims, rule_of

NEEDS_ALL = "something that needs all gradients, their norm say, stands between them and their update"
_HEAVY = frozenset(("scan", "while", "dot_general", "conv_general_dilated"))
_PULLED = ELEMENTWISE | {"broadcast_in_dim", "iota", "transpose", "reshape", "squeeze", "slice", "pad", "cond"}
LEAST_ROW = 2**16  # bytes: smaller rows are updated faster together, after the scan


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


@dataclasses.dataclass
class _Flow:
    """Where the rows of a scan's stacked results go.

    Attributes:
      dims: what is made of them, and still has rows; also arrays made elsewhere that it meets on the way.
      partial: reductions over all rows.
      known: the arrays made elsewhere: known before the scan, or at least without it.
      eqns: by identity, the equations that keep the rows apart, with the bits of the stacked results they come from.
      bits: of every variable.
      blocked: why the rows of a variable go no further, of those that lead to no other loop or matmul.
    """

    dims: dict[Var, Rows]
    partial: dict[Var, Partial]
    known: dict[Var, Rows]
    eqns: dict[int, Mask]
    bits: dict[Var, Mask]
    blocked: dict[Var, str]


def moves_of(
    program: Program,
    scan: Scan,
    at: int,
    next_of: Mapping[Var, Var],
    claimed: Set[int],
) -> tuple[Moves, list[str]]:
    """What can move into the scan that is equation ``at``, and why the rest of what it makes cannot.

    Args:
      program: the step, with its update inlined.
      scan: equation ``at``.
      next_of: result -> the leaf of state or parameters that it is the next value of.
      claimed: the equations that move elsewhere.
    """
    eqns = program.eqns
    flow = _flow(eqns, scan, at, claimed)
    results = {v for v in program.outputs if not isinstance(v, Literal)}
    whole = results | {v for eqn in eqns if id(eqn) not in flow.eqns for v in _vars(eqn.invars)}
    used = whole | {v for eqn in eqns for v in _vars(eqn.invars)}
    group = dict(zip(flow.eqns, groups(list(flow.eqns.values())), strict=True))
    moves: list[Move] = []
    why: list[str] = []
    moved: set[int] = set()
    inside: set[Var] = set()
    for number in sorted({*group.values()}):
        own = [eqn for eqn in eqns if group.get(id(eqn)) == number]
        made = [v for eqn in own for v in eqn.outvars]
        targets = [v for v in made if (v in flow.dims and v in whole) or (v in flow.partial and v in used)]
        if not any(v in next_of and _is_worth_it(v, scan.length) for v in targets):
            continue
        try:
            move = _move(program, own, targets, flow, next_of, scan)
        except (Stays, Dependent) as reason:
            why.append(str(reason))
            continue
        reads = {*move.slice.inputs}
        if any(reads & {*other.buffers} or {*other.slice.inputs} & {*move.buffers} for other in moves):
            why.append("two gradients change the same leaf")
            continue
        moves.append(move)
        moved |= {id(eqn) for eqn in own}
        inside |= {v for v in move.slice.inputs if v in scan.ys}
    if not moves:
        why += dict.fromkeys(flow.blocked.values())
    kept = frozenset(y for y in scan.ys if y in whole or y not in inside) - _dropped(scan.ys)
    return Moves(tuple(moves), kept, frozenset(moved)), why


def _flow(eqns: Sequence[Equation], scan: Scan, at: int, claimed: Set[int]) -> _Flow:
    ys = [y for y in scan.ys if not isinstance(y, DropVar)]
    flow = _Flow({y: Rows(0) for y in ys}, {}, {}, {}, {y: 1 << i for i, y in enumerate(ys)}, {})
    later = {*scan.carry, *scan.ys}  # all that cannot be known before the scan has run
    for eqn in eqns[at + 1 :]:
        ins = _vars(eqn.invars)
        if not any(v in later for v in ins):
            continue
        later.update(eqn.outvars)
        rows = [v for v in ins if v in flow.bits and v in flow.dims]
        if not rows or id(eqn) in claimed:
            continue
        if any(v in later and v not in rows for v in ins):
            if eqn.primitive.name not in _HEAVY:
                flow.blocked.update(dict.fromkeys(rows, NEEDS_ALL))
            continue
        shape, dim = rows[0].aval.shape, flow.dims[rows[0]]
        known = {v: d for v in ins if v not in later and (d := _like(v, shape, dim.dim)) is not None}
        if any(flow.known.get(v, d) != d for v, d in known.items()) or (known and dim.per_row > 1):
            flow.blocked.update(dict.fromkeys(rows, "its rows are merged"))
            continue
        dims = [None if isinstance(v, Literal) else flow.dims.get(v, known.get(v)) for v in eqn.invars]
        try:
            out, _ = rule_of(eqn, dims, scan.length, shape, dim.dim)
        except Dependent as why:
            if eqn.primitive.name not in _HEAVY:
                flow.blocked.update(dict.fromkeys(rows, f"its update does not keep layers apart: {why}"))
            continue
        if any(d is None for d in out):
            continue
        flow.known.update(known)
        flow.eqns[id(eqn)] = bits = union(flow.bits[v] for v in rows)
        for v, d in zip(eqn.outvars, out, strict=True):
            flow.bits[v] = bits
            if isinstance(d, Partial):
                flow.partial[v] = d
            elif d is not None:
                flow.dims[v] = d
    return flow


def _move(
    program: Program,
    own: Sequence[Equation],
    targets: Sequence[Var],
    flow: _Flow,
    next_of: Mapping[Var, Var],
    scan: Scan,
) -> Move:
    inside = {id(eqn) for eqn in own}

    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        if id(eqn) in inside:
            return [None if isinstance(v, Literal) else flow.dims.get(v, flow.known.get(v)) for v in eqn.invars]
        return pulled(eqn, needed, scan.length)

    taken, needed = closure(program.eqns, {v: flow.dims.get(v) for v in targets}, dims_of)
    return move_of(program, taken, targets, needed, scan, next_of)


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
) -> Move:
    """The move of some equations, which keep rows apart.

    Raises:
      Stays, Dependent: they do not.
    """
    s = slice_of(eqns, list(targets), program.debug_info, program.shards)
    dims = tuple(needed[v] for v in s.inputs)
    if any(needed[v] is None for v in s.loads):
        raise Stays("a leaf on the host that has no such rows is needed")
    rows = [(v, d) for v, d in needed.items() if isinstance(d, Rows) and v in program.shards]
    if any(program.shards[v][d.dim] > 1 for v, d in rows):
        raise Stays("its layers are divided between devices, each of which has other ones")
    leaves = [v for v in s.inputs if isinstance(needed[v], Rows) and v not in scan.ys] or list(s.inputs)
    lead = max(leaves, key=lambda v: nbytes(v.aval))
    shape, axis = lead.aval.shape, rows_of(needed[lead]).dim
    out_dims = tuple(chunked_dims(core(s).jaxpr, list(dims), scan.length, shape, axis))
    if any(d is None or (isinstance(d, Rows) and d.per_row > 1) for d in out_dims):
        raise Stays("its rows are merged")
    buffers = _buffers(s, dict(zip(s.inputs, dims, strict=True)), out_dims, next_of, {*_vars(program.outputs)}, scan)
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
        guess = [None if isinstance(v, Literal) else _like(v, shape, dim.dim) for v in eqn.invars]
    try:
        out, _ = rule_of(eqn, guess, size, shape, dim.dim)
    except Dependent:
        return None
    return guess if all(d == dim for v, d in zip(eqn.outvars, out, strict=True) if v in wanted) else None


def is_cheap(eqn: Equation) -> bool:
    """Whether an equation may be run twice."""
    return eqn.primitive.name in _PULLED


def rows_of(dim: Dim) -> Rows:
    assert isinstance(dim, Rows)
    return dim


def _is_worth_it(v: Var, size: int) -> bool:
    """Whether a leaf of the state moves into the scan: any on the host; on the device one whose rows are large."""
    return is_host_aval(v.aval) or nbytes(v.aval) >= size * LEAST_ROW


def _like(v: Var, shape: tuple[int, ...], dim: int) -> Rows | None:
    return Rows(dim) if v.aval.shape[: dim + 1] == shape[: dim + 1] else None


def _buffers(
    s: Slice,
    dims: Mapping[Var, Dim],
    out_dims: Sequence[Dim],
    next_of: Mapping[Var, Var],
    results: Set[Var],
    scan: Scan,
) -> tuple[Var | None, ...]:
    """Where each result is written: over the operand that it is the next value of."""
    taken = {*scan.ys, *_vars(scan.consts)}  # what the scan reads whole is read until its end
    free = [v for v in s.inputs if v not in taken and v not in {*next_of.values()}]
    found: list[Var | None] = []
    for v, d in zip(s.outputs, out_dims, strict=True):
        old = next_of.get(v)
        if old is not None and (old in taken or old not in dims or dims[old] != d or not _same_type(old, v)):
            old = None
        if old is None and isinstance(d, Rows) and v in results and not is_host_aval(v.aval):
            # new parameters that are made of an update after it: in place of the operand that is like them
            old = next((x for x in free if x not in taken and dims[x] == d and _same_type(x, v)), None)
        if old is None and is_host_aval(v.aval):
            raise Stays("it moves to the host in this step, or its next value is of another type")
        found.append(old)
        taken |= {old} if old is not None else set()
    return tuple(found)


def _same_type(a: Var, b: Var) -> bool:
    return (a.aval.shape, a.aval.dtype, is_host_aval(a.aval)) == (b.aval.shape, b.aval.dtype, is_host_aval(b.aval))


def _vars(atoms: Sequence[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _dropped(variables: Sequence[Var]) -> frozenset[Var]:
    return frozenset(v for v in variables if isinstance(v, DropVar))
