"""A step whose pass takes longer than its files, the state on disk beside the same state in host memory, in turn.

    JAX_PLATFORMS=cpu python -m benchmarks.disk.step [--directory DIR] [--layers 24] [--pairs 7] [--toy] [--json FILE]

Both are ``jo.jit`` of one step. Its backward pass waits in every layer, in a callback that sleeps: a device that takes
time and none of the host's cores, which is what reads, writes and sums blocks. How long, is found first: ``--longer``
times a step on files that does not wait. With files the pass is cut as beside an accelerator (a CPU's is
not). A sample is some steps one after the other until all is written; the order turns. Nothing is committed.

On a CPU the update itself takes the cores too, in both, and there is no link. A CPU runs programs beside each other, so
that groups are updated while the cut pass waits; in host memory the update follows it: what is below 1 is that. So
there is a second ratio, to the time that the pass waits, which no step can fall below: all else shows in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from benchmarks.disk.__main__ import in_turn, said, spread
from jax_offload._drive import run
from jax_offload._files.files import Disk

Timed = Callable[[], float]


def _sleep(seconds: Any) -> Any:
    time.sleep(float(seconds))
    return np.float32(0)


@jax.custom_vjp
def slow(x: jax.Array, seconds: jax.Array) -> jax.Array:
    """The identity, whose derivative takes so long."""
    return x


def _backward(seconds: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    # of what it is given, so that it begins where the layer's gradient does
    waited = jax.pure_callback(_sleep, jax.ShapeDtypeStruct((), jnp.float32), seconds + 0 * g[0, 0])
    return g + waited, None


slow.defvjp(lambda x, seconds: (x, seconds), _backward)


class Training:
    """Steps of a model of ``layers`` square matrices, with the state in host memory or, given a disk, there."""

    def __init__(self, layers: int, width: int, disk: Disk | None) -> None:
        self.disk, self.layers = disk, layers
        keys = {f"w{k:02}": jax.random.key(k) for k in range(layers)}
        params = {name: jax.random.normal(key, (width, width)) / width**0.5 for name, key in keys.items()}
        params = jax.device_put(params, jax.devices()[0])
        # whole leaves: a CPU runs a loop over chunks on one core
        tx = jo.offload(optax.adamw(1e-4), window=8 * layers * width**2, disk=disk)
        x = jnp.full((4, width), 0.1)

        def loss(params: Any, seconds: jax.Array) -> jax.Array:
            y = x
            for name in sorted(params):
                y = jnp.tanh(slow(y @ params[name], seconds))
            return (y**2).mean()

        def step(params: Any, state: Any, seconds: jax.Array) -> Any:
            return jo.update_params(tx, jax.grad(loss)(params, seconds), state, params)

        self.step = jo.jit(step, donate_argnums=(0, 1))
        self.held: Any = (params, tx.init(params))

    def seconds(self, steps: int, of_a_pass: float) -> float:
        """Of a step, on average, until all is written."""
        each = jnp.float32(of_a_pass / self.layers)
        begin = time.perf_counter()
        for _ in range(steps):
            self.held = self.step(*self.held, each)
        jax.block_until_ready(self.held)
        if self.disk is not None:
            self.disk.wait()
        return (time.perf_counter() - begin) / steps


def measured(folder: Path, layers: int, width: int, steps: int, pairs: int, longer: float) -> dict[str, Any]:
    """Seconds of steps in turn, of each pair the disk's by host memory's, and by those of the pass."""
    with mock.patch.object(run, "on_accelerators", return_value=True), contextlib.closing(jo.disk(folder)) as disk:
        both = {"host": Training(layers, width, None), "disk": Training(layers, width, disk)}
        for each in both.values():  # compiles; both slots have been written then
            each.seconds(2, 0.0)
        alone = {name: each.seconds(steps, 0.0) for name, each in both.items()}
        of_a_pass = longer * alone["disk"]

        def timed(name: str) -> Timed:
            return lambda: both[name].seconds(steps, of_a_pass)

        seconds = in_turn({name: timed(name) for name in both}, pairs)
    ratios = [x / y for x, y in zip(seconds["disk"], seconds["host"], strict=True)]
    by_pass = [x / of_a_pass for x in seconds["disk"]]
    found = {"disk / host": spread(ratios), "disk / pass": spread(by_pass)}
    return {"without waiting": alone, "pass": of_a_pass, "seconds": seconds, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048, help="a layer's state is 8 bytes times its square")
    parser.add_argument("--steps", type=int, default=4, help="of a sample")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--longer", type=float, default=2.0)
    parser.add_argument("--toy", action="store_true", help="small, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.toy:
        options.layers, options.width, options.steps, options.pairs = 4, 512, 2, 2
    load, folder = [os.getloadavg()], Path(tempfile.mkdtemp(dir=options.directory))
    try:
        found = measured(folder / "state", options.layers, options.width, options.steps, options.pairs, options.longer)
    finally:
        shutil.rmtree(folder)
    load.append(os.getloadavg())
    about = (
        f"{options.layers} layers of {options.width} x {options.width}, AdamW in float32, {options.steps} steps a "
        f"sample; {os.cpu_count()} cores of {platform.machine()}, {platform.system()} {platform.release()}, "
        f"jax {jax.__version__}"
    )
    median = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    print(f"{about}\nload {load[0][0]:.1f} before, {load[1][0]:.1f} after")
    print(f"host {median['host']:.3f} s a step, disk {median['disk']:.3f}, of which the pass waits {found['pass']:.3f}")
    print(f"disk / host {said(found['disk / host'])}; disk / pass {said(found['disk / pass'])}")
    if options.json:
        options.json.write_text(json.dumps({"about": about, "load": load, **found}) + "\n")


if __name__ == "__main__":
    main()
