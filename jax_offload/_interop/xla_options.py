"""Options of XLA's compiler that let transfers overlap with compute."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from jax_offload._base.jaxprs import jit

# How many host copies XLA's latency-hiding scheduler lets be in flight, two by default. A layer of a scan with masters
# and two moments moves dozens of leaves each way; more copies than that only raise the peak.
_COPIES, _MANY = "xla_gpu_experimental_parallel_async_compute_limit", 32
# XLA records a scan's body as a CUDA graph, in which by default a copy waits for the kernel before it. Outside of
# scans concurrent graphs only raise the peak, because buffers are not used again: notes/xla.md.
_IN_SCAN = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def options_for_sending(platform: str) -> dict[str, Any]:
    """As ``compiler_options``, for a program that copies to the host and nothing from it: gradients that wait for the
    host's cores. One copy at a time is in flight, as each further one is a gradient that waits on the device."""
    return _options(platform, {_COPIES: 1})


def compiler_options(platform: str, *, in_scan: bool = False) -> dict[str, Any]:
    """Return the options for ``jax.jit(..., compiler_options=)`` that make transfers overlap with arithmetic.

    Streaming works without them. XLA spends spare memory on overlap: add ``{"xla_gpu_memory_limit_slop_factor":
    percent}`` to limit temporaries to that share (95 by default) of what 80 % of the device leaves beside arguments and
    results. A lower share gives a lower peak and less overlap.

    Args:
      platform: ``"cuda"`` (or ``"gpu"``), ``"tpu"`` or ``"cpu"``. No option was found to help on the last two.
      in_scan: whether state moves in the scan of a model with stacked layers. ``jo.jit`` and ``jo.pipelined`` find
        that out. It raises the peak of a model with unrolled layers.

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
    return _options(platform, {_COPIES: _MANY} | (_IN_SCAN if in_scan else {}))


def _options(platform: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if platform not in ("cuda", "gpu", "tpu", "cpu"):
        raise ValueError(f"platform: expected 'cuda', 'gpu', 'tpu' or 'cpu', got {platform!r}.")
    known = options if platform in ("cuda", "gpu") else {}
    return {name: value for name, value in known.items() if _known(name, value)}


@functools.cache
def _known(name: str, value: Any) -> bool:
    if jax.__version_info__ < (0, 13):
        return True  # tried; a newer one is asked
    try:
        jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
