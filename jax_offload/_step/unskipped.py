"""An update that may be skipped, as one that always runs and keeps what was where it is to be skipped.

A skipped update is a loop that runs once or not at all, which moves nothing then, and in which nothing of a step can
be hidden. In the scans and between the passes of a step it runs, and each slice of it chooses between old and new: so a
step that is skipped moves its bytes, and changes none of them. A branch of an update (``apply_if_finite``) that makes
the new values of all leaves at once is a choice for each of them in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, branches_of, closed_like, jaxpr_of, renamed
from jax_offload._base.loops import at_most_once_of
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.own_primitives import params_of
from jax_offload._emit.border import copy_of
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._ir.conds import scalars_hoisted
from jax_offload._ir.program import Program, flat, replaced
from jax_offload._plan.moves import is_cheap


def choosing(program: Program) -> Program | None:
    """The step's program with its only update out of the loop that may skip it, and with choices in the place of the
    update's branches; ``None`` where it has neither."""
    outside = unskipped(program)
    found = outside or program
    at = [k for k, eqn in enumerate(found.eqns) if is_update(eqn)]
    without = _without_branches(found.eqns[at[0]]) if len(at) == 1 else None
    if without is None:
        return outside
    return dataclasses.replace(found, eqns=[*found.eqns[: at[0]], without, *found.eqns[at[0] + 1 :]])


def unskipped(program: Program) -> Program | None:
    """The step's program with its only update out of the loop that may skip it; ``None`` where that is not so."""
    holding = [k for k, eqn in enumerate(program.eqns) if holds_update(eqn)]
    if len(holding) != 1:
        return None
    chosen = _chosen(program.eqns[holding[0]])
    return None if chosen is None else replaced(program, holding[0], chosen)


def _chosen(eqn: Equation) -> Program | None:
    """A loop that may skip an update, of the same operands, without the loop."""
    loop = at_most_once_of(eqn)
    if loop is None or eqn.params["cond_nconsts"]:
        return None
    body = flat(loop.body)
    inside = [k for k, each in enumerate(body.eqns) if holds_update(each)]
    if len(inside) != 1 or not is_update(body.eqns[inside[0]]) or any(each.effects for each in body.eqns):
        return None
    at = inside[0]
    run, *olds = body.inputs[len(body.consts) + loop.carry :]
    of_update, eqns = {*body.eqns[at].outvars}, list(body.eqns)
    pairs = list(zip(olds, body.outputs[1:], strict=True))
    kept = {new: old for old, new in pairs if not isinstance(new, Literal) and new in of_update and new is not old}
    eqns[at], known = _keeping(body.eqns[at], run, kept)
    outputs: list[Atom] = [body.outputs[0]]
    for old, new in pairs:
        if new is old or (not isinstance(new, Literal) and new in known):
            outputs.append(new)
        elif is_host_aval(old.aval):  # a choice there would be the host's
            return None
        else:
            eqns.append(_choice(run, old, new))
            outputs.append(eqns[-1].outvars[0])
    return dataclasses.replace(body, eqns=eqns, outputs=outputs)


def _keeping(eqn: Equation, run: Var, kept: Mapping[Var, Var]) -> tuple[Equation, set[Var]]:
    """The equation of an update that leaves its arguments as they are where ``run`` does not hold, and of which of its
    results that is so. ``kept``: result -> what it then is."""
    update: Update = eqn.params["update"]
    program = update.program
    given = dict(zip(update.operands, eqn.invars, strict=True))
    holds = Var(run.aval)
    loaded = {e.invars[0]: e.outvars[0] for e in reversed(program.eqns) if e.primitive.name == "device_put"}
    stores = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive.name == "device_put"}
    before: dict[Var, Equation] = {}  # store's result -> the choice in front of it
    behind: dict[Var, Equation] = {}  # result on the device -> the choice after it
    known = set[Var]()
    for x, outside in zip(program.outputs, eqn.outvars, strict=True):
        old = None if isinstance(x, Literal) else update.next_values.get(x)
        if old is None or isinstance(x, Literal) or outside not in kept or given.get(old) is not kept[outside]:
            continue
        if not is_host_aval(x.aval):
            behind[x] = _choice(holds, old, x)
        elif x in stores and old in loaded:
            before[x] = _choice(holds, loaded[old], stores[x])
        else:
            continue
        known.add(outside)
    eqns = list[Equation]()
    for each in program.eqns:
        choice = before.get(each.outvars[0]) if each.outvars else None
        eqns += [each] if choice is None else [choice, each.replace(invars=[choice.outvars[0]])]
    names: dict[Var, Var] = {x: choice.outvars[0] for x, choice in behind.items()}
    chosen = dataclasses.replace(
        program,
        inputs=[*program.inputs, holds],
        eqns=[*eqns, *behind.values()],
        outputs=[x if isinstance(x, Literal) else names.get(x, x) for x in program.outputs],
    )
    new = dataclasses.replace(
        update.replanned(chosen, update.gradients),
        next_values={names.get(x, x): old for x, old in update.next_values.items()},
        names={**update.names, **{names[x]: name for x, name in update.names.items() if x in names}},
    )
    return eqn.replace(invars=[*eqn.invars, run], params=params_of(new)), known


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
            found.append(_moved(to_device, x))
            known = [found[-1].outvars[0]]
        loaded.append(known[0])
    choice = _choice(which, *loaded)
    return [*found, choice, _moved(to_host, choice.outvars[0]).replace(outvars=[v])]


def _moved(move: Callable[[jax.Array], jax.Array], x: Atom) -> Equation:
    (eqn,) = jaxpr_of(move, x.aval)[0].jaxpr.eqns
    return eqn.replace(invars=[x], outvars=[Var(eqn.outvars[0].aval)])


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
    (eqn,) = jaxpr_of(jax.lax.select_n, run.aval, old.aval, new.aval)[0].jaxpr.eqns
    return eqn.replace(invars=[run, old, new], outvars=[Var(eqn.outvars[0].aval)])
