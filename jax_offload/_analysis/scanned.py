"""What is exposed of transfers that a scan of the step makes beside its own arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.exposure import Link
from jax_offload._analysis.work import seconds
from jax_offload._base.arrays import nbytes
from jax_offload._plan.in_scan import InScan

# Of the arithmetic of a phase after the first what has passed when XLA for GPUs begins to load there: the most that was
# seen (docs/estimates.md). Its scheduler knows a copy by a constant, and these wait for stores of the phase before.
LATE = 0.5


def in_scans(
    plans: Sequence[InScan], link: Link, chip: Chip, shards: int, beside: float
) -> tuple[float, float]:  # fmt: skip
    """Seconds, at least and at most. A scan's first row is loaded before it, and its last one stored when it is over,
    while the next one's first is loaded, or before that. The forward pass hides the first of all, but where the updates
    are in that pass, which loads first what the step before has not handed on, and stores in the iteration itself."""
    waits = [_waits(plan, link, chip, shards, beside) for plan in plans]
    rows = [_rows(plan) for plan in plans]
    firsts = [sum(of.loaded) - first_rows(plan) for plan, of in zip(plans, rows, strict=True)]
    loads = [n if plan.ahead or k else 0 for k, (plan, n) in enumerate(zip(plans, firsts, strict=True))]
    stores = [0 if plan.ahead else sum(of.stored) for plan, of in zip(plans, rows, strict=True)]
    both = sum(link.seconds(*each) for each in zip([*loads, 0], [0, *stores], strict=True))
    apart = link.one_after_the_other(sum(loads), sum(stores))
    least, most = (sum(each) for each in zip(*waits, strict=True)) if waits else (0.0, 0.0)
    return least + both, most + max(both, apart)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Bytes on one device that an iteration loads, and stores, of each group."""

    loaded: Sequence[int]
    stored: Sequence[int]


def _rows(plan: InScan) -> _Rows:
    loaded, stored = ([sum(nbytes(v.aval) for v in group if v in of) for group in plan.groups]
                      for of in (plan.loaded, plan.stored))  # fmt: skip
    own = sum(p.slice.loaded_bytes for p in plan.planned) / (sum(loaded) or 1)  # the rest is on other devices
    return _Rows(*([int(n * own) // plan.scan.length for n in each] for each in (loaded, stored)))


def first_rows(plan: InScan) -> int:
    """Bytes on one device that are there from step to step: of the first row."""
    handed, every = (sum(nbytes(v.aval) for v in of) for of in (plan.handed_on, plan.loaded))
    return sum(_rows(plan).loaded) * handed // (every or 1)


def _waits(plan: InScan, link: Link, chip: Chip, shards: int, beside: float) -> tuple[float, float]:
    """Seconds of all iterations, at least and at most. In each phase of one a group of leaves is stored while another
    is loaded, behind that phase's arithmetic. ``beside``: seconds of an iteration in which parameters are gathered."""
    moving, behind = _moving(plan, link), _behind_each(plan, chip)
    count = len(behind)

    def waited(late: float) -> float:
        hides = [n / shards * (1 - late * (k > 0)) + beside / count for k, n in enumerate(behind)]
        return plan.scan.length * sum(max(0.0, t - n) for t, n in zip(moving, hides, strict=True))

    return waited(0.0), waited(LATE if chip.platform == "cuda" else 0.0)


def _moving(plan: InScan, link: Link) -> list[float]:
    """Seconds that each phase's transfers take."""
    rows = _rows(plan)
    return [link.seconds(rows.loaded[k - 1], rows.stored[k]) for k in range(len(rows.stored))]


def hidden_at(plans: Sequence[InScan], link: Link, chip: Chip, shards: int) -> float | None:
    """How many times the arithmetic has to be what it is, so that iterations wait for nothing; ``None`` where there are
    none, or a phase of them has no arithmetic."""
    pairs = [pair for plan in plans for pair in zip(_moving(plan, link), _behind_each(plan, chip), strict=True)]
    return max((t * shards / n for t, n in pairs), default=None) if all(n for _, n in pairs) else None


def _behind_each(plan: InScan, chip: Chip) -> list[float]:
    """Arithmetic of each phase, which is what runs between two gates. What is kept as it came, behind the first."""
    found = [seconds(phase.jaxpr, chip) for phase in plan.body.slices]
    kept = sum(2 * nbytes(v.aval) for v in plan.passed_through) / chip.reached.hbm
    return [n + (kept if k == 1 else 0.0) for k, n in enumerate(found)]
