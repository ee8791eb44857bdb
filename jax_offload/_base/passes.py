"""What the trace around an update tells of the passes that made its gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.private import equations_of_trace

LARGE = 1 << 16  # elements: of smaller gradients the activations are not worth a thought


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward and the backward pass, so far as a trace shows them.

    Attributes:
      held: bytes that the last operations before the gradients read: what is alive if all of these are put off.
      flops: of matmuls and convolutions.
      scaled: whether a gradient is a multiple by a number that needs others: clipped by their norm, outside.
    """

    held: int
    flops: float
    scaled: bool


def passes_of(gradients: Sequence[Any]) -> Passes | None:
    """Of traced gradients; ``None`` where they are arguments of the trace, or jax does not say."""
    try:
        large = [_Value(x) for x in gradients if math.prod(x.aval.shape) >= LARGE]
        if not any(x.made for x in large):
            return None
        eqns = equations_of_trace(gradients[0])
        held: dict[int, int] = {}
        numbers: list[_Value] = []
        ends, scopes = set[int](), dict[tuple[int, int], _Scope]()
        for x in large:
            _walk(x, held, numbers, ends, scopes)
        return Passes(sum(held.values()), sum(map(_flops, filter(None, eqns))), _needs(numbers, ends))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


_VIEWS = frozenset(
    """convert_element_type mul div neg max min clamp select_n transpose reshape squeeze add_any add sub integer_pow
    copy optimization_barrier pad slice split concatenate broadcast_in_dim""".split()
)
_LOOPS = frozenset(("scan", "while", "cond"))


class _Value:
    """A tracer, or a variable of a call that the trace has in one equation, with what makes it."""

    def __init__(self, value: Any, scope: _Scope | None = None) -> None:
        if scope is not None and value in scope.given:  # an operand of the call
            outer = scope.given[value]
            self.value, self.scope = outer.value, outer.scope
        else:
            self.value, self.scope = value, scope

    @property
    def made(self) -> Any:
        """The equation that makes it."""
        return self.value.parent if self.scope is None else self.scope.made.get(self.value)

    @property
    def size(self) -> int:
        return math.prod(self.value.aval.shape)

    @property
    def is_floating(self) -> bool:
        return bool(jnp.issubdtype(self.value.aval.dtype, jnp.floating))

    @property
    def key(self) -> int:
        return hash((id(self.value), id(self.scope.call) if self.scope else 0))

    @property
    def inputs(self) -> list[_Value]:
        """The operands of the equation that makes it, but for literals and constants."""
        eqn = self.made
        found = eqn.in_tracers if self.scope is None else [v for v in eqn.invars if not hasattr(v, "val")]
        return [_Value(v, self.scope) for v in found if self.scope is not None or hasattr(v, "parent")]

    def inside(self, scopes: dict[tuple[int, int], _Scope]) -> _Value | None:
        """The same as a result of the jaxpr that its equation runs once; ``scopes`` are those seen before."""
        eqn = self.made
        jaxpr = None if eqn.primitive.name in _LOOPS else _inner(eqn)
        if jaxpr is None:
            return None
        place = eqn.outvars.index(self.value.val if self.scope is None else self.value)
        key = id(eqn), id(self.scope and self.scope.call)
        if key in scopes:
            return _Value(jaxpr.outvars[place], scopes[key])
        operands = eqn.in_tracers if self.scope is None else eqn.invars
        given = {
            v: _Value(x, self.scope)
            for v, x in zip(jaxpr.invars, operands, strict=True)
            if hasattr(x, "parent" if self.scope is None else "count") or not hasattr(x, "val")
        }
        scopes[key] = _Scope(eqn, given, {v: each for each in jaxpr.eqns for v in each.outvars})
        return _Value(jaxpr.outvars[place], scopes[key])


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
    """Of a call: its equation, its operands by the variables of its jaxpr, and what makes the others."""

    call: Any
    given: Mapping[Any, _Value]
    made: Mapping[Any, Any]


def _walk(
    gradient: _Value,
    held: dict[int, int],
    numbers: list[_Value],
    ends: set[int],
    scopes: dict[tuple[int, int], _Scope],
) -> None:
    """Back to the operations that make a gradient, through scaling and the like.

    What these read goes to ``held``, what the gradient is scaled by to ``numbers``, they themselves to ``ends``.
    """
    seen, todo = set[int](), [gradient]
    while todo:
        x = todo.pop()
        if x.key in seen or x.made is None:
            continue
        seen.add(x.key)
        name, inputs = x.made.primitive.name, x.inputs
        if (inside := x.inside(scopes)) is not None:
            ends.add(id(x.made))
            todo.append(inside)
        elif name in _VIEWS or (name == "reduce_sum" and inputs and inputs[0].size == x.size):
            arrays = [v for v in inputs if v.size >= x.size and v.is_floating]
            todo += arrays
            numbers += [v for v in inputs if v not in arrays]
        else:
            ends.add(id(x.made))
            if name not in _LOOPS:  # a loop gives all that it makes at once
                held.update({v.key: nbytes(v.value.aval) for v in inputs if v.is_floating})


def _needs(numbers: Sequence[_Value], ends: set[int]) -> bool:
    """Whether numbers are made of what these equations make."""
    seen, todo = set[int](), list(numbers)
    while todo:
        x = todo.pop()
        if x.made is None or id(x.made) in seen:
            continue
        seen.add(id(x.made))
        if id(x.made) in ends:
            return True
        todo += x.inputs if x.scope is None else [*x.inputs, *x.scope.given.values()]
    return False


def _inner(eqn: Any) -> Any:
    """The jaxpr that an equation runs, where there is one and its inputs are the equation's."""
    for key in "jaxpr", "call_jaxpr":
        if (found := eqn.params.get(key)) is not None:
            jaxpr = getattr(found, "jaxpr", found)
            operands = getattr(eqn, "in_tracers", None) or getattr(eqn, "invars", ())
            sizes = len(operands), len(eqn.outvars)  # a kernel's jaxpr has its results among its inputs
            return jaxpr if hasattr(jaxpr, "eqns") and (len(jaxpr.invars), len(jaxpr.outvars)) == sizes else None
    return None


def _flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name in ("dot_general", "conv_general_dilated"):
        left, right = (v.aval.shape for v in list(getattr(eqn, "in_tracers", None) or eqn.invars)[:2])
        out = math.prod(eqn.outvars[0].aval.shape)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            return 2.0 * out * math.prod(left[i] for i in contracted)
        kernel = params["dimension_numbers"].rhs_spec
        return 2.0 * out * math.prod(right) / right[kernel[0]]
    times = params["length"] if name == "scan" else 1
    inner = [sum(map(_flops, jaxpr.eqns)) for jaxpr in _jaxprs(params)]
    return times * (max(inner, default=0.0) if name == "cond" else sum(inner))


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
