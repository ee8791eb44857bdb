"""A plan, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import gate, opaque
from jax_offload._base.jaxprs import values_of
from jax_offload._base.shardings import zeros
from jax_offload._emit.deduplicate import functions
from jax_offload._emit.loop import or_batched
from jax_offload._emit.serialise import run_prelude
from jax_offload._emit.transfers import Names
from jax_offload._ir.program import Program, Var
from jax_offload._plan.plan import Plan, Planned, PlannedPass

Env = dict[Var, Any]


def stream(
    program: Program,
    plan: Plan,
    args: Sequence[Any],
    *,
    gradients: Sequence[int],
    names: Names,
    lowered: bool,
    for_cpu: bool = False,
) -> list[Any]:
    """Runs a traced update by its plan; returns its results.

    Args:
      program: the usual recipe (load all, update, store all) as a program.
      plan: of it.
      args: its arguments.
      gradients: positions in ``args`` of the incoming updates, which gate the loads.
      names: of the state's leaves, of their next values too.
      lowered: whether this is how the update is lowered: neither ``vmap`` nor a derivative comes to its loops.
      for_cpu: whether it is lowered for a CPU. Its compiler takes a loop that runs once for a small call, and five
        times as long for it; and it needs no loop, as it hoists no transfers.
    """
    env: Env = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    grads = {program.inputs[len(program.consts) + i] for i in gradients}
    run = functions([p for each in plan.passes for p in each.slices], names, lowered=lowered)
    before: Sequence[Var] = ()  # what the loads of a pass wait for
    for each in plan.passes:
        run_prelude(each, env)
        if each.slices:
            if each.in_own_loop and not for_cpu:
                _run_in_own_loop(each, run, env, grads, before, lowered=lowered)
            else:
                _run_gated(each, run, env, grads, before)
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

        return jax.lax.while_loop(lambda c: c[0], once, (opaque(jnp.array(True)), start))[1]

    all_of_it = looped if lowered else or_batched(looped, gated)
    env.update(zip(outputs, all_of_it(*(env[v] for v in inputs)), strict=True))
