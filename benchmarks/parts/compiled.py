"""The cases of ``steps``, compiled for an H200 that need not be there: peaks, bytes, and the simulated step.

Attention is XLA's own, as cuDNN's is chosen by trying it on the device. So activations are larger than in a run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_offload as jo
from benchmarks.parts.steps import cases, predicted, program, table

__all__ = ["ALONE", "TIMED", "cases", "run"]
ALONE, TIMED = False, False


def run(name: str, toy: bool) -> dict[str, Any]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    it = program(table(toy)[name], here, jnp.bfloat16, "xla", gpu=True)
    return {"predicted": predicted(jo.inspect(it.jitted, *it.args, target="h200"), it.state)}
