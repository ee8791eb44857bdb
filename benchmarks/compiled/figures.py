"""The worker for a chip that is not there: compiles the step of a JAX case for it, and prints what the compiler says.

    python -m benchmarks.compiled.figures h200 "$CASE"

Attention is XLA's own: cuDNN's is chosen by trying it on the device. So activations are larger than in a run.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import jax_offload as jo
from benchmarks.harness.cases import Case
from benchmarks.harness.machine import report
from benchmarks.in_jax.system import loop_of, nbytes, program
from tests.aot.cases import device_sharding
from tests.aot.harness import H200, MIB, measure


def run(target: str, case: Case) -> dict[str, Any]:
    """Peak bytes, bytes on the link in each direction, and how much of them overlaps, by the schedule."""
    it = program(case, device_sharding(target), jnp.bfloat16, "xla")
    platform = "cuda" if target == H200 else "tpu"
    options = jo.compiler_options(platform) if case.options.get("offload") else None
    looped = loop_of(it, case)
    turned = case.options.get("whole") == "pipelined"  # whose results are where its arguments are
    step = looped.jitted.whole_step if "whole" in case.options else it.step
    m = measure(target, step, looped.args, (0, 1), None if turned else it.shardings, options)
    return {
        "compiled": True,
        "device_peak_bytes": round(m.peak * MIB),
        "host_bytes": round((m.host_arguments + m.host_temp) * MIB),
        "host_state_bytes": nbytes(it.state, host=True),
        "loaded_bytes": round(m.loaded * MIB),
        "stored_bytes": round(m.stored * MIB),
        "duplex": m.duplex,
        "hidden": m.hidden,
        "device": f"{target}, compiled for, not run",
        "versions": {"jax": jax.__version__},
        "notes": ["attention: xla"],
    }


if __name__ == "__main__":
    report(partial(run, sys.argv[1]), Case.from_json(sys.argv[2]))
