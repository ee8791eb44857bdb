"""Primitives of our own: one that is there to be lowered, and one that says in equations what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive

from jax_offload._base.collector import collector_waits
from jax_offload._base.jaxprs import ClosedJaxpr, Jaxpr, jax_fun, jaxpr_of
from jax_offload._base.private import jvp_jaxpr, lowered, nonzero, set_rules, zero_tangent


def identity_primitive(name: str, lower: Callable[..., list[Any]]) -> Primitive:
    """A primitive that returns its operands, one result for each, and is there to be lowered by ``lower``.

    Linear: derivatives pass it too, so that it is in the program of a gradient, which may need no result of the
    function itself. Results that nobody uses go, and their operands with them.
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


class Call(Protocol):
    """What an equation of a ``call_primitive`` does, in its parameter ``update``: no equations yet."""

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        """The types of its operands, and of its results."""
        ...

    @property
    def effects(self) -> frozenset[Any]: ...

    @property
    def recipe(self) -> Jaxpr:
        """Equations that need of jax what the emitted ones will: it looks for memories, shardings and callbacks in the
        jaxprs among an equation's parameters before it lowers any, and drops transfers where it has seen none."""
        ...

    def emitted(self, args: Sequence[Any], *, lowered: bool = False) -> list[Any]:
        """Its results, by equations of the trace that is under way.

        ``lowered``: whether these are lowered as they are; neither ``vmap`` nor a derivative will see them.
        """
        ...

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Call]:
        """What is left for some of the results, and which of the operands that needs."""
        ...


def equations(call: Call) -> ClosedJaxpr:
    """What a call emits, as a closed jaxpr."""
    return jaxpr_of(call.emitted, call.avals[0])[0]


def params_of(call: Call) -> dict[str, Any]:
    """The parameters of an equation that does what ``call`` says."""
    return {"update": call, "recipe": call.recipe}


def call_primitive(name: str) -> Primitive:
    """A primitive that does what its parameter ``update`` says, and says it in equations where it is lowered. Bind it
    with ``params_of``.

    Under ``vmap`` and differentiation these equations take its place, so that nothing needs to know of them.
    """

    def batched(axis: Any, xs: Sequence[Any], dims: Sequence[Any], *, update: Call, recipe: Jaxpr) -> Any:
        axes = tuple(None if d is None else int(d) for d in dims)
        over: dict[str, Any] = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        out = jax.vmap(jax_fun(equations(update)), axes, **over)(*xs)
        return out, [0] * len(out)

    def derived(xs: Sequence[Any], tangents: Sequence[Any], *, update: Call, recipe: Jaxpr) -> Any:
        derivative, out_nonzero = jvp_jaxpr(equations(update), [nonzero(t) for t in tangents])
        results = jax_fun(derivative)(*xs, *filter(nonzero, tangents))
        primals, found = results[: len(out_nonzero)], iter(results[len(out_nonzero) :])
        return primals, [next(found) if n else zero_tangent(x) for n, x in zip(out_nonzero, primals, strict=True)]

    def without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]
        if not any(used) and not eqn.effects:
            return [False] * len(eqn.invars), None
        needed, update = eqn.params["update"].only(list(used))
        invars = [v for v, n in zip(eqn.invars, needed, strict=True) if n]
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
        return needed, eqn.replace(invars=invars, outvars=outvars, params=params_of(update), effects=update.effects)

    @collector_waits()
    def lower(context: Any, *args: Any, update: Call, recipe: Jaxpr) -> Any:
        # Not as a function of its own: XLA's CPU rounds bfloat16 at its edges, as it inlines it too late.
        return lowered(lambda *args: update.emitted(args, lowered=True), context, *args, several=True)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, update, recipe: jax_fun(equations(update))(*xs))
    primitive.def_effectful_abstract_eval(lambda *_, update, recipe: (list(update.avals[1]), update.effects))
    set_rules(primitive, lower=lower, jvp=derived, batch_over=batched, dce=without_unused)
    return primitive


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used):
        return list(used), None
    invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars)
