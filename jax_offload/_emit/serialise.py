"""Numbers that need all gradients, a norm say, take them in turn, as the backward pass makes them.

Nothing else asks for a gradient before the last is there, and XLA's latency-hiding scheduler then puts the weights'
matmuls off to the end of the backward pass: the activations and cotangents that they need are alive for all layers at
once. (24 layers, 16384 tokens, clipping, compiled for an H200: 12288 MiB; in turn 8256. Resident 11328.)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import opaque, together
from jax_offload._ir.masks import Mask, forward, union
from jax_offload._ir.program import Var
from jax_offload._ir.slices import Slice, slice_of


class Serialise(enum.Enum):
    """Which gradients wait for each other."""

    NONE = "none: waiting for a number of an array that is divided between devices is a collective"
    SUMS = "those of a norm: where the backward pass is not in the program, none has to be made in time"
    ALL = "those of leaves that stay on the device too"


def serial_parts(s: Slice, gradients: Sequence[Var]) -> list[tuple[Var | None, Slice]]:
    """``s`` in parts, to be run one after the other: what needs no gradient, one at a time, and several."""
    needs: dict[Var, Mask] = {v: 1 << i for i, v in enumerate(gradients)}
    parts: list[list] = [[] for _ in range(len(gradients) + 2)]
    for eqn in s.jaxpr.eqns:
        mask = union(forward(eqn, needs))
        needs.update(dict.fromkeys(eqn.outvars, mask))  # of an equation that stands in one part: a cond, say
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
    """A result that is next to nothing beside the gradient it is made of: a part of a sum, say."""
    few = [v for v in s.outputs if 32 * math.prod(v.aval.shape) <= max(32, math.prod(gradient.aval.shape))]
    return few[:1]


def is_large(gradient: Any) -> bool:
    """Whether the activations that its matmul keeps are worth a thought: 64 Ki numbers."""
    return math.prod(gradient.shape) >= 1 << 16


def waiting(gradients: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """The gradients, each of which waits for the one before, and a zero that waits for all of them.

    Waiting needs a value that is made of a gradient and used: a number of it, masked to nothing by an opaque zero.
    """
    zero = opaque(jnp.zeros((), jnp.int32))
    read, held = zero, []
    for g in gradients:
        g, read = together((g, read))
        held.append(g)
        number = jax.lax.squeeze(jax.lax.slice(g, [0] * g.ndim, [1] * g.ndim), range(g.ndim))
        read = read | (jnp.real(number).astype(jnp.int32) & zero)
    return held, read
