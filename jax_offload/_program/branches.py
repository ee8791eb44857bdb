"""Branches of an update, replaced by choices.

``apply_if_finite`` puts all of an update into a branch, and with it the global norm of a clip. Cut leaf by leaf, every
part of such a branch would compute the norm of everything again, and none could run in chunks or inside a scan. Both
branches of cheap arithmetic, and a choice for each result, stream as any other update does.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_offload._program.jaxprs import Atom, ClosedJaxpr, Equation, Jaxpr, branches_of, jaxpr_of, nameless, variables
from jax_offload._program.memory import is_host_aval, to_device, to_host
from jax_offload._program.primitives import is_cheap
from jax_offload._program.program import Builder, Program, Var, flat, rebuilt, without_round_trips
from jax_offload._program.shardings import zeros


def without_branches(program: Program) -> Program:
    """Return a program that runs all branches of its ``cond``s, and chooses between their results.

    Costly equations (a matmul, a loop) still run only where their branch is taken. A ``cond`` with an effect stays.
    """
    if not any(eqn.primitive.name == "cond" for eqn in program.eqns):
        return program
    return without_round_trips(rebuilt(program, _chosen))


def _chosen(new: Builder, eqn: Equation, operands: list[Atom]) -> Sequence[Atom] | None:
    """Choose each result of a ``cond`` from its branches' results; ``None`` for any other equation."""
    if eqn.primitive.name != "cond" or eqn.effects:
        return None
    branches = [rebuilt(flat(branch), _chosen) for branch in branches_of(eqn)]
    inner = [each for branch in branches for each in branch.eqns]
    dear = [each for each in inner if not is_cheap(each)]
    if dear and (len(dear) == len(inner) or any(map(_makes_keys, dear))):
        return None
    which, *given = operands
    results = list[list[Atom]]()
    for k, branch in enumerate(branches):
        inside = new.inside(branch, given)
        inside.copy(*(each if is_cheap(each) else _only_in(eqn, which, k, each) for each in branch.eqns))
        results.append(inside.read(branch.outputs))
    return [choice(new, which, cases) for cases in zip(*results, strict=True)]


def _makes_keys(eqn: Equation) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars)


def _only_in(cond: Equation, which: Atom, k: int, eqn: Equation) -> Equation:
    """Put an equation of branch ``k`` of a ``cond`` into a ``cond`` of its own, with zeros in the other branches."""
    reads = list(dict.fromkeys(variables(eqn.invars)))
    inputs, like = [Var(v.aval) for v in reads], branches_of(cond)[0].jaxpr
    (run,) = Builder(names=dict(zip(reads, inputs, strict=True))).copy(eqn)
    zero = jaxpr_of(lambda: [zeros(v.aval) for v in eqn.outvars])[0].jaxpr
    taken, other = (
        ClosedJaxpr(Jaxpr([], inputs, outputs, eqns, like.effects, nameless(like.debug_info)), [])
        for eqns, outputs in (([run], run.outvars), (zero.eqns, zero.outvars))
    )
    branches = tuple(taken if i == k else other for i in range(len(branches_of(cond))))
    return cond.replace(invars=[which, *reads], outvars=eqn.outvars, params={**cond.params, "branches": branches})


def choice(new: Builder, which: Atom, cases: Sequence[Atom]) -> Atom:
    """Choose one of several values. Values in host memory are loaded, and the chosen one is stored."""
    first = cases[0]
    if all(x is first for x in cases):
        return first
    if not is_host_aval(first.aval):
        return new.run(jax.lax.select_n, which, *cases)[0]
    loaded = [new.run(to_device, x)[0] for x in cases]
    return new.run(to_host, *new.run(jax.lax.select_n, which, *loaded))[0]
