"""What is exposed of transfers that a scan of the step makes beside its own arithmetic."""

from __future__ import annotations

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.exposure import Link
from jax_offload._analysis.work import seconds
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import without_dead_code
from jax_offload._plan.in_scan import InScan


def in_a_scan(plan: InScan, link: Link, chip: Chip, divided: int, beside: float, *, first: bool) -> float:
    """Seconds. In each half of an iteration one group of leaves is stored while the other is loaded, behind that half's
    arithmetic. The last row is stored when the scan is over; the first is loaded before it, which the forward pass
    hides for the ``first`` scan alone. ``beside``: seconds of an iteration in which parameters are gathered."""
    groups = [sum(nbytes(v.aval) for v in group) for group in plan.groups]
    own = sum(p.slice.loaded_bytes for p in plan.planned) / (sum(groups) or 1)  # the rest is on other devices
    one, other = (int(n * own) // plan.scan.length for n in groups)
    moving = link.seconds(other, one), link.seconds(one, other)
    waits = sum(
        max(0.0, t - behind / divided - beside / 2) for t, behind in zip(moving, _halves(plan, chip), strict=True)
    )
    row = (one + other) / link.store + (0.0 if first else (one + other) / link.load)
    return plan.scan.length * waits + row


def _halves(plan: InScan, chip: Chip) -> tuple[float, float]:
    """Arithmetic before the gate between them and behind it: before it runs what it needs, the rest whenever XLA likes,
    which is behind it (GPT 2.7B, an H200: 5.1 ms before it, where what stands above it takes 6.7)."""
    first, second, gate = plan.body.first, plan.body.second, plan.body.gate
    whole = seconds(first.jaxpr, chip) + seconds(second.jaxpr, chip)
    if gate is None:
        return whole, 0.0
    needed = seconds(without_dead_code(first.jaxpr, [v == gate for v in first.outputs])[0], chip)
    return needed, max(0.0, whole - needed)
