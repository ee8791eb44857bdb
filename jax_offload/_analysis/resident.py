"""A step as it would be with its state on the device: the updates' own arithmetic, and no transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Equation, Var, jax_fun, renamed
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, Space
from jax_offload._base.shardings import sharding_of
from jax_offload._emit.find import without_updates


def resident(step: ClosedJaxpr, parameters: Sequence[Any]) -> Callable[..., list[Any]]:
    """Of its flat arguments, ``on_device``: the state is divided as its parameters, whatever ``shard_over`` says.

    ``parameters``: the types of the gradients.
    """
    program, shapes = without_updates(step), {tuple(x.shape) for x in parameters}
    same: dict[Var, Atom] = {}
    eqns: list[Any] = []
    for eqn in program.eqns:
        ins = [renamed(same, v) for v in eqn.invars]
        if _moves(eqn) or (eqn.primitive.name in _CONSTRAINTS and eqn.outvars[0].aval.shape in shapes):
            same.update(zip(eqn.outvars, ins, strict=True))
        else:
            eqns.append(eqn.replace(invars=ins))
    outputs = [renamed(same, v) for v in program.outputs]
    return jax_fun(dataclasses.replace(program, eqns=eqns, outputs=outputs).closed)


_CONSTRAINTS = ("sharding_constraint", "reshard")


def _moves(eqn: Equation) -> bool:
    return eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"])


def on_device(leaves: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """The types of a step's arguments, were its state in device memory: each leaf where its parameter is.

    ``parameters``: the types of the gradients.
    """
    shapes = {tuple(x.shape) for x in parameters}
    places = {tuple(x.shape): s for x in leaves if x.shape in shapes and not _hosted(s := sharding_of(x))}
    return [_there(x, places) for x in leaves]


def _hosted(sharding: Any) -> bool:
    return getattr(sharding, "memory_kind", None) == HOST_KIND


def _there(x: Any, places: Mapping[tuple[int, ...], Any]) -> Any:
    sharding: Any = sharding_of(x)
    if _hosted(sharding):
        sharding = places.get(tuple(x.shape)) or sharding.with_memory_kind(DEVICE_KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
