"""Facts that the current trace tells about gradients: the order in which they appear, and the passes that make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import DebugInfo, Equation, Var, flops, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.private import equation_of, equations_of_trace, is_result, variable_of
from jax_offload._program.program import Program, flat
from jax_offload._program.propagate import needed_for

LARGE = 1 << 16  # elements; the activations of smaller gradients do not matter


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


@dataclasses.dataclass(frozen=True)
class Produced:
    """How a trace produces gradients. The backward pass is traced in the order in which they appear.

    Attributes:
      order: for each gradient, the number of the operation that made it. Equations that cast, scale or move a gradient
        come later, in the order of the tree, and do not count. ``None`` if a gradient is an argument or belongs to
        another trace, so that the caller has to guess.
      constrained: for each gradient, whether that operation was a sharding constraint.
      backward: the passes that made the large ones. ``None`` if the trace makes none, because they are arguments, or
        because ``vmap`` or a derivative around the update traces them.
    """

    order: list[int] | None
    constrained: list[bool]
    backward: Backward | None


def production_of(gradients: Sequence[Any]) -> Produced:
    """Read off the trace how gradients are produced."""
    eqns, known, traces = list[Equation](), set[Var](), 0
    traced = [k for k, x in enumerate(gradients) if is_result(x)]
    for k in traced:
        if variable_of(gradients[k]) not in known:  # in a branch, say, some are from the trace around it
            eqns += equations_of_trace(gradients[k])
            known.update(v for eqn in eqns for v in eqn.outvars)
            traces += 1
    outputs = [variable_of(gradients[k]) for k in traced]
    program = Program([], outputs, eqns, [], DebugInfo("jit", "gradients", None, None))
    program = flat(program.closed, any_call=True)
    made: dict[Var, int] = {}
    fills = set[Var]()  # arrays of one number, which say nothing about the gradient beside them
    for k, eqn in enumerate(program.eqns):
        for v in eqn.outvars:
            arrays = _viewed(eqn, v)
            if arrays == []:
                fills.add(v)
            made[v] = max((made[x] for x in arrays or () if x in made and x not in fills), default=k)
    at = {k: made[v] for k, v in zip(traced, program.outputs, strict=True) if isinstance(v, Var) and v in made}
    large = [v for v in variables(program.outputs) if _size(v) >= LARGE]
    return Produced(
        [*at.values()] if len(at) == len(gradients) and traces == 1 else None,
        [k in at and program.eqns[at[k]].primitive.name == "sharding_constraint" for k in range(len(gradients))],
        _passes(large, program.eqns) if large else None,
    )


_VIEWS = frozenset(
    """convert_element_type mul div neg max min clamp select_n transpose reshape squeeze add_any add sub integer_pow
    copy optimization_barrier pad slice split concatenate broadcast_in_dim""".split()
)
_LOOPS = frozenset(("scan", "while", "cond"))


def _viewed(eqn: Equation, made: Var) -> list[Var] | None:
    """The arrays that an equation casts, scales, moves or adds to make a result; ``None`` if it does anything else."""
    name, inputs = eqn.primitive.name, variables(eqn.invars)
    if name not in _VIEWS and not (name == "reduce_sum" and inputs and _size(inputs[0]) == _size(made)):
        return None
    return [v for v in inputs if _size(v) >= _size(made) and _is_floating(v)]


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
        if (arrays := _viewed(made, x)) is not None:
            todo += arrays
            scales += [v for v in variables(made.invars) if v not in arrays]
        else:
            ends.add(id(made))
            if made.primitive.name not in _LOOPS:  # the results of a loop appear all at once
                held |= dict.fromkeys(v for v in variables(made.invars) if _is_floating(v))
    scaled = any(id(eqn) in ends for eqn in needed_for(eqns, scales)[0])  # their results make a gradient's scale
    return Backward(sum(nbytes(v.aval) for v in held), sum(map(flops, eqns)), scaled)


def _is_floating(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.floating))


def _size(v: Var) -> int:
    return math.prod(v.aval.shape)


def was_on_host(value: Any) -> bool:
    """Whether a traced value in device memory was loaded from host memory in its trace."""
    shape = np.shape(value)
    eqn = equation_of(value) if isinstance(value, Tracer) else None
    return eqn is not None and any(is_host_aval(v.aval) and v.aval.shape == shape for v in variables(eqn.invars))
