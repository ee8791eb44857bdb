"""Numbers that a branch of a ``cond`` computes, computed ahead of it.

``apply_if_finite`` puts a whole update into a branch, and with it the global norm of a clip; ``MultiSteps`` that may
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
    Equation,
    Literal,
    Var,
    branches_of,
    closed,
    closed_like,
    without_dead_code,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.masks import forward
from jax_offload._ir.program import Program, flat


def scalars_hoisted(program: Program) -> Program:
    """``program``, in which the numbers inside of a ``cond`` that needs host leaves are made by one of their own."""
    eqns = _ahead(program.eqns, {v for v in program.inputs if is_host_aval(v.aval)})
    return dataclasses.replace(program, eqns=eqns)


def _ahead(eqns: Sequence[Equation], on_host: Set[Var]) -> list[Equation]:
    """``eqns`` with such ``cond``s split; ``on_host``: the inputs that must be loaded."""
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
            waiting += rest  # which may have more numbers, of those that are ahead now
            eqn = ahead
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        result.append(eqn)
    return result


def _split(eqn: Equation, dependent: Sequence[bool]) -> list[Equation]:
    """A ``cond`` for the numbers of all branches, if there are any, and one that is given them."""
    branches: list[Program] = []
    found: list[list[Var]] = []
    for branch in branches_of(eqn):
        program = flat(branch)
        if program.consts:
            return [eqn]
        given = {v for v, d in zip(program.inputs, dependent, strict=True) if d}
        program = dataclasses.replace(program, eqns=_ahead(program.eqns, given))
        branches.append(program)
        found.append(_numbers(program, given))
    if not any(found):
        return [eqn]
    numbers = [Var(v.aval) for vs in found for v in vs]
    ahead: list[ClosedJaxpr] = []
    rest: list[ClosedJaxpr] = []
    for k, (branch, program) in enumerate(zip(branches_of(eqn), branches, strict=True)):
        own = [(v, i == k) for i, vs in enumerate(found) for v in vs]
        results = [v if mine else Literal(np.zeros((), v.aval.dtype), v.aval) for v, mine in own]
        names = [v if mine else Var(v.aval) for v, mine in own]
        made = set(found[k])
        others = [e for e in program.eqns if made.isdisjoint(e.outvars)]
        ahead.append(_closed(branch, program.inputs, program.eqns, results))
        rest.append(_closed(branch, [*program.inputs, *names], others, program.outputs))
    return [
        eqn.replace(outvars=numbers, params={**eqn.params, "branches": tuple(ahead)}),
        eqn.replace(invars=[*eqn.invars, *numbers], params={**eqn.params, "branches": tuple(rest)}),
    ]


def _numbers(program: Program, given: Set[Var]) -> list[Var]:
    """The numbers that can be made ahead at once, of those that the rest uses.

    These are the ones that need nothing ``given``, which is to be loaded; what is reduced from arrays that do, but not
    with the help of such a number: each leaf's part of a norm; and what is made of numbers that are there: the norm.
    """
    loaded = dict.fromkeys(given, 1)
    arrays = {v: int(v.aval.shape != ()) for v in program.inputs}
    parts: dict[Var, int] = {}  # what depends on a part that is made now
    wholes: dict[Var, int] = {}  # what depends on a number made of numbers
    made: list[Var] = []
    used: set[Var] = {v for v in program.outputs if not isinstance(v, Literal)}
    for eqn in program.eqns:
        for env in loaded, arrays, parts, wholes:
            env.update(zip(eqn.outvars, forward(eqn, env), strict=True))
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        number = eqn.outvars[0] if len(eqn.outvars) == 1 else None  # a nested cond may be left with no result
        if number is None or not _is_number(number.aval) or (not arrays[number] and not loaded[number]):
            used.update(operands)
        elif not loaded[number]:
            made.append(number)
        elif parts[number] or (wholes[number] and any(v.aval.shape for v in operands)):
            used.update(operands)
        elif any(v.aval.shape for v in operands):
            parts[number] = 1
            made.append(number)
            used.add(number)
        else:
            wholes[number] = 1
            made.append(number)
    return [v for v in made if v in used]


def _is_number(aval: Aval) -> bool:
    return aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # keys are not


def _closed(like: ClosedJaxpr, inputs: list[Var], eqns: list[Equation], outputs: Sequence[Atom]) -> ClosedJaxpr:
    jaxpr, _ = without_dead_code(closed_like(like, inputs, eqns, outputs).jaxpr, keep_inputs=True)
    return closed(jaxpr)
