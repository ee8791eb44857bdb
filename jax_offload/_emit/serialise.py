"""A prelude, with gradients that take turns as the plan says (``_plan/serialise`` has the reason and the figure)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import gate, opaque, together
from jax_offload._base.jaxprs import Var
from jax_offload._base.shardings import Shards, typed_sharding
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import PlannedPass
from jax_offload._plan.serialise import AllInTurn


def run_prelude(each: PlannedPass, env: dict[Var, Any]) -> None:
    """What a pass runs first, in an environment."""
    serial = each.serial
    if isinstance(serial, AllInTurn):
        held, zero = waiting([env[v] for v in serial.gradients], serial.shards)
        env.update(zip(serial.gradients, held, strict=True))
        _run(each.prelude, env)
        env[serial.last] = jnp.where(zero == 0, env[serial.last], jnp.zeros((), env[serial.last].dtype))
        return
    for part in each.prelude_parts:
        if part.gradient is not None:
            gate(env, [part.gradient], part.waits_for)
        _run(part.slice, env)


def _run(s: Slice, env: dict[Var, Any]) -> None:
    env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))


def waiting(gradients: Sequence[jax.Array], shards: Sequence[Shards] = ()) -> tuple[list[jax.Array], jax.Array]:
    """The gradients, each of which waits for the one before, and a zero that waits for all of them.

    Waiting needs a value that is made of a gradient and used: a number of it, masked to nothing by an opaque zero. Of a
    gradient that is divided between devices a number of each of them, for one alone would be a collective for each.

    Args:
      gradients: in the order in which they are made.
      shards: of each, how it is divided; empty where none is.
    """
    zero = opaque(jnp.zeros((), jnp.int32))
    held, read, kinds = list[jax.Array](), [zero], list[Any]([None])  # numbers of one kind go together
    for g, parts in zip(gradients, shards or [()] * len(gradients), strict=True):
        g, read = together((g, read))
        held.append(g)
        split = [k for k, n in enumerate(parts) if n > 1]
        few = [n if k in split else 1 for k, n in enumerate(g.shape)]
        number = jax.lax.squeeze(jax.lax.slice(g, [0] * g.ndim, few), [k for k in range(g.ndim) if k not in split])
        kind = (number.shape, parts, typed_sharding(jax.typeof(number))) if split else None
        number = jnp.real(number).astype(jnp.int32) & zero
        if kind in kinds:
            read[kinds.index(kind)] |= number
        else:
            kinds, read = [*kinds, kind], [*read, number]
    return held, functools.reduce(jnp.bitwise_or, (x.max() if x.ndim else x for x in read))
