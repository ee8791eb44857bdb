"""Where the equations of a forward and backward pass can be cut, and what then crosses from one program to a later one.

XLA fuses nothing across programs: what a later one reads of an earlier one is an array between the two, and stays until
the later one has ended. So a cut lies where little is alive, and what is cheap (arithmetic on elements) is computed
again where that makes less cross.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Jaxpr, Var, flops, variables
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.slices import Slice, slice_of

# Programs at most, and the least share of the arithmetic in each but the first: a step of 10 ms has then a program in
# 0.6 ms at least, and starting one takes the host a tenth of that.
MOST, LEAST = 8, 1 / 16

# The same where a state on disk follows: what a program hides of it is bounded by the groups behind it, so that more of
# them hide more, and free gradients earlier. Such a step takes longer; and programs of layers that are alike are one.
MOST_OF_FILES, LEAST_OF_FILES = 32, 1 / 32

# A value gives way to what it is made of although that is a little more (a softmax to its exponentials and their sums),
# as what these are made of may be less (scores in bfloat16).
SLACK = 1.05
CANDIDATES = 16

_NOT_AGAIN = {"optimization_barrier", "device_put", "sharding_constraint", "reshard"}
_VIEWS = ["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]
CHEAP = ELEMENTWISE.union(_VIEWS) - _NOT_AGAIN


def cuts_of(
    jaxpr: Jaxpr, ready: Sequence[int], updated: Sequence[Set[Var]], most: int = MOST, smallest: float = LEAST
) -> list[int]:
    """Behind how many equations each program but the last ends.

    The first ends with the first group's gradients, and each later one has its share of the arithmetic that is left.

    Args:
      jaxpr: of the pass.
      ready: for each group of the update behind how many equations its gradients are there.
      updated: for each group what it reads: a parameter that is updated while it is still to be read is kept twice.
      most: programs.
      smallest: share of the arithmetic in one.
    """
    eqns = jaxpr.eqns
    done = [0.0, *itertools.accumulate(map(flops, eqns))]
    total, places = done[-1], sorted({*ready} - {0})
    if len(places) < 2 or total == 0:
        return []
    least = max((total - done[places[0]]) / (most - 1), smallest * total)
    alive, last = _alive(jaxpr)
    producer, given = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}, {*jaxpr.invars}
    price = _prices(eqns)

    def crossing(cut: int) -> int:
        reads = {v for v, k in producer.items() if k < cut < last.get(v, 0)}
        return sum(nbytes(v.aval) for v in _computed_again(reads, given, eqns, producer, price)[1])

    cuts: list[int] = []
    for place, following in itertools.pairwise(places):
        if (cuts and done[place] - done[cuts[-1]] < least) or total - done[place] < smallest * total:
            continue
        early = {v for vs, at in zip(updated, ready, strict=True) if at <= place for v in vs}
        kept = [(last[v], nbytes(v.aval)) for v in jaxpr.invars if v in early and last.get(v, 0) > place]
        near = sorted(range(place, following), key=alive.__getitem__)[:CANDIDATES]
        cuts.append(min(sorted(near), key=lambda k: crossing(k) + sum(size for end, size in kept if end > k)))
    return cuts


def parts_of(jaxpr: Jaxpr, results: Set[Var], cuts: Sequence[int]) -> list[Slice]:
    """The equations up to each cut and behind the last, as programs of their own, with what they compute again."""
    eqns, given = jaxpr.eqns, {*jaxpr.invars}
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    price = _prices(eqns)
    crossing: set[Var] = set()  # what later parts read
    parts: list[Slice] = []
    for start, end in reversed([*itertools.pairwise([0, *cuts, len(eqns)])]):
        own = eqns[start:end]
        defined = {v for eqn in own for v in eqn.outvars}
        outputs = [v for eqn in own for v in eqn.outvars if v in results or v in crossing]
        crossing -= defined
        reads = {v for eqn in own for v in variables(eqn.invars)} - defined - given
        again, more = _computed_again(reads, crossing | given, eqns, producer, price)
        crossing |= more
        parts.append(slice_of([*again, *own], outputs, jaxpr.debug_info, {}))
    return parts[::-1]


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


def _computed_again(
    reads: Set[Var], free: Set[Var], eqns: Sequence[Equation], producer: Mapping[Var, int], price: Mapping[Var, float]
) -> tuple[list[Equation], set[Var]]:
    """What of earlier equations is repeated for ``reads``, and what these need beside ``free``: fewer bytes.

    Backwards from what is read, each value gives way to what it is made of, where that is no more; forwards
    again, where it was no less either. What can be made of the rest does not cross.
    """

    def operands(v: Var) -> set[Var]:
        return {x for x in variables(eqns[producer[v]].invars) if x not in free}

    need, again = {*reads} - free, set[Var]()
    waiting = sorted(need, key=producer.__getitem__)
    while waiting:
        v = waiting.pop()
        eqn = eqns[producer[v]]
        more = operands(v) - need - again
        if v in need and _is_cheap(eqn) and sum(price[x] for x in more) <= SLACK * nbytes(v.aval):
            need = (need - {v}) | more
            again.add(v)
            for x in more:
                bisect.insort(waiting, x, key=producer.__getitem__)
    users: dict[Var, set[Var]] = {}
    for v in again:
        for x in operands(v):
            users.setdefault(x, set()).add(v)
    for v in sorted(again, key=producer.__getitem__):
        alone = {x for x in operands(v) if x in need and x not in reads and users[x] == {v}}
        if alone and operands(v) <= need and sum(nbytes(x.aval) for x in alone) >= nbytes(v.aval):
            again.remove(v)
            need = (need - alone) | {v}
            for x in operands(v):
                users[x].discard(v)
    for v in sorted(need, key=producer.__getitem__):  # a mask, say, of what crosses anyway
        chain, waiting = {v}, [v]
        while waiting and all(_is_cheap(eqns[producer[x]]) for x in waiting):
            waiting = [x for x in operands(waiting.pop()) - chain - again - need] + waiting
            chain.update(waiting)
        if not waiting:
            need.remove(v)
            again |= chain
    return [eqns[k] for k in sorted({producer[v] for v in again})], need


def _prices(eqns: Sequence[Equation]) -> dict[Var, float]:
    """Of each variable its bytes, or those of what it can be made of again, where these are fewer."""
    price: dict[Var, float] = {}
    for eqn in eqns:
        size = sum(price.get(x, 0) for x in {*variables(eqn.invars)}) if _is_cheap(eqn) else math.inf
        price.update((v, min(nbytes(v.aval), size)) for v in eqn.outvars)
    return price


def _is_cheap(eqn: Equation) -> bool:
    return eqn.primitive.name in CHEAP and not eqn.effects and len(eqn.outvars) == 1
