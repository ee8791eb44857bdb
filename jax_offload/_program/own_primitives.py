"""Primitives of our own: with a lowering of their own, functions that stay one equation, and marks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_offload._program.jaxprs import ClosedJaxpr, Equation, Var, jit
from jax_offload._program.private import equation_of, nonzero, set_rules

# ---- a primitive with a lowering of its own


def identity_primitive(name: str, lower: Callable[..., list[Any]]) -> Primitive:
    """Make a primitive that returns its operands, one result for each, and is lowered by ``lower``.

    It is linear, and derivatives pass through it, so that it is in the program of a gradient too, which may need no
    result of the function itself. Unused results are removed together with their operands.
    """

    def bind_all_but_zeros(tangents: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        arrays = [i for i, t in enumerate(tangents) if nonzero(t)]
        new = primitive.bind(*(tangents[i] for i in arrays), **params) if arrays else ()
        bound = dict(zip(arrays, new, strict=True))
        return [bound.get(i, t) for i, t in enumerate(tangents)]

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **_: list(xs))
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    set_rules(
        primitive,
        lower=lower,
        jvp=lambda xs, tangents, **params: (primitive.bind(*xs, **params), bind_all_but_zeros(tangents, params)),
        batch=lambda xs, dims, **params: (primitive.bind(*xs, **params), dims),
        transpose=lambda cotangents, *_, **params: bind_all_but_zeros(cotangents, params),
        dce=_without_unused,
    )
    return primitive


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used):
        return list(used), None
    invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars)


# ---- functions that stay one equation of a program until they are lowered

_COMPOSITE = "jax_offload_composite"


def composite(fun: Callable[..., Sequence[jax.Array]], *xs: jax.Array, **static: Hashable) -> list[jax.Array]:
    """``fun(*xs, **static)``, several arrays, as one equation.

    Cutting and planning a program take as long as it has equations. An encoder has a dozen for each leaf, and only a
    chunk of the leaf needs to look into them.

    Args:
      fun: has no effects and no transfers between memories. It makes each of its results, and none twice.
      xs: arrays.
      static: the other arguments of ``fun``.
    """
    return list(_jitted(fun, tuple(sorted(static.items())))(*xs))


@functools.cache
def _jitted(fun: Callable[..., Any], static: tuple[tuple[str, Hashable], ...]) -> Callable[..., Any]:
    def run(*xs: Any) -> Any:
        return fun(*xs, **dict(static))

    run.__name__ = _COMPOSITE
    return jit(run)


def is_composite(eqn: Equation) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == _COMPOSITE


# ---- marks: equations that do nothing, and say about a value what its type does not
#
# They are found by reading the trace. A program (``_program/program``) has none, and lowering drops them.

MARK = "jax_offload_mark"


@dataclasses.dataclass(frozen=True, eq=False)
class _Said:
    """Any value as a parameter of an equation, which must be hashable."""

    what: Any


def mark(x: jax.Array, says: Any) -> jax.Array:
    """Return ``x``, marked: from here on the trace says ``says`` about it."""
    return _mark.bind(x, says=_Said(says))[0]


def mark_of(x: Any) -> Any:
    """The mark of a traced value, if its last operation was to mark it."""
    eqn = equation_of(x)
    return eqn.params["says"].what if eqn is not None and eqn.primitive is _mark else None


def is_mark(eqn: Equation) -> bool:
    return eqn.primitive is _mark


def marks_in(step: ClosedJaxpr) -> dict[Var, Any]:
    """Map each marked variable at the top of a closed jaxpr to its mark."""
    return {eqn.outvars[0]: eqn.params["says"].what for eqn in step.jaxpr.eqns if eqn.primitive is _mark}


_mark = identity_primitive(MARK, lambda context, *xs, says: list(xs))
