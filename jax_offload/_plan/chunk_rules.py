"""Whether a slice may run in chunks along an axis, and how: decided by its equations, never by an optimizer's name.

Each variable either has the chunked axis, at some dimension, or does not. Every equation must keep rows apart:
elementwise arithmetic and reductions over other dimensions do, a sort along the axis does not. A reduction over the
axis is put together from those of the chunks, if the slice does not use it itself. A primitive without one of the
``rules`` means no: then the leaf is loaded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_offload._base import composite
from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    called_by,
    nameless,
    values_of,
)
from jax_offload._base.shardings import types_of_axes
from jax_offload._plan.rules import RULES, Answer, Dependent, Dim, Partial, Rows, Run, Where, rule, without_rows

Dims = dict[Var, Dim]

OTHER_AXES = "some of it is made on a mesh with Auto axes, as random numbers are, and the rest on one with Explicit"


def chunked_dims(jaxpr: Jaxpr, dims: Sequence[Dim], size: int, shape: tuple[int, ...], axis: int) -> list[Dim]:
    """The chunked dimension of every result of ``jaxpr``, given those of its operands.

    Args:
      jaxpr: of a slice.
      dims: chunked dimension of each operand.
      size: length of the chunked axis.
      shape, axis: a leaf's shape and its chunked axis: what is broadcast to that shape is computed chunk by chunk.

    Raises:
      Dependent: some equation mixes rows.
    """
    if len({kinds for v in jaxpr.invars if (kinds := types_of_axes(v.aval))}) > 1:
        raise Dependent(OTHER_AXES)
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule_of(eqn, _read(env, eqn.invars), size, shape, axis)[0], strict=True))
    return _read(env, jaxpr.outvars)


def run_chunk(
    jaxpr: Jaxpr, dims: Sequence[Dim], where: tuple[int, tuple[int, ...], int], chunk: jax.Array, *args: Any
) -> list[Any]:
    """Evaluates ``jaxpr`` on operands of which the chunked dimension has only the rows with the numbers ``chunk``."""
    size, shape, axis = where
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    values: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        out_dims, run = rule_of(eqn, _read(env, eqn.invars), size, shape, axis)
        env.update(zip(eqn.outvars, out_dims, strict=True))
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        with eqn.ctx.manager:
            results = run(chunk, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return values_of(values, jaxpr.outvars)


def _read(env: Dims, atoms: Sequence[Atom]) -> list[Dim]:
    return [None if isinstance(v, Literal) else env[v] for v in atoms]


def rule_of(
    eqn: Equation, all_dims: Sequence[Dim], size: int, shape: tuple[int, ...], axis: int
) -> tuple[Sequence[Dim], Run]:
    """For an equation: the chunked dimensions of its results, and how to run it on a chunk.

    Raises:
      Dependent: its rule says no, or there is none.
    """
    name, known = eqn.primitive.name, RULES.get(eqn.primitive.name)
    dims = [d for d in all_dims if not isinstance(d, Partial)]
    if len(dims) < len(all_dims):
        raise Dependent(f"{name} of a reduction over all rows")
    if all(d is None for d in dims) and not (known and known.makes_rows):
        return without_rows(eqn)
    if eqn.effects:
        raise Dependent(f"{name} has an effect")
    answer = known.answer(eqn, dims, Where(size, shape, axis)) if known else None
    if answer is None:
        raise Dependent(name)
    return answer


# ---- the rules of equations that hold others


@rule("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", composite.NAME)
def called(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    inner = composite.decomposition(eqn) if eqn.primitive.name == composite.NAME else called_by(eqn)
    jaxpr, all_dims = _inside(inner, dims)

    def run(chunk: jax.Array, *args: Any) -> list[Any]:
        return run_chunk(jaxpr, all_dims, where, chunk, *inner.consts, *args)

    return chunked_dims(jaxpr, all_dims, *where), run


@rule("cond")
def chosen(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    if dims[0] is not None:
        raise Dependent("cond on a row")
    branches = [_inside(b, dims[1:]) for b in branches_of(eqn)]
    outs = [chunked_dims(jaxpr, d, *where) for jaxpr, d in branches]
    results = zip(*outs, strict=True)
    merged = [_merged(found, [jaxpr.outvars[k] for jaxpr, _ in branches]) for k, found in enumerate(results)]

    def run(chunk: jax.Array, index: Any, *args: Any) -> list[Any]:
        def on_chunk(jaxpr: Jaxpr, dims: list[Dim], consts: list[Any]) -> Run:
            return lambda *operands: run_chunk(jaxpr, dims, where, chunk, *consts, *operands)

        pairs = zip(branches, branches_of(eqn), strict=True)
        functions = [on_chunk(jaxpr, d, b.consts) for (jaxpr, d), b in pairs]
        # jax does not annotate the index
        return lax.switch(index, functions, *args)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    return merged, run


def _inside(called: ClosedJaxpr, dims: Sequence[Dim]) -> tuple[Jaxpr, list[Dim]]:
    """What is called, with its constants as operands, and the chunked dimension of each."""
    j = called.jaxpr
    jaxpr = Jaxpr([], [*j.constvars, *j.invars], j.outvars, j.eqns, j.effects, nameless(j.debug_info))
    return jaxpr, [*(None for _ in called.consts), *dims]


def _merged(dims: Sequence[Dim], results: Sequence[Atom]) -> Dim:
    """The chunked dimension of a result of a ``cond``, given those of its branches' results."""
    nothing = [_is_zero(v) for v in results]  # what a chunk adds in a branch that returns 0
    found: set[Dim] = {dim for dim, zero in zip(dims, nothing, strict=True) if not zero} or {None}
    if len(found) > 1 or (any(nothing) and found - {Partial(lax.add), None}):
        raise Dependent("cond whose branches differ in what they chunk")
    return found.pop()


def _is_zero(v: Atom) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0
