"""A schedule, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._emit.rows import Names, looped, or_batched, prefetch, update_of, write_back
from jax_offload._program.barriers import gate, opaque
from jax_offload._program.jaxprs import Var, closed, jax_fun, jit
from jax_offload._program.memory import is_host_aval, to_device, to_host
from jax_offload._program.program import numbered, structure
from jax_offload._program.shardings import zeros
from jax_offload._program.slices import Slice
from jax_offload._schedule.schedule import Chunked, Gate, Planned, Schedule

Env = dict[Var, Any]


def follow(each: Schedule, names: Names, env: Env, *, lowered: bool, for_cpu: bool = False) -> None:
    """Run the slices and gates of a schedule in an environment.

    Args:
      each: the schedule.
      names: the names of the state's leaves, and of their next values.
      env: the values of its operands; its results are added.
      lowered: whether this is how the update is lowered: neither ``vmap`` nor a derivative comes to its loops.
      for_cpu: whether it is lowered for a CPU. Its compiler takes a loop that runs once for a small call, and five
        times as long for it; and it needs no loop, as it hoists no transfers.
    """
    run = functions(each.slices, names, lowered=lowered)
    _in_order(each.first, run, env)
    if each.in_own_loop and not for_cpu:
        _in_own_loop(each, run, env, lowered=lowered)
    else:
        _in_order(each.order, run, env)


def _in_order(order: Iterable[Slice | Planned | Gate], run: Callable[[Planned, Env], None], env: Env) -> None:
    for step in order:
        if isinstance(step, Gate):
            gate(env, step.held, step.waits_for)
        elif isinstance(step, Slice):
            env.update(zip(step.outputs, step.run(*(env[v] for v in step.inputs)), strict=True))
        else:
            run(step, env)


def _in_own_loop(each: Schedule, run: Callable[[Planned, Env], None], env: Env, *, lowered: bool) -> None:
    """Run the slices of a pass in a loop that runs once; XLA does not know that it runs once."""
    slices = [p.slice for p in each.slices]
    outputs = dict.fromkeys(v for s in slices for v in s.outputs)
    waits_for = [v for step in each.order if isinstance(step, Gate) for v in step.waits_for if v not in outputs]
    inputs = list(dict.fromkeys([*(v for s in slices for v in s.inputs), *waits_for]))
    carried = each.carried or {}

    def gated(*operands: Any) -> list[Any]:
        inner = dict(zip(inputs, operands, strict=True))
        _in_order(each.order, run, inner)
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


# ---- slices that do the same to leaves of the same types, traced and lowered once: a network's layers, say


def functions(planned: Sequence[Planned], names: Names, *, lowered: bool = False) -> Callable[[Planned, Env], None]:
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

    def run(p: Planned, env: Env) -> None:
        s, how = p.slice, p.transfer
        operands = [env[v] for v in s.inputs]
        if isinstance(how, Chunked):
            loop = looped(s, how, names)
            results = (loop if lowered else or_batched(loop, s.run))(*operands)
        else:
            results = unchunked(p, operands)
        env.update(zip(s.outputs, results, strict=True))

    return run
