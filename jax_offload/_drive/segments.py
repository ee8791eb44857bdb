"""The forward and backward pass in several programs, so that the first gradients' update need not wait for the last.

All results of one program become ready together. Cut behind the gradients of a group, the pass leaves them while it
goes on: the cores, or the drives, have work then. One rule says where (``cuts.py``).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set

from jax_offload._base.jaxprs import Jaxpr, Var, variables
from jax_offload._drive.cuts import LEAST, LEAST_OF_FILES, MOST, MOST_OF_FILES, cuts_of, parts_of
from jax_offload._drive.pieces import InTurn, Piece
from jax_offload._drive.stages import BEFORE, GROUP, Stage, Staged
from jax_offload._ir.conds import structure
from jax_offload._ir.slices import slice_of

# Why the pass is one program; what follows "the forward and the backward pass are one program: ".
NO_GROUPS = "no update of the cores, or of a state on disk, follows it at once"
ON_A_CPU = "it runs on the host's cores itself"
ON_DEVICES = "its state is on disk, and it runs on several devices"
ON_PROCESSES = "it runs on devices of several processes"
EFFECTS = "it has side effects"
ALL_FIRST = "the update needs all gradients first, as clipping by their norm does"
TOGETHER = "one group of the update, or one loop of the pass, has all of the large gradients"
LITTLE_LEFT = "little of it is left when the first gradients are there"
REPLICATED = "parameters are replicated on several devices, and each program would reduce their gradients by itself"


def in_segments(step: Staged, replicated: bool = False) -> tuple[Staged, str]:
    """The step with its first program in several, where groups of the update have their gradients early; and why not.

    Groups of the cores follow all segments: these are under way by then, and each group waits for its gradients alone.
    Groups whose state is on disk run on the device. They follow the segment after the one that makes their gradients:
    so the device has work while the host waits for a file.

    Args:
      step: its stages; the first has the pass as its first piece.
      replicated: whether it runs on several devices that have the same parameters.
    """
    first = step.stages[0]
    pass_ = first.pieces[0] if first.pieces else None
    if first.name != BEFORE or pass_ is None or pass_.jaxpr is None or not _groups(step):
        return step, NO_GROUPS
    if any(eqn.effects for eqn in pass_.jaxpr.eqns):
        return step, EFFECTS
    return (step, REPLICATED) if replicated else _cut(step)


def _groups(step: Staged) -> list[Stage]:
    """The groups of the update that follow its first program at once."""
    rest = step.stages[1:]
    on_disk = [*itertools.takewhile(lambda s: s.name == GROUP, rest)]
    return on_disk or [*itertools.takewhile(lambda s: s.on_cores, (s for s in rest if s.name != "device"))]


def _cut(step: Staged) -> tuple[Staged, str]:
    groups, (first, *rest) = _groups(step), step.stages
    pass_, *others = first.pieces
    jaxpr, on_disk = pass_.jaxpr, groups[0].name == GROUP
    assert jaxpr is not None
    of_pass = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    others = [part for piece in others for part in _without_gradients_first(piece, of_pass)]
    defs, ready = _produced_at(jaxpr, others), list[int]()
    for group in groups:  # some rows of a parameter are written after others
        ready.append(max((defs.get(v, 0) for v in group.reads), default=0))
        defs.update(dict.fromkeys(group.makes, ready[-1]))
    reads = [{*group.reads} for group in groups]
    if len({*ready} - {0}) < 2:
        return step, _why_at_once(jaxpr, others, groups)
    bounds = (MOST_OF_FILES, LEAST_OF_FILES) if on_disk else (MOST, LEAST)
    cuts = cuts_of(jaxpr, ready, reads, *bounds)
    if not cuts:
        return step, LITTLE_LEFT
    segments = _segments(jaxpr, pass_, others, defs, cuts)
    stages = [*_interleaved(segments, cuts, groups, ready), *rest[len(groups) :]] if on_disk else [*segments, *rest]
    return dataclasses.replace(step, stages=stages), ""


def _interleaved(
    segments: Sequence[Stage], cuts: Sequence[int], groups: Sequence[Stage], ready: Sequence[int]
) -> Iterator[Stage]:
    """The segments, and behind the one after each the groups that the device updates from its gradients."""
    after = [min(bisect.bisect_left(cuts, at) + 1, len(segments) - 1) for at in ready]
    for k, segment in enumerate(segments):
        yield segment
        yield from (group for group, at in zip(groups, after, strict=True) if at == k)


def _produced_at(jaxpr: Jaxpr, others: Sequence[Piece]) -> dict[Var, int]:
    """Behind how many equations each variable is there; what other pieces make, behind the last that they need."""
    defs = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for piece in others:
        if isinstance(piece, InTurn):
            defs.update((new, defs.get(v, 0)) for v, new in zip(variables(piece.inputs), piece.outputs, strict=True))
        else:
            at = max((defs.get(v, 0) for v in variables(piece.inputs)), default=0)
            defs.update(dict.fromkeys(piece.outputs, at))
    return defs


def _without_gradients_first(piece: Piece, defs: Set[Var]) -> list[Piece]:
    """A piece as two, what needs nothing that is made of gradients and the rest: a learning rate, of which the groups
    wait, beside the update of leaves that stay on the device."""
    late = {v for v in variables(piece.inputs) if v in defs}
    if piece.jaxpr is None or not late or any(eqn.effects for eqn in piece.jaxpr.eqns):
        return [piece]
    names = dict(zip(piece.jaxpr.invars, piece.inputs, strict=True))
    late, eqns = {v for v, x in names.items() if x in late}, ([], [])
    for eqn in piece.jaxpr.eqns:
        waits = not late.isdisjoint(variables(eqn.invars))
        eqns[waits].append(eqn)
        late.update(eqn.outvars if waits else ())
    wanted = {v for eqn in eqns[True] for v in variables(eqn.invars)}.union(piece.outputs)
    found: list[Piece] = []
    for own in eqns:
        part = slice_of(own, [v for eqn in own for v in eqn.outvars if v in wanted], piece.jaxpr.debug_info, {})
        inputs = [names.get(v, v) for v in part.inputs]
        found += [Piece(inputs, part.outputs, part.run, structure(part.jaxpr), part.jaxpr)] if part.outputs else []
    return found


def _segments(
    jaxpr: Jaxpr, pass_: Piece, others: Sequence[Piece], defs: dict[Var, int], cuts: Sequence[int]
) -> list[Stage]:
    """The pass in programs, each with those other pieces whose operands are there at its end."""
    names = dict(zip(jaxpr.invars, pass_.inputs, strict=True))
    pieces: list[list[Piece]] = []
    for part in parts_of(jaxpr, {*pass_.outputs}, cuts):
        inputs = [names.get(v, v) for v in part.inputs]
        pieces.append([Piece(inputs, part.outputs, part.run, structure(part.jaxpr), part.jaxpr)])
    for piece in others:
        if isinstance(piece, InTurn):
            of = [bisect.bisect_left(cuts, defs.get(v, 0)) for v in variables(piece.inputs)]
            for k in sorted({*of}):
                own = {v for v, at in zip(variables(piece.inputs), of, strict=True) if at == k}
                pieces[k].append(piece.some(own))
        else:
            at = max((defs.get(v, 0) for v in variables(piece.inputs)), default=0)
            pieces[bisect.bisect_left(cuts, at)].append(piece)
    return [Stage(BEFORE, tuple(each)) for each in pieces]


def _why_at_once(jaxpr: Jaxpr, others: Sequence[Piece], groups: Sequence[Stage]) -> str:
    """Why no group has its gradients before the others: a number that is made of several is read by all."""
    defs = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    pieces = [p for p in others if not isinstance(p, InTurn) and len(defs.intersection(variables(p.inputs))) > 1]
    several = {v for piece in pieces for v in piece.outputs}
    return ALL_FIRST if all(several & {*s.reads} for s in groups) else TOGETHER
