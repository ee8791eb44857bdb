"""A backward scan over layers as several, of fewer layers each, so that a pass can be cut between them.

They are scans over the numbers of layers, with what was stacked as constants of which the body takes its row: nothing
is sliced or copied. A row of a gradient goes to host memory inside the scan as soon as it is made, so that the stack is
nowhere on the device, and the cores update the layers of one part while the next one runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.flops import flops
from jax_offload._base.jaxprs import (
    Atom,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Scan,
    Var,
    jax_fun,
    jaxpr_of,
    renamed,
    run_equation,
    scan_of,
    variables,
)
from jax_offload._base.memory import is_host_aval, to_host
from jax_offload._base.shardings import typed_sharding
from jax_offload._drive.cores import is_sent
from jax_offload._drive.cuts import CHEAP, LEAST, MOST
from jax_offload._drive.loops import has_numba
from jax_offload._drive.pieces import InTurn, Joined, Piece, joined
from jax_offload._drive.row_groups import ends_of_piece, is_loop, of_last_loops
from jax_offload._drive.stages import Stage, Staged
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.shares import structure
from jax_offload._ir.slices import slice_of

LEAST_ROW = 2**16  # bytes; smaller rows are stacked on the device, and go down at the end of their part

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A gradient that a scan stacks, and nothing but a loop of the cores reads.

    Attributes:
      row: the scan's result.
      late: what is made of it element by element.
      result: that, as the pass returns it.
      gradient: as the cores read it.
      piece: that reads it.
    """

    row: Var
    late: tuple[Equation, ...]
    result: Var
    gradient: Var
    piece: Piece


def with_scan_in_parts(step: Staged) -> Staged:
    """The step with the backward scan that its first stage ends with in parts; itself where there is none for it.

    That is for gradients of which a leaf is several groups of rows (``row_groups.py``) and which are updated by loops.
    """
    pass_, *others = step.stages[0].pieces
    jaxpr = pass_.jaxpr
    if jaxpr is None or not has_numba() or (at := _last_large(jaxpr)) is None:
        return step
    eqn, scan = jaxpr.eqns[at], scan_of(jaxpr.eqns[at])
    assert scan is not None
    stacks, ranges = _stacks(step, jaxpr, scan), _ranges(jaxpr, at, scan, _begins_before(step, jaxpr, at))
    if not ranges or not any(len(ends_of_piece(stack.piece)) > 1 for stack in stacks):
        return step
    found = _in_parts(eqn, scan, stacks, ranges)
    if found is None:
        return step
    eqns, parts = found
    late = {id(each) for stack in stacks for each in stack.late}
    eqns = [*jaxpr.eqns[:at], *eqns, *(each for each in jaxpr.eqns[at + 1 :] if id(each) not in late)]
    of_result = {stack.result: own for stack, own in zip(stacks, parts, strict=True)}
    outputs = [x for v in variables(jaxpr.outvars) for x in of_result.get(v, [v])]
    names = dict(zip(jaxpr.invars, pass_.inputs, strict=True))
    cut_out = slice_of(eqns, outputs, jaxpr.debug_info, {})
    inputs = [names.get(v, v) for v in cut_out.inputs]
    new = Piece(inputs, cut_out.outputs, cut_out.run, structure(cut_out.jaxpr), cut_out.jaxpr)
    others = [left for piece in others if (left := _without(piece, {*of_result})) is not None]
    first = dataclasses.replace(step.stages[0], pieces=(new, *others))
    pieces = [joined(own, stack.gradient, ranges) for stack, own in zip(stacks, parts, strict=True)]
    return dataclasses.replace(step, stages=[first, *_rearranged(step.stages[1:], stacks, pieces)])


def _last_large(jaxpr: Jaxpr) -> int | None:
    """The scan with most of the arithmetic of those behind which little is left: what is written of new parameters is
    so when the pass is over, or nearly."""
    late = of_last_loops(jaxpr)
    found = [k for k, eqn in enumerate(jaxpr.eqns) if not late.isdisjoint(eqn.outvars) and _can_be_in_parts(eqn)]
    return max(found, key=lambda k: flops(jaxpr.eqns[k]), default=None)


def _can_be_in_parts(eqn: Equation) -> bool:
    scan = scan_of(eqn)
    if scan is None or scan.length < 2 or scan.body.consts:
        return False
    every = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return not any(is_host_aval(aval) or typed_sharding(aval) is not None for aval in every)


def _begins_before(step: Staged, jaxpr: Jaxpr, at: int) -> bool:
    """Whether the cores read a gradient that is there before the scan begins, of a head say."""
    wanted = {v for stage in step.stages[1:] if stage.on_cores for v in stage.reads}
    wanted |= {v for piece in step.stages[0].pieces if isinstance(piece, InTurn) for v in variables(piece.inputs)}
    return any(v in wanted and is_sent(v.aval) for eqn in jaxpr.eqns[:at] for v in eqn.outvars)


def _ranges(jaxpr: Jaxpr, at: int, scan: Scan, begun: bool) -> Ranges:
    """Rows of each part, in the order in which the scan comes to them: as few as ``cuts_of`` makes a program of.

    ``begun``: whether an earlier program is cut off ahead of the scan.
    """
    own, total = flops(jaxpr.eqns[at]), sum(map(flops, jaxpr.eqns))
    before, n = sum(map(flops, jaxpr.eqns[:at])), scan.length
    for rows in range(1, -(-n // 2) + 1):
        each = own * rows / n
        left = total - before - (0 if begun else each)
        if own and each >= max(left / (MOST - 1), LEAST * total):
            begins = range(n, 0, -rows) if scan.reverse else range(0, n, rows)
            return tuple((max(k - rows, 0), k) if scan.reverse else (k, min(k + rows, n)) for k in begins)
    return ()


def _stacks(step: Staged, jaxpr: Jaxpr, scan: Scan) -> list[Stack]:
    """The gradients that go to the cores as they are made."""
    stages = step.stages[1:]
    groups = [stage for stage in stages if stage.on_cores and stage.name == "cores"]
    every = [*step.stages[0].pieces[1:], *(piece for stage in stages for piece in stage.pieces)]
    held = {v: x for p in every if isinstance(p, InTurn) for v, x in zip(variables(p.inputs), p.outputs, strict=True)}
    read_by = Counter(v for p in every if not isinstance(p, InTurn) for v in variables(p.inputs))
    read_by.update(v for stage in stages if stage.loop is not None for v in stage.reads)
    pieces = {v: piece for stage in groups for piece in stage.pieces for v in variables(piece.inputs)}
    found, results, returned = list[Stack](), {*variables(jaxpr.outvars)}, {*step.results}
    for y in scan.ys:
        late, result = _elementwise(jaxpr, y)
        gradient = held.get(result, result)
        alone = read_by[gradient] == 1 and (gradient is result or not read_by[result])
        if result not in results or not alone or {result, gradient} & returned:
            continue
        if gradient in pieces and is_loop(pieces[gradient]):
            found.append(Stack(y, late, result, gradient, pieces[gradient]))
    defined = {v for stage in groups for v in stage.makes}
    while True:
        known = {*step.inputs, *(stack.gradient for stack in found)}
        kept = [
            stack
            for stack in found
            if _reads_only(stack.piece, known) and defined.isdisjoint(variables(stack.piece.inputs))
        ]
        if len(kept) == len(found):
            return found
        found = kept


def _reads_only(piece: Piece, known: set[Var]) -> bool:
    return all(v in known for v in variables(piece.inputs) if is_sent(v.aval))


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
    read = any(y in variables(eqn.invars) for eqn in jaxpr.eqns)
    return (tuple(late), y) if not read else ((), y)


def _in_parts(
    eqn: Equation, scan: Scan, stacks: Sequence[Stack], ranges: Ranges
) -> tuple[list[Equation], list[list[Var]]] | None:
    """The scan's equation as several, and of each stack its parts."""
    own = {stack.row for stack in stacks}
    others = [y for y in scan.ys if y not in own and not isinstance(y, DropVar)]
    carry, rows = [*scan.init], list[Atom]()
    eqns, parts = list[Equation](), [list[Var]() for _ in stacks]
    for of in ranges:
        last = of is ranges[-1]
        operands = [*scan.consts, *scan.xs, *carry, *rows]
        with eqn.ctx.manager:
            traced, _ = jaxpr_of(_part(scan, stacks, others, of), *(v.aval for v in operands))
        jaxpr = traced.jaxpr
        defined = {v for each in jaxpr.eqns for v in each.outvars}
        produced = variables(jaxpr.outvars)
        if traced.consts or len({*produced} & defined) < len(jaxpr.outvars):
            return None
        n, m = len(scan.carry), len(others)
        carry, rows = produced[:n], produced[n : n + m]
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        outer = dict(zip(produced, [*scan.carry, *others], strict=False)) if last else dict[Var, Var]()
        for each in jaxpr.eqns:
            outs = [outer.get(v, v) for v in each.outvars]
            eqns.append(each.replace(invars=[renamed(names, v) for v in each.invars], outvars=outs))
        for part, v in zip(parts, produced[n + m :], strict=True):
            part.append(v)
    return eqns, parts


def _part(scan: Scan, stacks: Sequence[Stack], others: Sequence[Var], of: tuple[int, int]) -> Callable[..., Any]:
    """Some iterations of a scan: of its constants, its stacked operands, its carry and what it stacks and others read.

    The last is an array of all rows from the first part on, into which each part writes its own.
    """
    begin, end = of
    n, m = len(scan.consts), len(scan.consts) + len(scan.xs)
    body, places = jax_fun(scan.body), {y: len(scan.init) + k for k, y in enumerate(scan.ys)}

    def part(*operands: Any) -> list[Any]:
        consts, xs, carry = operands[:n], operands[n:m], list(operands[m : m + len(scan.init)])
        filled = list(operands[m + len(scan.init) :])
        if not filled:
            filled = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in others]

        def iteration(carried: Any, _: None) -> Any:
            k, carry, filled = carried
            i = jnp.uint32(end - 1) - k if scan.reverse else jnp.uint32(begin) + k  # no sign, so none is looked at
            results = body(*consts, *carry, *(jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in xs))
            new = [
                jax.lax.dynamic_update_index_in_dim(x, results[places[y]], i, 0)
                for x, y in zip(filled, others, strict=True)
            ]
            rows = [_row(stack, results[places[stack.row]]) for stack in stacks]
            return (k + jnp.uint32(1), results[: len(carry)], new), rows

        init, length = (jnp.uint32(0), carry, filled), end - begin
        # not unrolled: rows of several iterations would be put together in host memory
        (_, carry, filled), rows = jax.lax.scan(iteration, init, length=length, reverse=scan.reverse)
        return [*carry, *filled, *rows]

    return part


def _row(stack: Stack, row: jax.Array) -> jax.Array:
    for eqn in stack.late:
        operands = [v.val if isinstance(v, Literal) else row for v in eqn.invars]
        (row,) = run_equation(eqn, operands, eqn.params)
    return to_host(row) if nbytes(jax.typeof(row)) >= LEAST_ROW else row


def _without(piece: Piece, gone: set[Var]) -> Piece | None:
    """A piece that has gradients in turn, without those that go down as they are made."""
    if not isinstance(piece, InTurn) or gone.isdisjoint(variables(piece.inputs)):
        return piece
    left = {*variables(piece.inputs)} - gone
    return piece.some(left) if left else None


def _rearranged(stages: Sequence[Stage], stacks: Sequence[Stack], pieces: Sequence[Joined]) -> list[Stage]:
    """What the cores make of the stacks as one stage, part by part, in the place of the first of them."""
    together = list({id(stack.piece): stack.piece for stack in stacks}.values())
    found: list[Stage] = []
    placed = False
    for stage in stages:
        left = tuple(piece for piece in stage.pieces if not any(piece is each for each in together))
        if len(left) < len(stage.pieces) and not placed:
            found.append(dataclasses.replace(stage, pieces=(*pieces, *together)))
            placed = True
        found += [dataclasses.replace(stage, pieces=left)] if left or stage.loop is not None else []
    return found
