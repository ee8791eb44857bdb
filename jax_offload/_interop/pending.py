"""Gradients that wait in host memory for their update: ``pipelined(..., gradients="host")`` rewrites a step.

The gradients of a step that is turned round live from one call to the next. On the host they take nothing of the device
meanwhile: the backward pass stores them as it makes them, and the update loads each beside its state. For that, numbers
that need all of them (their norm) are taken before they leave, and arithmetic with such numbers (clipping) is left for
the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, renamed, variables
from jax_offload._base.memory import DEVICE_KIND, is_host_aval, to_device, to_host
from jax_offload._base.own_primitives import params_of
from jax_offload._base.shardings import constrained, same_sharding, shards_of, typed_sharding
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._emit.rows import prefetch, write_back
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Builder, Program
from jax_offload._ir.propagate import Mask, forward, needed_for
from jax_offload._ir.slices import is_summary
from jax_offload._step.checked import check_program, tell


class CannotWait(ValueError):
    """Gradients cannot wait in host memory for their update."""


_HOST, _GRADIENT = 1, 2  # bits for the needs of an update's equations
LEAST = 2**16  # bytes, as of a leaf of the state
_LATE = (ELEMENTWISE | {"broadcast_in_dim"}) - {"sharding_constraint", "reshard", "optimization_barrier", "device_put"}


def home_of(v: Var, carried: Mapping[Var, Any]) -> NamedSharding | None:
    """How what waits is divided between devices: as its state, the carried array of that shape in the most parts.

    Left to XLA, the gradients of parameters that are divided wait whole on every device (jax 0.12, CPU). ``None`` where
    the type tells, where nothing is divided, and where two arrays of that shape are divided in different ways.
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
    """The same for the gradients of one update, by its number in the program."""
    at = [k for k, eqn in enumerate(program.eqns) if is_update(eqn)][number]
    before, after = program.eqns[:at], program.eqns[at + 1 :]
    eqn, scalars = _without_scalars(program.eqns[at])
    update: Update = eqn.params["update"]
    given = dict(zip(update.operands, eqn.invars, strict=True))
    gradients = [given[update.operands[i]] for i in update.gradients]
    defined = [v for each in before for v in each.outvars]
    late, sources = _left_late(before, {*variables(gradients)} & {*filter(_is_large, defined)}, {*carried})
    moved = [v for v in defined if v in sources and _is_large(v)]
    if not moved:
        raise CannotWait(
            f"gradients='host': none that the update reads is a float array of {LEAST >> 10} KiB or more. "
            "Use gradients='device'."
        )
    stores = {v: _store(v, f"gradients/{k}", home_of(v, carried)) for k, v in enumerate(moved)}
    stored = {v: eqns[-1].outvars[0] for v, eqns in stores.items()}
    loaded = {v: _load(x, f"gradients/{k}") for k, (v, x) in enumerate(stored.items())}
    behind: dict[Var, Atom] = {v: each.outvars[0] for v, each in loaded.items()}
    inside_update = [*loaded.values(), *Builder(names=behind).copy(*late)]
    eqn = _absorbed(eqn.replace(invars=[renamed(behind, v) for v in eqn.invars]), inside_update)
    after = _reading_again(eqn, after, stored)
    storing = [each for eqns in stores.values() for each in eqns]
    return dataclasses.replace(program, eqns=[*before, *scalars, *storing, eqn, *after])


def _left_late(eqns: Sequence[Equation], gradients: Set[Var], carried: Set[Var]) -> tuple[list[Equation], Set[Var]]:
    """The last arithmetic on gradients (a scale, a cast to more bytes), and its operands, which take no more bytes."""
    sources_of: dict[Var, frozenset[Var]] = {}
    for eqn in eqns:
        if eqn.primitive.name in _LATE and len(eqn.outvars) == 1 and not eqn.effects and eqn.outvars[0].aval.shape:
            (out,) = eqn.outvars
            of = frozenset[Var]().union(*(sources_of.get(v, {v}) for v in variables(eqn.invars)))
            if sum(nbytes(v.aval) for v in of - carried if v.aval.shape) <= nbytes(out.aval):
                sources_of[out] = of
    sources = {source for v in gradients for source in sources_of.get(v, {v})}
    late, _ = needed_for(eqns, gradients - sources, lambda eqn: sources.isdisjoint(eqn.outvars))
    return late, sources


def _reading_again(update: Equation, eqns: Sequence[Equation], stored: Mapping[Var, Var]) -> list[Equation]:
    """The equations after an update. Those that need a gradient load it once more."""
    late, loads, found = {*update.outvars}, dict[Var, Atom](), list[Equation]()
    for eqn in eqns:
        reads = variables(eqn.invars)
        if not late.isdisjoint(reads):
            late.update(eqn.outvars)
            for v in reads:
                if v in stored and v not in loads:
                    found.append(load := _load(stored[v], "gradients"))
                    loads[v] = load.outvars[0]
            eqn = eqn.replace(invars=[renamed(loads, v) for v in eqn.invars])
        found.append(eqn)
    return found


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


# ---- an update's boundary, moved


def _without_scalars(eqn: Equation) -> tuple[Equation, list[Equation]]:
    """The equation of an update that is given the numbers that need gradients and no state, and what makes these."""
    update: Update = eqn.params["update"]
    program, operands = update.program, update.operands
    needs: dict[Var, Mask] = {v: _HOST for v in operands if is_host_aval(v.aval)}
    needs |= {operands[i]: _GRADIENT for i in update.gradients}
    summaries, scalars = set[Var](), set[Var]()
    for each in program.eqns:
        if is_summary(each, summaries):
            summaries.update(each.outvars)
        needs.update(zip(each.outvars, forward(each, needs), strict=True))
        if all(needs[v] == _GRADIENT and (not v.aval.shape or v in summaries) for v in each.outvars):
            scalars.update(each.outvars)
    taken, _ = needed_for(program.eqns, scalars)
    if any(each.effects for each in taken):
        return eqn, []
    env: dict[Var, Atom] = dict(zip(operands, eqn.invars, strict=True))
    apart = Builder(names=env).copy(*taken)
    # A result that is such a number is made ahead as well: an update that only returns its operands would be none.
    results = list(zip(program.outputs, eqn.outvars, strict=True))
    ahead = {env[x]: v for x, v in results if not isinstance(x, Literal) and x in scalars}
    apart = [
        each.replace(
            invars=[renamed(ahead, v) for v in each.invars],  # pyright: ignore[reportArgumentType]
            outvars=[ahead.get(v, v) for v in each.outvars],
        )
        for each in apart
    ]
    kept = [(x, v) for x, v in results if isinstance(x, Literal) or x not in scalars]
    left = [each for each in program.eqns if scalars.isdisjoint(each.outvars)]
    read = {v for each in left for v in variables(each.invars)}
    given = [v for v in env if v in scalars and v in read]
    rest = dataclasses.replace(program, inputs=[*program.inputs, *given], eqns=left, outputs=[x for x, _ in kept])
    params = params_of(update.replanned(rest, update.gradients))
    operand_of = [renamed(ahead, env[v]) for v in given]  # pyright: ignore[reportArgumentType]
    return eqn.replace(invars=[*eqn.invars, *operand_of], outvars=[v for _, v in kept], params=params), apart


def _absorbed(eqn: Equation, eqns: Sequence[Equation]) -> Equation:
    """The equation of an update that begins with these equations, which make some of its operands.

    What they read in host memory, gradients that wait there, is loaded as the leaves of the state are, beside these.
    """
    update: Update = eqn.params["update"]
    program = update.program
    defined = {v for each in eqns for v in each.outvars}
    both = list(zip(update.operands, eqn.invars, strict=True))
    gone = {v: x for v, x in both if not isinstance(x, Literal) and x in defined}
    kept = [(v, x) for v, x in both if v not in gone]
    env: dict[Var, Atom] = {x: v for v, x in reversed(kept) if not isinstance(x, Literal)}
    more = {
        x: Var(x.aval)
        for x in dict.fromkeys(x for each in eqns for x in variables(each.invars))
        if x not in defined and x not in env
    }
    env |= more
    first = Builder(names=env).copy(*eqns)
    inside = {v: env[x] for v, x in gone.items()}
    then = [each.replace(invars=[renamed(inside, v) for v in each.invars]) for each in program.eqns]
    inputs = [*more.values(), *(v for v, _ in kept)]
    places = {v: k for k, v in enumerate(inputs)}
    sharded = {inside[v]: program.shards[v] for v in gone if v in program.shards}
    hosts = {each.invars[0]: each.outvars[0] for each in first if is_host_aval(each.invars[0].aval)}
    shards = {v: sharded[x] for v, x in hosts.items() if x in sharded}
    rest = dataclasses.replace(
        program,
        inputs=inputs,
        outputs=[renamed(inside, v) for v in program.outputs],
        eqns=[*first, *then],
        shards={**program.shards, **shards},
    )
    gradients = [places[v] for i in update.gradients if (v := update.operands[i]) in places]
    last = 1 + max(update.rank.values(), default=0)
    new = dataclasses.replace(
        update.replanned(rest, tuple(gradients)),
        backward=None,  # they are no longer in front of it
        names={**update.names, **{v: f"gradients/{k}" for k, v in enumerate(hosts)}},
        rank={**update.rank, **{v: last + k for k, v in enumerate(hosts)}},  # the state beside them decides
        next_values={new: old for new, old in update.next_values.items() if old in places},
    )
    return eqn.replace(invars=[*more, *(x for _, x in kept)], params=params_of(new))
