"""Primitives of our own: calls of an update, functions that stay one equation, and marks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive

from jax_offload._program.jaxprs import ClosedJaxpr, Equation, Jaxpr, Var, jax_fun, jaxpr_of, jit
from jax_offload._program.private import equation_of, lowered, nonzero, set_rules, zero_tangent

# ---- a primitive with a lowering of its own, and a primitive that becomes equations


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


class Call(Protocol):
    """The parameter ``update`` of a ``call_primitive``'s equation: its work, not yet as equations."""

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        """The types of its operands, and of its results."""
        ...

    @property
    def effects(self) -> frozenset[Any]: ...

    @property
    def recipe(self) -> Jaxpr:
        """Equations with the memories, shardings and callbacks of the emitted ones. jax looks for these in the jaxprs
        among an equation's parameters before it lowers anything, and drops transfers if it has seen none."""
        ...

    def emitted(self, args: Sequence[Any], *, lowered: bool = False, for_cpu: bool = False) -> list[Any]:
        """Emit equations into the current trace and return their results.

        Args:
          args: its operands.
          lowered: whether these equations are lowered unchanged, so that neither ``vmap`` nor a derivative sees them.
          for_cpu: whether they are lowered for a CPU, whose compiler needs no help with the order of transfers.
        """
        ...

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Call]:
        """Reduce the work to some of the results; return it and the operands that it needs."""
        ...


def equations(call: Call) -> ClosedJaxpr:
    """Return the equations that a call emits, as a closed jaxpr."""
    return jaxpr_of(call.emitted, call.avals[0])[0]


def params_of(call: Call) -> dict[str, Any]:
    """The parameters of an equation that runs ``call``."""
    return {"update": call, "recipe": call.recipe}


def call_primitive(name: str) -> Primitive:
    """Make a primitive that runs its parameter ``update``, and becomes equations when it is lowered. Bind it with
    ``params_of``.

    Under ``vmap`` and differentiation the equations take its place, so that no other rule is needed.
    """

    def batched(axis: Any, xs: Sequence[Any], dims: Sequence[Any], *, update: Call, recipe: Jaxpr) -> Any:
        axes = tuple(None if d is None else int(d) for d in dims)
        over: dict[str, Any] = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        out = jax.vmap(jax_fun(equations(update)), axes, **over)(*xs)
        return out, [0] * len(out)

    def derived(xs: Sequence[Any], tangents: Sequence[Any], *, update: Call, recipe: Jaxpr) -> Any:
        run, moving = jax_fun(equations(update)), {i: t for i, t in enumerate(tangents) if nonzero(t)}

        def of_moving(*moved: Any) -> list[Any]:
            given = dict(zip(moving, moved, strict=True))
            return run(*(given.get(i, x) for i, x in enumerate(xs)))

        primals, found = jax.jvp(of_moving, [xs[i] for i in moving], [*moving.values()])
        return primals, [t if nonzero(t) else zero_tangent(x) for t, x in zip(found, primals, strict=True)]

    def without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]
        if not any(used) and not eqn.effects:
            return [False] * len(eqn.invars), None
        needed, update = eqn.params["update"].only(list(used))
        invars = [v for v, n in zip(eqn.invars, needed, strict=True) if n]
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
        return needed, eqn.replace(invars=invars, outvars=outvars, params=params_of(update), effects=update.effects)

    def lower(context: Any, *args: Any, update: Call, recipe: Jaxpr, for_cpu: bool = False) -> Any:
        # Not as a function of its own: XLA's CPU rounds bfloat16 at its edges, as it inlines it too late.
        return lowered(lambda *args: update.emitted(args, lowered=True, for_cpu=for_cpu), context, *args, several=True)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, update, recipe: jax_fun(equations(update))(*xs))
    primitive.def_effectful_abstract_eval(lambda *_, update, recipe: (list(update.avals[1]), update.effects))
    for_cpu = functools.partial(lower, for_cpu=True)
    set_rules(primitive, lower=lower, lower_for_cpu=for_cpu, jvp=derived, batch_over=batched, dce=without_unused)
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
