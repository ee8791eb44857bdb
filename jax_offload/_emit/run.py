"""A plan, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import values_of
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import varying_over, zeros
from jax_offload._emit.barriers import gate
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.loop import or_batched
from jax_offload._emit.serialise import Serialise, is_large, serial_parts, small, waiting
from jax_offload._emit.transfers import Names
from jax_offload._ir.program import Program, Var
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Plan, Planned, PlannedPass

Env = dict[Var, Any]


def stream(
    program: Program,
    plan: Plan,
    args: Sequence[Any],
    *,
    gradients: Sequence[int],
    serialise: Serialise,
    results: Set[Var],
    names: Names,
    lowered: bool,
) -> list[Any]:
    """Runs a traced update by its plan; returns its results.

    Args:
      program: the usual recipe (load all, update, store all) as a program.
      plan: of it.
      args: its arguments.
      gradients: positions in ``args`` of the incoming updates, which gate the loads, in the order of the backward
        pass.
      serialise: which of them wait for each other.
      results: those that are the next value of an argument.
      names: of the state's leaves, of their next values too.
      lowered: whether this is how the update is lowered: neither ``vmap`` nor a derivative comes to its loops.
    """
    env: Env = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    grads = [program.inputs[len(program.consts) + i] for i in gradients]
    run = functions([p for each in plan.passes for p in each.slices], names, lowered=lowered)
    before: Sequence[Var] = ()  # what the loads of a pass wait for
    for each in plan.passes:
        _run_prelude(each.prelude, env, grads, results, serialise)
        if each.slices:
            if each.in_own_loop:
                _run_in_own_loop(each, run, env, set(grads), before, lowered=lowered)
            else:
                _run_gated(each, run, env, set(grads), before)
            before = each.slices[-1].token
    return values_of(env, program.outputs)


def _run_gated(
    each: PlannedPass, run: Callable[[Planned, Env], None], env: Env, gradients: Set[Var], before: Sequence[Var]
) -> None:
    """A slice loads once there is room, and the gradient of the first slice that is still in the window."""
    slices, done = each.slices, 0
    for p in slices:
        for q in slices[done : p.once_stored + 1]:
            run(q, env)
        done = max(done, p.once_stored + 1)
        grads = [] if p.once_produced is None else [v for v in slices[p.once_produced].slice.inputs if v in gradients]
        gate(env, p.slice.loads, [*grads, *(slices[p.once_stored].token if p.once_stored >= 0 else before)])
    for p in slices[done:]:
        run(p, env)


def _run_in_own_loop(
    each: PlannedPass,
    run: Callable[[Planned, Env], None],
    env: Env,
    gradients: Set[Var],
    before: Sequence[Var],
    *,
    lowered: bool,
) -> None:
    """As ``_run_gated``, in a loop that runs once, which XLA does not see."""
    outputs = list(dict.fromkeys(v for p in each.slices for v in p.slice.outputs))
    inputs = list(dict.fromkeys([*(v for p in each.slices for v in p.slice.inputs), *before]))
    carried = each.carried or {}

    def gated(*operands: Any) -> list[Any]:
        inner = dict(zip(inputs, operands, strict=True))
        _run_gated(each, run, inner, gradients, before)
        return [inner[v] for v in outputs]

    def looped(*operands: Any) -> list[Any]:
        given = dict(zip(inputs, operands, strict=True))
        start = [given[carried[v]] if v in carried else zeros(v.aval) for v in outputs]

        def once(carry: Any) -> Any:
            now = given | {carried[v]: x for v, x in zip(outputs, carry[1], strict=True) if v in carried}
            return jnp.zeros_like(carry[0]), gated(*(now[v] for v in inputs))

        return jax.lax.while_loop(lambda c: c[0], once, (jax.lax.optimization_barrier(jnp.array(True)), start))[1]

    all_of_it = looped if lowered else or_batched(looped, gated)
    env.update(zip(outputs, all_of_it(*(env[v] for v in inputs)), strict=True))


def _run_prelude(
    prelude: Slice, env: dict[Var, Any], gradients: Sequence[Var], results: Set[Var], serialise: Serialise
) -> None:
    """Of the gradients, in their order, each is used once the one before it has been."""
    if serialise is Serialise.NONE:
        _run(prelude, env)
        return
    parts, large = serial_parts(prelude, gradients), [v for v in gradients if is_large(v.aval)]
    # Leaves that stay on the device are updated here. What is only stored, the last gradient say, is on the host.
    updated = [v for g, part in parts if g in large and not small(part, g) for v in part.outputs if v in results]
    updated = [v for v in updated if not is_host_aval(v.aval)]
    everywhere = varying_over(jnp.zeros(()))
    if updated and serialise is Serialise.ALL and all(varying_over(env[v]) == everywhere for v in large):
        held, zero = waiting([env[v] for v in large])
        env.update(zip(large, held, strict=True))
        _run(prelude, env)
        last = min(updated, key=lambda v: nbytes(v.aval))
        env[last] = jnp.where(zero == 0, env[last], jnp.zeros((), env[last].dtype))
        return
    used: list[Var] = []
    for gradient, part in parts:
        if gradient is not None:
            gate(env, [gradient], used)
            used = small(part, gradient) or used
        _run(part, env)


def _run(s: Slice, env: dict[Var, Any]) -> None:
    env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))
