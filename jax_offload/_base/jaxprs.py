"""What the package needs of jax beyond its documented API. Loud where jax has moved it.

| needed | for | seen in jax |
|---|---|---|
| the fields of variables, literals, jaxprs and equations | the types below | 0.10 to 0.12 |
| ``Primitive``, rules for batching, jvp, dce and lowering | ``identity_primitive``, ``call_primitive`` | 0.10 to 0.12 |
| ``jvp_jaxpr`` | ``call_primitive`` | 0.10 to 0.12 |
| where an equation has the jaxprs that it runs | ``sub_jaxprs`` | 0.10 to 0.12 |
| how a ``scan`` says which of its operands are what | ``scan_of`` | 0.10 and 0.11, 0.12 |
| ``dce_jaxpr``; the jaxprs among parameters | ``without_dead_code``, ``holds_equations`` | 0.10 to 0.12 |
| the names of arguments and results in a ``DebugInfo`` | ``nameless`` | 0.10 to 0.12 |
| a module's entry, ``main`` in its symbol table | ``take_back_aliases`` | 0.10 to 0.12 |
| the attributes of its arguments, set before the body is lowered | ``take_back_aliases`` | 0.10 to 0.12 |
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax._src.interpreters.ad import jvp_jaxpr
from jax.extend.core import DebugInfo, Effects, Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe


class Aval(Protocol):
    """The type of an array in a jaxpr. jax annotates it as ``AbstractValue``, which tells neither shape nor dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def weak_type(self) -> bool: ...


class EquationContext(Protocol):
    """The settings of jax under which an equation was traced."""

    @property
    def manager(self) -> AbstractContextManager[None]: ...


if TYPE_CHECKING:
    # jax's classes, as far as they are the same in every supported version. jax's own annotations say less of values
    # (see Aval), and in 0.12 they no longer tell an open jaxpr from a closed one, which in 0.10 are two classes.
    # tests/unit/test_jaxpr_types.py holds what stands here against the classes.

    class Var:
        aval: Aval

        def __init__(self, aval: Aval) -> None: ...

    class DropVar(Var): ...

    class Literal:
        val: Any
        aval: Aval
        __hash__: ClassVar[None]  # pyright: ignore[reportIncompatibleMethodOverride]

        def __init__(self, val: Any, aval: Aval) -> None: ...

    class Equation:
        invars: list[Var | Literal]
        outvars: list[Var]
        primitive: Primitive
        params: dict[str, Any]
        effects: Effects
        ctx: EquationContext

        def replace(
            self,
            *,
            invars: Sequence[Var | Literal] = ...,
            outvars: Sequence[Var] = ...,
            params: dict[str, Any] = ...,
            effects: Effects = ...,
        ) -> Equation: ...

    class Jaxpr:
        constvars: list[Var]
        invars: list[Var]
        outvars: list[Var | Literal]
        eqns: list[Equation]
        effects: Effects
        debug_info: DebugInfo

        def __init__(
            self,
            constvars: Sequence[Var],
            invars: Sequence[Var],
            outvars: Sequence[Var | Literal],
            eqns: Sequence[Equation],
            effects: Effects,
            debug_info: DebugInfo,
        ) -> None: ...

    class ClosedJaxpr:
        jaxpr: Jaxpr
        consts: list[Any]
        effects: Effects
        out_avals: list[Aval]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None: ...

else:
    from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var  # noqa: F401
    from jax.extend.core import JaxprEqn as Equation

Atom = Var | Literal

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

    @property
    def recipe(self) -> Jaxpr:
        """Equations that need of jax what the emitted ones will: it looks for memories, shardings and callbacks in the
        jaxprs among an equation's parameters before it lowers any, and drops transfers where it has seen none."""
        ...

    def emitted(self, args: Sequence[Any]) -> list[Any]:
        """Its results, by equations of the trace that is under way."""
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
        nonzero = [not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0 for t in tangents]
        derivative, out_nonzero = jvp_jaxpr(cast(Any, equations(update)), nonzero, instantiate=False)
        results = jax_fun(cast(Any, derivative))(*xs, *(t for t, used in zip(tangents, nonzero, strict=True) if used))
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
        return needed, eqn.replace(invars=invars, outvars=outvars, params=params_of(update), effects=update.effects)

    def lower(context: Any, *args: Any, update: Call, recipe: Jaxpr) -> Any:
        # Not as a function of its own: XLA's CPU rounds bfloat16 at its edges, as it inlines it too late.
        return mlir.lower_fun(lambda *args: update.emitted(args), multiple_results=True)(context, *args)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, update, recipe: jax_fun(equations(update))(*xs))
    primitive.def_effectful_abstract_eval(lambda *_, update, recipe: (list(update.avals[1]), update.effects))
    batching.fancy_primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derived
    pe.dce_rules[primitive] = without_unused
    mlir.register_lowering(primitive, lower)
    return primitive


def sub_jaxprs(eqn: Equation) -> Iterator[tuple[Jaxpr, Sequence[Atom]]]:
    """The jaxprs, open, that an equation runs, each with what the equation gives its inputs."""
    params, name = eqn.params, eqn.primitive.name
    found: list[tuple[Any, list[Atom]]]  # closed jaxprs, and the open one of jax.checkpoint
    if name == "cond":
        found = [(branch, eqn.invars[1:]) for branch in branches_of(eqn)]
    elif name == "while":
        found = [(params["body_jaxpr"], eqn.invars[params["cond_nconsts"] :])]
    else:
        found = [(params[key], eqn.invars) for key in _CALLED if key in params][:1]
    for jaxpr, operands in found:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        if len(jaxpr.invars) == len(operands):
            yield jaxpr, operands


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a ``scan`` equation.

    Attributes:
      consts, init, xs: its operands: read whole, carried from one iteration to the next, and read by rows.
      carry, ys: its results: what is carried out of the last iteration, and the rows of all of them, stacked.
      body: takes consts, carry and a row of each of xs; returns the carry and a row of each of ys.
    """

    body: ClosedJaxpr
    consts: list[Atom]
    init: list[Atom]
    xs: list[Atom]
    carry: list[Var]
    ys: list[Var]
    length: int
    reverse: bool
    unroll: int


def scan_of(eqn: Equation) -> Scan | None:
    """``eqn``, if it is a ``scan``."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    if "ft_in" in params:  # from jax 0.12 on
        consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    ins, outs = list(eqn.invars), list(eqn.outvars)
    return Scan(
        params["jaxpr"],
        ins[:consts],
        ins[consts : consts + carry],
        ins[consts + carry :],
        outs[:carry],
        outs[carry:],
        params["length"],
        params["reverse"],
        params["unroll"],
    )


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def called_by(eqn: Equation) -> ClosedJaxpr:
    """The jaxpr that a call runs: a ``jit``, a function with derivatives of its own."""
    return next(eqn.params[name] for name in _CALLED if name in eqn.params)


def branches_of(eqn: Equation) -> tuple[ClosedJaxpr, ...]:
    """The branches of a ``cond``."""
    return eqn.params["branches"]


def holds_equations(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr: a call, a branch, a loop."""
    return any(True for _ in jex.jaxprs_in_params(eqn.params))


def jaxpr_of(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``fun`` for the types of ``args``, and the structure of its result."""
    jaxpr, result = jax.make_jaxpr(fun, return_shape=True)(*args)
    return cast(ClosedJaxpr, jaxpr), jax.tree.structure(result)


def jax_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function."""
    return jex.jaxpr_as_fun(cast(Any, jaxpr))


def closed(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, list(consts))


def closed_like(
    like: ClosedJaxpr, inputs: Sequence[Var], eqns: Sequence[Equation], outputs: Sequence[Atom]
) -> ClosedJaxpr:
    """Some equations in the place of a closed jaxpr, of a branch say, without constants."""
    return closed(Jaxpr([], inputs, outputs, eqns, like.effects, nameless(like.jaxpr.debug_info)))


def jaxpr_like(like: Jaxpr, eqns: Sequence[Equation], outputs: Sequence[Atom]) -> Jaxpr:
    """Other equations, with the same inputs and effects."""
    return cast(Any, like).replace(eqns=list(eqns), outvars=list(outputs))


def with_jaxprs(params: dict[str, Any], change: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """An equation's parameters, with the open jaxprs in them changed; the same where none is."""
    if not any(True for _ in jex.jaxprs_in_params(params)):
        return params

    def one(value: Any) -> Any:
        if type(value) in (tuple, list):
            new = [one(x) for x in value]
            return value if all(map(operator.is_, new, value)) else type(value)(new)
        if not isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):  # pyright: ignore[reportPrivateImportUsage]
            return value
        jaxpr: Any = getattr(value, "jaxpr", value)
        new = change(jaxpr)
        return value if new is jaxpr else new if value is jaxpr else value.replace(jaxpr=new)

    found = {name: one(value) for name, value in params.items()}
    return params if all(found[name] is value for name, value in params.items()) else found


def nameless(debug_info: DebugInfo) -> DebugInfo:
    """``debug_info`` for a jaxpr with other arguments and results than the one that it is of."""
    return debug_info._replace(arg_names=None, result_paths=None)


def without_dead_code(
    jaxpr: Jaxpr, used: Sequence[bool] | None = None, *, keep_inputs: bool = False
) -> tuple[Jaxpr, list[bool]]:
    """``jaxpr`` with the equations that its results need and those with effects, and which of its inputs are left.

    Args:
      jaxpr: an open one.
      used: for each result whether it is needed; ``None``: all are.
      keep_inputs: whether inputs stay that nothing needs.
    """
    needed = [True] * len(jaxpr.outvars) if used is None else list(used)
    return cast("tuple[Jaxpr, list[bool]]", pe.dce_jaxpr(cast(Any, jaxpr), needed, instantiate=keep_inputs))


def run_equation(eqn: Equation, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The results of an equation's primitive for these operands and parameters: a list, of one too."""
    results: Any = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def barrier(behind: Mapping[Var, Var]) -> Equation:
    """The equation of an ``optimization_barrier``: variables -> those that they are behind it."""
    avals = [jax.ShapeDtypeStruct((), np.int32) for _ in behind]
    (eqn,) = jaxpr_of(lambda *xs: lax.optimization_barrier(xs), *avals)[0].jaxpr.eqns
    return eqn.replace(invars=list(behind), outvars=list(behind.values()))


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
