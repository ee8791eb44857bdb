"""How long a step with an unrolled model takes to trace and to compile for an H200, by how its moments are stored.

    python -m benchmarks.compiled.times [--leaves 48] [--repeats 2]

Needs no GPU: jax's CUDA plugin compiles for one that is not there (``pip install 'jax_offload[aot]'``). Seconds of CPU
time, of all threads; compare rows of one run only, and only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from jax_offload._analysis.targets import compile_for, target_of
from tests.aot.cases import device_sharding, loss, parameters
from tests.aot.harness import H200

STORAGES: dict[str, Any] = {
    "float32": None,
    "bfloat16": "bfloat16",
    "float8_e4m3fn, nu float16": {"mu": "float8_e4m3fn", "nu": "float16"},
    "int8, nu uint8": {"mu": "int8", "nu": "uint8"},
}


def stages(storage: Any, leaves: int, width: int = 1024) -> tuple[float, float]:
    """Seconds for tracing and lowering, and for compiling."""
    sharding = device_sharding(H200)
    params = parameters(leaves, width, False, sharding)
    batch = jax.ShapeDtypeStruct((512, width), jnp.float32, sharding=sharding)
    tx = jo.offload(optax.adamw(1e-3), storage=storage)
    state = jo.abstract_state(tx, params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        return jo.update_params(tx, jax.grad(loss)(params, batch), state, params)

    out = jax.tree.map(lambda x: x.sharding, (params, state))
    jax.clear_caches()
    clock = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1), out_shardings=out).trace(params, state, batch)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    clock.append(time.process_time())
    compile_for(target_of(H200), module, 1, jo.compiler_options("cuda"))
    clock.append(time.process_time())
    return clock[1] - clock[0], clock[2] - clock[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    print("| stored | trace and lower, s | compile, s |\n|---|---:|---:|")
    for name, storage in STORAGES.items():
        trace, compiled = zip(*(stages(storage, args.leaves) for _ in range(args.repeats)), strict=True)
        print(f"| {name} | {statistics.median(trace):.2f} | {statistics.median(compiled):.1f} |", flush=True)
    print(f"\n{args.leaves} leaves, jax {jax.__version__}, optax {optax.__version__}")


if __name__ == "__main__":
    main()
