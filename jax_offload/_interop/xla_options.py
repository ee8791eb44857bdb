"""Options of XLA's compiler that let transfers overlap with compute."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_offload._base.jaxprs import jit

# The latency-hiding scheduler counts a host copy as async compute, of which it lets two be in flight; masters,
# accumulators and moments in 8 bits are more copies per leaf. notes/xla.md has the figures.
_COPIES = "xla_gpu_experimental_parallel_async_compute_limit"
# XLA records the body of a loop as a CUDA graph, and by default its copies run one after the other with its kernels.
_GRAPHS = "xla_gpu_command_buffer_scheduling_mode"
_GPU = {_COPIES: 32, _GRAPHS: "CONCURRENT"}
# Where copies go down only, gradients that the host's cores need, more in flight are gradients that wait.
_GPU_DOWN = {_COPIES: 1, _GRAPHS: "CONCURRENT"}


def options_for_sending(platform: str) -> dict[str, Any]:
    """As ``compiler_options``, for a program that copies to the host and nothing from it."""
    options = _GPU_DOWN if platform in ("cuda", "gpu") else {}
    return {name: value for name, value in options.items() if _known(name, value)}


def compiler_options(platform: str) -> dict[str, Any]:
    """Return the options for ``jax.jit(..., compiler_options=)`` that make transfers overlap with arithmetic.

    Streaming works without them. XLA spends spare memory on overlap: add ``{"xla_gpu_memory_limit_slop_factor":
    percent}`` to limit temporaries to that share (95 by default) of what 80 % of the device leaves beside arguments and
    results. A lower share gives a lower peak and less overlap.

    Args:
      platform: ``"cuda"`` (or ``"gpu"``), ``"tpu"`` or ``"cpu"``. No option was found to help on the last two.

    Returns:
      A dict, without options that the running jaxlib does not know.

    Raises:
      ValueError: ``platform`` is none of these.

    Example:
      >>> import jax, jax_offload as jo
      >>> double = jax.jit(lambda x: 2 * x, compiler_options=jo.compiler_options(jax.default_backend()))
      >>> int(double(21))
      42
    """
    if platform not in ("cuda", "gpu", "tpu", "cpu"):
        raise ValueError(f"platform: expected 'cuda', 'gpu', 'tpu' or 'cpu', got {platform!r}.")
    options = _GPU if platform in ("cuda", "gpu") else {}
    return {name: value for name, value in options.items() if _known(name, value)}


@functools.cache
def _known(name: str, value: Any) -> bool:
    if name in _GPU and jax.__version_info__ < (0, 13):
        return True  # tried; a newer one is asked
    try:
        jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
