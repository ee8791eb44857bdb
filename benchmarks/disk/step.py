"""A step whose pass takes longer than its files: with its state on disk, in host memory, and the pass alone, in turn.

    JAX_PLATFORMS=cpu python -m benchmarks.disk.step [--directory DIR] [--layers 12] [--pairs 7] [--toy] [--json FILE]

All are of one model. Its backward pass waits in every layer, in a callback that sleeps: a device that takes time and
none of the host's cores, which is what reads, writes and sums blocks. How long, is found first: ``--longer`` times a
step on files that does not wait. With files the pass is cut as beside an accelerator (a CPU's is not). A sample is some
steps one after the other until all is written; the order turns. Nothing is committed.

On a CPU the update itself takes the cores too, and there is no link: so it is one with little arithmetic, of momentum
alone. A CPU runs programs beside each other, so that groups are updated while the cut pass waits; in host memory the
update follows it: what is below 1 of host memory's time is that. No step can take less than its pass: beside that, what
files and update add shows as a whole. Two cores, 5 GiB of memory, 2 of disk; four minutes where nothing else runs.
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

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from benchmarks.disk.__main__ import in_turn, said, spread
from jax_offload._disk.disk import Disk

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
    """Steps of a model of ``layers`` square matrices, with the state in host memory or, given a disk, there; or without
    an update, which is their pass."""

    def __init__(self, layers: int, width: int, disk: Disk | None = None, *, updates: bool = True) -> None:
        self.disk, self.layers = disk, layers
        keys = {f"w{k:02}": jax.random.key(k) for k in range(layers)}
        params = {name: jax.random.normal(key, (width, width)) / width**0.5 for name, key in keys.items()}
        params = jax.device_put(params, jax.devices()[0])
        # whole leaves: a CPU runs a loop over chunks on one core
        tx = jo.offload(optax.sgd(1e-4, momentum=0.9), window=4 * layers * width**2, disk=disk)
        x = jnp.full((4, width), 0.1)

        def loss(params: Any, seconds: jax.Array) -> jax.Array:
            y = x
            for name in sorted(params):
                y = jnp.tanh(slow(y @ params[name], seconds))
            return (y**2).mean()

        def step(params: Any, state: Any, seconds: jax.Array) -> Any:
            return jo.update_params(tx, jax.grad(loss)(params, seconds), state, params)

        def only_pass(params: Any, gradients: Any, seconds: jax.Array) -> Any:
            return params, jax.grad(loss)(params, seconds)

        self.step = jo.jit(step, donate_argnums=(0, 1)) if updates else jax.jit(only_pass, donate_argnums=(0, 1))
        self.held: Any = (params, tx.init(params) if updates else jax.tree.map(jnp.zeros_like, params))

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
    """Seconds of steps in turn, and those with files by those of their neighbours."""
    with contextlib.closing(jo.disk(folder)) as disk:
        ways = {"host": Training(layers, width), "disk": Training(layers, width, disk)}
        ways |= {"pass": Training(layers, width, updates=False)}
        for each in ways.values():  # compiles; both slots have been written then
            each.seconds(2, 0.0)
        alone = {name: each.seconds(steps, 0.0) for name, each in ways.items()}
        waits = longer * alone["disk"]

        def timed(name: str) -> Timed:
            return lambda: ways[name].seconds(steps, waits)

        seconds = in_turn({name: timed(name) for name in ways}, pairs)
    ratios = {
        f"disk / {name}": spread([x / y for x, y in zip(seconds["disk"], seconds[name], strict=True)])
        for name in ("host", "pass")
    }
    return {"without waiting": alone, "waits": waits, "seconds": seconds} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096, help="a layer's state is 4 bytes times its square")
    parser.add_argument("--steps", type=int, default=3, help="of a sample")
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
        f"{options.layers} layers of {options.width} x {options.width}, momentum in float32, {options.steps} steps a "
        f"sample; {os.cpu_count()} cores of {platform.machine()}, {platform.system()} {platform.release()}, "
        f"jax {jax.__version__}"
    )
    median = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    print(f"{about}\nload {load[0][0]:.1f} before, {load[1][0]:.1f} after")
    print(", ".join(f"{name} {each:.3f}" for name, each in median.items()), f"s a step; it waits {found['waits']:.3f}")
    print(f"disk / host {said(found['disk / host'])}; disk / pass {said(found['disk / pass'])}")
    if options.json:
        options.json.write_text(json.dumps({"about": about, "load": load, **found}) + "\n")


if __name__ == "__main__":
    main()
