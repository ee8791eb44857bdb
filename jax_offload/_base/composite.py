"""Functions that stay one equation of a program until it is lowered.

What cuts and plans a program takes as long as it has equations. An encoder has a dozen at each leaf, into which nothing
but a chunk of the leaf needs to look.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Equation, Literal, Var, jaxpr_of, renamed
from jax_offload._base.private import as_arrays, lowered_jaxpr, set_rules

NAME = "jax_offload_composite"

Static = tuple[tuple[str, Hashable], ...]


def composite(fun: Callable[..., Sequence[jax.Array]], *xs: jax.Array, **static: Hashable) -> list[jax.Array]:
    """``fun(*xs, **static)``, several arrays, as one equation.

    Args:
      fun: without effects, and without transfers between memories. It makes each of its results, and none twice.
      xs: arrays.
      static: what else ``fun`` takes.
    """
    return _composite.bind(*xs, fun=fun, static=tuple(sorted(static.items())))


def plain(fun: Callable[..., Any], static: Static) -> Callable[..., Any]:
    """The function of its arrays alone."""
    return functools.partial(fun, **dict(static))


def decomposition(eqn: Equation) -> ClosedJaxpr:
    """The equations that a composite one stands for."""
    return _jaxpr(eqn.params["fun"], eqn.params["static"], *(v.aval for v in eqn.invars))


def decomposed(eqns: Iterable[Equation]) -> list[Equation]:
    """The equations, composite ones as those that they stand for, of the same operands and results."""
    found: list[Equation] = []
    for eqn in eqns:
        if eqn.primitive.name != NAME:
            found.append(eqn)
            continue
        inner = decomposition(eqn)
        consts = [Literal(x, v.aval) for x, v in zip(inner.consts, inner.jaxpr.constvars, strict=True)]
        inputs = [*inner.jaxpr.constvars, *inner.jaxpr.invars]
        names: dict[Var, Atom] = dict(zip(inputs, [*consts, *eqn.invars], strict=True))
        defs = {v: Var(v.aval) for each in inner.jaxpr.eqns for v in each.outvars}
        defs |= {v: out for v, out in zip(inner.jaxpr.outvars, eqn.outvars, strict=True) if not isinstance(v, Literal)}
        names |= defs
        for each in inner.jaxpr.eqns:
            ins, outs = [renamed(names, v) for v in each.invars], [defs[v] for v in each.outvars]
            found.append(each.replace(invars=ins, outvars=outs))
    return found


def _jaxpr(fun: Any, static: Static, *avals: Any) -> ClosedJaxpr:
    return _traced(fun, static, avals, jax.config.jax_enable_x64)


@functools.lru_cache(1024)
def _traced(fun: Any, static: Static, avals: tuple[Any, ...], x64: bool) -> ClosedJaxpr:
    """The function for these types, traced once however many equations of a program are it."""
    return jaxpr_of(plain(fun, static), *avals)[0]


@functools.cache
def _jitted(fun: Any, static: Static) -> Callable[..., Any]:
    return jax.jit(plain(fun, static))


def _batched(xs: Sequence[Any], dims: Sequence[Any], *, fun: Any, static: Static) -> tuple[Any, Any]:
    out = jax.vmap(plain(fun, static), tuple(None if d is None else int(d) for d in dims))(*xs)
    return out, [0] * len(out)


def _derived(xs: Sequence[Any], tangents: Sequence[Any], *, fun: Any, static: Static) -> Any:
    return jax.jvp(plain(fun, static), tuple(xs), as_arrays(tangents))


def _lower(context: Any, *xs: Any, fun: Any, static: Static) -> Any:
    return lowered_jaxpr(_jaxpr(fun, static, *context.avals_in), context, *xs)


_composite = Primitive(NAME)
_composite.multiple_results = True
_composite.def_impl(lambda *xs, fun, static: list(_jitted(fun, static)(*xs)))
_composite.def_abstract_eval(lambda *avals, fun, static: list(_jaxpr(fun, static, *avals).out_avals))
set_rules(_composite, lower=_lower, jvp=_derived, batch=_batched)
