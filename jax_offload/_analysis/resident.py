"""A step as it would be with its state on the device: the updates' own arithmetic, and no transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Var, jax_fun, renamed
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, Space
from jax_offload._base.shardings import sharding_of
from jax_offload._emit.find import without_updates


def resident(step: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Of its flat arguments, ``on_device``."""
    program = without_updates(step)
    same: dict[Var, Atom] = {}
    eqns: list[Any] = []
    for eqn in program.eqns:
        ins = [renamed(same, v) for v in eqn.invars]
        if eqn.primitive.name == "device_put" and all(isinstance(d, Space) for d in eqn.params["devices"]):
            same.update(zip(eqn.outvars, ins, strict=True))
        else:
            eqns.append(eqn.replace(invars=ins))
    outputs = [renamed(same, v) for v in program.outputs]
    return jax_fun(dataclasses.replace(program, eqns=eqns, outputs=outputs).closed)


def on_device(x: Any) -> Any:
    """The type of an argument, were it in device memory."""
    sharding = sharding_of(x)
    if sharding is not None and sharding.memory_kind == HOST_KIND:
        sharding = sharding.with_memory_kind(DEVICE_KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
