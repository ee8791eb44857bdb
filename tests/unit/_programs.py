"""Tiny updates as programs: what is on the host is so by its type alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jax_offload._base.memory import in_its_memory, to_device, to_host, with_kind
from jax_offload._ir.program import Program, flat, without_round_trips
from jax_offload._ir.slices import Pass

load, store = to_device, to_host


def device(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A value on the device."""
    return jax.ShapeDtypeStruct(shape, dtype)


def host(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A leaf of the state in host memory."""
    here = with_kind(jax.sharding.SingleDeviceSharding(jax.devices()[0]), "pinned_host")
    return in_its_memory(jax.ShapeDtypeStruct(shape, dtype, sharding=here))


def program_of(fun: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> Program:
    """Of a function whose arguments are not nested."""
    program = without_round_trips(flat(jax.make_jaxpr(fun)(*args)))
    assert not program.consts
    return program


def inputs_of(program: Program, *places: int) -> list[Any]:
    """The variables of these arguments."""
    return [program.inputs[k] for k in places]


def run(program: Program, passes: Sequence[Pass], args: Sequence[Any]) -> list[Any]:
    """The program's results, by its passes: the prelude, then every slice, the last one first."""
    env = dict(zip(program.inputs, args, strict=True))
    for each in passes:
        for s in (each.prelude, *reversed(each.slices)):
            found = s.run(*(env[v] for v in s.inputs))
            assert not env.keys() & dict.fromkeys(s.outputs), "made twice"
            env.update(zip(s.outputs, found, strict=True))
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in program.outputs]


def values_of(program: Program) -> list[Any]:
    """Different whole numbers for every argument, where it is."""
    arrays = (jnp.asarray(np.arange(v.aval.size).reshape(v.aval.shape) % 13 - k, v.aval.dtype)
            for k, v in enumerate(program.inputs))  # fmt: skip
    return [x if v.aval.memory_space != jax.memory.Space.Host else to_host(x)
            for x, v in zip(arrays, program.inputs, strict=True)]  # fmt: skip
