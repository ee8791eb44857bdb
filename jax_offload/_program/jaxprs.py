"""Jaxprs: their types, what equations hold, and how jaxprs are made.

The table in ``private`` lists the parts of this that jax does not document.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Effects, Primitive

from jax_offload._program.private import replayed

jit = jax.jit  # jax's own, also where a user puts jax_offload.jit in its place


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
    def update(self, **fields: Any) -> Aval: ...


if TYPE_CHECKING:
    # jax's classes, as far as they are the same in every supported version. jax's own annotations say less about values
    # (see Aval), and in 0.12 they no longer tell an open jaxpr from a closed one, which in 0.10 are two classes.

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
        ctx: Any  # the settings of jax under which it was traced
        source_info: Any  # a SourceInfo of jax.extend.source_info_util

        def replace(self, **fields: Any) -> Equation: ...

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


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among some atoms."""
    return [v for v in atoms if not isinstance(v, Literal)]


def renamed(names: Mapping[Var, Atom], v: Atom) -> Atom:
    """The replacement of ``v``, or ``v`` itself if there is none."""
    return v if isinstance(v, Literal) else names.get(v, v)


def as_array(literal: Literal) -> jax.Array:
    """A result that the trace found to be a constant, as the array that the function would have returned."""
    return jnp.asarray(literal.val, None if literal.aval.weak_type else literal.aval.dtype)


def typed_as(types: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Results with the weak types that jax gave the step: the two branches of a ``cond`` may differ in them."""

    def typed(like: Any, x: Any) -> Any:
        weak = getattr(like, "weak_type", None)
        if weak is None or getattr(x, "weak_type", weak) == weak:
            return x
        return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)

    return [typed(like, x) for like, x in zip(types, values, strict=True)]


def values_of(env: Mapping[Var, Any], atoms: Iterable[Atom]) -> list[Any]:
    """The values of some atoms, given the values of variables."""
    return [as_array(v) if isinstance(v, Literal) else env[v] for v in atoms]


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a ``scan`` equation.

    Attributes:
      consts, init, xs: its operands: read whole, carried from one iteration to the next, and read by rows.
      carry, ys: its results: the values carried out of the last iteration, and the rows of all iterations, stacked.
      body: takes consts, carry and a row of each of xs; returns the carry and a row of each of ys.
    """

    eqn: Equation
    body: ClosedJaxpr
    consts: list[Atom]
    init: list[Atom]
    xs: list[Atom]
    carry: list[Var]
    ys: list[Var]
    length: int
    reverse: bool
    unroll: int

    def parted(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The equation's operands as consts, init and xs."""
        n = len(self.consts)
        m = n + len(self.init)
        return list(operands[:n]), list(operands[n:m]), list(operands[m:])

    def run(
        self,
        body: Callable[..., list[Any]],
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Any,
        length: int | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """A scan in the same direction with another body and other operands: what it carries out, and its rows."""

        def one(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            produced = body(*consts, *carry, *x)
            return produced[: len(init)], produced[len(init) :]

        length = self.length if length is None else length
        return jax.lax.scan(one, list(init), list(xs), length, self.reverse, self.unroll)


def scan_of(eqn: Equation) -> Scan | None:
    """``eqn``, if it is a ``scan``."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    if "ft_in" in params:  # from jax 0.12 on
        consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    rows = consts + carry
    ins = list(eqn.invars[:consts]), list(eqn.invars[consts:rows]), list(eqn.invars[rows:])
    outs = list(eqn.outvars[:carry]), list(eqn.outvars[carry:])
    return Scan(eqn, params["jaxpr"], *ins, *outs, params["length"], params["reverse"], params["unroll"])


def sharded_like(eqn: Equation, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fun`` under a ``shard_map`` that divides operands and results as the equation does."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=(*params["in_specs"],),
        out_specs=[*params["out_specs"]],
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_RUNS = frozenset((*_CALLED, "branches", "body_jaxpr"))


def called_by(eqn: Equation) -> ClosedJaxpr:
    """The jaxpr that a call runs: a ``jit``, a function with derivatives of its own."""
    return next(eqn.params[name] for name in _CALLED if name in eqn.params)


class Inner(NamedTuple):
    """A jaxpr, open, that an equation runs.

    Attributes:
      first: the number of the equation's operand that is the first input.
      carried: the numbers of the inputs that an iteration of a loop hands on to the next, as its first results.
    """

    jaxpr: Jaxpr
    first: int
    carried: range


def inner_of(eqn: Equation) -> list[Inner]:
    """The jaxprs that an equation runs: all branches of a ``cond``, the body of a ``while``."""
    params, name = eqn.params, eqn.primitive.name
    if _RUNS.isdisjoint(params):
        return []
    first, carried = 0, range(0)
    found: list[Any] = [params[key] for key in _CALLED if key in params][:1]
    if name == "cond":
        found, first = list(branches_of(eqn)), 1
    elif name == "while":
        n = params["body_nconsts"]
        found, first, carried = [params["body_jaxpr"]], params["cond_nconsts"], range(n, n + len(eqn.outvars))
    elif (scan := scan_of(eqn)) is not None:
        n = len(scan.consts)
        carried = range(n, n + len(scan.init))
    inner = [Inner(getattr(each, "jaxpr", each), first, carried) for each in found]
    return [each for each in inner if len(each.jaxpr.invars) == len(eqn.invars) - first]


def holds(eqn: Equation, which: Callable[[Equation], bool]) -> bool:
    """Whether ``which`` holds for an equation, or for one that it runs in a branch, a loop or a call."""
    return which(eqn) or (not _RUNS.isdisjoint(eqn.params) and holds_inside(eqn, which))


def holds_inside(eqn: Equation, which: Callable[[Equation], bool]) -> bool:
    """Whether ``which`` holds for an equation that another one runs."""
    return any(holds(each, which) for inner in inner_of(eqn) for each in inner.jaxpr.eqns)


def branches_of(eqn: Equation) -> tuple[ClosedJaxpr, ...]:
    """The branches of a ``cond``."""
    return eqn.params["branches"]


def jaxpr_of(
    fun: Callable[..., Any], *args: Any, static: Sequence[int] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``fun`` for the types of ``args``, and the structure of its result.

    ``static``: the numbers of the arguments that are no operands. ``named``: keyword arguments.
    """
    jaxpr, result = jax.make_jaxpr(fun, static_argnums=tuple(static), return_shape=True)(*args, **named)
    return cast(ClosedJaxpr, jaxpr), jax.tree.structure(result)


def jax_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function, whose results are arrays: jax would return a constant as the Python number."""
    evaluate: Callable[..., list[Any]] = jex.jaxpr_as_fun(cast(Any, jaxpr))

    def run(*args: Any) -> list[Any]:
        results = replayed(jaxpr, args) or evaluate(*args)
        of = zip(jaxpr.jaxpr.outvars, results, strict=True)
        return [as_array(v) if isinstance(v, Literal) else x for v, x in of]

    return run


def jaxpr_like(like: Jaxpr, eqns: Sequence[Equation], outputs: Sequence[Atom]) -> Jaxpr:
    """Other equations, with the same inputs and effects."""
    return cast(Any, like).replace(eqns=list(eqns), outvars=list(outputs))


def holds_jaxprs(params: dict[str, Any]) -> bool:
    """Whether an equation with these parameters runs a jaxpr: a call, a branch, a loop."""
    return bool(params) and any(True for _ in jex.jaxprs_in_params(params))


def with_jaxprs(params: dict[str, Any], change: Callable[[Jaxpr], Jaxpr]) -> dict[str, Any]:
    """An equation's parameters, with the open jaxprs in them changed; the same where none is."""
    if not holds_jaxprs(params):
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
    """``debug_info`` without the names of arguments and results, for a jaxpr that has others."""
    return debug_info._replace(arg_names=None, result_paths=None)


def run_equation(eqn: Equation, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The results of an equation's primitive for these operands and parameters, always as a list."""
    results: Any = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def says_nothing_of_placement(eqn: Equation) -> bool:
    """Whether a ``jit`` equation leaves donation, shardings, layouts and compiling to others, as a plain one does."""
    plain = _plain_jit().params
    names = plain.keys() - {"jaxpr", "name", "keep_unused", "inline", "ctx_mesh"}
    return all({*eqn.params[name]} <= {*plain[name]} for name in names)


@functools.cache
def _plain_jit() -> Equation:
    (eqn,) = jaxpr_of(jit(lambda x: x), 0.0)[0].jaxpr.eqns
    return eqn


# ---- lines of the user's program

source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


def located(why: str, *eqns: Equation) -> str:
    """Add to a reason the line of the user's program that the first equation with a line comes from: the innermost one
    outside installed packages, else the innermost one."""
    for eqn in eqns:
        frames = source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()  # the innermost is the last
        found = [match for frame in frames if (match := re.match(r"(.+?):(\d+)(:\d+)? \(", frame))]
        places = [(match[1], match[2]) for match in found]
        own = [place for place in places if not re.search(r"[/\\](site|dist)-packages[/\\]", place[0])]
        if places:
            path, line = (own or places)[-1]
            inside = path.startswith(os.getcwd() + os.sep)
            return f"{why} (at {os.path.relpath(path) if inside else path}:{line})"
    return why


# ---- effects, whose classes are private: known by examples


def _nothing(_: Any) -> None: ...


Examples = tuple[Callable[[Any], Any], ...]
AXES: Examples = (lambda _: jax.lax.axis_index("i"),)  # traces on any mesh
REFERENCES: Examples = (lambda x: jax.new_ref(x)[...],)
_UNORDERED: Examples = (lambda x: jax.debug.callback(_nothing, x), lambda x: io_callback(_nothing, None, x), *AXES)
_ORDERED: Examples = (
    lambda x: jax.debug.callback(_nothing, x, ordered=True),
    lambda x: io_callback(_nothing, None, x, ordered=True),
)


@functools.cache
def effects_of(examples: Examples) -> frozenset[type]:
    """The classes of effects that the first equations of some functions have."""
    eqns = [jax.make_jaxpr(fun, axis_env=[("i", 1)])(0.0).eqns[0] for fun in examples]
    return frozenset(type(effect) for eqn in eqns for effect in eqn.effects)


def ordered(effects: Iterable[Any]) -> list[str]:
    """The names of the effects whose order would be lost if the equations were rearranged."""
    kinds = {type(effect) for effect in effects}
    return sorted(kind.__name__ for kind in kinds - effects_of(_UNORDERED)) if kinds else []


def only_callbacks(effects: Iterable[Any]) -> bool:
    """Return whether all effects belong to callbacks and prints.

    jax knows the effects of mutable arrays and of checks in its own equations only.
    """
    kinds = {type(effect) for effect in effects}
    return not kinds or kinds <= effects_of(_UNORDERED) | effects_of(_ORDERED)


# ---- arithmetic that counts: matmuls and convolutions

MATMULS = frozenset(("dot_general", "conv_general_dilated"))


def own_flops(eqn: Any) -> float:
    """The floating point operations of a matmul or a convolution; 0 for anything else."""
    name, params = eqn.primitive.name, eqn.params
    if name not in MATMULS:
        return 0.0
    left, right = (v.aval.shape for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * out * math.prod(left[i] for i in contracted)
    kernel = params["dimension_numbers"].rhs_spec
    return 2.0 * out * math.prod(right) / right[kernel[0]]


def flops(eqn: Any) -> float:
    """Count an equation's floating point operations, including the jaxprs inside it.

    The body of a ``scan`` counts once per iteration, a ``while`` once, and a ``cond`` as its most expensive branch.
    """
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    inner = [sum(map(flops, jaxpr.eqns)) for jaxpr in jex.jaxprs_in_params(eqn.params)]
    return own_flops(eqn) + times * (max(inner, default=0.0) if eqn.primitive.name == "cond" else sum(inner))
