"""The classes that functions of ``jax_offload`` return, for annotations and ``isinstance``."""

from jax_offload._look.answer import Plan as Plan
from jax_offload._look.answer import Row as Row
from jax_offload._look.chips import Chip as Chip
from jax_offload._look.inspection import Inspection as Inspection
from jax_offload._look.report import Placement as Placement
from jax_offload._look.timeline import Timeline as Timeline
from jax_offload._state.placement import Leaf as Leaf
from jax_offload._state.storage import StoredState as StoredState
from jax_offload._step.pipelined import Pipelined as Pipelined

__all__ = [
    "Chip",
    "Inspection",
    "Leaf",
    "Pipelined",
    "Placement",
    "Plan",
    "Row",
    "StoredState",
    "Timeline",
]
