"""The classes that functions of ``jax_offload`` return, for annotations and ``isinstance``."""

import typing as _typing
from importlib import import_module as _import_module

from jax_offload._disk.disk import Disk as Disk
from jax_offload._interop.pipelined import Pipelined as Pipelined
from jax_offload._placement.placement import Leaf as Leaf
from jax_offload._precision.storage import StoredState as StoredState
from jax_offload._report.printed import Placement as Placement

if _typing.TYPE_CHECKING:
    from jax_offload._analysis.answer import Plan as Plan
    from jax_offload._analysis.answer import Row as Row
    from jax_offload._analysis.chips import Chip as Chip
    from jax_offload._analysis.inspection import Inspection as Inspection
    from jax_offload._analysis.profiled import Profile as Profile
    from jax_offload._analysis.timeline import Timeline as Timeline

# Classes that only look at steps are imported when they are asked for: the name, and the module of _analysis.
_LAZY = {
    "Chip": "chips",
    "Inspection": "inspection",
    "Plan": "answer",
    "Profile": "profiled",
    "Row": "answer",
    "Timeline": "timeline",
}

__all__ = [
    "Chip",
    "Disk",
    "Inspection",
    "Leaf",
    "Pipelined",
    "Placement",
    "Plan",
    "Profile",
    "Row",
    "StoredState",
    "Timeline",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f"{__package__}._analysis.{_LAZY[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    """Without the modules, whose names start with an underscore."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
