"""Where an update begins, drawn elsewhere: what of it runs ahead, and what in front of it becomes a part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, renamed, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.own_primitives import params_of
from jax_offload._emit.region import Update
from jax_offload._ir.conds import scalars_hoisted
from jax_offload._ir.propagate import Mask, forward
from jax_offload._ir.slices import is_summary

_HOST, _GRADIENT = 1, 2


def without_scalars(eqn: Equation) -> tuple[Equation, list[Equation]]:
    """The equation of an update that is given the numbers that need gradients and no state, and what makes these."""
    update: Update = eqn.params["update"]
    program, operands = scalars_hoisted(update.program), update.operands
    needs: dict[Var, Mask] = {v: _HOST for v in operands if is_host_aval(v.aval)}
    needs |= {operands[i]: _GRADIENT for i in update.gradients}
    summaries, scalars = set[Var](), set[Var]()
    for each in program.eqns:
        if is_summary(each, summaries):
            summaries.update(each.outvars)
        needs.update(zip(each.outvars, forward(each, needs), strict=True))
        if all(needs[v] == _GRADIENT and (not v.aval.shape or v in summaries) for v in each.outvars):
            scalars.update(each.outvars)
    wanted, taken = {*scalars}, list[Equation]()
    for each in reversed(program.eqns):
        if not wanted.isdisjoint(each.outvars):
            taken.append(each)
            wanted.update(variables(each.invars))
    if any(each.effects for each in taken):
        return eqn, []
    env: dict[Var, Atom] = dict(zip(operands, eqn.invars, strict=True))
    apart = [copy_of(each, env) for each in reversed(taken)]
    # A result that is such a number is made ahead as well: an update that returns what it is given would be none.
    results = list(zip(program.outputs, eqn.outvars, strict=True))
    ahead = {env[x]: v for x, v in results if not isinstance(x, Literal) and x in scalars}
    apart = [
        each.replace(
            invars=[renamed(ahead, v) for v in each.invars],  # pyright: ignore[reportArgumentType]
            outvars=[ahead.get(v, v) for v in each.outvars],
        )
        for each in apart
    ]
    kept = [(x, v) for x, v in results if isinstance(x, Literal) or x not in scalars]
    left = [each for each in program.eqns if scalars.isdisjoint(each.outvars)]
    read = {v for each in left for v in variables(each.invars)}
    given = [v for v in env if v in scalars and v in read]
    rest = dataclasses.replace(program, inputs=[*program.inputs, *given], eqns=left, outputs=[x for x, _ in kept])
    params = params_of(update.replanned(rest, update.gradients))
    operand_of = [renamed(ahead, env[v]) for v in given]  # pyright: ignore[reportArgumentType]
    return eqn.replace(invars=[*eqn.invars, *operand_of], outvars=[v for _, v in kept], params=params), apart


def absorbed(eqn: Equation, eqns: Sequence[Equation]) -> Equation:
    """The equation of an update that begins with these equations, which make some of its operands.

    What they read in host memory, gradients that wait there, is loaded as the leaves of the state are, beside these.
    """
    update: Update = eqn.params["update"]
    program = update.program
    defined = {v for each in eqns for v in each.outvars}
    both = list(zip(update.operands, eqn.invars, strict=True))
    gone = {v: x for v, x in both if not isinstance(x, Literal) and x in defined}
    kept = [(v, x) for v, x in both if v not in gone]
    env: dict[Var, Atom] = {x: v for v, x in reversed(kept) if not isinstance(x, Literal)}
    more = {
        x: Var(x.aval)
        for x in dict.fromkeys(x for each in eqns for x in variables(each.invars))
        if x not in defined and x not in env
    }
    env |= more
    first = [copy_of(each, env) for each in eqns]
    inside = {v: env[x] for v, x in gone.items()}
    then = [each.replace(invars=[renamed(inside, v) for v in each.invars]) for each in program.eqns]
    inputs = [*more.values(), *(v for v, _ in kept)]
    places = {v: k for k, v in enumerate(inputs)}
    sharded = {inside[v]: program.shards[v] for v in gone if v in program.shards}
    hosts = {each.invars[0]: each.outvars[0] for each in first if is_host_aval(each.invars[0].aval)}
    shards = {v: sharded[x] for v, x in hosts.items() if x in sharded}
    rest = dataclasses.replace(
        program,
        inputs=inputs,
        outputs=[renamed(inside, v) for v in program.outputs],
        eqns=[*first, *then],
        shards={**program.shards, **shards},
    )
    gradients = [places[v] for i in update.gradients if (v := update.operands[i]) in places]
    last = 1 + max(update.rank.values(), default=0)
    new = dataclasses.replace(
        update.replanned(rest, tuple(gradients)),
        backward=None,  # they are no longer in front of it
        names={**update.names, **{v: f"gradients/{k}" for k, v in enumerate(hosts)}},
        rank={**update.rank, **{v: last + k for k, v in enumerate(hosts)}},  # the state beside them decides
        next_values={new: old for new, old in update.next_values.items() if old in places},
    )
    return eqn.replace(invars=[*more, *(x for _, x in kept)], params=params_of(new))


def copy_of(eqn: Equation, env: dict[Var, Atom]) -> Equation:
    """The same equation, of what ``env`` says, with results of its own, which ``env`` then knows."""
    invars = [renamed(env, v) for v in eqn.invars]
    outs = [Var(v.aval) for v in eqn.outvars]
    env.update(zip(eqn.outvars, outs, strict=True))
    return eqn.replace(invars=invars, outvars=outs)
