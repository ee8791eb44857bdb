"""The classes that functions of ``jax_offload`` return, for annotations and ``isinstance``."""

from jax_offload._analysis.answer import Plan as Plan
from jax_offload._analysis.answer import Row as Row
from jax_offload._analysis.chips import Chip as Chip
from jax_offload._analysis.inspection import Inspection as Inspection
from jax_offload._analysis.profiled import Profile as Profile
from jax_offload._analysis.timeline import Timeline as Timeline
from jax_offload._interop.pipelined import Pipelined as Pipelined
from jax_offload._placement.placement import Leaf as Leaf
from jax_offload._precision.storage import StoredState as StoredState
from jax_offload._report.report import Placement as Placement

__all__ = [
    "Chip",
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
