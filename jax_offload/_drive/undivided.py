"""A program for the host's cores of one for a mesh: on one device, without the mesh's constraints and types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jax_offload._base.jaxprs import (
    Atom,
    EquationContext,
    Jaxpr,
    Literal,
    Var,
    closed,
    jax_fun,
    jaxpr_of,
    with_jaxprs,
)

_CONSTRAINTS = ("sharding_constraint", "reshard")


def run_undivided(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function of arrays that are whole, on one device."""
    with _no_mesh():
        traced = jaxpr_of(lambda x: x + 1, jax.ShapeDtypeStruct((), np.float32))[0]
        return jax_fun(closed(_undivided(jaxpr, traced.jaxpr.eqns[0].ctx)))


def without_mesh(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` where no mesh is set: the step's is none of the cores'."""

    def called(*operands: Any) -> Any:
        with _no_mesh():
            return run(*operands)

    return called


def _no_mesh() -> Any:
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def _undivided(jaxpr: Jaxpr, context: EquationContext) -> Jaxpr:
    """``context``: of an equation that was traced without a mesh, as these know theirs."""
    names: dict[Var, Atom] = {}

    def read(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else names[v]

    def variable(v: Any) -> Any:
        names[v] = new = Var(v.aval.update(sharding=None)) if hasattr(v.aval, "sharding") else v
        return new

    consts, inputs = [variable(v) for v in jaxpr.constvars], [variable(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CONSTRAINTS:
            names[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        operands = [read(v) for v in eqn.invars]
        inside = with_jaxprs(eqn.params, functools.partial(_undivided, context=context))
        params = {k: None if isinstance(x, Sharding) else x for k, x in inside.items()}
        results = [variable(v) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=results, params=params, ctx=context))
    return Jaxpr(consts, inputs, [read(v) for v in jaxpr.outvars], eqns, jaxpr.effects, jaxpr.debug_info)
