"""The forward and backward pass in several programs, so that the first gradients' update need not wait for the last.

All results of one program become ready together. Cut behind the gradients of a group, the pass leaves them while it
goes on: the cores have work then. Where that would take more device memory than one program, by the estimate of
``_peak``, there are fewer cuts, or none.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence, Set

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Jaxpr, Literal, Var, jaxpr_like, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.cuts import cuts_of, parts_of
from jax_offload._drive.pieces import InTurn, Piece
from jax_offload._drive.stages import BEFORE, Stage, Staged
from jax_offload._drive.tasks import Task, tasks_of
from jax_offload._ir.shares import structure
from jax_offload._peak.liveness import peak

# Why the pass is one program; what follows "the forward and the backward pass are one program: ".
NO_GROUPS = "no update of the cores follows it at once"
ON_A_CPU = "the host's cores run it too"
ON_DEVICES = "it runs on several devices"
EFFECTS = "it has side effects"
ALL_FIRST = "the update needs all gradients first, as clipping by their norm does"
TOGETHER = "one group of the update, or one loop of the pass (a scan over layers), has all of the large gradients"
LITTLE_LEFT = "little of it is left when the first gradients are there"
PEAK = "cut, it would take more device memory, by an estimate"

ALIKE = 1.001  # a loss that is handed on is no more memory


def in_segments(step: Staged, donated: Set[Var]) -> tuple[Staged, str]:
    """The step with its first program in several, where groups of the cores have their gradients early; and why not.

    The groups follow all segments: these are under way by then, and each group waits for its gradients alone.

    Args:
      step: its stages; the first has the pass as its first piece.
      donated: what of its inputs is.
    """
    first, rest = step.stages[0], step.stages[1:]
    pass_, *others = first.pieces or (None,)
    groups = [*itertools.takewhile(lambda s: s.on_cores, (s for s in rest if s.name != "device"))]
    if first.name != BEFORE or pass_ is None or pass_.jaxpr is None or not groups:
        return step, NO_GROUPS
    jaxpr = pass_.jaxpr
    if any(eqn.effects for eqn in jaxpr.eqns):
        return step, EFFECTS
    made = _made_at(jaxpr, others)
    ready = [max((made.get(v, 0) for v in s.reads), default=0) for s in groups]
    if len({*ready} - {0}) < 2:
        return step, _why_at_once(jaxpr, others, groups)
    cuts = cuts_of(jaxpr, ready, [{*s.reads} for s in groups])
    if not cuts:
        return step, LITTLE_LEFT
    most = min(peaks(step, donated, 1)[0])
    while cuts:
        found = dataclasses.replace(step, stages=[*_segments(jaxpr, pass_, others, made, cuts), *rest])
        each = [max(both) for both in peaks(found, donated, len(cuts) + 1)]
        if max(each) <= ALIKE * most:
            return found, ""
        worst = each.index(max(each))
        del cuts[min(worst, len(cuts) - 1)]
    return step, PEAK


def peaks(step: Staged, donated: Set[Var], count: int) -> list[tuple[int, int]]:
    """Of each of the first programs an estimate of the device memory while it runs, in the order of its trace and with
    all as early as it can be; with what lies beside it for others."""
    tasks = tasks_of(step, donated)[:count]
    here = {v: nbytes(v.aval) for v in step.inputs if not is_host_aval(v.aval)}
    found: list[tuple[int, int]] = []
    for task in tasks:
        beside = sum(here.values()) - sum(here.get(v, 0) for v in {*task.inputs})
        own = _with_results(task)
        reused = {task.inputs[k] for k in task.reused}
        free = [isinstance(v, Var) and v in reused for v in task.stage.pieces[0].inputs]
        found.append((beside + peak(own, free), beside + peak(own, free, early=True)))
        here |= {v: nbytes(v.aval) for v in task.outputs if not is_host_aval(v.aval)}
        for v in task.free:
            here.pop(v, None)
    return found


def _with_results(task: Task) -> Jaxpr:
    """The task's pass, with those results that are arrays on the device at its end: not what it has sent down."""
    pass_, *others = task.stage.pieces
    assert pass_.jaxpr is not None
    wanted = {*task.outputs}.union(*(variables(p.inputs) for p in others if not isinstance(p, InTurn)))
    for turns in (p for p in others if isinstance(p, InTurn)):
        wanted |= {v for v, held in zip(variables(turns.inputs), turns.outputs, strict=True) if held in wanted}
    kept = [v for v in pass_.jaxpr.outvars if isinstance(v, Literal) or v in wanted]
    return jaxpr_like(pass_.jaxpr, pass_.jaxpr.eqns, kept)


def _made_at(jaxpr: Jaxpr, others: Sequence[Piece]) -> dict[Var, int]:
    """Behind how many equations each variable is there; what other pieces make, behind the last that they need."""
    made = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for piece in others:
        if isinstance(piece, InTurn):
            made.update((new, made.get(v, 0)) for v, new in zip(variables(piece.inputs), piece.outputs, strict=True))
        else:
            at = max((made.get(v, 0) for v in variables(piece.inputs)), default=0)
            made.update(dict.fromkeys(piece.outputs, at))
    return made


def _segments(
    jaxpr: Jaxpr, pass_: Piece, others: Sequence[Piece], made: dict[Var, int], cuts: Sequence[int]
) -> list[Stage]:
    """The pass in programs, each with those other pieces whose operands are there at its end."""
    names = dict(zip(jaxpr.invars, pass_.inputs, strict=True))
    pieces: list[list[Piece]] = []
    for part in parts_of(jaxpr, {*pass_.outputs}, cuts):
        inputs = [names.get(v, v) for v in part.inputs]
        pieces.append([Piece(inputs, part.outputs, part.run, structure(part.jaxpr), part.jaxpr)])
    for piece in others:
        if isinstance(piece, InTurn):
            of = [bisect.bisect_left(cuts, made.get(v, 0)) for v in variables(piece.inputs)]
            for k in sorted({*of}):
                own = {v for v, at in zip(variables(piece.inputs), of, strict=True) if at == k}
                pieces[k].append(piece.some(own))
        else:
            at = max((made.get(v, 0) for v in variables(piece.inputs)), default=0)
            pieces[bisect.bisect_left(cuts, at)].append(piece)
    return [Stage(BEFORE, tuple(each)) for each in pieces]


def _why_at_once(jaxpr: Jaxpr, others: Sequence[Piece], groups: Sequence[Stage]) -> str:
    """Why no group has its gradients before the others: a number that is made of several is read by all."""
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    pieces = [p for p in others if not isinstance(p, InTurn) and len(made.intersection(variables(p.inputs))) > 1]
    several = {v for piece in pieces for v in piece.outputs}
    return ALL_FIRST if len(groups) > 1 and all(several & {*s.reads} for s in groups) else TOGETHER
