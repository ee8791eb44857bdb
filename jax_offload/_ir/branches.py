"""Scalars that a branch of a ``cond`` computes, hoisted out of it.

``apply_if_finite`` puts all of an update into a branch, and with it the global norm of a clip; ``MultiSteps`` that may
skip does so with the norm of its accumulators. Cut leaf by leaf, every part of such a branch would compute the norm of
everything again, and none could run in chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._base.jaxprs import (
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Equation,
    Literal,
    Var,
    branches_of,
    closed,
    closed_like,
    without_dead_code,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.masks import forward, union
from jax_offload._ir.program import Program, flat


def scalars_hoisted(program: Program) -> Program:
    """``program`` with a ``cond`` of scalars alone ahead of each ``cond`` that needs host leaves and computes some."""
    eqns = _hoisted(program.eqns, {v for v in program.inputs if is_host_aval(v.aval)})
    return dataclasses.replace(program, eqns=eqns)


def _hoisted(eqns: Sequence[Equation], on_host: Set[Var]) -> list[Equation]:
    """``eqns``, in which such ``cond``s are split; ``on_host``: the inputs that must be loaded."""
    if not any(eqn.primitive.name == "cond" for eqn in eqns):
        return list(eqns)
    waiting = list(reversed(eqns))
    result: list[Equation] = []
    needs = dict.fromkeys(on_host, 1)
    while waiting:
        eqn = waiting.pop()
        dependent = [not isinstance(v, Literal) and bool(needs.get(v, 0)) for v in eqn.invars]
        if eqn.primitive.name == "cond" and any(dependent) and not eqn.effects and not dependent[0]:
            ahead, *rest = _split(eqn, dependent[1:])
            waiting += rest  # it may hold more scalars, which need those that are hoisted now
            eqn = ahead
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        result.append(eqn)
    return result


def _split(eqn: Equation, dependent: Sequence[bool]) -> list[Equation]:
    """A ``cond`` for the scalars of all branches, if there are any, and one that takes them as operands."""
    branches: list[Program] = []
    found: list[list[Var]] = []
    for branch in branches_of(eqn):
        program = flat(branch)
        if program.consts:
            return [eqn]
        given = {v for v, d in zip(program.inputs, dependent, strict=True) if d}
        program = dataclasses.replace(program, eqns=_hoisted(program.eqns, given))
        branches.append(program)
        found.append(_scalars_to_hoist(program, given))
    if not any(found):
        return [eqn]
    scalars = [Var(v.aval) for vs in found for v in vs]
    ahead: list[ClosedJaxpr] = []
    rest: list[ClosedJaxpr] = []
    for k, (branch, program) in enumerate(zip(branches_of(eqn), branches, strict=True)):
        own = [(v, i == k) for i, vs in enumerate(found) for v in vs]
        results = [v if mine else Literal(np.zeros((), v.aval.dtype), v.aval) for v, mine in own]
        names = [v if mine else Var(v.aval) for v, mine in own]
        hoisted = set(found[k])
        others = [e for e in program.eqns if hoisted.isdisjoint(e.outvars)]
        ahead.append(_closed(branch, program.inputs, program.eqns, results))
        rest.append(_closed(branch, [*program.inputs, *names], others, program.outputs))
    return [
        eqn.replace(outvars=scalars, params={**eqn.params, "branches": tuple(ahead)}),
        eqn.replace(invars=[*eqn.invars, *scalars], params={**eqn.params, "branches": tuple(rest)}),
    ]


def _scalars_to_hoist(program: Program, given: Set[Var]) -> list[Var]:
    """The scalars that can be hoisted together, of those that the rest uses.

    There are three kinds. A scalar may need nothing ``given``, which is to be loaded. It may be reduced from arrays
    that do, but not with the help of another such scalar: each leaf's part of a norm. And it may be computed from
    scalars that are hoisted themselves: the norm.
    """
    array, loaded, reduced, combined = 1, 2, 4, 8  # what a variable depends on: the latter two are hoisted now
    depends = {v: array * (v.aval.shape != ()) | loaded * (v in given) for v in program.inputs}
    hoisted: list[Var] = []
    used: set[Var] = {v for v in program.outputs if not isinstance(v, Literal)}
    for eqn in program.eqns:
        depends.update(zip(eqn.outvars, forward(eqn, depends), strict=True))
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        scalars = [v for v in eqn.outvars if not isinstance(v, DropVar)]  # of a nested cond several, or none
        on, of_arrays = union(depends[v] for v in scalars), any(v.aval.shape for v in operands)
        if not all(_is_scalar(v.aval) for v in scalars) or not on & (array | loaded):
            used.update(operands)
        elif not on & loaded:
            hoisted += scalars
        elif on & reduced or (on & combined and of_arrays):
            depends.update(dict.fromkeys(scalars, on | reduced))  # what is made of it waits too: a second norm, say
            used.update(operands)
        else:
            depends.update(dict.fromkeys(scalars, on | (reduced if of_arrays else combined)))
            hoisted += scalars
            used.update(scalars if of_arrays else ())
    return [v for v in hoisted if v in used]


def _is_scalar(aval: Aval) -> bool:
    return aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # keys are not


def _closed(like: ClosedJaxpr, inputs: list[Var], eqns: list[Equation], outputs: Sequence[Atom]) -> ClosedJaxpr:
    jaxpr, _ = without_dead_code(closed_like(like, inputs, eqns, outputs).jaxpr, keep_inputs=True)
    return closed(jaxpr)
