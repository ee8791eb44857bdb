"""The forward and backward pass in several programs, so that the update of the first gradients need not wait for the last.

All results of one program become ready together. Cut behind the gradients of a group, the pass leaves them while it goes
on: the cores have work then.

What a later program reads of an earlier one stays on the device between the two, and XLA fuses nothing across it. So a
cut lies where little is alive, and what is cheap (arithmetic on elements) is computed again where that makes less cross.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.flops import flops
from jax_offload._base.jaxprs import Equation, Jaxpr, Var, variables
from jax_offload._drive.stages import Piece, Stage, Staged
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.shares import structure
from jax_offload._ir.slices import slice_of

BEFORE = "before"
# Programs at most, and the least share of the arithmetic in each but the first: a step of 10 ms has then a program in
# 0.6 ms at least, and starting one takes the host a tenth of that.
MOST = 8
LEAST = 1 / 16

# A value gives way to what it is made of although that is a little more (a softmax to its exponentials and their sums),
# as what these are made of may be less (scores in bfloat16).
SLACK = 1.05
CANDIDATES = 16

_AGAIN = ELEMENTWISE.union(["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]) - {
    "optimization_barrier",
    "device_put",
    "sharding_constraint",
    "reshard",
}


def in_segments(step: Staged) -> Staged:
    """The step with its first program in several, where groups of the update have their gradients early; else as it is.

    The groups follow all segments: these are under way by then, and each group waits for its gradients alone.
    """
    first, rest = step.stages[0], step.stages[1:]
    if first.name != BEFORE or not first.pieces or first.pieces[0].jaxpr is None:
        return step
    pass_, *others = first.pieces
    jaxpr = pass_.jaxpr
    assert jaxpr is not None
    groups = [*itertools.takewhile(lambda s: s.on_cores, (s for s in rest if s.name != "device"))]
    made = _made_at(jaxpr.eqns, others)
    ready = [max((made.get(v, 0) for v in s.reads), default=0) for s in groups]
    cuts = _cuts(jaxpr, groups, ready)
    if not cuts:
        return step
    pieces = [[piece] for piece in _parts(jaxpr, pass_, cuts)]
    for piece in others:
        at = max((made.get(v, 0) for v in variables(piece.inputs)), default=0)
        pieces[bisect.bisect_left(cuts, at)].append(piece)
    segments = [Stage(BEFORE, tuple(each)) for each in pieces]
    return dataclasses.replace(step, stages=[*segments, *rest])


def _made_at(eqns: Sequence[Equation], others: Sequence[Piece]) -> dict[Var, int]:
    """Behind how many equations each variable is there; what other pieces make, behind the last that they need."""
    made = {v: k + 1 for k, eqn in enumerate(eqns) for v in eqn.outvars}
    for piece in others:
        at = max((made.get(v, 0) for v in variables(piece.inputs)), default=0)
        made.update(dict.fromkeys(piece.outputs, at))
    return made


def _cuts(jaxpr: Jaxpr, groups: Sequence[Stage], ready: Sequence[int]) -> list[int]:
    """Behind how many equations each program but the last ends.

    The first ends with the first group's gradients, and each later one has its share of the arithmetic that is left.
    """
    eqns = jaxpr.eqns
    done = [0.0, *itertools.accumulate(map(flops, eqns))]
    total, places = done[-1], sorted({*ready} - {0})
    if len(places) < 2 or total == 0:
        return []
    least = max((total - done[places[0]]) / (MOST - 1), LEAST * total)
    alive, last = _alive(jaxpr)
    made_by, given = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}, {*jaxpr.invars}
    price = _prices(eqns)

    def crossing(cut: int) -> int:
        reads = {v for v, k in made_by.items() if k < cut < last.get(v, 0)}
        return sum(nbytes(v.aval) for v in _computed_again(reads, given, eqns, made_by, price)[1])

    cuts: list[int] = []
    for place, following in itertools.pairwise(places):
        if (cuts and done[place] - done[cuts[-1]] < least) or total - done[place] < LEAST * total:
            continue
        updated = {v for s, at in zip(groups, ready, strict=True) if at <= place for v in s.reads}
        kept = [(last[v], nbytes(v.aval)) for v in jaxpr.invars if v in updated and last.get(v, 0) > place]
        near = sorted(range(place, following), key=alive.__getitem__)[:CANDIDATES]
        cut = min(sorted(near), key=lambda k: crossing(k) + sum(size for end, size in kept if end > k))
        cuts.append(cut)
    return cuts


def _alive(jaxpr: Jaxpr) -> tuple[list[int], dict[Var, int]]:
    """Bytes behind each number of equations that later ones read, and where each variable is read last."""
    last = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in variables(eqn.invars)}
    change = [0] * (len(jaxpr.eqns) + 2)
    for k, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if last.get(v, 0) > k + 1:
                change[k + 1] += nbytes(v.aval)
                change[last[v]] -= nbytes(v.aval)
    return [*itertools.accumulate(change)], last


def _parts(jaxpr: Jaxpr, whole: Piece, cuts: Sequence[int]) -> list[Piece]:
    """The equations up to each cut, as programs of their own, with what they compute again."""
    eqns, given, results = jaxpr.eqns, {*jaxpr.invars}, {*whole.outputs}
    names = dict(zip(jaxpr.invars, whole.inputs, strict=True))
    made_by = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    price = _prices(eqns)
    crossing: set[Var] = set()  # what later parts read
    parts: list[Piece] = []
    for start, end in reversed([*itertools.pairwise([0, *cuts, len(eqns)])]):
        own = eqns[start:end]
        made = {v for eqn in own for v in eqn.outvars}
        outputs = [v for eqn in own for v in eqn.outvars if v in results or v in crossing]
        crossing -= made
        reads = {v for eqn in own for v in variables(eqn.invars)} - made - given
        again, more = _computed_again(reads, crossing | given, eqns, made_by, price)
        crossing |= more
        part = slice_of([*again, *own], outputs, jaxpr.debug_info, {})
        inputs = [names.get(v, v) for v in part.inputs]
        parts.append(Piece(inputs, outputs, part.run, structure(part.jaxpr), part.jaxpr))
    return parts[::-1]


def _computed_again(
    reads: Set[Var], free: Set[Var], eqns: Sequence[Equation], made_by: Mapping[Var, int], price: Mapping[Var, float]
) -> tuple[list[Equation], set[Var]]:
    """What of earlier equations is repeated for ``reads``, and what these need beside ``free``: fewer bytes.

    Backwards from what is read, each value gives way to what it is made of, where that is no more; forwards
    again, where it was no less either.
    """

    def operands(v: Var) -> set[Var]:
        return {x for x in variables(eqns[made_by[v]].invars) if x not in free}

    need, again = reads - free, set[Var]()
    waiting = sorted(need, key=made_by.__getitem__)
    while waiting:
        v = waiting.pop()
        eqn = eqns[made_by[v]]
        more = operands(v) - need - again
        if v in need and _is_cheap(eqn) and sum(price[x] for x in more) <= SLACK * nbytes(v.aval):
            need = (need - {v}) | more
            again.add(v)
            for x in more:
                bisect.insort(waiting, x, key=made_by.__getitem__)
    users: dict[Var, set[Var]] = {}
    for v in again:
        for x in operands(v):
            users.setdefault(x, set()).add(v)
    for v in sorted(again, key=made_by.__getitem__):
        alone = {x for x in operands(v) if x in need and x not in reads and users[x] == {v}}
        if alone and operands(v) <= need and sum(nbytes(x.aval) for x in alone) >= nbytes(v.aval):
            again.remove(v)
            need = (need - alone) | {v}
            for x in operands(v):
                users[x].discard(v)
    return [eqns[k] for k in sorted({made_by[v] for v in again})], need


def _prices(eqns: Sequence[Equation]) -> dict[Var, float]:
    """Of each variable its bytes, or those of what it can be made of again, where these are fewer."""
    price: dict[Var, float] = {}
    for eqn in eqns:
        size = sum(price.get(x, 0) for x in {*variables(eqn.invars)}) if _is_cheap(eqn) else math.inf
        price.update((v, min(nbytes(v.aval), size)) for v in eqn.outvars)
    return price


def _is_cheap(eqn: Equation) -> bool:
    return eqn.primitive.name in _AGAIN and not eqn.effects and len(eqn.outvars) == 1
