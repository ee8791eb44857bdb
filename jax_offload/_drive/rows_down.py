"""Stacked gradients that go to host memory while a scan makes them: each row as soon as it is there.

Beside one accelerator, for gradients that nothing but the cores' update reads. The stack is then nowhere on the device,
and on its way beside the matmuls of the pass, after which the cores begin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import (
    Equation,
    Jaxpr,
    Literal,
    Var,
    closed,
    jax_fun,
    jaxpr_of,
    renamed,
    run_equation,
    scan_of,
    variables,
)
from jax_offload._base.memory import to_device, to_host
from jax_offload._drive.cores import is_sent
from jax_offload._drive.cuts import CHEAP
from jax_offload._drive.pieces import InTurn, Piece
from jax_offload._drive.stages import BEFORE, Staged
from jax_offload._ir.conds import structure
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.slices import slice_of

LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the pass


@dataclasses.dataclass(frozen=True)
class Stack:
    """A gradient that a scan stacks.

    Attributes:
      late: the arithmetic on its elements behind the scan, a cast say.
      result: the variable that the pass returns.
      host: its variable in host memory.
    """

    late: tuple[Equation, ...]
    result: Var
    host: Var


def rows_sent_down(step: Staged) -> Staged:
    """The step with its stacked gradients sent down by the scans that make them."""
    pass_, *others = step.stages[0].pieces
    jaxpr = pass_.jaxpr
    if step.stages[0].name != BEFORE or jaxpr is None:
        return step
    alone = _read_by_cores_alone(step)
    stacks: dict[Var, Stack] = {}
    for scan in (scan for eqn in jaxpr.eqns if (scan := scan_of(eqn)) is not None and not scan.body.consts):
        for y in scan.ys:
            late, result = _elementwise(jaxpr, y)
            if result in alone and nbytes(result.aval) >= scan.length * LEAST_ROW:
                stacks[y] = Stack(late, result, Var(_in_host_memory(result.aval)))
    if not stacks:
        return step
    late = {id(eqn) for stack in stacks.values() for eqn in stack.late}
    eqns = [_sending(eqn, stacks) for eqn in jaxpr.eqns if id(eqn) not in late]
    host = {stack.result: stack.host for stack in stacks.values()}
    cut_out = slice_of(eqns, [host.get(v, v) for v in variables(jaxpr.outvars)], jaxpr.debug_info, {})
    names = dict(zip(jaxpr.invars, pass_.inputs, strict=True))
    inputs = [names.get(v, v) for v in cut_out.inputs]
    first = [Piece(inputs, cut_out.outputs, cut_out.run, structure(cut_out.jaxpr), cut_out.jaxpr)]
    for piece in others:
        if isinstance(piece, InTurn) and (left := {*variables(piece.inputs)} - host.keys()) != {
            *variables(piece.inputs)
        }:
            host |= {new: host[v] for v, new in zip(variables(piece.inputs), piece.outputs, strict=True) if v in host}
            first += [piece.some(left)] if left else []
        else:
            first.append(piece)
    later = (dataclasses.replace(s, pieces=tuple(_reading(p, host) for p in s.pieces)) for s in step.stages[1:])
    return dataclasses.replace(step, stages=[dataclasses.replace(step.stages[0], pieces=tuple(first)), *later])


def _in_host_memory(aval: Any) -> Any:
    return aval.update(memory_space=jax.memory.Space.Host)


def _read_by_cores_alone(step: Staged) -> set[Var]:
    """What the first program makes for the cores and for nobody else."""
    first, *later = step.stages
    held = {
        v: new
        for p in first.pieces
        if isinstance(p, InTurn)
        for v, new in zip(variables(p.inputs), p.outputs, strict=True)
    }
    own = {v for piece in first.pieces[1:] if not isinstance(piece, InTurn) for v in variables(piece.inputs)}
    others = {*step.results, *own}.union(*(s.reads for s in later if not s.on_cores))
    others |= {v for s in later for p in s.pieces if p.jaxpr is None for v in variables(p.inputs)}
    cores = {v for s in later if s.on_cores for v in s.reads if is_sent(v.aval)} - others
    return {v for v in first.pieces[0].outputs if held.get(v, v) in cores and v not in others}


def _elementwise(jaxpr: Jaxpr, y: Var) -> tuple[tuple[Equation, ...], Var]:
    """What is made of a variable alone, element by element, up to what the pass returns or more than one reads."""
    late: list[Equation] = []
    results = {*variables(jaxpr.outvars)}
    while y not in results:
        readers = [eqn for eqn in jaxpr.eqns if y in variables(eqn.invars)]
        if len(readers) != 1 or variables(readers[0].invars) != [y] or len(readers[0].outvars) != 1:
            break
        name = readers[0].primitive.name
        if name not in ELEMENTWISE or name not in CHEAP or readers[0].effects:
            break
        late.append(readers[0])
        (y,) = readers[0].outvars
    return ((), y) if any(y in variables(eqn.invars) for eqn in jaxpr.eqns) else (tuple(late), y)


def _sending(eqn: Equation, stacks: Mapping[Var, Stack]) -> Equation:
    """An equation; or, of a scan that makes some of the stacks, the scan that sends them down."""
    scan = scan_of(eqn)
    if scan is None or stacks.keys().isdisjoint(scan.ys):
        return eqn
    body, n = jax_fun(scan.body), len(scan.carry)

    def sending(*operands: Any) -> list[Any]:
        results = body(*operands)
        rows = zip(scan.ys, results[n:], strict=True)
        return [*results[:n], *(_row(stacks[y].late, x) if y in stacks else x for y, x in rows)]

    with eqn.ctx.manager:
        traced, _ = jaxpr_of(sending, *(v.aval for v in scan.body.jaxpr.invars))
    made = [*scan.carry, *(stacks[y].host if y in stacks else y for y in scan.ys)]
    # not unrolled: rows of several iterations would be put together in host memory
    return eqn.replace(params=eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=made)


def _row(late: Sequence[Equation], row: Any) -> Any:
    for eqn in late:
        (row,) = run_equation(eqn, [v.val if isinstance(v, Literal) else row for v in eqn.invars], eqn.params)
    return to_host(row)


def _reading(piece: Piece, host: Mapping[Var, Var]) -> Piece:
    """A piece of the cores that reads gradients in host memory."""
    reads = [isinstance(v, Var) and v in host for v in piece.inputs]
    if piece.jaxpr is None or not any(reads):
        return piece
    inner = jax_fun(closed(piece.jaxpr))
    inputs = [renamed(host, v) for v in piece.inputs]
    avals = [x.aval if there else v.aval for v, x, there in zip(piece.jaxpr.invars, inputs, reads, strict=True)]
    traced, _ = jaxpr_of(
        lambda *xs: inner(*(to_device(x) if there else x for x, there in zip(xs, reads, strict=True))), *avals
    )
    return Piece(inputs, piece.outputs, jax_fun(traced), structure(traced.jaxpr), traced.jaxpr)
