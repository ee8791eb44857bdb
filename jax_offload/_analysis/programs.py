"""The pass before an update of the cores, or of a state on disk, in the programs that it is cut into: what goes on
beside it, as ``_drive/segments.py`` has it."""

from __future__ import annotations

import dataclasses
import itertools

from jax_offload._analysis.work import all_flops
from jax_offload._base.arrays import nbytes
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.stages import BEFORE, GROUP, Stage, Staged


@dataclasses.dataclass(frozen=True)
class Programs:
    """Of a pass.

    Attributes:
      shares: of its arithmetic, program by program.
      groups: of the update, in their order: behind which program one runs that is on disk, or can begin that the cores
        update; and its bytes of state.
    """

    shares: tuple[float, ...] = (1.0,)
    groups: tuple[tuple[int, int], ...] = ()

    def beside(self, cores: float, compute: float) -> float:
        """Of the seconds that the cores take in all, those in which the pass still goes on, in ``compute`` seconds."""
        ends, total = [*itertools.accumulate(self.shares)], sum(size for _, size in self.groups)
        end = 0.0
        for behind, size in self.groups:
            end = max(end, compute * ends[behind]) + cores * size / total
        through = cores - max(0.0, end - compute)
        return through if total and through > 1e-9 * cores else 0.0  # sums of shares are rounded

    def behind(self, groups: int) -> list[int]:
        """How many groups of so many run behind each program; behind the last one, where another number is known."""
        if len(self.groups) != groups:
            return [0 for _ in self.shares[:-1]] + [groups]
        return [sum(behind == k for behind, _ in self.groups) for k in range(len(self.shares))]


ONE = Programs()


def programs_of(step: Staged) -> Programs:
    """Of a step's stages."""
    segments = [stage for stage in step.stages if stage.name == BEFORE]
    flops = [sum(all_flops(p.jaxpr) for p in stage.pieces if p.jaxpr is not None) for stage in segments]
    if not sum(flops):
        return ONE
    maker = {v: k for k, stage in enumerate(segments) for v in stage.makes}
    groups: list[tuple[int, int]] = []
    passed = 0
    for stage in step.stages:
        passed += stage.name == BEFORE
        if stage.name == GROUP:
            groups.append((passed - 1, _state(stage)))
        elif stage.on_cores:
            groups.append((max((maker.get(v, 0) for v in stage.reads), default=0), _state(stage)))
    return Programs(tuple(n / sum(flops) for n in flops), tuple(groups))


def _state(stage: Stage) -> int:
    return sum(nbytes(v.aval) for v in stage.reads if is_host_aval(v.aval))
