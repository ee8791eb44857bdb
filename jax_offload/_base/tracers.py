"""What a traced value tells beyond its type: the equation that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._base.memory import is_host_aval
from jax_offload._base.private import equation_of, equations_of_trace, traced_operands


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
