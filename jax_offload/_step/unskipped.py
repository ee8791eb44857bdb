"""An update that may be skipped, as one that always runs and keeps what was where it is to be skipped.

A skipped update is a loop that runs once or not at all, which moves nothing then, and in which nothing of a step can
be hidden. In the scans and between the passes of a step it runs, and each slice of it chooses between old and new: so a
step that is skipped moves its bytes, and changes none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from jax_offload._base.calls import params_of
from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, jaxpr_of
from jax_offload._base.loops import at_most_once_of
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._ir.program import Program, flat, replaced


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
    kept = {new: old for old, new in zip(olds, body.outputs[1:], strict=True) if new in of_update and new is not old}
    eqns[at], known = _keeping(body.eqns[at], run, kept)
    outputs: list[Atom] = [body.outputs[0]]
    for old, new in zip(olds, body.outputs[1:], strict=True):
        if new is old or new in known:
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


def _choice(run: Var, old: Atom, new: Atom) -> Equation:
    """The new value where ``run`` holds, else the old one."""
    (eqn,) = jaxpr_of(jax.lax.select_n, run.aval, old.aval, new.aval)[0].jaxpr.eqns
    return eqn.replace(invars=[run, old, new], outvars=[Var(eqn.outvars[0].aval)])
