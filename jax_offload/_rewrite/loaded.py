"""Trace a step whose model computes with parameters in host memory.

jax refuses arithmetic between memories. If the model does not load such parameters itself, the step is traced with a
load of each parameter at its start, and stores the new parameters in host memory at its end. As written, it would load
whole parameters. A plan then loads them by rows, where a scan reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax

from jax_offload._program.jaxprs import Atom, ClosedJaxpr, Literal, Var, jaxpr_of
from jax_offload._program.memory import is_host_aval, to_host
from jax_offload._program.program import Builder, flat, is_load
from jax_offload._rewrite.inlined import UPDATED, origins_of
from jax_offload._state.arguments import is_state
from jax_offload._state.around import load, loading


def traced_step(
    fun: Callable[..., Any], *args: Any, static: Sequence[int] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ClosedJaxpr, Any]:
    """Trace a step: its jaxpr, and the structure of its result.

    Args:
      fun: the step.
      args: its arguments, traced or abstract.
      static: the numbers of the arguments that are no operands.
      named: keyword arguments.
    """
    try:
        return jaxpr_of(fun, *args, static=static, named=named)
    except ValueError as error:
        given = [x for k, x in enumerate(args) if k not in static], named
        if "memory_space" not in str(error) or not any(map(_may_load, jax.tree.leaves(given))):
            raise
    return _with_loads(fun, args, static, named)


def _may_load(x: Any) -> bool:
    return is_host_aval(jax.typeof(x)) if hasattr(x, "dtype") else False


def _with_loads(
    fun: Callable[..., Any],
    args: Sequence[Any],
    static: Sequence[int],
    named: Mapping[str, Any],
    kept: Set[int] = frozenset(),
) -> tuple[ClosedJaxpr, Any]:
    """Trace a step with all of its host arguments but states of optimizers loaded at its start.

    A state without optax's types, such as a dict, is known by the update that takes it: where the trace fails, the
    step is traced once more with these leaves ``kept`` in host memory, by their numbers.
    """
    numbers, states = dict[int, int](), list[Any]()

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers.clear()

        def of_leaf(x: Any) -> Any:
            number = numbers.setdefault(id(x), len(numbers))
            return x if number in kept or is_state(x) else load(x)

        def loaded(x: Any) -> Any:
            return jax.tree.map(of_leaf, x, is_leaf=is_state)

        with loading(states):
            return fun(*(x if k in static else loaded(x) for k, x in enumerate(args)), **loaded(kwargs))

    try:
        closed, result = jaxpr_of(run, *args, static=static, named=named)
    except TypeError:
        of_states = {numbers[id(x)] for x in states}
        if of_states <= kept:
            raise
        return _with_loads(fun, args, static, named, kept | of_states)
    results = jax.tree.unflatten(result, closed.jaxpr.outvars)
    states = [is_state(x) for x in jax.tree.leaves(results, is_leaf=is_state) for _ in jax.tree.leaves(x)]
    return _returned_to_host(closed, states), result


def _returned_to_host(closed: ClosedJaxpr, states: Sequence[bool]) -> ClosedJaxpr:
    """Let a step return to host memory the next value of each argument that it loads.

    Among the results of the argument's type that elementwise arithmetic makes of it, that is one made by an update if
    there is one, of the fewest other arguments, and first: the new parameters rather than an average or a copy of them.
    ``states`` says which results belong to an optimizer's state, which knows its own memory.
    """
    program = flat(closed)
    loads = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if is_load(eqn)}
    bits = {x: UPDATED << (k + 1) for k, x in enumerate(program.inputs)}
    made_of = zip(program.outputs, origins_of(program, bits), states, strict=True)
    masks = {v: m for v, m, of_state in made_of if isinstance(v, Var) and not of_state}
    made = {v: k for k, eqn in enumerate(program.eqns) for v in eqn.outvars}
    new, outputs = Builder([*program.eqns]), dict[Atom, Atom]()
    left = dict.fromkeys(x for x in loads.values() if x in bits)
    for v in sorted(masks, key=lambda v: (not masks[v] & UPDATED, masks[v].bit_count(), made.get(v, -1))):
        if (same := loads.get(v)) in bits:
            outputs[v] = same
            left.pop(same, None)
        elif not is_host_aval(v.aval):
            old = next((x for x in left if masks[v] & bits[x] and _type(x) == _type(v)), None)
            if old is not None:
                del left[old]
                outputs[v] = same or new.run(to_host, v)[0]
    results = [v if isinstance(v, Literal) else outputs.get(v, v) for v in program.outputs]
    return dataclasses.replace(program, eqns=new.eqns, outputs=results).closed


def _type(v: Var) -> tuple[Any, ...]:
    return v.aval.shape, v.aval.dtype
