"""Compiling for a chip that is not there.

The step is traced for the CPU's devices and lowered for the target's platform, and the module goes to a compile-only
client of that platform's plugin: compile-only GPU devices report no memory spaces, and drop ``pinned_host`` without a
word.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jax_offload._analysis.chips import Chip, chip
from jax_offload._base.private import compiled

_GPUS = ("a100", "h100", "h200")
# Some topologies of each; there are more.
_TPUS = {"v5e": "1x1, 2x2, 2x4, 4x4, 8x8", "v5p": "1x1x1, 2x2x1, 2x2x2, 2x2x4", "v6e": "1x1, 2x2, 2x4, 4x4, 8x8"}
_CUDA_PLUGIN = "jax_plugins.xla_cuda13"
# Without these, libtpu queries the machine of a TPU.
_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare() -> None:
    """Set the environment variables that the plugins read, if nobody has; call it before jax asks for a platform."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Attributes:
      name: as it was given: ``h200``, ``v5e:2x2``.
      platform: ``cuda`` or ``tpu``, for jax's lowering.
      chip: its figures.
    """

    name: str
    platform: str
    chip: Chip

    @property
    def missing(self) -> str:
        """The wheel that has to be installed to compile for this target; empty if it is there."""
        wheel, module = ("jax-cuda13-plugin", "jax_cuda13_plugin") if self.platform == "cuda" else ("libtpu", "libtpu")
        return "" if importlib.util.find_spec(module) else wheel


def target_of(name: str) -> Target:
    """Return the target of that name, and set the environment variables that its plugin reads.

    Raises:
      TypeError: ``name`` is not a string.
      ValueError: the target is not known, or a TPU's name has no topology.
    """
    if not isinstance(name, str):
        raise TypeError(f'target: expected the name of a chip, "h200" or "v5e:2x2"; got {name!r}.')
    prepare()
    kind, _, topology = name.lower().partition(":")
    if kind in _GPUS and not topology:
        return Target(kind, "cuda", chip(kind))
    if kind in _TPUS:
        return Target(f"{kind}:{topology or '1x1'}", "tpu", chip(kind))
    known = ", ".join((*_GPUS, *(f"{tpu}:2x2" for tpu in _TPUS)))
    raise ValueError(f"target: cannot compile for {name!r}. Known: {known} (of a TPU any topology).")


def check_installed(target: Target) -> None:
    """Raise ``ValueError`` if the compiler of ``target`` is not installed."""
    if target.missing:
        raise ValueError(
            f"target: {target.missing}, which compiles for {target.name}, is not installed: "
            "pip install 'jax_offload[aot]'."
        )


def _described(target: Target, name: str, **kwargs: Any) -> Any:
    """Return the topology of that name.

    If jax started before the environment was set, it has given up the plugin for GPUs and knows no topologies of cuda.
    The plugin is then initialized once more. A plugin that cannot describe a chip at all fails in the same way.
    """
    prepare()
    for again in (False, True):
        try:
            if again:
                importlib.import_module(_CUDA_PLUGIN).initialize()
            return topologies.get_topology_desc(platform=target.platform, topology_name=name, **kwargs)
        except (NotImplementedError, ImportError) as error:
            if again or target.platform != "cuda":
                raise ValueError(
                    f"target: jax's plugin that compiles for {target.name} cannot describe a chip that is not there "
                    f"({error}). Its version has to be jax's own: pip install --upgrade 'jax_offload[aot]' "
                    f"'jax=={jax.__version__}'."
                ) from error
        except jax.errors.JaxRuntimeError as error:
            kind, _, topology = name.partition(":")
            raise ValueError(
                f"target: {kind} has no topology {topology!r}: {str(error).splitlines()[0]}. Known: "
                f"{_TPUS.get(kind, 'none')} and larger ones."
            ) from error


@functools.cache
def _devices(target: Target, n: int) -> list[Any]:
    if target.platform == "cuda":
        spec = Path(__file__).with_name(f"{target.name}.txtpb").read_text()
        described = _described(target, target.name, target_config=spec, topology=f"1x1x{n}")
    else:
        described = _described(target, target.name)
    if len(described.devices) < n:
        raise ValueError(f"target: the step is for {n} devices, and {target.name} has {len(described.devices)}.")
    return list(described.devices)[:n]


def compile_for(target: Target, module: Any, n: int, options: dict[str, Any]) -> Any:
    """Compile a StableHLO module, lowered for ``target.platform``, for ``n`` devices."""
    check_installed(target)
    devices = _devices(target, n)
    ids = [device.id for device in devices] if target.platform == "tpu" else list(range(n))
    # Autotuning needs the device.
    tuned = {"xla_gpu_autotune_level": 0} if target.platform == "cuda" else {}
    return compiled(module, devices, ids, {**tuned, **options})
