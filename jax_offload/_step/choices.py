"""An update whose branches are cheap, as one that runs both and chooses.

A branch of an update (``apply_if_finite``) that makes the new values of all leaves at once cannot be hidden in the
scans of a step, or between its passes. A choice for each of the leaves can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jax_offload._base.jaxprs import Atom, Equation, Var, branches_of, closed_like, renamed
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.own_primitives import params_of
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.conds import scalars_hoisted
from jax_offload._ir.program import Program, copy_of, flat, only_equation
from jax_offload._plan.hoist import is_cheap


def choosing(program: Program) -> Program | None:
    """The step's program with choices in the place of its only update's branches; ``None`` where there are none."""
    at = [k for k, eqn in enumerate(program.eqns) if is_update(eqn)]
    without = _without_branches(program.eqns[at[0]]) if len(at) == 1 else None
    if without is None:
        return None
    return dataclasses.replace(program, eqns=[*program.eqns[: at[0]], without, *program.eqns[at[0] + 1 :]])


def _without_branches(eqn: Equation) -> Equation | None:
    """The equation of an update that runs both of two branches that are cheap, and chooses; ``None`` if it has none."""
    update: Update = eqn.params["update"]
    program = scalars_hoisted(update.program)
    eqns = [inner for each in program.eqns for inner in _both(each)]
    if len(eqns) == len(program.eqns):
        return None
    chosen = dataclasses.replace(program, eqns=[_reading_less(each) for each in eqns])
    return eqn.replace(params=params_of(update.replanned(chosen, update.gradients)))


def _both(eqn: Equation) -> list[Equation]:
    """Both branches of a ``cond``, and for each of its results a choice; any other equation as it is."""
    if eqn.primitive.name != "cond" or eqn.effects or not any(v.aval.shape for v in eqn.outvars):
        return [eqn]
    branches = [flat(branch) for branch in branches_of(eqn)]
    inner = [each for branch in branches for each in branch.eqns]
    if len(branches) != 2 or any(branch.consts for branch in branches) or not all(map(is_cheap, inner)):
        return [eqn]
    eqns, cases = list[Equation](), list[list[Atom]]()
    for branch in branches:
        env: dict[Var, Atom] = dict(zip(branch.inputs, eqn.invars[1:], strict=True))
        eqns += [again for each in branch.eqns for again in _both(copy_of(each, env))]
        cases.append([renamed(env, v) for v in branch.outputs])
    for v, no, yes in zip(eqn.outvars, *cases, strict=True):
        eqns += _chosen_on_device(eqn.invars[0], no, yes, v, eqns)
    return eqns


def _chosen_on_device(which: Atom, no: Atom, yes: Atom, v: Var, eqns: Sequence[Equation]) -> list[Equation]:
    """``v`` as a choice; of what is in host memory, between the loaded values, before the result is stored.

    ``eqns`` may load or store the two already.
    """
    if not is_host_aval(v.aval):
        return [_choice(which, no, yes).replace(outvars=[v])]
    moves = [e for e in eqns if e.primitive.name == "device_put"]
    found, loaded = list[Equation](), list[Atom]()
    for x in (no, yes):
        known = [e.invars[0] for e in moves if e.outvars[0] is x]
        known += [e.outvars[0] for e in moves if e.invars[0] is x and not is_host_aval(e.outvars[0].aval)]
        if not known:
            found.append(only_equation(to_device, x))
            known = [found[-1].outvars[0]]
        loaded.append(known[0])
    choice = _choice(which, *loaded)
    return [*found, choice, only_equation(to_host, choice.outvars[0]).replace(outvars=[v])]


def _reading_less(eqn: Equation) -> Equation:
    """A ``cond`` without the operands that no branch of it reads: a norm of gradients waits for no state."""
    if eqn.primitive.name != "cond" or any(branch.consts for branch in branches_of(eqn)):
        return eqn
    jaxprs = [branch.jaxpr for branch in branches_of(eqn)]
    read = {id(v) for jaxpr in jaxprs for v in [*jaxpr.outvars, *(x for each in jaxpr.eqns for x in each.invars)]}
    places = zip(*(jaxpr.invars for jaxpr in jaxprs), strict=True)
    kept = [k for k, each in enumerate(places) if any(id(v) in read for v in each)]
    branches = tuple(
        closed_like(branch, [branch.jaxpr.invars[k] for k in kept], branch.jaxpr.eqns, branch.jaxpr.outvars)
        for branch in branches_of(eqn)
    )
    invars = [eqn.invars[0], *(eqn.invars[1 + k] for k in kept)]
    return eqn.replace(invars=invars, params={**eqn.params, "branches": branches})


def _choice(run: Atom, old: Atom, new: Atom) -> Equation:
    """The new value where ``run`` holds, else the old one."""
    return only_equation(jax.lax.select_n, run, old, new)
