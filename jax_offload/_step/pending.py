"""Gradients that wait in host memory for their update: ``pipelined(..., gradients="host")`` rewrites a step.

The gradients of a step that is turned round live from one call to the next. In host memory they take no device memory
meanwhile: the backward pass stores them as it makes them, and the update loads each beside its state. So numbers that
need all of them (their norm) are computed before they leave, and arithmetic with such numbers (clipping) moves into the
update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, Sharding

from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._emit.rows import prefetch, write_back
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Equation, Var, variables
from jax_offload._program.memory import DEVICE_KIND, is_host_aval, to_device, to_host
from jax_offload._program.primitives import ELEMENTWISE
from jax_offload._program.program import Builder, Program
from jax_offload._program.propagate import Mask, forward, needed_for
from jax_offload._program.shardings import constrained, same_sharding, shards_of, typed_sharding
from jax_offload._program.slices import is_summary
from jax_offload._rewrite.checked import check_program, tell
from jax_offload._rewrite.cut import computed_again
from jax_offload._rewrite.inlined import consisting_of, equation_of, localised


class CannotWait(ValueError):
    """Gradients cannot wait in host memory for their update."""


_HOST, _GRADIENT = 1, 2  # bits for the needs of an update's equations
LEAST = 2**16  # bytes, as of a leaf of the state
_LATE = (ELEMENTWISE | {"broadcast_in_dim"}) - {"sharding_constraint", "reshard", "optimization_barrier", "device_put"}


def like_state(v: Var, carried: Mapping[Var, Any]) -> Sharding | None:
    """The sharding of a value's state: of the carried array of its shape in the most parts. ``None`` if nothing tells,
    or if two arrays of that shape are divided in different ways."""
    alike = [x.sharding for x in carried.values() if x.shape == v.aval.shape and x.sharding is not None]
    parts = [math.prod(shards_of(s, v.aval.shape)) for s in alike]
    most = [s for s, n in zip(alike, parts, strict=True) if n == max(parts)]
    return most[0] if most and all(same_sharding(s, most[0]) for s in most) else None


def home_of(v: Var, like: Sharding | None) -> NamedSharding | None:
    """How a waiting value is to be divided between devices: ``like`` its state.

    XLA by itself would let the gradients of divided parameters wait whole on every device. ``None`` if the type tells
    the sharding, or if nothing is divided.
    """
    if not _is_large(v) or typed_sharding(v.aval) is not None or not isinstance(like, NamedSharding):
        return None
    if {*like.mesh.axis_types} != {AxisType.Auto} or math.prod(shards_of(like, v.aval.shape)) == 1:
        return None
    return like.with_memory_kind(DEVICE_KIND)


def on_host(program: Program, carried: Mapping[Var, Any]) -> Program:
    """Return a step's program with gradients of 64 KiB and more waiting for their update in host memory.

    Args:
      program: a step's program, with every ``jit`` inlined.
      carried: the inputs that wait anyway -> their types.

    Raises:
      CannotWait: the step's update cannot load them.
    """
    try:
        found = _on_host(program, carried)
        check_program(found)
    except CannotWait:
        raise
    except Exception as fault:
        tell("gradients wait on the device", fault)
        return program
    return found


def _on_host(program: Program, carried: Mapping[Var, Any]) -> Program:
    inside = [eqn.primitive.name for eqn in program.eqns if not is_update(eqn) and holds_update(eqn)]
    if inside:
        raise CannotWait(
            f"gradients='host': the step's update runs in a {inside[0]}, where it cannot load them. Use "
            "gradients='device'."
        )
    for number in range(sum(map(is_update, program.eqns))):
        program = _of_update(program, number, carried)
    return program


def _of_update(program: Program, number: int, carried: Mapping[Var, Any]) -> Program:
    """Let the gradients of one update wait in host memory. ``number``: its place among the program's updates."""
    at = [k for k, eqn in enumerate(program.eqns) if is_update(eqn)][number]
    before = program.eqns[:at]
    update = localised(program.eqns[at])
    gradients = {*update.gradients}
    defined = [v for each in before for v in each.outvars]
    arithmetic = [each for each in before if each.primitive.name in _LATE]
    late, sources = computed_again(gradients & {*filter(_is_large, defined)}, {*carried}, arithmetic)
    moved = [v for v in defined if v in sources and _is_large(v)]
    if not moved:
        raise CannotWait(
            f"gradients='host': none that the update reads is a float array of {LEAST >> 10} KiB or more. "
            "Use gradients='device'."
        )
    ahead, scalars = _ahead(update, gradients)
    storing, inside, stored = Builder(), Builder(), dict[Var, Var]()
    for k, v in enumerate(moved):
        name, home = f"gradients/{k}", home_of(v, like_state(v, carried))
        with write_back(v, {v: name}):
            (x,) = variables(storing.run(lambda x, home=home: to_host(constrained(x, home)), v))
        with prefetch(x, {x: name}):
            (inside.names[v],) = inside.run(to_device, x)
        stored[v] = x
    for each in (*late, *(each for each in update.program.eqns if scalars.isdisjoint(each.outvars))):
        inside.put(each)
    made = {*variables(update.program.outputs)} - scalars
    rest, last = consisting_of(update, inside.eqns, made), 1 + max(update.rank.values(), default=0)
    divided = {x: update.program.shards[v] for v, x in stored.items() if v in update.program.shards}
    rest = dataclasses.replace(
        rest,
        program=dataclasses.replace(rest.program, shards={**rest.program.shards, **divided}),
        backward=None,  # they are no longer in front of it
        names={**update.names, **{x: f"gradients/{k}" for k, x in enumerate(stored.values())}},
        rank={**update.rank, **{x: last + k for k, x in enumerate(stored.values())}},  # the state decides the order
    )
    eqns = [*before, *ahead, *storing.eqns, equation_of(rest, program.eqns[at]), *program.eqns[at + 1 :]]
    return dataclasses.replace(program, eqns=eqns)


def _is_large(v: Var) -> bool:
    return nbytes(v.aval) >= LEAST and jnp.issubdtype(v.aval.dtype, jnp.floating) and not is_host_aval(v.aval)


def _ahead(update: Update, gradients: Set[Var]) -> tuple[list[Equation], set[Var]]:
    """The equations of a localised update that make numbers from gradients and no state, and these numbers."""
    needs: dict[Var, Mask] = {v: _HOST for v in update.operands if is_host_aval(v.aval)}
    needs |= dict.fromkeys(gradients, _GRADIENT)
    summaries, scalars = set[Var](), set[Var]()
    for eqn in update.program.eqns:
        if is_summary(eqn, summaries):
            summaries.update(eqn.outvars)
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        if all(needs[v] == _GRADIENT and (not v.aval.shape or v in summaries) for v in eqn.outvars):
            scalars.update(eqn.outvars)
    taken, _ = needed_for(update.program.eqns, scalars)
    if any(eqn.effects for eqn in taken):
        return [], set()
    # under new names, because the update makes the numbers in between again
    return Builder().copy(*taken, results={v: v for v in scalars}), scalars
