"""Trace a step whose model computes with parameters in host memory.

jax refuses arithmetic between memories. So a step with such parameters, whose model does not load them, is traced with
a load of each at its start, and what it makes of them goes back to host memory at its end. As it stands, that loads
them as a whole. A plan then loads them by rows, where a scan reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from jax_offload._base.around import loading
from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Literal, Var, jaxpr_of
from jax_offload._base.memory import is_host_aval, on_host, to_device, to_host
from jax_offload._ir.program import Builder, flat, is_load
from jax_offload._placement.arguments import is_state
from jax_offload._step.returned import UPDATED, origins_of


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
    fun: Callable[..., Any], args: Sequence[Any], static: Sequence[int], named: Mapping[str, Any]
) -> tuple[ClosedJaxpr, Any]:
    """Trace a step with all of its host arguments but states of optimizers loaded at its start."""

    def run(*args: Any, **kwargs: Any) -> Any:
        origins = list[tuple[Any, Any]]()

        def load(x: Any) -> Any:
            if is_state(x) or not on_host(x):
                return x
            origins.append((to_device(x), x))
            return origins[-1][0]

        args = tuple(x if k in static else jax.tree.map(load, x, is_leaf=is_state) for k, x in enumerate(args))
        kwargs = jax.tree.map(load, kwargs, is_leaf=is_state)
        with loading(origins):
            return fun(*args, **kwargs)

    closed, result = jaxpr_of(run, *args, static=static, named=named)
    return _returned_to_host(closed), result


def _returned_to_host(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Let a step return to host memory what its updates make of the arguments that it loads."""
    program = flat(closed)
    loads = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if is_load(eqn)}
    loads = {v: x for v, x in loads.items() if x in program.inputs}
    bits = {x: UPDATED << (k + 1) for k, x in enumerate(dict.fromkeys(loads.values()))}
    new = Builder([*program.eqns])

    def stored(v: Atom, mask: int) -> Atom:
        if isinstance(v, Literal) or is_host_aval(v.aval):
            return v
        if v in loads:
            return loads[v]
        alike = [x for x, bit in bits.items() if mask & bit and _type(x) == _type(v)]
        return new.run(to_host, v)[0] if mask & UPDATED and alike else v

    outputs = [stored(v, mask) for v, mask in zip(program.outputs, origins_of(program, bits), strict=True)]
    return dataclasses.replace(program, eqns=new.eqns, outputs=outputs).closed


def _type(v: Var) -> tuple[Any, ...]:
    return v.aval.shape, v.aval.dtype
