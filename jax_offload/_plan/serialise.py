"""Numbers that need all gradients, such as a norm, take them in turn, as the backward pass makes them.

Nothing else asks for a gradient before the last one exists, and XLA's latency-hiding scheduler then puts the weights'
matmuls off to the end of the backward pass: the activations and cotangents that they need are alive for all layers at
once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_offload._base.jaxprs import Equation
from jax_offload._ir.program import Var
from jax_offload._ir.propagate import Mask, forward, union
from jax_offload._ir.slices import Slice, consecutive


@dataclasses.dataclass(frozen=True)
class SerialPart:
    """The part of a prelude that uses one gradient, none, or several.

    Attributes:
      gradient: the gradient, if it is one.
      waits_for: values of an earlier part for which the gradient waits; empty if it does not wait.
    """

    slice: Slice
    gradient: Var | None = None
    waits_for: tuple[Var, ...] = ()


def in_turn(prelude: Slice, gradients: Sequence[Var]) -> tuple[SerialPart, ...]:
    """Divide a prelude into parts, to be run one after the other: each uses a gradient once the one before has been.

    Args:
      prelude: the slice that a pass runs first.
      gradients: operands of the update, in the order of the backward pass.
    """
    needs: dict[Var, Mask] = {v: 1 << i for i, v in enumerate(gradients)}
    parts: list[list[Equation]] = [[] for _ in range(len(gradients) + 2)]  # none, one after the other, several
    for eqn in prelude.jaxpr.eqns:
        mask = union(forward(eqn, needs))
        needs.update(dict.fromkeys(eqn.outvars, mask))  # of an equation that stands in one part, such as a cond
        parts[-1 if mask.bit_count() > 1 else mask.bit_length()].append(eqn)
    if prelude.jaxpr.effects or sum(map(bool, parts[1:-1])) < 2:
        return (SerialPart(prelude),)
    slices = consecutive(parts, prelude.outputs, prelude.jaxpr.debug_info, prelude.shards)
    found: list[SerialPart] = []
    used: list[Var] = []
    for gradient, part in zip([None, *gradients, None], slices, strict=True):
        if part.jaxpr.eqns:
            found.append(SerialPart(part, gradient, () if gradient is None else tuple(used)))
            used = used if gradient is None else _small(part, gradient) or used
    return tuple(found)


def _small(s: Slice, gradient: Var) -> list[Var]:
    """A result that is tiny beside the gradient from which it is made, such as a part of a sum."""
    few = [v for v in s.outputs if 32 * math.prod(v.aval.shape) <= max(32, math.prod(gradient.aval.shape))]
    return few[:1]
