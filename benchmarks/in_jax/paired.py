"""Whether the rewritten step is slower than the plain one, on this CPU, in runs that take turns.

    python -m benchmarks.in_jax.paired [--rounds 40] [--json FILE]

A round runs one step of each system, in another order each time, so that whatever else the machine does befalls all of
them; a ratio is of two steps of one round. On a CPU jax elides the copies: this says what the rewriting costs, the
gates, the loops, the rows, and nothing about the link.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from benchmarks.in_jax.finished import finished

LAYERS, WIDTH, TOKENS = 8, 512, 1024
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def parameters(stacked: bool) -> Any:
    weights = np.random.default_rng(0).standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / WIDTH**0.5
    params = {"w": weights} if stacked else {f"w{k}": w for k, w in enumerate(weights)}
    return jax.device_put(params, jax.devices()[0])


def loss(params: Any, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
    if "w" in params:
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0] ** 2).mean()
    for w in params.values():
        x = layer(x, w)
    return (x**2).mean()


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


class Plain:
    """A step in a loop, under ``jax.jit`` or ``jo.jit``; called, it runs once."""

    def __init__(self, jit: Callable[..., Any], tx: optax.GradientTransformation, stacked: bool) -> None:
        params = parameters(stacked)
        self.values, self.step = (params, tx.init(params)), jit(step_of(tx), donate_argnums=(0, 1))

    def __call__(self, x: jax.Array) -> None:
        *self.values, value = self.step(*self.values, x)
        jax.block_until_ready((self.values, value))


class Turned:
    """A step of ``jo.pipelined``."""

    def __init__(self, tx: optax.GradientTransformation, stacked: bool, gradients: Any) -> None:
        self.train = jo.pipelined(step_of(tx), donate_argnames=("params", "state"), gradients=gradients)
        self.tx, self.stacked, self.carry = tx, stacked, None

    def __call__(self, x: jax.Array) -> None:
        if self.carry is None:
            params = parameters(self.stacked)
            self.carry, _ = self.train((params, self.tx.init(params)), x)
        self.carry, aux = self.train(self.carry, x)
        jax.block_until_ready((self.carry, aux.now))


def systems(stacked: bool, clipped: bool) -> dict[str, Callable[[jax.Array], None]]:
    inner = CLIPPED if clipped else ADAMW
    tx = jo.offload(inner)
    found: dict[str, Callable[[jax.Array], None]] = {
        "resident": Plain(jax.jit, inner, stacked),
        "offload, jax.jit": Plain(jax.jit, tx, stacked),
        "offload, jo.jit": Plain(jo.jit, tx, stacked),
    }
    if clipped:
        found |= {
            "jo.pipelined": Turned(tx, stacked, "device"),
            "jo.pipelined, gradients on the host": Turned(tx, stacked, "host"),
        }
    return found


def rounds(all_: dict[str, Callable[[jax.Array], None]], n: int) -> list[dict[str, float]]:
    """Seconds of a step of each system, in turn; three rounds before count for nothing."""
    x = jax.device_put(np.random.default_rng(1).standard_normal((TOKENS, WIDTH), np.float32), jax.devices()[0])
    order, found = list(all_), list[dict[str, float]]()
    shuffled = random.Random(0)
    for _ in range(n + 3):
        shuffled.shuffle(order)
        times: dict[str, float] = {}
        for name in order:
            start = time.perf_counter()
            all_[name](x)
            times[name] = time.perf_counter() - start
        found.append({name: times[name] for name in all_})
    return found[3:]


def summary(found: Sequence[dict[str, float]], name: str, beside: str) -> dict[str, float]:
    """Of the ratios of two systems' steps: median, and a tenth below and above."""
    ratios = [times[name] / times[beside] for times in found]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {"median": statistics.median(ratios), "tenth": tenths[0], "nine_tenths": tenths[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| | step, ms | beside `jax.jit` | a tenth, nine tenths |\n|---|---:|---:|---:|")
    for stacked in True, False:
        for clipped in False, True:
            found = rounds(systems(stacked, clipped), args.rounds)
            model = f"{'scanned' if stacked else 'unrolled'}{', clipped' if clipped else ''}"
            for name in found[0]:
                one = summary(found, name, "offload, jax.jit")
                row = {"model": model, "system": name, "seconds": [times[name] for times in found], **one}
                spread = f"{one['tenth']:.2f} to {one['nine_tenths']:.2f}"
                step = 1e3 * statistics.median(row["seconds"])
                print(f"| {model}: {name} | {step:.0f} | {one['median']:.2f} | {spread} |", flush=True)
                rows.append(row)
    finished(f"{LAYERS} layers of {WIDTH}x{WIDTH}, {TOKENS} tokens, AdamW, float32", rows, args.json)


if __name__ == "__main__":
    main()
