"""A schedule, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jax_offload._emit.rows import Names, looped, or_batched, prefetch, update_of, write_back
from jax_offload._program.barriers import gate, opaque
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Var,
    jax_fun,
    jaxpr_like,
    jaxpr_of,
    jit,
    variables,
)
from jax_offload._program.memory import is_host_aval, to_device, to_host
from jax_offload._program.program import is_load, is_store, numbered, structure
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
      for_cpu: whether it is lowered for a CPU. Its compiler hoists no transfers, so no loop has to hold them, and
        takes five times as long for a loop that runs once.
    """
    run = SliceRunner(each.slices, names, lowered=lowered)
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


class SliceRunner:
    """Runs slices of a program.

    Slices that are alike call one function, which XLA inlines, instead of tracing their own equations.

    Args:
      planned: the slices.
      names: the names of the state's leaves, and of their next values.
      lowered: whether neither ``vmap`` nor a derivative comes to the slices.
    """

    def __init__(self, planned: Sequence[Planned], names: Names, *, lowered: bool = False) -> None:
        key_of = numbered()
        self._names, self._lowered = names, lowered
        self._kind = {id(p): structure(p.slice.jaxpr, key_of) for p in planned if not p.in_chunks}
        self._times = Counter(self._kind.values())
        self._updates: dict[Hashable, tuple[Callable[..., list[Any]], Sequence[int]]] = {}
        self._traced: dict[Hashable, ClosedJaxpr] = {}

    def __call__(self, p: Planned, env: Env) -> None:
        """Run a slice in an environment, to which its results are added."""
        env.update(zip(p.slice.outputs, self._run(p, [env[v] for v in p.slice.inputs]), strict=True))

    def equations(self, p: Planned) -> ClosedJaxpr:
        """Trace a slice. Only the first of several slices that are alike is traced."""
        s, kind = p.slice, self._kind.get(id(p))
        if (first := self._traced.get(kind)) is not None:
            return self._named(first, s)
        traced, _ = jaxpr_of(lambda *operands: self._run(p, [*operands]), *(v.aval for v in s.inputs))
        if kind is not None and self._is_shared(p):
            self._traced[kind] = traced
        return traced

    def _named(self, first: ClosedJaxpr, s: Slice) -> ClosedJaxpr:
        """Return the equations of a slice like ``s`` in the scopes of the leaves of ``s``."""
        inputs = dict(zip(first.jaxpr.invars, s.inputs, strict=True))
        outputs = {x: v for x, v in zip(first.jaxpr.outvars, s.outputs, strict=True) if isinstance(x, Var)}

        def renamed(eqn: Equation) -> Equation:
            if is_load(eqn):
                scope = prefetch(inputs[variables(eqn.invars)[0]], self._names)
            elif is_store(eqn):
                scope = write_back(outputs[eqn.outvars[0]], self._names)
            else:
                scope = update_of(s.loads, self._names)
            with scope:
                stack = source_info_util.current_name_stack()
            return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

        like = jaxpr_like(first.jaxpr, [*map(renamed, first.jaxpr.eqns)], first.jaxpr.outvars)
        return ClosedJaxpr(like, first.consts)

    def _run(self, p: Planned, operands: list[Any]) -> list[Any]:
        if not isinstance(p.transfer, Chunked):
            return self._whole(p, operands)
        loop = looped(p.slice, p.transfer, self._names)
        return (loop if self._lowered else or_batched(loop, p.slice.run))(*operands)

    def _whole(self, p: Planned, operands: list[Any]) -> list[Any]:
        s, names, (update, loaded) = p.slice, self._names, self._update_for(p)
        for i in loaded:
            with prefetch(s.inputs[i], names):
                operands[i] = to_device(operands[i])
        with update_of(s.loads, names):
            results = update(*operands)
        for k, v in enumerate(s.outputs):
            if is_host_aval(v.aval):
                with write_back(v, names):
                    results[k] = to_host(results[k])
        return results

    def _is_shared(self, p: Planned) -> bool:
        return self._times[self._kind.get(id(p))] > 1 and not p.slice.jaxpr.effects

    def _update_for(self, p: Planned) -> tuple[Callable[..., list[Any]], Sequence[int]]:
        """What a slice does between its transfers, and the places of the operands that are loaded for it."""
        kind = self._kind[id(p)]
        if kind not in self._updates:
            inner = p.slice.core
            run = jax_fun(ClosedJaxpr(inner.jaxpr, []))

            def update_slice(*args: Any) -> Any:  # the name that profiles show
                return run(*args)

            loaded = [i for i, v in enumerate(p.slice.inputs) if v in inner.loads]
            self._updates[kind] = (jit(update_slice) if self._is_shared(p) else run), loaded
        return self._updates[kind]
