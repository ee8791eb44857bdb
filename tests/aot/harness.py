"""What tests of compiled programs share. Nothing runs: steps are traced on CPU devices and compiled for a chip."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._look.compiled import compile_for, prepare, target_of

prepare()

MIB = 2**20
H200, V5E = "h200", "v5e:1x1"


def require(target: str) -> None:
    """Skips, loudly, where the compiler of ``target`` is not installed."""
    wheel, module = ("jax-cuda13-plugin", "jax_cuda13_plugin") if target == H200 else ("libtpu", "libtpu")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"cannot compile for {target}: {wheel} is not installed (pip install 'jax_offload[aot]')")


def mesh_for(target: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("data",)) -> Mesh:
    """CPU devices that stand for the chip's."""
    return Mesh(np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape), axes)


def on_a_fixed_link(target: str) -> jo.types.Chip:
    """The chip of a target, with a link that does not change when one is measured: shares exposed compare schedules."""
    name = target.partition(":")[0]
    one_way = {"h200": 50e9, "v5e": 12e9}[name]
    return dataclasses.replace(jo.chip(name), host_link=one_way, host_link_both=2 * one_way)


def device_sharding(target: str) -> NamedSharding:
    return NamedSharding(mesh_for(target), PartitionSpec(), memory_kind="device")


def array(*shape: int, dtype: Any = jnp.float32, spec: PartitionSpec = PartitionSpec(), n: int = 1) -> Any:
    """An abstract array, divided by ``spec`` over ``n`` devices along the axis ``data``."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_for("", (n,)), spec, memory_kind="device"))


def scheduled(jitted: Any, args: tuple[Any, ...], name: str = H200) -> str:
    """The program of a jitted step as the compiler of a target schedules it."""
    target = target_of(name)
    module = jitted.trace(*args).lower(lowering_platforms=(target.platform,)).compiler_ir("stablehlo")
    return compile_for(target, module, 1, {}).hlo_modules()[0].to_string()
