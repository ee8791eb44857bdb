"""What a step's rewriting costs before its first run: tracing, lowering and compiling on a CPU, in turns.

    JAX_PLATFORMS=cpu python -m benchmarks.in_jax.rewriting [--repeats 5] [--json FILE]

The same offload under ``jax.jit`` and ``jo.jit``, of a GPT of 12 small layers. CPU seconds of this process, so that
other work on the machine counts for little; medians, and of the ratios of each turn.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from benchmarks.harness.cases import Shape
from benchmarks.in_jax import gpt
from benchmarks.in_jax.finished import finished
from benchmarks.in_jax.system import training_step

SHAPE = Shape(12, 64, 2, vocab=256, context=32)
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def seconds(jit: Callable[..., Any], tx: optax.GradientTransformation, params: Any) -> list[float]:
    """CPU seconds of each stage."""
    loss = functools.partial(gpt.loss, SHAPE, None, jnp.bfloat16)
    step = jit(training_step(tx, loss, masters=False), donate_argnums=(0, 1))
    tokens = jnp.zeros((2, SHAPE.context + 1), jnp.int32)
    state = tx.init(params)
    begin = time.process_time()
    lowered = step.lower(params, state, tokens)
    lower = time.process_time()
    lowered.compile()
    return [lower - begin, time.process_time() - lower]


def in_turn(scans: int, inner: optax.GradientTransformation, repeats: int) -> list[dict[str, list[float]]]:
    """Of each turn, the stages of each; the first turn fills jax's caches and counts for nothing."""
    params = jax.device_put(gpt.init(SHAPE, scans), jax.devices()[0])
    jits = {"jax.jit": jax.jit, "jo.jit": jo.jit}
    turns = []
    for k in range(repeats + 1):
        order = list(jits) if k % 2 else list(jits)[::-1]
        turns.append({name: seconds(jits[name], jo.offload(inner, min_bytes=0), params) for name in order})
    return turns[1:]


def row(what: str, turns: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians of the stages' sums, and of the ratios of those, and of tracing and lowering alone."""
    ratio = statistics.median(sum(turn["jo.jit"]) / sum(turn["jax.jit"]) for turn in turns)
    alone = statistics.median(turn["jo.jit"][0] / turn["jax.jit"][0] for turn in turns)
    both = {name: statistics.median(sum(turn[name]) for turn in turns) for name in ("jax.jit", "jo.jit")}
    return {"what": what, "seconds": both, "ratio": ratio, "trace and lower": alone, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| | `jax.jit`, s | `jo.jit`, s | ratio | trace and lower alone |\n|---|---:|---:|---:|---:|")
    for scans, name in (1, "scanned"), (0, "unrolled"):
        for inner, clipped in (ADAMW, ""), (CLIPPED, ", clipped"):
            one = row(name + clipped, in_turn(scans, inner, args.repeats))
            times = " | ".join(f"{s:.2f}" for s in one["seconds"].values())
            print(f"| {one['what']} | {times} | {one['ratio']:.2f} | {one['trace and lower']:.2f} |", flush=True)
            rows.append(one)
    finished(f"a GPT of {SHAPE.layers} layers of {SHAPE.width}", rows, args.json)


if __name__ == "__main__":
    main()
