"""The forward and backward pass before an update that Python drives: its gradients leave it as early as they can.

It runs as several programs, so that the first gradients' update need not wait for the last: all results of a program
become ready together. If one ends where the gradients of a group exist, the cores or the drives can start on them while
the rest of the pass runs.

XLA fuses nothing across programs: each value that crosses from one program to a later one is an array in memory. So
cheap values (elementwise arithmetic) are computed again if their operands are no larger.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._host.cores import is_sent
from jax_offload._host.stages import BEFORE, GROUP, Stage, Staged
from jax_offload._program.arrays import nbytes
from jax_offload._program.barriers import opaque, together
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Scan,
    Var,
    flops,
    jaxpr_like,
    renamed,
    scan_of,
    variables,
)
from jax_offload._program.memory import on_host, to_host
from jax_offload._program.primitives import ELEMENTWISE
from jax_offload._program.program import Builder
from jax_offload._program.propagate import needed_for
from jax_offload._program.slices import Slice, slice_of
from jax_offload._rewrite.cut import computed_again

# The most programs, and the least share of the arithmetic in each but the first: the host needs a tenth of a program's
# run time to start it. A state on disk takes longer, and with more programs gradients are freed earlier.
FOR_CORES, FOR_DISK = (8, 1 / 16), (32, 1 / 32)
_NOT_AGAIN = {"optimization_barrier", "device_put", "sharding_constraint", "reshard"}
_VIEWS = ["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]
CHEAP = ELEMENTWISE.union(_VIEWS) - _NOT_AGAIN
LATE = frozenset(("convert_element_type", "mul", "div", "neg"))  # arithmetic that the cores do as well
LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the program


def arranged(step: Staged, *, may_be_cut: bool) -> Staged:
    """Return the step with its first program, the pass, as one slice, or cut into several programs.

    Groups of the cores follow all segments, which have been started by then; each group waits for its own gradients.
    Groups whose state is on disk run on the device, after the segment that follows the one with their gradients: the
    device has work while the host waits for a file.
    """
    step = _with_late_arithmetic(step)
    (first, *rest), groups = step.stages, _groups(step)
    (pass_,) = first.slices
    jaxpr = pass_.jaxpr
    if not may_be_cut or not groups or any(eqn.effects for eqn in jaxpr.eqns):
        return step
    on_disk, ready = groups[0].name == GROUP, list[int]()
    made_by = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for group in groups:  # some rows of a parameter are written after others
        ready.append(max((made_by.get(v, 0) for v in group.reads), default=0))
        made_by.update(dict.fromkeys(group.makes, ready[-1]))
    cuts = cuts_of(jaxpr, ready, *(FOR_DISK if on_disk else FOR_CORES))
    segments = [Stage(BEFORE, (part,)) for part in divided(jaxpr, {*pass_.outputs}, cuts)]
    stages = [*_interleaved(segments, cuts, groups, ready), *rest[len(groups) :]] if on_disk else [*segments, *rest]
    return dataclasses.replace(step, stages=stages)


def _with_late_arithmetic(step: Staged) -> Staged:
    """Let the cores do the last arithmetic on gradients that only they read, and join the slices of the pass.

    A gradient that is cast to float32 then goes to host memory in bfloat16.
    """
    first, *later = step.stages
    eqns = [eqn for s in first.slices for eqn in s.jaxpr.eqns]
    made = {v: k for k, v in enumerate(v for eqn in eqns for v in eqn.outvars)}
    others = {*step.results}.union(*(s.reads for s in later if not s.on_cores))
    sent = {v for s in later if s.on_cores for v in s.reads if v in made and is_sent(v.aval)} - others
    late, starts = computed_again(sent, frozenset(), [*filter(_is_late, eqns)])

    def with_arithmetic(s: Slice) -> Slice:
        own, _ = needed_for(late, s.inputs)
        return slice_of([*own, *s.jaxpr.eqns], s.outputs, s.jaxpr.debug_info, s.shards) if own else s

    def instead(values: Iterable[Var]) -> list[Var]:
        """Replace the results of late arithmetic by its operands."""
        each = ({v} if v not in sent else needed_for(late, [v])[1] & starts for v in values)
        return list(dict.fromkeys(x for found in each for x in sorted(found & made.keys(), key=made.__getitem__)))

    later = [dataclasses.replace(s, slices=tuple(map(with_arithmetic, s.slices))) if s.on_cores else s for s in later]
    pass_ = dataclasses.replace(first, slices=(_joined(first.slices, instead(first.makes)),))
    return dataclasses.replace(step, stages=[pass_, *later], in_turn=instead(step.in_turn))


def _is_late(eqn: Equation) -> bool:
    """Whether the cores' kernels do an equation as well."""
    return eqn.primitive.name in LATE and all(v.aval.dtype in (np.float32, jnp.bfloat16) for v in eqn.invars)


def _joined(slices: Sequence[Slice], outputs: list[Var]) -> Slice:
    """Join slices. Each equation of a later slice comes as soon as its operands exist, so that the update's groups wait
    for a learning rate, and not for the gradients of leaves that stay on the device."""
    made: dict[Var, int] = {}  # by which equation of the first slice, the pass
    found: list[tuple[int, Equation]] = []
    for s in slices:
        for k, eqn in enumerate(s.jaxpr.eqns):
            at = k if s is slices[0] else max((made.get(v, -1) for v in variables(eqn.invars)), default=-1)
            found.append((at, eqn))
            made.update(dict.fromkeys(eqn.outvars, at))
    eqns, _ = needed_for(
        [eqn for _, eqn in sorted(found, key=lambda each: each[0])], outputs, kept=lambda e: bool(e.effects)
    )
    return slice_of(eqns, outputs, slices[0].jaxpr.debug_info, {})


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


def divided(jaxpr: Jaxpr, results: Set[Var], cuts: Sequence[int]) -> list[Slice]:
    """Divide the equations at the cuts into programs of their own, each with the values that it computes again."""
    eqns, given = jaxpr.eqns, {*jaxpr.invars}
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    crossing: set[Var] = set()  # the values that later parts read
    parts: list[Slice] = []
    for start, end in reversed([*itertools.pairwise([0, *cuts, len(eqns)])]):
        own = eqns[start:end]
        outputs = [v for eqn in own for v in eqn.outvars if v in results or v in crossing]
        crossing -= {v for eqn in own for v in eqn.outvars}
        reads = {v for eqn in own for v in variables(eqn.invars) if producer.get(v, start) < start}
        cheap = [eqn for eqn in eqns[:start] if eqn.primitive.name in CHEAP]
        again, more = computed_again(reads, crossing | given, cheap)
        crossing |= more
        parts.append(slice_of([*again, *own], outputs, jaxpr.debug_info, {}))
    return parts[::-1]


# ---- within one of the programs --------------------------------------------------------------------------------------


def sending_rows(jaxpr: Jaxpr, n: int) -> Jaxpr:
    """Let scans send the results after the first ``n`` to host memory row by row, if nothing else in it reads them.

    Such a stack never exists on the device, and its rows are copied during the matmuls of the pass.
    """
    times = Counter(v for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in variables(atoms))
    sent = {v for v in variables(jaxpr.outvars[n:]) if times[v] == 1}
    hosts: dict[Var, Var] = {}
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        scan = scan_of(eqn)
        ys = [y for y in scan.ys if y in sent and nbytes(y.aval) >= scan.length * LEAST_ROW] if scan else []
        if scan is not None and ys and not scan.body.consts:
            hosts |= {y: Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host)) for y in ys}
            eqn = _sending(scan, [hosts.get(y, y) for y in scan.ys])
        eqns.append(eqn)
    return jaxpr_like(jaxpr, eqns, [renamed(hosts, v) for v in jaxpr.outvars]) if hosts else jaxpr


def _sending(scan: Scan, ys: Sequence[Var]) -> Equation:
    """Return the equation of a scan whose stacks are ``ys``, some of them in host memory."""
    body, n, new = scan.body.jaxpr, len(scan.carry), Builder([*scan.body.jaxpr.eqns])
    with scan.eqn.ctx.manager:
        rows = zip(body.outvars[n:], ys, scan.ys, strict=True)
        sent = [x if y is old else new.run(to_host, x)[0] for x, y, old in rows]
    traced = ClosedJaxpr(jaxpr_like(body, new.eqns, [*body.outvars[:n], *sent]), [])
    # not unrolled: rows of several iterations would be put together in host memory
    return scan.eqn.replace(params=scan.eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=[*scan.carry, *ys])


def in_turn(results: Sequence[Any], turns: Sequence[int]) -> list[Any]:
    """Let each of some results wait for the one before, and the smallest of the others wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    found, turns = list(results), [k for k in turns if not on_host(results[k])]
    if len(turns) < 2:
        return found
    # XLA must compute each gradient when its turn comes, because one of its numbers counts, times a zero unknown to XLA
    read, zero = opaque(jnp.int32(0)), opaque(jnp.int32(0))
    for k in turns:
        found[k], read = together((found[k], read))
        first = jax.lax.slice(found[k], [0] * found[k].ndim, [1] * found[k].ndim).reshape(())
        read |= jnp.real(first).astype(jnp.int32) & zero
    others = {*range(len(found))}.difference(turns)
    others = [k for k in others if not on_host(found[k]) and not jnp.issubdtype(found[k].dtype, jax.dtypes.extended)]
    last = min(others or turns, key=lambda k: nbytes(jax.typeof(found[k])))
    found[last] = jnp.where(read == 0, found[last], jnp.zeros((), found[last].dtype))
    return found
