"""What the package needs of jax beyond its documented API. Loud where jax has moved it.

| needed | for | seen in jax |
|---|---|---|
| ``Primitive``, rules for batching, jvp, dce and lowering | ``identity_primitive``, ``call_primitive`` | 0.10 to 0.12 |
| ``jvp_jaxpr`` | ``call_primitive`` | 0.10 to 0.12 |
| where an equation has the jaxprs that it runs | ``sub_jaxprs`` | 0.10 to 0.12 |
| a module's entry, ``main`` in its symbol table | ``take_back_aliases`` | 0.10 to 0.12 |
| the attributes of its arguments, set before the body is lowered | ``take_back_aliases`` | 0.10 to 0.12 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, Protocol

import jax
import jax.extend.core as jex
from jax._src.interpreters.ad import jvp_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

ALIAS, DONOR, KIND = "tf.aliasing_output", "jax.buffer_donor", "mhlo.memory_kind"


def identity_primitive(name: str, lower: Callable[..., list[Any]]) -> Primitive:
    """A primitive that returns its operands, one result for each, and is there to be lowered by ``lower``.

    Linear: derivatives pass it too, so that it is in the program of a gradient, which may need no result of the
    function itself. Results that nobody uses go, and their operands with them.
    """

    def bind_all_but_zeros(tangents: Sequence[Any]) -> list[Any]:
        nonzero = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0]
        bound = dict(zip(nonzero, primitive.bind(*(tangents[i] for i in nonzero)) if nonzero else (), strict=True))
        return [bound.get(i, t) for i, t in enumerate(tangents)]

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs: list(xs))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    batching.primitive_batchers[primitive] = lambda xs, dims: (primitive.bind(*xs), dims)
    ad.primitive_jvps[primitive] = lambda xs, tangents: (primitive.bind(*xs), bind_all_but_zeros(tangents))
    ad.primitive_transposes[primitive] = lambda cotangents, *_: bind_all_but_zeros(cotangents)
    pe.dce_rules[primitive] = _without_unused
    mlir.register_lowering(primitive, lower)
    return primitive


class Call(Protocol):
    """What an equation of a ``call_primitive`` does, in its parameter ``update``: no equations yet."""

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        """The types of its operands, and of its results."""
        ...

    @property
    def effects(self) -> frozenset[Any]: ...

    def emitted(self, args: Sequence[Any]) -> list[Any]:
        """Its results, by equations of the trace that is under way."""
        ...

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Call]:
        """What is left for some of the results, and which of the operands that needs."""
        ...


def equations(call: Call) -> Any:
    """What a call emits, as a closed jaxpr."""
    return jax.make_jaxpr(call.emitted)(call.avals[0])


def call_primitive(name: str) -> Primitive:
    """A primitive that does what its parameter ``update`` says, and says it in equations where it is lowered.

    Under ``vmap`` and differentiation these equations take its place, so that nothing needs to know of them.
    """

    def batched(axis: Any, xs: Sequence[Any], dims: Sequence[Any], *, update: Call) -> Any:
        axes = tuple(None if d is None else int(d) for d in dims)
        over: dict[str, Any] = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        out = jax.vmap(jax_fun(equations(update)), axes, **over)(*xs)
        return out, [0] * len(out)

    def derived(xs: Sequence[Any], tangents: Sequence[Any], *, update: Call) -> Any:
        nonzero = [not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0 for t in tangents]
        derivative, out_nonzero = jvp_jaxpr(equations(update), nonzero, instantiate=False)
        results = jax_fun(derivative)(*xs, *(t for t, used in zip(tangents, nonzero, strict=True) if used))
        primals, found = results[: len(out_nonzero)], iter(results[len(out_nonzero) :])
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals]
        return primals, [next(found) if n else zero for n, zero in zip(out_nonzero, zeros, strict=True)]

    def without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]
        if not any(used) and not eqn.effects:
            return [False] * len(eqn.invars), None
        needed, update = eqn.params["update"].only(list(used))
        invars = [v for v, n in zip(eqn.invars, needed, strict=True) if n]
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
        return needed, eqn.replace(invars=invars, outvars=outvars, params={"update": update}, effects=update.effects)

    def lower(context: Any, *args: Any, update: Call) -> Any:
        # Not as a function of its own: XLA's CPU rounds bfloat16 at its edges, as it inlines it too late.
        return mlir.lower_fun(lambda *args: update.emitted(args), multiple_results=True)(context, *args)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, update: jax_fun(equations(update))(*xs))
    primitive.def_effectful_abstract_eval(lambda *_, update: (list(update.avals[1]), update.effects))
    batching.fancy_primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derived
    pe.dce_rules[primitive] = without_unused
    mlir.register_lowering(primitive, lower)
    return primitive


def sub_jaxprs(eqn: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The jaxprs, open, that an equation runs, each with what the equation gives its inputs."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        found = [(branch, eqn.invars[1:]) for branch in params["branches"]]
    elif name == "while":
        found = [(params["body_jaxpr"], eqn.invars[params["cond_nconsts"] :])]
    else:
        names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
        found = [(params[key], eqn.invars) for key in names if key in params][:1]
    for jaxpr, operands in found:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if len(jaxpr.invars) == len(operands):
            yield jaxpr, operands


def jax_fun(jaxpr: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function."""
    return jex.jaxpr_as_fun(jaxpr)  # pyright: ignore[reportPrivateImportUsage]


def closed(jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
    return jex.ClosedJaxpr(jaxpr, list(consts))  # pyright: ignore[reportPrivateImportUsage]


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used):
        return list(used), None
    invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars)


def take_back_aliases(context: Any, default_kind: str) -> None:
    """Leaves the pairing of donated arguments to XLA where jax has paired two of different memory kinds.

    Args:
      context: that of a lowering rule; it tells the module, whose entry is called ``main``.
      default_kind: of what has no memory kind.
    """
    _check_lowering()
    ir, main = mlir.ir, context.module_context.symbol_table["main"]
    if "arg_attrs" not in main.attributes:  # no arguments
        return
    arguments, results = (
        [{named.name: named.attr for named in each} for each in main.attributes[name]]
        for name in ("arg_attrs", "res_attrs")
    )

    def kind(attributes: dict[str, Any]) -> str:
        return attributes[KIND].value if KIND in attributes else default_kind

    paired = [a for a in arguments if ALIAS in a]
    if all(kind(a) == kind(results[a[ALIAS].value]) for a in paired):
        return
    for a in paired:
        del a[ALIAS]
        a[DONOR] = ir.BoolAttr.get(True)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])


@functools.cache
def _check_lowering() -> None:
    """Raises ``RuntimeError`` where jax lowers a function otherwise than ``take_back_aliases`` relies on."""
    lower = getattr(mlir, "lower_jaxpr_to_fun", None)
    missing = {ALIAS, DONOR, KIND} - set(_strings(lower.__code__) if lower is not None else ())
    if missing:
        raise RuntimeError(
            f"jax {jax.__version__} sets up donation otherwise than jax_offload knows (no {sorted(missing)} in "
            "lower_jaxpr_to_fun), so donated host memory could be overwritten. Install a jax that jax_offload supports "
            "(see its pyproject.toml), and report this."
        )


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
