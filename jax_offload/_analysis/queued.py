"""What an update in pieces exposes: its loads and stores, played in the order and between the gates of the step.

Each direction is a queue. The value that the pass goes on with waits for the stores of two groups before, and the loads
of the next group for that value; so a large slice is on its way up or down, and seldom both at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.exposure import Link
from jax_offload._analysis.work import production_times
from jax_offload._base.jaxprs import Equation, Jaxpr, Var, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.region import Moved, Update
from jax_offload._ir.slices import slice_of
from jax_offload._peak.sequence import GATE
from jax_offload._plan.network import Piece
from jax_offload._plan.plan import Planned


def in_pieces(jaxpr: Jaxpr, chip: Chip, link: Link) -> float | None:
    """Seconds, of a step on one device; ``None`` where not all of its update is in pieces between its equations."""
    updates = [update for eqn in jaxpr.eqns if (update := _update(eqn)) is not None]
    if not updates or not all(isinstance(u, Moved) and isinstance(u.plan, Piece) for u in updates):
        return None
    ready, total = _ready(jaxpr, chip)
    load = store = waited = gate = last = 0.0
    stored = [0.0]  # of each group its last store
    for eqn in jaxpr.eqns:
        if _is_gate(eqn):
            last = max(last, *(ready.get(v, 0.0) for v in variables(eqn.invars)))
            waited += max(0.0, (stored[-2] if len(stored) > 1 else 0.0) - last - waited)
            gate = last + waited
            stored += [0.0] if stored[-1] else []
        elif (update := _update(eqn)) is not None:
            last = max(last, *(ready.get(v, 0.0) for v in variables(eqn.invars)))
            seconds = sum(p.slice.loaded_bytes for p in update.planned) / link.both
            if seconds:
                load = max(load, gate) + seconds
                store = stored[-1] = max(store, load, last + waited) + seconds
    return max(total + waited, store) - total


def as_gated(jaxpr: Jaxpr, chip: Chip, link: Link) -> float:
    """Seconds from the end of the arithmetic to the last store, of slices that are whole and in no loop, with each copy
    as early as it can be: a load waits for the gradient and for the stores that its gate names, and a store for its own
    gradient. On one device; of updates between the step's equations."""
    pairs = [(eqn, update) for eqn in jaxpr.eqns if isinstance(update := _update(eqn), Update)]
    if not pairs:
        return 0.0
    ready, total = _ready(jaxpr, chip)
    load = store = 0.0
    for eqn, update in pairs:
        given = zip(update.operands, eqn.invars, strict=True)
        at = {v: ready[x] for v, x in given if isinstance(x, Var) and x in ready}
        for each in update.plan.passes:
            gradients = [max((at[v] for v in p.slice.inputs if v in at), default=0.0) for p in each.slices]
            load, store = _moved(each.slices, gradients, link, load, store)
    return max(0.0, store - total)


def through_the_window(updates: Sequence[Update | Moved], link: Link) -> float:
    """Seconds of the slices that are whole and in no loop, one after the other through their window, if nothing hides
    them: a load waits for the stores that make room for it, and large slices go one way at a time."""
    load = store = 0.0
    for update in updates:
        for each in update.plan.passes if isinstance(update, Update) else ():
            load, store = _moved(each.slices, [0.0] * len(each.slices), link, load, store)
    return store


def _moved(
    slices: Sequence[Planned], gradients: Sequence[float], link: Link, load: float, store: float
) -> tuple[float, float]:  # fmt: skip
    """When the last load and the last store of a pass end, those before it at ``load`` and ``store``: each as early as
    it can be, given when the gradients are there."""
    ends: list[float] = []
    for p, gradient in zip(slices, gradients, strict=True):
        if not (p.in_chunks or p.on_cores or p.window.own_loop):  # those move in a loop, or not at all
            seconds = p.slice.loaded_bytes / link.both
            room = ends[p.once_stored] if p.once_stored >= 0 else 0.0
            load = max(load, room, 0.0 if p.once_produced is None else gradients[p.once_produced]) + seconds
            store = max(store, load, gradient) + seconds
        ends.append(store)
    return load, store


def _is_gate(eqn: Equation) -> bool:
    return eqn.primitive.name == GATE and any(is_host_aval(v.aval) for v in eqn.invars)


def _update(eqn: Equation) -> Update | Moved | None:
    found = eqn.params.get("update")
    return found if isinstance(found, Update | Moved) else None


def _ready(jaxpr: Jaxpr, chip: Chip) -> tuple[Mapping[Var, float], float]:
    """When an operand of a piece or a gate is made, without the pieces; and when all is."""
    rest = [eqn for eqn in jaxpr.eqns if _update(eqn) is None]
    own: set[Any] = {v for eqn in rest for v in eqn.outvars}
    read = [v for eqn in jaxpr.eqns if _update(eqn) is not None or _is_gate(eqn) for v in variables(eqn.invars)]
    outputs = list(dict.fromkeys(v for v in [*read, *variables(jaxpr.outvars)] if v in own))
    times, total = production_times(slice_of(rest, outputs, jaxpr.debug_info, {}).jaxpr, chip)
    return dict(zip(outputs, times, strict=True)), total
