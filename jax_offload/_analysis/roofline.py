"""The one model of time: a link, arithmetic, and the part of the arithmetic that hides the link.

- A step's arithmetic is its operations at the speed that large matmuls reach on the chip.
- The link takes the time of both directions at once, then of the rest of the larger one alone.
- The backward pass, two thirds of the arithmetic, hides what streams under ``jo.jit``; the forward pass, a third, under
  ``jo.pipelined``. Nothing hides an update that waits for a norm of all gradients, or one on the host's cores.
- The rest is added to the step. Latency, launches and contention for device memory are left out.
"""

from __future__ import annotations

import jax

from jax_offload._analysis.chips import Chip

BACKWARD, FORWARD, NOTHING = 2 / 3, 1 / 3, 0.0
OPERATIONS = 6  # of the forward and the backward pass, for each parameter of a matrix and each token
_ROUNDED = (None, "default", "fastest", "bfloat16")  # precisions at which a TPU rounds what its matmuls read


def link(chip: Chip, loaded: int, stored: int) -> float:
    """Seconds of copies both ways at once, then of the rest of one way."""
    together, rest = min(loaded, stored), abs(loaded - stored)
    return 2 * together / chip.host_link_both + rest / chip.host_link


def arithmetic(chip: Chip, operations: float, dtype: str) -> float:
    """Seconds of matmuls of arrays of ``dtype``; a TPU rounds them to bfloat16 unless jax is told not to."""
    rounds = chip.platform == "tpu" and jax.config.jax_default_matmul_precision in _ROUNDED  # pyright: ignore
    fast = rounds or dtype in ("bfloat16", "float16")
    return operations / (chip.reached.bf16 if fast else chip.reached.f32)


def cores(chip: Chip, state: int, up: int, down: int) -> float | None:
    """Seconds in which a host's cores read and write the state once, write what goes up and read what comes down, which
    the link reads and writes as well; ``None`` without a figure of the host's memory."""
    return None if chip.dram_bandwidth is None else 2 * (state + up + down) / chip.dram_bandwidth


def added(moved: float, compute: float, hidden_by: float) -> float:
    """Seconds that ``moved`` seconds of transfers add to a step, of whose arithmetic a share hides them."""
    return max(0.0, moved - hidden_by * compute)


def tokens_to_hide(moved: float, seconds_per_token: float, hidden_by: float) -> int | None:
    """From how many tokens a step on nothing is added; ``None`` where nothing hides the transfers."""
    if not moved:
        return 0
    return None if not hidden_by or not seconds_per_token else -int(-moved // (hidden_by * seconds_per_token))
