"""An iteration of a scan in phases, between which transfers change direction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Literal, flops, variables
from jax_offload._ir.program import Program, Var
from jax_offload._ir.slices import Slice, slice_of


@dataclasses.dataclass(frozen=True)
class Phases:
    """A program, run one phase after the other.

    Attributes:
      program: it.
      slices: its phases.
      gates: the matmul that each but the last is there for; ``None`` where nothing in the program is worth dividing.
      held: what the next phase's arithmetic reads, where that does not need the gate.
    """

    program: Program
    slices: tuple[Slice, ...]
    gates: tuple[Var | None, ...]
    held: tuple[tuple[Var, ...], ...]


def phases(program: Program, times: Sequence[float]) -> Phases | None:
    """Cuts behind matmuls, so that each phase has the share of the arithmetic that it has of the transfers' time.

    A phase is what its last matmul needs. What stands above that without being needed, a weight's gradient say, is the
    next one's: XLA for GPUs runs it behind the gate by itself, that for TPUs before it, unless it is held. And the
    arithmetic is shared as the transfers are, however long they take beside it: behind the first matmul past the half,
    a clipped GPT 1.3B with bfloat16 moments, turned round, had 0.33 of its transfers exposed (16,384 tokens,
    simulated); now 0.13.

    Args:
      program: an iteration.
      times: of the transfers of each phase, in any unit.

    Returns:
      ``None`` where there are too few matmuls for so many phases.
    """
    work = [flops(eqn) for eqn in program.eqns]
    left = [sum(work) - done for done in itertools.accumulate(work)]
    heavy_of = _heavy_of(program.eqns, work)
    cuts, done = list[int](), [0]
    for k in range(len(times) - 1):
        share = times[k] / (sum(times[k:]) or 1)
        before, after = (1 - share, share) if 0 < share < 1 else (1, 1)
        start = cuts[-1] + 1 if cuts else 0
        needed = {
            at: sum(work[h] for h in _bits(heavy_of[at] & ~done[-1])) for at in range(start, len(work)) if work[at]
        }
        weight = {at: (min(n * before, left[at] * after), n) for at, n in needed.items()}
        best = max(weight, key=weight.__getitem__, default=-1)
        if len(times) > 2 and (not weight or not left[best]):
            return None
        done.append(done[-1] | (heavy_of[best] if weight else 0))
        cuts.append(best)
    phase_of = _phase_of(program.eqns, work, done[1:])
    parts = [[eqn for eqn, turn in zip(program.eqns, phase_of, strict=True) if turn == k] for k in range(len(times))]
    read = [{v for eqn in eqns for v in variables(eqn.invars)} for eqns in parts]
    results = {*variables(program.outputs)}
    slices: list[Slice] = []
    for k, eqns in enumerate(parts):
        wanted = results.union(*read[k + 1 :])
        outputs = [v for eqn in eqns for v in eqn.outvars if v in wanted]
        slices.append(slice_of(eqns, outputs, program.debug_info, {}))
    gates = [
        next((v for v in program.eqns[cut].outvars if v in s.outputs), None) if cut >= 0 else None
        for cut, s in zip(cuts, slices, strict=False)
    ]
    inputs = {*program.inputs}
    held = [() if gate is None else _held(eqns, gate, inputs) for gate, eqns in zip(gates, parts[1:], strict=True)]
    return Phases(program, tuple(slices), tuple(gates), tuple(held))


def _phase_of(eqns: Sequence[Equation], work: Sequence[float], done: Sequence[int]) -> list[int]:
    """Of each equation its phase: of what has no arithmetic, where it is first read. ``done``: when each phase but the
    last is, as bits."""
    first: dict[Var, int] = {}
    phase_of: list[int] = []
    for at, (eqn, n) in reversed([*enumerate(zip(eqns, work, strict=True))]):
        turn = sum(not mask >> at & 1 for mask in done)
        if not n:
            turn = min((first[v] for v in eqn.outvars if v in first), default=len(done))
        first.update((v, min(turn, first.get(v, turn))) for v in variables(eqn.invars))
        phase_of.append(turn)
    return phase_of[::-1]


def _held(eqns: Sequence[Equation], gate: Var, inputs: Set[Var]) -> tuple[Var, ...]:
    """Of each of a phase's matmuls that need no gate what would make it wait: the smallest array of those that it is
    made of, and rather one that the program has made than an input, whose rows XLA may read where they are."""
    behind, found = {gate}, list[Var]()
    of: dict[Var, Var | None] = {}  # what the phase makes -> the array of those that it is made of, if any
    for eqn in eqns:
        made_of = [x for v in variables(eqn.invars) if (x := of.get(v, v)) is not None]
        best = min(filter(_is_array, made_of), key=lambda v: (v in inputs, nbytes(v.aval)), default=None)
        if behind.isdisjoint(made_of) and best is not None and flops(eqn):
            found.append(best)
            behind.add(best)
        if behind.isdisjoint(made_of):
            of.update(dict.fromkeys(eqn.outvars, best))
        else:
            behind.update(eqn.outvars)
    return tuple(found)


def _is_array(v: Var) -> bool:
    """Of numbers, and no key."""
    return v.aval.ndim > 0 and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _heavy_of(eqns: Sequence[Equation], work: Sequence[float]) -> list[int]:
    """Of each equation, all with arithmetic that it needs, and itself, as bits."""
    of: dict[Var, int] = {}
    found: list[int] = []
    for k, eqn in enumerate(eqns):
        bits = 1 << k if work[k] else 0
        for v in eqn.invars:
            bits |= 0 if isinstance(v, Literal) else of.get(v, 0)
        of.update(dict.fromkeys(eqn.outvars, bits))
        found.append(bits)
    return found


def _bits(mask: int) -> list[int]:
    return [k for k in range(mask.bit_length()) if mask >> k & 1]
