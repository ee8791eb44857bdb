"""The arithmetic of a traced program, as far as it counts: matmuls and convolutions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend.core as jex

from jax_offload._base.private import operands_of

MATMULS = frozenset(("dot_general", "conv_general_dilated"))


def at_default_precision(eqn: Any) -> bool:
    """Of a matmul or a convolution, whether it asks for no more: then a TPU rounds what it reads to bfloat16."""
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in asked)


def own_flops(eqn: Any) -> float:
    """Floating point operations of a matmul or a convolution; 0 of all else. Of equations of a trace under way too."""
    name, params = eqn.primitive.name, eqn.params
    if name not in MATMULS:
        return 0.0
    left, right = (v.aval.shape for v in operands_of(eqn)[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * out * math.prod(left[i] for i in contracted)
    kernel = params["dimension_numbers"].rhs_spec
    return 2.0 * out * math.prod(right) / right[kernel[0]]


def flops(eqn: Any) -> float:
    """The same, with those inside of it: of a ``scan`` as often as it runs, of a ``cond`` the branch with most, of a
    ``while`` once."""
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    inner = [sum(map(flops, jaxpr.eqns)) for jaxpr in jex.jaxprs_in_params(eqn.params)]
    return own_flops(eqn) + times * (max(inner, default=0.0) if eqn.primitive.name == "cond" else sum(inner))
