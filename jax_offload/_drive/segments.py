"""The forward and backward pass in several programs, so that the first gradients' update need not wait for the last.

All results of one program become ready together. If a program ends where the gradients of a group exist, the cores or
the drives can start on them while the rest of the pass runs.

XLA fuses nothing across programs: each value that crosses from one program to a later one is an array in memory. So
cheap values (elementwise arithmetic) are computed again if their operands are no larger.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Jaxpr, Var, flops, variables
from jax_offload._drive.stages import BEFORE, GROUP, Stage, Staged
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.slices import Slice, slice_of

# The most programs, and the least share of the arithmetic in each but the first: the host needs a tenth of a program's
# run time to start it. A state on disk takes longer, and with more programs gradients are freed earlier.
FOR_CORES, FOR_DISK = (8, 1 / 16), (32, 1 / 32)
_NOT_AGAIN = {"optimization_barrier", "device_put", "sharding_constraint", "reshard"}
_VIEWS = ["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]
CHEAP = ELEMENTWISE.union(_VIEWS) - _NOT_AGAIN
# Operands may be a little larger than the value that is computed from them again (a softmax from its exponentials and
# their sums), because their own operands may be smaller (scores in bfloat16).
SLACK = 1.05


def in_segments(step: Staged) -> Staged:
    """Cut the pass of a step into several programs, if groups of the update have their gradients early.

    Groups of the cores follow all segments, which have been started by then; each group waits for its own gradients.
    Groups whose state is on disk run on the device, after the segment that follows the one with their gradients: the
    device has work while the host waits for a file.
    """
    (first, *rest), groups = step.stages, _groups(step)
    pass_ = first.slices[0]
    jaxpr = pass_.jaxpr
    if not groups or any(eqn.effects for eqn in jaxpr.eqns):
        return step
    on_disk, ready = groups[0].name == GROUP, list[int]()
    made_by = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for group in groups:  # some rows of a parameter are written after others
        ready.append(max((made_by.get(v, 0) for v in group.reads), default=0))
        made_by.update(dict.fromkeys(group.makes, ready[-1]))
    cuts = cuts_of(jaxpr, ready, *(FOR_DISK if on_disk else FOR_CORES))
    segments = [Stage(BEFORE, (part,)) for part in parts_of(jaxpr, {*pass_.outputs}, cuts)]
    stages = [*_interleaved(segments, cuts, groups, ready), *rest[len(groups) :]] if on_disk else [*segments, *rest]
    return dataclasses.replace(step, stages=stages)


def _groups(step: Staged) -> list[Stage]:
    """Return the groups of the update that follow the first program immediately."""
    rest = step.stages[1:]
    on_disk = [*itertools.takewhile(lambda s: s.name == GROUP, rest)]
    return on_disk or [*itertools.takewhile(lambda s: s.on_cores, (s for s in rest if s.name != "device"))]


def _interleaved(
    segments: Sequence[Stage], cuts: Sequence[int], groups: Sequence[Stage], ready: Sequence[int]
) -> Iterator[Stage]:
    """Yield the segments; the groups that a segment's gradients update come after the next segment."""
    after = [min(bisect.bisect_left(cuts, at) + 1, len(segments) - 1) for at in ready]
    for k, segment in enumerate(segments):
        yield segment
        yield from (group for group, at in zip(groups, after, strict=True) if at == k)


def cuts_of(jaxpr: Jaxpr, ready: Sequence[int], most: int, smallest: float) -> list[int]:
    """Return the number of equations after which each program but the last ends: with the gradients of a group.

    The first program ends with the first group's gradients. Each later one has its share of the remaining arithmetic.

    Args:
      jaxpr: the pass.
      ready: for each group of the update, the number of equations after which its gradients exist.
      most: the greatest number of programs.
      smallest: the least share of the arithmetic in a program.
    """
    done = [0.0, *itertools.accumulate(map(flops, jaxpr.eqns))]
    total, places = done[-1], sorted({*ready} - {0})
    cuts: list[int] = []
    for place in places[:-1]:
        least = max((total - done[places[0]]) / (most - 1), smallest * total)
        if total - done[place] >= smallest * total > 0 and (not cuts or done[place] - done[cuts[-1]] >= least):
            cuts.append(place)
    return cuts


def parts_of(jaxpr: Jaxpr, results: Set[Var], cuts: Sequence[int]) -> list[Slice]:
    """Divide the equations at the cuts into programs of their own, each with what it computes again."""
    eqns, given = jaxpr.eqns, {*jaxpr.invars}
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    crossing: set[Var] = set()  # what later parts read
    parts: list[Slice] = []
    for start, end in reversed([*itertools.pairwise([0, *cuts, len(eqns)])]):
        own = eqns[start:end]
        outputs = [v for eqn in own for v in eqn.outvars if v in results or v in crossing]
        crossing -= {v for eqn in own for v in eqn.outvars}
        reads = {v for eqn in own for v in variables(eqn.invars) if producer.get(v, start) < start}
        again, more = _computed_again(reads, crossing | given, eqns, producer)
        crossing |= more
        parts.append(slice_of([*again, *own], outputs, jaxpr.debug_info, {}))
    return parts[::-1]


def _computed_again(
    reads: Set[Var], free: Set[Var], eqns: Sequence[Equation], producer: Mapping[Var, int]
) -> tuple[list[Equation], set[Var]]:
    """Return the earlier equations that are repeated to make ``reads``, and the values that must cross for them.

    Going backwards, each cheap value gives way to its operands if they are no larger. Values in ``free`` are there.
    """
    need, again = {*reads} - free, set[Var]()
    waiting = sorted(need, key=producer.__getitem__)
    while waiting:
        v = waiting.pop()
        eqn = eqns[producer[v]]
        more = {*variables(eqn.invars)} - free - need - again
        cheap = eqn.primitive.name in CHEAP and not eqn.effects and len(eqn.outvars) == 1
        if cheap and sum(nbytes(x.aval) for x in more) <= SLACK * nbytes(v.aval):
            need = (need - {v}) | more
            again.add(v)
            for x in more:
                bisect.insort(waiting, x, key=producer.__getitem__)
    return [eqns[k] for k in sorted({producer[v] for v in again})], need
