"""A plan, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import gate, opaque
from jax_offload._base.jaxprs import Var, closed, jax_fun, jit, values_of
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import zeros
from jax_offload._emit.chunks import looped, or_batched
from jax_offload._emit.rows import Names, prefetch, update_of, write_back
from jax_offload._ir.program import Program, numbered, structure
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Chunked, Planned, PlannedPass

Env = dict[Var, Any]


def stream(
    program: Program,
    passes: Sequence[PlannedPass],
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
      passes: its plan.
      args: its arguments.
      gradients: positions in ``args`` of the incoming updates, which gate the loads.
      names: of the state's leaves, of their next values too.
      lowered: whether this is how the update is lowered: neither ``vmap`` nor a derivative comes to its loops.
      for_cpu: whether it is lowered for a CPU. Its compiler takes a loop that runs once for a small call, and five
        times as long for it; and it needs no loop, as it hoists no transfers.
    """
    env: Env = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    grads = {program.inputs[len(program.consts) + i] for i in gradients}
    run = functions([p for each in passes for p in each.slices], names, lowered=lowered)
    before: Sequence[Var] = ()  # what the loads of a pass wait for
    for each in passes:
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
    """Like ``_run_gated``, in a loop that runs once; XLA does not know that it runs once."""
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


def run_prelude(each: PlannedPass, env: dict[Var, Any]) -> None:
    """Run the first part of a pass, its prelude, in an environment. `in_turn` says why gradients wait."""
    for part in each.prelude_parts:
        if part.gradient is not None:
            gate(env, [part.gradient], part.waits_for)
        s = part.slice
        env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))


# ---- slices that do the same to leaves of the same types, traced and lowered once: a network's layers, say


def functions(
    planned: Sequence[Planned], names: Names, *, lowered: bool = False
) -> Callable[[Planned, dict[Var, Any]], None]:
    """How to run each of the slices in an environment; ``lowered``: where neither ``vmap`` nor a derivative comes.

    Slices that are alike call one function, which XLA inlines, instead of tracing their own equations.
    """
    key_of = numbered()
    kind = {id(p): structure(p.slice.jaxpr, key_of) for p in planned if not p.in_chunks}
    times = Counter(kind.values())
    updates: dict[Hashable, tuple[Callable[..., list[Any]], Sequence[int]]] = {}

    def update_for(p: Planned) -> tuple[Callable[..., list[Any]], Sequence[int]]:
        """What a slice does between its transfers, and the places of the operands that are loaded for it."""
        k = kind[id(p)]
        if k not in updates:
            inner = p.slice.core
            run = jax_fun(closed(inner.jaxpr))

            def update_slice(*args: Any) -> Any:  # the name that profiles show
                return run(*args)

            shared = times[k] > 1 and not p.slice.jaxpr.effects
            loaded = [i for i, v in enumerate(p.slice.inputs) if v in inner.loads]
            updates[k] = (jit(update_slice) if shared else run), loaded
        return updates[k]

    def unchunked(p: Planned, operands: Sequence[Any]) -> list[Any]:
        s, given, (update, loaded) = p.slice, list(operands), update_for(p)
        for i in loaded:
            with prefetch(s.inputs[i], names):
                given[i] = to_device(given[i])
        with update_of(s.loads, names):
            results = update(*given)
        for k, v in enumerate(s.outputs):
            if is_host_aval(v.aval):
                with write_back(v, names):
                    results[k] = to_host(results[k])
        return results

    def in_chunks(s: Slice, how: Chunked) -> Callable[..., list[Any]]:
        loop = looped(s, how, names)
        return loop if lowered else or_batched(loop, s.run)

    def run(p: Planned, env: dict[Var, Any]) -> None:
        operands = [env[v] for v in p.slice.inputs]
        how = p.transfer
        results = in_chunks(p.slice, how)(*operands) if isinstance(how, Chunked) else unchunked(p, operands)
        env.update(zip(p.slice.outputs, results, strict=True))

    return run
