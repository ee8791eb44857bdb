"""What a tracer tells beyond its type. Reads its private parts; where they have moved, the answer is that it is not
known."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any


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


def _origin(tracer: Any) -> Any:
    """What ``tracer`` is a cast or a multiple of."""
    scaling = ("convert_element_type", "mul", "div", "select_n")
    while tracer.parent is not None and tracer.parent.primitive.name in scaling:
        alike = [x for x in tracer.parent.in_tracers if x.aval.shape == tracer.aval.shape]
        if len(alike) != 1:
            break
        tracer = alike[0]
    return tracer
