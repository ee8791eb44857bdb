"""What the machinery itself costs, without an accelerator: tracing, lowering, compiling, and a step on the CPU.

    python benchmarks/machinery.py [--leaves 100 400] [--json benchmarks/results/machinery.json]

Plain optax and offloaded, in turn, in one process; medians, and ratios of neighbouring runs. On a CPU jax elides the
copies, so the step time is that of the program that is left: it says what slicing costs, nothing about the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def parameters(n: int, width: int) -> Any:
    """``n`` matrices of five different shapes."""
    params = {f"layers_{i}": jnp.ones((width, width + 8 * (i % 5))) for i in range(n)}
    return jax.device_put(params, jax.devices()[0])


def stages(tx: optax.GradientTransformation, params: Any) -> dict[str, float]:
    """Seconds of CPU time for each stage, in a step whose gradients cost next to nothing."""
    state = tx.init(params)

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    clock = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state)
    clock.append(time.process_time())
    lowered = traced.lower()
    clock.append(time.process_time())
    lowered.compile()
    clock.append(time.process_time())
    trace, lower, compile = (b - a for a, b in itertools.pairwise(clock))
    return {"trace and lower": trace + lower, "compile": compile}


class Step:
    """A compiled step of a small network, and its state."""

    def __init__(self, tx: optax.GradientTransformation, params: Any, batch: Any) -> None:
        def loss(params: Any) -> Any:
            x = batch
            for w in params.values():
                x = jnp.tanh(x @ w)[:, : batch.shape[1]]
            return (x**2).mean()

        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        self.values = jax.tree.map(jnp.copy, params), tx.init(params)
        self.step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self) -> float:
        start = time.perf_counter()
        self.values = jax.block_until_ready(self.step(*self.values))
        return time.perf_counter() - start


def compare(pairs: list[Any]) -> dict[str, float]:
    plain, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"plain": plain, "ours": ours, "ratio": statistics.median(b / a for a, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    offloaded = jo.offload(ADAMW, min_bytes=0)
    rows: list[dict[str, Any]] = []
    for n in args.leaves:
        params = parameters(n, 64)
        stages(ADAMW, params), stages(offloaded, params)  # jax's own caches
        both = [(stages(ADAMW, params), stages(offloaded, params)) for _ in range(args.repeats)]
        for stage in both[0][0]:
            rows.append({"what": f"{stage}, {n} leaves, s", **compare([(a[stage], b[stage]) for a, b in both])})
    params, batch = parameters(12, 768), jnp.ones((512, 768))
    steps = [Step(tx, params, batch) for tx in (ADAMW, offloaded)]
    times = [[step() for step in steps] for _ in range(args.steps + 3)][3:]
    rows.append({"what": "step on this CPU, 12 leaves of 768×768, s", **compare(times)})
    print("| | plain optax | offloaded | ratio |\n|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row['what']} | {row['plain']:.3f} | {row['ours']:.3f} | {row['ratio']:.2f} |")
    machine = f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}"
    about = f"{machine}, jax {jax.__version__}, optax {optax.__version__}"
    print(f"\n{about}")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
