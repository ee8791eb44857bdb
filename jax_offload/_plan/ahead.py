"""Updates that come before a scan which reads the parameters: what of them can run inside it, a row ahead of its use.

In a step that begins with the update for the gradients of the batch before, the forward pass reads new parameters layer
by layer; so each layer's update can run when its turn comes, while the state of its neighbours moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from jax_offload._base.jaxprs import Equation, Literal, Scan, Var, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.program import Program
from jax_offload._ir.propagate import Node, groups, needed
from jax_offload._plan.moves import Move, Moves, Stays, closure, is_cheap, move_of, pulled
from jax_offload._plan.rules import Dependent, Rows


def moves_ahead(
    program: Program, scan: Scan, at: int, next_of: Mapping[Var, Var], own: Set[int], claimed: Set[int], read: Set[Var]
) -> tuple[Moves, list[str]]:
    """What of an update can move into the scan that is equation ``at`` and comes after it, and why the rest cannot.

    Args:
      program: the step, with its update inlined.
      scan: equation ``at``.
      next_of: result -> the leaf of state or parameters that it is the next value of.
      own: the equations of the update, by identity.
      claimed: the equations that move elsewhere.
      read: what the scans read that host other moves, beyond what the equations of the program say.
    """
    eqns = [eqn for eqn in program.eqns[:at] if id(eqn) not in claimed]

    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        return pulled(eqn, needed, scan.length, own)

    hosts_of: dict[Var, set[Var]] = {}  # of the scan's xs -> the host leaves that it is made of
    for x in dict.fromkeys(x for x in scan.xs if not isinstance(x, Literal)):
        try:
            taken, rows = closure(eqns, {x: Rows(0)}, dims_of)
        except Stays:
            continue
        defined = {v for eqn in taken for v in eqn.outvars}
        hosts = {v for v in rows if is_host_aval(v.aval) and v not in defined}
        if hosts and any(id(eqn) in own for eqn in taken):
            hosts_of[x] = hosts
    number = {v: k for k, v in enumerate({v for hosts in hosts_of.values() for v in hosts})}
    group = groups([sum(1 << number[v] for v in hosts) for hosts in hosts_of.values()])
    moves: list[Move] = []
    why: list[str] = []
    moved: set[int] = set()
    for which in sorted({*group}):
        xs = [x for x, g in zip(hosts_of, group, strict=True) if g == which]
        try:
            move, taken = _move(program, eqns, xs, scan, at, next_of, own, read)
        except (Stays, Dependent) as reason:
            why.append(str(reason))
            continue
        moves.append(move)
        moved |= {id(eqn) for eqn in taken}
    return Moves(tuple(moves), frozenset(scan.ys), frozenset(moved)), why


def _move(
    program: Program,
    eqns: list[Equation],
    xs: list[Var],
    scan: Scan,
    at: int,
    next_of: Mapping[Var, Var],
    own: Set[int],
    read: Set[Var],
) -> tuple[Move, list[Equation]]:
    def dims_of(eqn: Equation, needed: Mapping[Var, Rows | None]) -> list[Rows | None] | None:
        return pulled(eqn, needed, scan.length, own)

    wanted: dict[Var, Rows | None] = dict.fromkeys(xs, Rows(0))
    while True:  # with every leaf of the state its next value
        taken, rows = closure(eqns, wanted, dims_of)
        more = {v: d for v, old in next_of.items() if v not in wanted and (d := rows.get(old)) is not None}
        if not more:
            break
        wanted |= more
    taken_twice = _also_before(program, at, taken)
    inside = {id(eqn) for eqn in taken} - taken_twice
    defined = [v for eqn in taken if id(eqn) in inside for v in eqn.outvars]
    read_by_scan = {v for v in [*scan.consts, *scan.init] if not isinstance(v, Literal)}
    results = {v for v in program.outputs if not isinstance(v, Literal)}
    others = read | {
        v
        for k, eqn in enumerate(program.eqns)
        if id(eqn) not in inside and k != at
        for v in eqn.invars
        if not isinstance(v, Literal)
    }
    targets = [v for v in defined if v in results or v in others or v in read_by_scan or v in wanted]
    if read_by_scan & {*defined}:
        raise Stays(_NEEDED_BEFORE)
    move = move_of(program, taken, targets, rows, scan, next_of)
    stacked = {v for v in targets if v in results or v in others}
    feeds = dataclasses.replace(move, feeds=frozenset(v for v in xs if v not in stacked))
    return feeds, [eqn for eqn in taken if id(eqn) in inside]


_NEEDED_BEFORE = "new parameters are needed as a whole before the scan that reads them by layers"


def _also_before(program: Program, at: int, taken: list[Equation]) -> set[int]:
    """Which of the equations that move stay where they are as well: a norm that the others wait for is made of them.

    Raises:
      Stays: they are dear, or load what is on the host.
    """
    twice: set[int] = set()
    while True:
        inside = {id(eqn) for eqn in taken} - twice
        nodes = [Node(eqn, variables(eqn.invars), [] if id(eqn) in inside else eqn.outvars) for eqn in program.eqns]
        reading = [k for k, eqn in enumerate(program.eqns) if k == at or id(eqn) in inside]
        before = needed(nodes, [v for k in reading for v in nodes[k].reads], kept=False)
        wanted = {v for k in before if k != at for v in nodes[k].reads}
        found: list[Equation] = []
        for eqn in reversed(taken):
            if id(eqn) in inside and not wanted.isdisjoint(eqn.outvars):
                found.append(eqn)
                wanted.update(variables(eqn.invars))
        if not found:
            return twice
        if not all(is_cheap(eqn) for eqn in found) or any(is_host_aval(v.aval) for eqn in found for v in eqn.invars):
            raise Stays(_NEEDED_BEFORE)
        twice |= {id(eqn) for eqn in found}
