"""Measure updates on the host's cores and their memory: a driven step on a CPU, a one-pass loop, and a triad.

    JAX_PLATFORMS=cpu python -m benchmarks.on_cores [--parameters 67108864] [--repeats 15] [--json FILE]

The optimizer's update alone, donated: in loops of one pass (numba, the extra ``cores``), and AdamW by XLA's programs
too; in turn with a loop by hand, torch's fused AdamW, DeepSpeed's (each left out where it is missing), and
``a = b + 2 c`` over arrays as large. Medians of the runs, with the quartiles. Bytes: AdamW's one pass moves 28 a
parameter; a triad 12 for each element, and where a line is read before it is written 16.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from jax_offload._host import cores

OPTIMIZERS = {
    "AdamW": optax.adamw(1e-3),
    "Adam": optax.adam(1e-3),
    "SGD with momentum": optax.sgd(1e-3, momentum=0.9),
    "Lion": optax.lion(1e-4),
}
WIDTH, LEAVES = 4096, 16


def driven(inner: optax.GradientTransformation, n: int, *, loops: bool = True) -> Callable[[], None]:
    """Return an update of ``n`` parameters by ``update_on="host"``; without ``loops`` XLA's programs run it."""
    leaf = jnp.full((n // LEAVES // WIDTH, WIDTH), 0.1)
    params = jax.device_put({str(k): jnp.copy(leaf) for k in range(LEAVES)}, jax.devices()[0])
    tx = jo.offload(inner, update_on="host")
    state, grads = tx.init(params), jax.tree.map(lambda p: 0.5 * p, params)
    step = jo.jit(lambda p, s, g: jo.update_params(tx, g, s, p), donate_argnums=(0, 1))
    held: list[Any] = [params, state]

    def run() -> None:
        held[:] = step(*held, grads)
        jax.block_until_ready(held)

    with contextlib.nullcontext() if loops else mock.patch.object(cores, "has_numba", return_value=False):
        run()  # what runs it is chosen here
    return run


def rivals(n: int) -> dict[str, Callable[[], None]]:
    """Return torch's fused AdamW and DeepSpeed's, which compiles itself first, as far as they are installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    params = [torch.full((n // LEAVES // WIDTH, WIDTH), 0.1, requires_grad=True) for _ in range(LEAVES)]
    for p in params:
        p.grad = 0.5 * p.detach()
    found = {"AdamW, torch, fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step}
    with contextlib.suppress(ImportError):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["AdamW, DeepSpeed's CPUAdam"] = DeepSpeedCPUAdam(params, lr=1e-3, adamw_mode=True).step
    return found


def loops(n: int) -> dict[str, Callable[[], None]]:
    """Return numba's loops, which show what the machine can do; nothing if numba is missing."""
    try:
        import numba
    except ImportError:
        return {}
    f32 = np.float32

    @numba.njit(parallel=True)
    def adamw(m: Any, v: Any, p: Any, g: Any, c1: Any, c2: Any, lr: Any, decay: Any) -> None:
        for i in numba.prange(m.size):
            m[i] = f32(0.9) * m[i] + f32(0.1) * g[i]
            v[i] = f32(0.999) * v[i] + f32(0.001) * g[i] * g[i]
            p[i] -= lr * ((m[i] / c1) / (math.sqrt(v[i] / c2) + f32(1e-8)) + decay * p[i])

    @numba.njit(parallel=True)
    def triad(a: Any, b: Any, c: Any) -> None:
        for i in numba.prange(a.size):
            a[i] = b[i] + f32(2) * c[i]

    arrays = [np.full(n, 0.1, np.float32) for _ in range(4)]
    scalars = f32(0.5), f32(0.5), f32(1e-3), f32(1e-4)
    return {"AdamW, by hand": lambda: adamw(*arrays, *scalars), "triad": lambda: triad(*arrays[:3])}


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def timed(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Time each function in turn; the first two rounds compile and fill caches.

    Each runs once before it is timed, because the threads of the previous one, such as torch's, spin for a while.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(repeats + 2):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            run()
            if k > 1:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=2**26)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    n = args.parameters
    runs = {name: driven(tx, n) for name, tx in OPTIMIZERS.items()}
    runs["AdamW, XLA's programs"] = driven(OPTIMIZERS["AdamW"], n, loops=False)
    times = timed(runs | rivals(n) | loops(n), args.repeats)
    rows = []
    print("| | 1e9 elements/s | quartiles |\n|---|---:|---:|")
    for name, seconds in times.items():
        slow, middle, fast = (n / s / 1e9 for s in reversed(statistics.quantiles(seconds, n=4)))
        rows.append({"what": name, "rate": middle, "quartiles": [slow, fast], "seconds": seconds})
        print(f"| {name} | {middle:.2f} | {slow:.2f} to {fast:.2f} |")
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("jax", "numba", "torch", "deepspeed") if installed(name)
    )
    about = f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}, {versions}"
    print(f"\n{about}, {n} parameters")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "parameters": n, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
