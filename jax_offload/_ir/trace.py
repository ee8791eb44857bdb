"""Facts that the current trace tells: the order in which gradients appear, and the passes that make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import DebugInfo, Equation, Var, flops, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.private import equation_of, equations_of_trace, variable_of
from jax_offload._ir.program import Program, flat

LARGE = 1 << 16  # elements; the activations of smaller gradients do not matter


def production_order(values: Sequence[Any]) -> list[int] | None:
    """For each traced value, the number of the equation that made it. ``None`` if a value is an argument or belongs to
    another trace, so that the caller has to guess.

    The backward pass is traced in the order in which gradients appear. Equations that cast or scale a gradient come
    later, in the order of the tree, so the search goes through them.
    """
    if not values or any(equation_of(x) is None for x in values):
        return None
    makers = _makers(values[0])
    found = [makers.get(_origin(variable_of(x), makers)) for x in values]
    return None if None in found else [made[0] for made in found if made is not None]


def are_constrained(values: Sequence[Any]) -> list[bool]:
    """For each value, whether it is traced and a sharding constraint made it, casts and scales aside."""
    makers: dict[Any, tuple[int, Any]] = {}
    found: list[bool] = []
    for x in values:
        made = None
        if equation_of(x) is not None:
            if variable_of(x) not in makers:  # in a branch, say, some are from the trace around it
                makers |= _makers(x)
            made = makers.get(_origin(variable_of(x), makers))
        found.append(made is not None and made[1].primitive.name == "sharding_constraint")
    return found


def _makers(x: Any) -> dict[Any, tuple[int, Any]]:
    """Map each variable in a value's trace to the equation that makes it, and the equation's number."""
    return {v: (k, eqn) for k, eqn in enumerate(equations_of_trace(x)) for v in eqn.outvars}


def was_on_host(value: Any) -> bool:
    """Whether a traced value in device memory was loaded from host memory in its trace."""
    shape = np.shape(value)
    eqn = equation_of(value) if isinstance(value, Tracer) else None
    return eqn is not None and any(is_host_aval(v.aval) and v.aval.shape == shape for v in variables(eqn.invars))


_SCALING = frozenset("convert_element_type mul div max min clamp select_n".split())
_CHOOSING = frozenset("broadcast_in_dim eq ne lt le gt ge is_finite and or not".split())


def _origin(v: Any, makers: dict[Any, tuple[int, Any]]) -> Any:
    """The variable from which ``v`` was cast, scaled or clipped."""
    while (made := makers.get(v)) is not None and _scales(made[1]):
        like = [x for x in variables(made[1].invars) if x.aval.shape == v.aval.shape and _is_floating(x)]
        if len(like) != 1:
            break
        v = like[0]
    return v


def _scales(eqn: Any) -> bool:
    """Whether an equation, or a call such as ``jnp.where`` or ``jnp.nan_to_num``, only casts, scales or clips."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return all(e.primitive.name in _CHOOSING or _scales(e) for e in eqn.params["jaxpr"].jaxpr.eqns)
    return name in _SCALING


def _is_floating(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.floating))


# ---- the passes that made gradients


@dataclasses.dataclass(frozen=True)
class Backward:
    """The passes through the network that made gradients, forward and backward, so far as a trace shows them.

    Attributes:
      held: bytes that the last operations before the gradients read; they stay alive if all of these are put off.
      flops: floating point operations of matmuls and convolutions.
      scaled: whether a gradient is scaled by a number that needs others, as clipping by their norm outside does.
    """

    held: int
    flops: float
    scaled: bool


_VIEWS = frozenset(
    """convert_element_type mul div neg max min clamp select_n transpose reshape squeeze add_any add sub integer_pow
    copy optimization_barrier pad slice split concatenate broadcast_in_dim""".split()
)
_LOOPS = frozenset(("scan", "while", "cond"))


def backward_of(gradients: Sequence[Any]) -> Backward | None:
    """The passes that made traced gradients.

    Returns ``None`` if no trace makes a large gradient, because the gradients are arguments, or because ``vmap`` or a
    derivative around the update traces them.
    """
    large = [x for x in gradients if math.prod(np.shape(x)) >= LARGE and equation_of(x) is not None]
    if not large:
        return None
    eqns, known = list[Equation](), set[Var]()
    for x in large:
        if variable_of(x) not in known:  # in a branch, say, some are from the trace around it
            eqns += equations_of_trace(x)
            known.update(v for eqn in eqns for v in eqn.outvars)
    traced = Program([], [variable_of(x) for x in large], eqns, [], DebugInfo("jit", "gradients", None, None))
    program = flat(traced.closed, any_call=True)
    return _passes(variables(program.outputs), program.eqns)


def _passes(gradients: Sequence[Var], eqns: Sequence[Equation]) -> Backward:
    """Go back from gradients to the operations that make them, through scaling and the like."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    held, scales, ends = dict[Var, None](), list[Var](), set[int]()
    visited, todo = set[Var](), [*gradients]
    while todo:
        x = todo.pop()
        if x in visited or (made := makers.get(x)) is None:
            continue
        visited.add(x)
        name, inputs = made.primitive.name, variables(made.invars)
        if name in _VIEWS or (name == "reduce_sum" and inputs and _size(inputs[0]) == _size(x)):
            arrays = [v for v in inputs if _size(v) >= _size(x) and _is_floating(v)]
            todo += arrays
            scales += [v for v in inputs if v not in arrays]
        else:
            ends.add(id(made))
            if name not in _LOOPS:  # a loop gives all that it makes at once
                held |= dict.fromkeys(v for v in inputs if _is_floating(v))
    visited, todo, scaled = set[Var](), scales, False
    while todo and not scaled:  # the scale of a gradient is made of these operations' results
        x = todo.pop()
        if x not in visited and (made := makers.get(x)) is not None:
            visited.add(x)
            scaled = id(made) in ends
            todo += variables(made.invars)
    return Backward(sum(nbytes(v.aval) for v in held), sum(map(flops, eqns)), scaled)


def _size(v: Var) -> int:
    return math.prod(v.aval.shape)
