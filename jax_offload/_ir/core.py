"""A slice's equations without its loads and stores, so that a loop can load ahead of the update."""

from __future__ import annotations

import dataclasses

from jax_offload._base.jaxprs import Atom, Jaxpr, Literal, Var, without_dead_code
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.slices import Slice


@dataclasses.dataclass(frozen=True)
class Core:
    """What a slice computes, on the device.

    Attributes:
      jaxpr: takes the slice's operands, those of ``loads`` already loaded, and returns its results, not yet stored.
      loads: the host leaves among the operands that are loaded once and not used otherwise (by a ``cond`` in which
        another ``offload`` loads them, say).
    """

    jaxpr: Jaxpr
    loads: frozenset[Var]


def core(s: Slice) -> Core:
    moves = [
        (eqn, v, eqn.outvars[0])
        for eqn in s.jaxpr.eqns
        if eqn.primitive.name == "device_put" and len(eqn.invars) == 1 and not isinstance(v := eqn.invars[0], Literal)
    ]
    hosts = {*s.loads}
    loads = [(eqn, v, out) for eqn, v, out in moves if v in hosts and not is_host_aval(out.aval)]
    loaded_by = {id(eqn) for eqn, _, _ in loads}
    others = [eqn for eqn in s.jaxpr.eqns if id(eqn) not in loaded_by]
    kept = {v for eqn in others for v in eqn.invars if not isinstance(v, Literal)}
    on_device = {v: Var(out.aval) for _, v, out in loads if v not in kept}
    loaded = {out: on_device[v] for _, v, out in loads if v in on_device}
    stored = {out: v for _, v, out in moves if is_host_aval(out.aval)}

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else loaded.get(v, v)

    eqns = [
        eqn.replace(invars=[read(v) for v in eqn.invars])
        for eqn in s.jaxpr.eqns
        if not any(v in loaded for v in eqn.outvars)
    ]
    inputs = [on_device.get(v, v) for v in s.inputs]
    outputs = [read(stored.get(v, v)) for v in s.outputs]
    jaxpr = Jaxpr([], inputs, outputs, eqns, s.jaxpr.effects, s.jaxpr.debug_info)
    return Core(without_dead_code(jaxpr, keep_inputs=True)[0], frozenset(on_device))
