"""Gradients that wait in host memory for their update: ``pipelined(..., gradients="host")`` rewrites a step.

The gradients of a step that is turned round live from one call to the next. In host memory they take no device memory
meanwhile: the backward pass stores them as it makes them, and the update loads each beside its state. So numbers that
need all of them (their norm) are computed before they leave, and arithmetic with such numbers (clipping) moves into the
update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Var, variables
from jax_offload._base.memory import DEVICE_KIND, is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, same_sharding, shards_of, typed_sharding
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._emit.rows import prefetch, write_back
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Builder, Program
from jax_offload._ir.propagate import Mask, forward, needed_for
from jax_offload._ir.slices import is_summary
from jax_offload._step.checked import check_program, tell
from jax_offload._step.cut import computed_again
from jax_offload._step.inlined import consisting_of, equation_of, localised


class CannotWait(ValueError):
    """Gradients cannot wait in host memory for their update."""


_HOST, _GRADIENT = 1, 2  # bits for the needs of an update's equations
LEAST = 2**16  # bytes, as of a leaf of the state
_LATE = (ELEMENTWISE | {"broadcast_in_dim"}) - {"sharding_constraint", "reshard", "optimization_barrier", "device_put"}


def home_of(v: Var, carried: Mapping[Var, Any]) -> NamedSharding | None:
    """How a waiting value is divided between devices: like its state, the carried array of its shape in the most parts.

    XLA by itself would let the gradients of divided parameters wait whole on every device. ``None`` if the type tells
    the sharding, if nothing is divided, or if two arrays of that shape are divided in different ways.
    """
    if not _is_large(v) or typed_sharding(v.aval) is not None:
        return None
    like = [x.sharding for x in carried.values() if x.shape == v.aval.shape and hasattr(x, "sharding")]
    like = [s for s in like if isinstance(s, NamedSharding) and {*s.mesh.axis_types} == {AxisType.Auto}]
    parts = [math.prod(shards_of(s, v.aval.shape)) for s in like]
    most = [s for s, n in zip(like, parts, strict=True) if n == max(parts)]
    if not most or max(parts) == 1 or not all(same_sharding(s, most[0]) for s in most):
        return None
    return most[0].with_memory_kind(DEVICE_KIND)


def on_host(program: Program, carried: Mapping[Var, Any]) -> Program:
    """Return a step's program with gradients of 64 KiB and more waiting for their update in host memory.

    Args:
      program: a step's program, with every ``jit`` inlined.
      carried: the inputs that wait anyway -> their arrays or types.

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
    stores = {v: _store(v, f"gradients/{k}", home_of(v, carried)) for k, v in enumerate(moved)}
    stored = {v: eqns[-1].outvars[0] for v, eqns in stores.items()}
    inside = Builder()
    for k, (v, x) in enumerate(stored.items()):
        inside.eqns.append(load := _load(x, f"gradients/{k}"))
        inside.names[v] = load.outvars[0]
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
        rank={**update.rank, **{x: last + k for k, x in enumerate(stored.values())}},  # the state beside them decides
    )
    storing = [each for eqns in stores.values() for each in eqns]
    after = _reading_again(program.eqns[at + 1 :], variables(rest.program.outputs), stored)
    eqns = [*before, *ahead, *storing, equation_of(rest, program.eqns[at]), *after]
    return dataclasses.replace(program, eqns=eqns)


def _reading_again(eqns: Sequence[Equation], made: Iterable[Var], stored: Mapping[Var, Var]) -> list[Equation]:
    """Change the equations after an update: those that need what it ``made`` load their gradients again."""
    late, new = {*made}, Builder()
    for eqn in eqns:
        if late.isdisjoint(variables(eqn.invars)):
            new.eqns.append(eqn)
            continue
        late.update(eqn.outvars)
        for v in variables(eqn.invars):
            if v in stored and v not in new.names:
                new.eqns.append(load := _load(stored[v], "gradients"))
                new.names[v] = load.outvars[0]
        new.put(eqn)
    return new.eqns


def _store(v: Var, name: str, home: NamedSharding | None) -> list[Equation]:
    pins = [] if home is None else [_equation(lambda x: constrained(x, home), v)]
    return [*pins, _equation(to_host, pins[0].outvars[0] if pins else v, write_back(v, {v: name}))]


def _load(v: Var, name: str) -> Equation:
    return _equation(to_device, v, prefetch(v, {v: name}))


def _equation(
    run: Callable[[jax.Array], jax.Array], v: Var, scope: AbstractContextManager[Any] | None = None
) -> Equation:
    """The only equation of ``run`` of a variable, in a scope."""
    new = Builder()
    with scope or contextlib.nullcontext():
        new.run(run, v)
    (eqn,) = new.eqns
    return eqn


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
