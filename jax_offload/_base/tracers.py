"""What a tracer tells beyond its type. Reads its private parts; where they have moved, the answer is that it is not
known."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def production_order(values: Sequence[Any]) -> list[int] | None:
    """For each traced value the number of the equation that made it; ``None``: jax does not say.

    The backward pass is traced in the order in which gradients appear. What casts or scales a gradient comes later, in
    the order of the tree, so it is looked through. Reads the tracer's private parts: where they have changed, or a
    value is an argument, the caller has to guess.
    """
    try:
        numbers: dict[int, int] = {}
        for k, eqn in enumerate(values[0]._trace.frame.tracing_eqns):
            numbers[id(eqn() if isinstance(eqn, weakref.ref) else eqn)] = k
        return [numbers[id(_origin(x).parent)] for x in values]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


def is_constrained(value: Any) -> bool:
    """Whether a traced value's sharding was said where it was made; as far as jax tells."""
    try:
        return _origin(value).parent.primitive.name == "sharding_constraint"
    except AttributeError:
        return False


_SCALING = frozenset("convert_element_type mul div max min clamp select_n".split())
_CHOOSING = frozenset("broadcast_in_dim eq ne lt le gt ge is_finite and or not".split())


def _origin(tracer: Any) -> Any:
    """What ``tracer`` is a cast, a multiple or a bound of."""
    while tracer.parent is not None and _scales(tracer.parent):
        alike = [x for x in tracer.parent.in_tracers if x.aval.shape == tracer.aval.shape and _is_floating(x)]
        if len(alike) != 1:
            break
        tracer = alike[0]
    return tracer


def _scales(eqn: Any) -> bool:
    """Whether an equation, or a function such as ``jnp.where`` or ``jnp.nan_to_num``, does no more than that."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return all(e.primitive.name in _CHOOSING or _scales(e) for e in eqn.params["jaxpr"].jaxpr.eqns)
    return name in _SCALING


def _is_floating(tracer: Any) -> bool:
    return jnp.issubdtype(tracer.aval.dtype, jnp.floating)
