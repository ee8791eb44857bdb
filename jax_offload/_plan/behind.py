"""What of a step can run inside the scan that makes its gradients, on one row at a time, as it makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import DropVar, Equation, Literal, Scan, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program, Var
from jax_offload._ir.propagate import Mask, forward, groups, union
from jax_offload._plan.moves import Move, Moves, Stays, closure, move_of, pulled, rows_like
from jax_offload._plan.rules import Dependent, Partial, Rows, rule_of

NEEDS_ALL = "something that needs all gradients, their norm say, stands between them and their update"
OF_THE_SCAN = "a number that the same scan carries to its end stands between their gradients and their update"
BY_INDEX = "a scan takes its layers by their index, and sums their gradients up; scan over stacked parameters instead"
SHARED = (
    "every iteration of a scan uses it, and its gradient is the sum over all of them (tied layers, a recurrent net)"
)
MICROBATCHES = "its gradient is summed up over microbatches in a scan, the last of which cannot host the update"
_NONE: Mapping[Var, Var] = {}
LEAST_ROW = 2**16  # bytes: smaller rows are updated faster together, after the scan
_PLACED = frozenset(("dynamic_update_slice", "scatter", "scatter-add", "pad"))  # a row among zeros
_HEAVY = frozenset(("scan", "while", "dot_general", "conv_general_dilated"))


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
    waiting: Mapping[Var, Var] = _NONE,
) -> tuple[Moves, list[str]]:
    """What can move into the scan that is equation ``at``, and why the rest of what it makes cannot.

    Args:
      program: the step, with its update inlined.
      scan: equation ``at``.
      next_of: result -> the leaf of state or parameters that it is the next value of.
      claimed: the equations that move elsewhere.
      waiting: gradient that goes to the host for the next step -> the array there that nothing reads any more.
    """
    eqns = program.eqns
    flow = _flow(eqns, scan, at, claimed)
    results = {v for v in program.outputs if not isinstance(v, Literal)}
    stacked = results | {v for eqn in eqns if id(eqn) not in flow.eqns for v in variables(eqn.invars)}
    used = stacked | {v for eqn in eqns for v in variables(eqn.invars)}
    group = dict(zip(flow.eqns, groups(list(flow.eqns.values())), strict=True))
    moves: list[Move] = []
    why: list[str] = []
    moved: set[int] = set()
    inside: set[Var] = set()
    for number in sorted({*group.values()}):
        own = [eqn for eqn in eqns if group.get(id(eqn)) == number]
        defined = [v for eqn in own for v in eqn.outvars]
        targets = [v for v in defined if (v in flow.dims and v in stacked) or (v in flow.partial and v in used)]
        if not any((v in next_of or v in waiting) and _is_worth_it(v, scan.length) for v in targets):
            continue
        try:
            move = _move(program, own, targets, flow, next_of, scan, waiting)
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
    why += dict.fromkeys(flow.blocked[v] for v in _missed(eqns[at + 1 :], flow.blocked, moved | claimed, next_of, scan))
    kept = frozenset(y for y in scan.ys if y in stacked or y not in inside) - _dropped(scan.ys)
    return Moves(tuple(moves), kept, frozenset(moved)), why


def sums_up(program: Program, scan: Scan, at: int, gradients: Sequence[Var]) -> str:
    """How gradients are what equation ``at``, a scan, carries out of its last iteration, scaled or cast; else empty.

    What a microbatch adds needs nothing of the microbatch before; what a layer does, the cotangent.
    """
    wanted = {*gradients}
    for eqn in reversed(program.eqns[at + 1 :]):
        if eqn.primitive.name in ELEMENTWISE and not wanted.isdisjoint(eqn.outvars):
            wanted.update(variables(eqn.invars))
    sums = [k for k, v in enumerate(scan.carry) if v in wanted and v.aval.ndim]
    if not sums:
        return ""
    body, n = scan.body.jaxpr, len(scan.consts)
    needs = {v: 1 << k for k, v in enumerate(body.invars[n : n + len(scan.carry)]) if v.aval.ndim}
    maker: dict[Var, Equation] = {}
    for eqn in body.eqns:
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        maker.update(dict.fromkeys(eqn.outvars, eqn))
    defined = [v for k in sums if not isinstance(v := body.outvars[k], Literal) and needs.get(v, 0) & ~(1 << k)]
    if not defined:
        return MICROBATCHES
    added = [maker[x] for v in defined for x in variables(maker[v].invars) if x in maker]
    return BY_INDEX if any(eqn.primitive.name in _PLACED for eqn in added) else SHARED


def _flow(eqns: Sequence[Equation], scan: Scan, at: int, claimed: Set[int]) -> _Flow:
    ys = [y for y in scan.ys if not isinstance(y, DropVar)]
    flow = _Flow({y: Rows(0) for y in ys}, {}, {}, {}, {y: 1 << i for i, y in enumerate(ys)}, {})
    later = {*scan.carry, *scan.ys}  # all that cannot be known before the scan has run
    of_rows = {*scan.ys}
    for eqn in eqns[at + 1 :]:
        ins = variables(eqn.invars)
        if not any(v in later for v in ins):
            continue
        later.update(eqn.outvars)
        of_rows.update(eqn.outvars if any(v in of_rows for v in ins) else ())
        rows = [v for v in ins if v in flow.bits and v in flow.dims]
        if not rows or id(eqn) in claimed:
            continue
        if others := [v for v in ins if v in later and v not in rows]:
            if eqn.primitive.name not in _HEAVY:
                why = NEEDS_ALL if any(v in of_rows for v in others) else OF_THE_SCAN
                flow.blocked.update(dict.fromkeys(rows, why))
            continue
        shape, dim = rows[0].aval.shape, flow.dims[rows[0]]
        known = {v: d for v in ins if v not in later and (d := rows_like(v, shape, dim.dim)) is not None}
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
    waiting: Mapping[Var, Var],
) -> Move:
    inside = {id(eqn) for eqn in own}

    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        if id(eqn) in inside:
            return [None if isinstance(v, Literal) else flow.dims.get(v, flow.known.get(v)) for v in eqn.invars]
        return pulled(eqn, needed, scan.length)

    taken, needed = closure(program.eqns, {v: flow.dims.get(v) for v in targets}, dims_of)
    return move_of(program, taken, targets, needed, scan, next_of, waiting)


def _missed(
    eqns: Sequence[Equation], blocked: Iterable[Var], moved: Set[int], next_of: Mapping[Var, Var], scan: Scan
) -> list[Var]:
    """Those of the blocked for whose rows a leaf waits that has not moved and is worth it; not what is only logged."""
    bits = {v: 1 << k for k, v in enumerate(blocked)}
    needs, found = dict(bits), 0
    for eqn in eqns:
        if id(eqn) not in moved:
            needs.update((v, needs.get(v, 0) | m) for v, m in zip(eqn.outvars, forward(eqn, needs), strict=True))
            found |= union(needs[v] for v in eqn.outvars if v in next_of and _is_worth_it(v, scan.length))
    return [v for v, bit in bits.items() if bit & found]


def _is_worth_it(v: Var, size: int) -> bool:
    """Whether a leaf of the state moves into the scan: any on the host; on the device one whose rows are large."""
    return is_host_aval(v.aval) or nbytes(v.aval) >= size * LEAST_ROW


def _dropped(variables: Sequence[Var]) -> frozenset[Var]:
    return frozenset(v for v in variables if isinstance(v, DropVar))
