"""Compiles a step for an H200 or a TPU without either, and measures the executable.

``measure(target, step, args, donate, out_shardings)`` returns a ``Measured``. For a TPU everything is public API. For
the H200 the step is traced on CPU devices, because compile-only GPU devices report no memory spaces and drop
``pinned_host`` without a word; the lowered module goes to the CUDA plugin's compile-only client.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from jax_offload._analysis.targets import compile_for, prepare, target_of
from jax_offload._analysis.timeline import Timeline, timeline
from tests.aot.link import hidden, on_a_fixed_link, traffic

prepare()

MIB = 2**20
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
H200 = "h200"
V5E = "v5e:1x1"
V5E_2X2 = "v5e:2x2"


def require(target: str) -> None:
    """Skips, loudly, where the compiler of ``target`` is not installed."""
    wheel, module = ("jax-cuda13-plugin", "jax_cuda13_plugin") if target == H200 else ("libtpu", "libtpu")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"cannot compile for {target}: {wheel} is not installed (pip install 'jax_offload[aot]')")


@functools.cache
def mesh_for(target: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("x",)) -> Mesh:
    n = int(np.prod(shape))
    if target == H200:
        return Mesh(np.array(jax.devices("cpu")[:n]).reshape(shape), axes)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    return Mesh(np.array(topology.devices)[:n].reshape(shape), axes)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one executable, MiB per device.

    Attributes:
      loaded, stored: what one run copies from the host and to it, loops included.
      duplex: share of these that moves while the other direction moves too, as far as the schedule goes.
      hidden: of these, the share that is in flight across a matmul; what a loop copies is not.
    """

    peak: float
    arguments: float
    temp: float
    host_arguments: float
    host_temp: float
    loaded: float
    stored: float
    duplex: float
    hidden: float
    text: str

    @property
    def collectives(self) -> dict[str, int]:
        """How often each kind stands in the program; a TPU's reduce-scatter is a fusion around an all-reduce."""
        found = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", self.text))
        scattered = len(re.findall("calls=%all-reduce-scatter", self.text))
        found["reduce-scatter"] += scattered
        found["all-reduce"] -= scattered
        return {name: times for name, times in found.items() if times > 0}

    def timeline(self, chip: str) -> Timeline:
        """The simulated timeline of the step on ``chip``, a name, with the link of the stored tables."""
        return timeline(self.text, on_a_fixed_link(chip))


def scheduled(jitted: Any, args: tuple[Any, ...]) -> str:
    """The program of a jitted step as the H200's compiler schedules it."""
    module = jitted.trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    return compile_for(target_of(H200), module, 1, {}).hlo_modules()[0].to_string()


def measure(
    target: str,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    options: dict[str, Any] | None = None,
    n: int = 1,
) -> Measured:
    kwargs = {} if out_shardings is None else {"out_shardings": out_shardings}
    jitted = jax.jit(step, donate_argnums=donate, **kwargs)
    if target == H200:
        module = jitted.trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        executable = compile_for(target_of(H200), module, n, options or {})
        m, text = executable.get_compiled_memory_stats(), executable.hlo_modules()[0].to_string()
    else:
        compiled = jitted.lower(*args).compile(compiler_options=options)
        m, text = compiled.memory_analysis(), compiled.as_text()
    moved = traffic(text)
    return Measured(
        peak=(m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes) / MIB,
        arguments=m.argument_size_in_bytes / MIB,
        temp=m.temp_size_in_bytes / MIB,
        host_arguments=m.host_argument_size_in_bytes / MIB,
        host_temp=m.host_temp_size_in_bytes / MIB,
        loaded=moved.loaded / MIB,
        stored=moved.stored / MIB,
        duplex=moved.duplex,
        hidden=hidden(text) / (moved.loaded + moved.stored or 1),
        text=text,
    )
