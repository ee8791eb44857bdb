"""Stacked gradients that go to host memory row by row, while a scan makes them.

This applies beside one accelerator, to gradients that only the cores' update reads. The stack never exists on the
device, and its rows are copied during the matmuls of the pass; then the cores begin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import (
    Equation,
    Jaxpr,
    Literal,
    Scan,
    Var,
    closed,
    jax_fun,
    jaxpr_of,
    run_equation,
    scan_of,
    variables,
)
from jax_offload._base.memory import to_device, to_host
from jax_offload._drive.by_rows import Piece
from jax_offload._drive.cores import is_sent
from jax_offload._drive.stages import Staged, piece_of
from jax_offload._ir.program import structure
from jax_offload._ir.slices import slice_of

LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the pass
LATE = frozenset(("convert_element_type", "mul", "div", "neg"))  # arithmetic that the cores do as well


@dataclasses.dataclass(frozen=True)
class Stack:
    """A gradient whose rows go down.

    Attributes:
      host: the variable of the stack in host memory.
      late: the arithmetic on its elements after the scan, such as a cast, which the cores do instead.
    """

    host: Var
    late: tuple[Equation, ...]

    def read(self, x: Any) -> Any:
        """Return the gradient, given the stack in host memory."""
        x = to_device(x)
        for eqn in self.late:
            (x,) = run_equation(eqn, [v.val if isinstance(v, Literal) else x for v in eqn.invars], eqn.params)
        return x


def rows_sent_down(step: Staged) -> Staged:
    """Let the scans that make stacked gradients send them to host memory."""
    first, *later = step.stages
    pass_ = first.pieces[0]
    assert pass_.jaxpr is not None
    alone = _read_by_cores_alone(step)
    rows: dict[Var, Stack] = {}  # by the variable that a scan makes
    stacks: dict[Var, Stack] = {}  # by the gradient
    for scan in filter(None, map(scan_of, pass_.jaxpr.eqns)):
        for y in () if scan.body.consts else scan.ys:
            late, gradient = _behind(pass_.jaxpr, y)
            if gradient in alone and nbytes(y.aval) >= scan.length * LEAST_ROW:
                host = Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host))
                rows[y] = stacks[gradient] = Stack(host, late)
    if not rows:
        return step
    late = {id(eqn) for stack in rows.values() for eqn in stack.late}
    eqns = [_sending(eqn, rows) for eqn in pass_.jaxpr.eqns if id(eqn) not in late]
    made = [stacks[v].host if v in stacks else v for v in pass_.outputs]
    names = dict(zip(pass_.jaxpr.invars, pass_.inputs, strict=True))
    cut_out = slice_of(eqns, made, pass_.jaxpr.debug_info, {})
    pieces = (piece_of(cut_out, [names.get(v, v) for v in cut_out.inputs]), *first.pieces[1:])
    stages = [dataclasses.replace(first, pieces=pieces)]
    stages += [dataclasses.replace(s, pieces=tuple(_reading(p, stacks) for p in s.pieces)) for s in later]
    return dataclasses.replace(step, stages=stages, in_turn=[v for v in step.in_turn if v not in stacks])


def _read_by_cores_alone(step: Staged) -> set[Var]:
    """Return the results of the pass that only the cores read."""
    first, *later = step.stages
    others = {*step.results, *(v for piece in first.pieces[1:] for v in variables(piece.inputs))}
    others = others.union(*(s.reads for s in later if not s.on_cores))
    return {v for s in later if s.on_cores for v in s.reads if is_sent(v.aval)} & {*first.pieces[0].outputs} - others


def _behind(jaxpr: Jaxpr, y: Var) -> tuple[tuple[Equation, ...], Var]:
    """Return the arithmetic on the elements of ``y`` alone and its result; nothing and ``y`` if others read ``y``."""
    late: list[Equation] = []
    v = y
    while readers := [eqn for eqn in jaxpr.eqns if v in variables(eqn.invars)]:
        eqn = readers[0]
        if len(readers) > 1 or v in jaxpr.outvars or variables(eqn.invars) != [v] or eqn.primitive.name not in LATE:
            return (), y
        late.append(eqn)
        (v,) = eqn.outvars
    return tuple(late), v


def _sending(eqn: Equation, rows: Mapping[Var, Stack]) -> Equation:
    """Return a scan that sends its stacks down row by row; return any other equation unchanged."""
    scan = scan_of(eqn)
    if scan is None or rows.keys().isdisjoint(scan.ys):
        return eqn
    with eqn.ctx.manager:
        traced, _ = jaxpr_of(_body(scan, [y in rows for y in scan.ys]), *(v.aval for v in scan.body.jaxpr.invars))
    made = [*scan.carry, *(rows[y].host if y in rows else y for y in scan.ys)]
    # not unrolled: rows of several iterations would be put together in host memory
    return eqn.replace(params=eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=made)


def _body(scan: Scan, sent: Sequence[bool]) -> Any:
    body, n = jax_fun(scan.body), len(scan.carry)

    def sending(*operands: Any) -> list[Any]:
        results = body(*operands)
        return [*results[:n], *(to_host(x) if down else x for x, down in zip(results[n:], sent, strict=True))]

    return sending


def _reading(piece: Piece, stacks: Mapping[Var, Stack]) -> Piece:
    """Let a piece read its gradients in host memory."""
    if piece.jaxpr is None or stacks.keys().isdisjoint(variables(piece.inputs)):
        return piece
    found = [None if isinstance(v, Literal) else stacks.get(v) for v in piece.inputs]
    inputs = [v if stack is None else stack.host for v, stack in zip(piece.inputs, found, strict=True)]
    run = jax_fun(closed(piece.jaxpr))

    def reading(*xs: Any) -> list[Any]:
        return run(*(x if stack is None else stack.read(x) for x, stack in zip(xs, found, strict=True)))

    avals = [v.aval if x is None else x.host.aval for v, x in zip(piece.jaxpr.invars, found, strict=True)]
    traced, _ = jaxpr_of(reading, *avals)
    return Piece(inputs, piece.outputs, jax_fun(traced), structure(traced.jaxpr), traced.jaxpr)
