"""Train in JAX when the optimizer state does not fit on the accelerator.

``tx = jax_offload.offload(optax.adamw(1e-3))`` keeps the optimizer's state in pinned host memory.
``jax_offload.jit(step)`` hides its transfers, and ``jax_offload.pipelined(step)`` does if gradients are clipped.
``print(jax_offload.placement(tx, params))`` says what lives where, and
``print(jax_offload.plan(tx, params, chip="h100"))`` whether the model fits and what offloading costs.
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib import metadata as _metadata

from jax_offload._disk.disk import Disk as disk
from jax_offload._look.report import placement as placement
from jax_offload._offload import offload as offload
from jax_offload._offload import to_host as to_host
from jax_offload._offload import update_params as update_params
from jax_offload._state.checkpoint import restore as restore
from jax_offload._state.checkpoint import save_args as save_args
from jax_offload._state.masters import with_master_params as with_master_params
from jax_offload._state.state import abstract_state as abstract_state
from jax_offload._state.state import from_plain as from_plain
from jax_offload._state.state import to_device as to_device
from jax_offload._state.state import to_plain as to_plain
from jax_offload._state.storage import Storage as Storage
from jax_offload._step.jit import compiler_options as compiler_options
from jax_offload._step.jit import jit as jit
from jax_offload._step.pipelined import pipelined as pipelined

if _typing.TYPE_CHECKING:
    from jax_offload import types as types
    from jax_offload._look.chips import chip as chip
    from jax_offload._look.inspection import inspect as inspect
    from jax_offload._look.inspection import profile as profile
    from jax_offload._look.inspection import verify as verify
    from jax_offload._look.plan import plan as plan

try:
    __version__ = _metadata.version("jax_offload")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# What only looks at steps is imported when it is asked for: name, and the module in _look that has it.
_LAZY = {
    "chip": "chips",
    "inspect": "inspection",
    "plan": "plan",
    "profile": "inspection",
    "verify": "inspection",
}

__all__ = [
    "Storage",
    "abstract_state",
    "chip",
    "compiler_options",
    "disk",
    "from_plain",
    "inspect",
    "jit",
    "offload",
    "pipelined",
    "placement",
    "plan",
    "profile",
    "restore",
    "save_args",
    "to_device",
    "to_host",
    "to_plain",
    "types",
    "update_params",
    "verify",
    "with_master_params",
]


def __getattr__(name: str) -> object:
    if name == "types":
        return _import_module(f"{__name__}.types")
    if name not in _LAZY:
        fix = ". Fix: jax.tree.map(lambda x: x.sharding, jax_offload.abstract_state(tx, params))"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{fix if name == 'state_shardings' else ''}")
    return globals().setdefault(name, getattr(_import_module(f"{__name__}._look.{_LAZY[name]}"), name))


def __dir__() -> list[str]:
    """Without the modules, whose names start with an underscore."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
