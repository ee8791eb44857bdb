"""What a trace under way tells: the order in which gradients are made, and the passes that make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import flops
from jax_offload._base.memory import is_host_aval
from jax_offload._base.private import equation_of, equations_of_trace, operands_of, traced_operands, variable_of

# ---- the equation that made a value


def production_order(values: Sequence[Any]) -> list[int] | None:
    """For each traced value the number of the equation that made it; ``None``: one is an argument, or not of this
    trace, and the caller has to guess.

    The backward pass is traced in the order in which gradients appear. What casts or scales a gradient comes later, in
    the order of the tree, so it is looked through.
    """
    defined = [equation_of(_origin(x)) for x in values]
    if not defined or any(eqn is None for eqn in defined):
        return None
    number_of = {id(eqn): k for k, eqn in enumerate(equations_of_trace(values[0]))}
    found = [number_of.get(id(eqn)) for eqn in defined]
    return None if None in found else found  # pyright: ignore[reportReturnType]


def is_constrained(value: Any) -> bool:
    """Whether a traced value's sharding was said where it was made; as far as jax tells."""
    eqn = equation_of(_origin(value))
    return eqn is not None and eqn.primitive.name == "sharding_constraint"


def was_on_host(value: Any) -> bool:
    """Whether a traced value that is in device memory was brought there in its trace, from host memory."""
    eqn = equation_of(value) if isinstance(value, Tracer) else None
    shape = np.shape(value)
    return eqn is not None and any(is_host_aval(x.aval) and np.shape(x) == shape for x in traced_operands(eqn))


_SCALING = frozenset("convert_element_type mul div max min clamp select_n".split())
_CHOOSING = frozenset("broadcast_in_dim eq ne lt le gt ge is_finite and or not".split())


def _origin(tracer: Any) -> Any:
    """What ``tracer`` is a cast, a multiple or a bound of."""
    while (eqn := equation_of(tracer)) is not None and _scales(eqn):
        like = [x for x in traced_operands(eqn) if x.aval.shape == tracer.aval.shape and _is_floating(x)]
        if len(like) != 1:
            break
        tracer = like[0]
    return tracer


def _scales(eqn: Any) -> bool:
    """Whether an equation, or a function such as ``jnp.where`` or ``jnp.nan_to_num``, does no more than that."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return all(e.primitive.name in _CHOOSING or _scales(e) for e in eqn.params["jaxpr"].jaxpr.eqns)
    return name in _SCALING


def _is_floating(tracer: Any) -> bool:
    return jnp.issubdtype(tracer.aval.dtype, jnp.floating)


# ---- the passes that made gradients

LARGE = 1 << 16  # elements: of smaller gradients the activations are not worth a thought


@dataclasses.dataclass(frozen=True)
class Backward:
    """The passes through the network that made gradients, forward and backward, so far as a trace shows them.

    Attributes:
      held: bytes that the last operations before the gradients read: what is alive if all of these are put off.
      flops: of matmuls and convolutions.
      scaled: whether a gradient is a multiple by a number that needs others: clipped by their norm, outside.
    """

    held: int
    flops: float
    scaled: bool


def backward_of(gradients: Sequence[Any]) -> Backward | None:
    """Of traced gradients; ``None`` where no large one is made in a trace: arguments, or what ``vmap`` or a derivative
    around the update traces."""
    large = [x for x in gradients if math.prod(np.shape(x)) >= LARGE and equation_of(x) is not None]
    if not large:
        return None
    eqns, producers = list[Any](), dict[Any, Any]()
    for x in large:
        if variable_of(x) not in producers:  # in a branch, say, some are from the trace around it
            more = equations_of_trace(x)
            eqns, producers = eqns + more, producers | _makers(more)
    trace, walk = _Scope({}, producers), _Walk()
    for x in large:
        walk.back_from(_value(variable_of(x), trace))
    return Backward(sum(nbytes(v.aval) for v in walk.held), sum(map(flops, eqns)), walk.scales_by_them())


_VIEWS = frozenset(
    """convert_element_type mul div neg max min clamp select_n transpose reshape squeeze add_any add sub integer_pow
    copy optimization_barrier pad slice split concatenate broadcast_in_dim""".split()
)
_LOOPS = frozenset(("scan", "while", "cond"))


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
    """The trace, or a call in it: what the variables of its jaxpr are that are operands of the call, and the equations
    that make the others."""

    given: Mapping[Any, _Value]
    producers: Mapping[Any, Any]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A variable, where it is."""

    variable: Any
    scope: _Scope

    @property
    def aval(self) -> Any:
        return self.variable.aval

    @property
    def producer(self) -> Any:
        """The equation that makes it; ``None`` for an argument, or a constant."""
        return self.scope.producers.get(self.variable)

    @property
    def size(self) -> int:
        return math.prod(self.aval.shape)

    @property
    def is_floating(self) -> bool:
        return bool(jnp.issubdtype(self.aval.dtype, jnp.floating))

    @property
    def inputs(self) -> list[_Value]:
        """The operands of the equation that makes it, but for literals."""
        return [_value(v, self.scope) for v in operands_of(self.producer) if not isinstance(v, jex.Literal)]


def _value(variable: Any, scope: _Scope) -> _Value:
    """A variable, in a call that it is handed to where it comes from."""
    return scope.given.get(variable) or _Value(variable, scope)


def _makers(eqns: Sequence[Any]) -> dict[Any, Any]:
    return {v: eqn for eqn in eqns for v in eqn.outvars}


class _Walk:
    """Back from gradients to the operations that make them, through scaling and the like, and into calls.

    Attributes:
      held: what these operations read.
      scales: what the gradients are scaled by.
      ends: the operations themselves, by identity, in the call that they are in.
    """

    def __init__(self) -> None:
        self.held: dict[_Value, None] = {}
        self.scales: list[_Value] = []
        self.ends: set[tuple[int, _Scope]] = set()
        self._scopes: dict[tuple[int, _Scope], _Scope] = {}

    def back_from(self, gradient: _Value) -> None:
        visited, todo = set[_Value](), [gradient]
        while todo:
            x = todo.pop()
            if x in visited or x.producer is None:
                continue
            visited.add(x)
            name, inputs = x.producer.primitive.name, x.inputs
            if (inside := self._inside(x)) is not None:
                todo.append(inside)
            elif name in _VIEWS or (name == "reduce_sum" and inputs and inputs[0].size == x.size):
                arrays = [v for v in inputs if v.size >= x.size and v.is_floating]
                todo += arrays
                self.scales += [v for v in inputs if v not in arrays]
            else:
                self.ends.add((id(x.producer), x.scope))
                if name not in _LOOPS:  # a loop gives all that it makes at once
                    self.held |= dict.fromkeys(v for v in inputs if v.is_floating)

    def scales_by_them(self) -> bool:
        """Whether a number that a gradient is scaled by is made of what these operations make."""
        visited, todo = set[_Value](), list(self.scales)
        while todo:
            x = todo.pop()
            if x in visited or x.producer is None:
                continue
            visited.add(x)
            if (id(x.producer), x.scope) in self.ends:
                return True
            inside = self._inside(x)  # a call beside the number may make gradients that it does not need
            todo += x.inputs if inside is None else [inside]
        return False

    def _inside(self, x: _Value) -> _Value | None:
        """The same as a result of the jaxpr that its equation runs once."""
        eqn = x.producer
        jaxpr = None if eqn.primitive.name in _LOOPS else _inner(eqn)
        if jaxpr is None:
            return None
        key = id(eqn), x.scope
        if key not in self._scopes:
            pairs = zip(jaxpr.invars, operands_of(eqn), strict=True)
            given = {v: _value(outer, x.scope) for v, outer in pairs if not isinstance(outer, jex.Literal)}
            self._scopes[key] = _Scope(given, _makers(jaxpr.eqns))
        out = jaxpr.outvars[eqn.outvars.index(x.variable)]
        return None if isinstance(out, jex.Literal) else _value(out, self._scopes[key])


def _inner(eqn: Any) -> Any:
    """The jaxpr that an equation runs, where there is one and its inputs are the equation's."""
    for key in "jaxpr", "call_jaxpr":
        if (found := eqn.params.get(key)) is not None:
            jaxpr = getattr(found, "jaxpr", found)
            sizes = len(operands_of(eqn)), len(eqn.outvars)  # a kernel's jaxpr has its results among its inputs
            return jaxpr if hasattr(jaxpr, "eqns") and (len(jaxpr.invars), len(jaxpr.outvars)) == sizes else None
    return None
