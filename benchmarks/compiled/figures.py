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
from benchmarks.in_jax.system import duplex, loop_of, nbytes, program


def run(target: str, case: Case) -> dict[str, Any]:
    """Peak bytes, bytes on the link in each direction, and how much of them overlaps, by the schedule."""
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="device")
    it = program(case, here, jnp.bfloat16, "xla")
    looped = loop_of(it, case)
    step = looped.jitted
    if "whole" not in case.options and case.options.get("offload"):
        options = jo.compiler_options("tpu" if target.startswith("v") else "cuda")
        step = jax.jit(it.step, donate_argnums=(0, 1), out_shardings=it.shardings, compiler_options=options)
    seen = jo.inspect(step, *looped.args, target=target)
    moved = seen.loaded + seen.stored
    return {
        "compiled": True,
        "device_peak_bytes": seen.peak,
        "host_bytes": seen.host,
        "host_state_bytes": nbytes(it.state, host=True),
        "loaded_bytes": seen.loaded,
        "stored_bytes": seen.stored,
        "duplex": duplex(seen.timeline),
        "hidden": sum(t.nbytes * t.hidden for t in seen.transfers) / moved if moved else 0.0,
        "device": f"{target}, compiled for, not run",
        "versions": {"jax": jax.__version__},
        "notes": ["attention: xla"],
    }


if __name__ == "__main__":
    report(partial(run, sys.argv[1]), Case.from_json(sys.argv[2]))
