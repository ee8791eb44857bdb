"""What is exposed of transfers that a scan of the step makes beside its own arithmetic."""

from __future__ import annotations

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.exposure import Link
from jax_offload._analysis.work import seconds
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Jaxpr, without_dead_code
from jax_offload._peak.flattened import flattened, loop_of
from jax_offload._plan.in_scan import InScan


def in_a_scan(plan: InScan, link: Link, chip: Chip, shards: int, beside: float, *, first: bool) -> float:
    """Seconds. In each phase of an iteration one group of leaves is stored while another is loaded, behind that phase's
    arithmetic. The last row is stored when the scan is over; the first is loaded before it, which the forward pass
    hides for the ``first`` scan alone. ``beside``: seconds of an iteration in which parameters are gathered."""
    groups = [sum(nbytes(v.aval) for v in group) for group in plan.groups]
    own = sum(p.slice.loaded_bytes for p in plan.planned) / (sum(groups) or 1)  # the rest is on other devices
    rows = [int(n * own) // plan.scan.length for n in groups]
    moving = [link.seconds(rows[k - 1], rows[k]) for k in range(len(rows))]
    waits = sum(
        max(0.0, t - behind / shards - beside / len(rows))
        for t, behind in zip(moving, _behind_each(plan, chip), strict=True)
    )
    row = sum(rows) / link.store + (0.0 if first else sum(rows) / link.load)
    return plan.scan.length * waits + row


def _behind_each(plan: InScan, chip: Chip) -> list[float]:
    """Arithmetic of each phase: before its gate runs what that needs, the rest whenever XLA likes, which is behind it
    (GPT 2.7B, an H200: 5.1 ms before it, where what stands above it takes 6.7)."""
    found: list[float] = []
    late = 0.0
    for phase, gate in zip(plan.body.slices, [*plan.body.gates, None], strict=True):
        by_itself = seconds(phase.jaxpr, chip)
        needed = by_itself
        if gate is not None:
            needed = _needed(phase.jaxpr, phase.outputs.index(gate), chip)
        found.append(late + needed)
        late = max(0.0, by_itself - needed)
    return found


def _needed(jaxpr: Jaxpr, output: int, chip: Chip) -> float:
    """Of what one result is made of. A loop is run whole, whatever of it is needed: XLA takes none apart (a state-space
    model, an H200: 2.3 ms of its loops are needed before the gate, 3.0 run there)."""
    wanted = [k == output for k in range(len(jaxpr.outvars))]
    pruned = without_dead_code(jaxpr, wanted)[0]
    return seconds(pruned, chip) + _in_loops(jaxpr, output, chip) - _in_loops(pruned, 0, chip)


def _in_loops(jaxpr: Jaxpr, output: int, chip: Chip) -> float:
    """Of the loops that one result is made of, all that they do."""
    program, found = flattened(jaxpr), 0.0
    live = {program.outputs[output]}
    for node in reversed(program.nodes):
        if live.isdisjoint(node.makes):
            continue
        live |= {*node.reads, *node.waits}
        loop = loop_of(node.eqn)
        found += 0.0 if loop is None else (loop.length or 1) * seconds(loop.body, chip)
    return found
