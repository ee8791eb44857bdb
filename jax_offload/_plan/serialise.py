"""Numbers that need all gradients, such as a norm, take them in turn, as the backward pass makes them.

Nothing else asks for a gradient before the last one exists, and XLA's latency-hiding scheduler then puts the weights'
matmuls off to the end of the backward pass: the activations and cotangents that they need are alive for all layers at
once.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence, Set
from typing import Any

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import Shards, varies
from jax_offload._ir.program import Var
from jax_offload._ir.propagate import Mask, forward, union
from jax_offload._ir.slices import Slice, slice_of


class Serialise(enum.Enum):
    """Which gradients may wait for each other, as the trace around an update knows."""

    NONE = "none: an array may be divided between devices in an unknown way, and then any number is a collective"
    DIVIDED = "gradients of leaves that stay on the device: each part of a divided array's norm would be a collective"
    SUMS = "gradients of a norm: if the backward pass is not in the program, none has to be made in time"
    ALL = "gradients of leaves that stay on the device too"


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


@dataclasses.dataclass(frozen=True)
class InParts:
    """The prelude in parts, one after the other: a gradient is used once the one before has been."""

    parts: tuple[SerialPart, ...]

    def __str__(self) -> str:
        waiting = sum(bool(part.waits_for) for part in self.parts)
        return f"uses gradients in turn, {waiting} of them once the one before has been" if waiting else ""


@dataclasses.dataclass(frozen=True)
class AllInTurn:
    """Each gradient waits for the one before, ahead of the prelude.

    Attributes:
      gradients: those, in turn.
      last: the result of the prelude that waits for all of them.
      shards: of each gradient, how it is divided between devices; empty where none is.
    """

    gradients: tuple[Var, ...]
    last: Var
    shards: tuple[Shards, ...] = ()

    def __str__(self) -> str:
        return f"{len(self.gradients)} gradients in turn, each once the one before is made"


Serial = InParts | AllInTurn


def serial_of(
    prelude: Slice, gradients: Sequence[Var], results: Set[Var], serialise: Serialise, *, gated: bool = False
) -> Serial | None:
    """Decide how the gradients that a prelude uses take turns; ``None``: they do not.

    Args:
      prelude: the slice that a pass runs first.
      gradients: operands of the update, in the order of the backward pass.
      results: the update's results that are the next value of an operand.
      serialise: which of the gradients may wait.
      gated: whether the update is in pieces, between gates of the passes: these hold the gradients.
    """
    if serialise is Serialise.NONE and not gated:
        return None
    parts, large = serial_parts(prelude, gradients), [v for v in gradients if is_large(v.aval)]
    # Leaves that stay on the device are updated here. Values that are only stored, such as the last gradient, are
    # on the host.
    updated = [v for g, part in parts if g in large and not small(part, g) for v in part.outputs if v in results]
    updated = [v for v in updated if not is_host_aval(v.aval)]
    by_shards = serialise is Serialise.DIVIDED
    if updated and not gated and (by_shards or serialise is Serialise.ALL) and not any(varies(v.aval) for v in large):
        shards = tuple(prelude.shards.get(v, ()) for v in large) if by_shards else ()
        return AllInTurn(tuple(large), min(updated, key=lambda v: nbytes(v.aval)), shards)
    if by_shards and not gated:
        return None
    found: list[SerialPart] = []
    used: tuple[Var, ...] = ()
    for gradient, part in parts:
        found.append(SerialPart(part, gradient, () if gradient is None else used))
        if gradient is not None:
            used = tuple(small(part, gradient)) or used
    return InParts(tuple(found)) if len(found) > 1 else None


def serial_parts(s: Slice, gradients: Sequence[Var]) -> list[tuple[Var | None, Slice]]:
    """``s`` in parts, to be run one after the other: what needs no gradient, one at a time, and several."""
    needs: dict[Var, Mask] = {v: 1 << i for i, v in enumerate(gradients)}
    parts: list[list[Equation]] = [[] for _ in range(len(gradients) + 2)]
    for eqn in s.jaxpr.eqns:
        mask = union(forward(eqn, needs))
        needs.update(dict.fromkeys(eqn.outvars, mask))  # of an equation that stands in one part, such as a cond
        parts[-1 if mask.bit_count() > 1 else mask.bit_length()].append(eqn)
    if s.jaxpr.effects or sum(map(bool, parts[1:-1])) < 2:
        return [(None, s)]
    found: list[tuple[Var | None, Slice]] = []
    wanted: dict[Var, int] = {}  # in the order in which they are asked for

    def want(variables: Sequence[Var]) -> None:
        for v in variables:
            wanted.setdefault(v, len(wanted))

    want(s.outputs)
    for gradient, eqns in reversed([*zip([None, *gradients, None], parts, strict=True)]):
        if eqns:
            defined = {v for eqn in eqns for v in eqn.outvars if v in wanted}
            part = slice_of(eqns, sorted(defined, key=wanted.__getitem__), s.jaxpr.debug_info, s.shards)
            want(part.inputs)
            found.append((gradient, part))
    return found[::-1]


def small(s: Slice, gradient: Var) -> list[Var]:
    """A result that is tiny beside the gradient from which it is made, such as a part of a sum."""
    few = [v for v in s.outputs if 32 * math.prod(v.aval.shape) <= max(32, math.prod(gradient.aval.shape))]
    return few[:1]


def is_large(gradient: Any) -> bool:
    """Whether the activations that its matmul keeps are worth a thought: 64 Ki numbers."""
    return math.prod(gradient.shape) >= 1 << 16
