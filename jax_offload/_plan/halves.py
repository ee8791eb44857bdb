"""An iteration of a scan in two halves of about the same work, between which transfers change direction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jax_offload._base.flops import flops
from jax_offload._base.jaxprs import Equation, Literal
from jax_offload._ir.program import Program, Var
from jax_offload._ir.slices import Slice, slice_of


@dataclasses.dataclass(frozen=True)
class Halves:
    """A program, run one half after the other.

    Attributes:
      program: it.
      first, second: its halves.
      gate: what is made last in the first; ``None`` where nothing in the program is worth halving.
    """

    program: Program
    first: Slice
    second: Slice
    gate: Var | None


def halves(program: Program) -> Halves:
    """Cut behind the matmul with the most arithmetic on both sides: what it needs, and what is written behind it.

    What stands above it without being needed, a matmul on the cotangent say, says nothing of when it runs. Half of the
    transfers take as long as the other half, whatever the arithmetic beside them: behind the first matmul past the
    half, a clipped GPT 1.3B with bfloat16 moments, turned round, had 0.33 of its transfers exposed (16,384 tokens,
    simulated); now 0.13.
    """
    work = [flops(eqn) for eqn in program.eqns]
    needed = _work_needed(program.eqns, work)
    left = [sum(work) - done for done in itertools.accumulate(work)]
    heavy = [k for k, n in enumerate(work) if n]
    cut = 1 + max(heavy, key=lambda k: (min(needed[k], left[k]), needed[k])) if heavy else 0
    parts = program.eqns[:cut], program.eqns[cut:]
    results = {v for v in program.outputs if not isinstance(v, Literal)}
    read = {v for eqn in parts[1] for v in eqn.invars if not isinstance(v, Literal)}
    wanted = results | read, results
    outputs = [[v for eqn in eqns for v in eqn.outvars if v in w] for eqns, w in zip(parts, wanted, strict=True)]
    first, second = (slice_of(e, o, program.debug_info, {}) for e, o in zip(parts, outputs, strict=True))
    gate = next((v for v in program.eqns[cut - 1].outvars if v in first.outputs), None) if cut else None
    return Halves(program, first, second, gate)


def _work_needed(eqns: Sequence[Equation], work: Sequence[float]) -> list[float]:
    """Of each equation, the work of all that it needs, with its own."""
    of: dict[Var, int] = {}  # what a value is made of, as bits
    needed: list[float] = []
    heavy = [k for k, n in enumerate(work) if n]
    for k, eqn in enumerate(eqns):
        bits = 1 << k if work[k] else 0
        for v in eqn.invars:
            bits |= 0 if isinstance(v, Literal) else of.get(v, 0)
        of.update(dict.fromkeys(eqn.outvars, bits))
        needed.append(sum(work[h] for h in heavy if bits >> h & 1))
    return needed
