"""Marks: equations that do nothing, by which a trace says of a value what its type does not.

Who reads the trace finds them. A program has none (``_ir/program``), and lowered they are gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_offload._base.jaxprs import ClosedJaxpr, Equation, Var
from jax_offload._base.private import equation_of, set_rules

NAME = "jax_offload_mark"


@dataclasses.dataclass(frozen=True, eq=False)
class _Said:
    """Anything, as a parameter of an equation: those are to be hashed."""

    what: Any


def mark(x: jax.Array, says: Any) -> jax.Array:
    """``x``, of which the trace says something from here on."""
    return _mark.bind(x, says=_Said(says))


def mark_of(x: Any) -> Any:
    """What a traced value was marked with, if that was the last thing that happened to it."""
    eqn = equation_of(x)
    return eqn.params["says"].what if eqn is not None and eqn.primitive is _mark else None


def is_mark(eqn: Equation) -> bool:
    return eqn.primitive is _mark


def marks_in(step: ClosedJaxpr) -> dict[Var, Any]:
    """Variable -> what it was marked with, at the top of a closed jaxpr."""
    return {eqn.outvars[0]: eqn.params["says"].what for eqn in step.jaxpr.eqns if eqn.primitive is _mark}


_mark = Primitive(NAME)
_mark.def_impl(lambda x, says: x)
_mark.def_abstract_eval(lambda aval, says: aval)
set_rules(
    _mark,
    lower=lambda context, x, says: [x],
    jvp=lambda xs, tangents, says: (_mark.bind(*xs, says=says), *tangents),
    batch=lambda xs, dims, says: (_mark.bind(*xs, says=says), *dims),
)
