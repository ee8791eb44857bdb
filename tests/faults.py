"""Kills a training job again and again, in the middle of saves and of steps, and compares what it ends with.

    python -m tests.faults [--kills 60] [--steps 1500] [--json benchmarks/results/faults.json]

The job trains with its optimizer state in host memory, donates, and saves asynchronously every few steps. It is killed
with SIGKILL at random times and started again until it is done. Parameters and state must then equal, bit for bit,
those of a run that nobody disturbed.

What a kill hit is told by what it left behind: a step that began and did not end (a byte in a file that the job maps
into its memory), and a save that did not end (orbax's temporary folder, which a rename completes).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

SAVE_EVERY = 4
PAUSE = 0.01  # seconds between steps, so that no machine is done before it was killed often enough
WIDTH = 192
LOADED, IN_STEP, STEP = 0, 1, slice(8, 16)  # bytes of the job's marks


def job(folder: Path, steps: int, slow: float) -> None:
    """One life of the job: from the last complete checkpoint, if there is one, to the last step.

    Args:
      folder: of the checkpoints, the marks, the log and the result.
      steps: of the whole training.
      slow: seconds that each save waits before it reads what it writes, and again before it is complete.
    """
    import asyncio
    from functools import partial

    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.serialization import serialization

    import jax_offload as jo

    write = serialization.async_serialize_from_host

    async def slowly(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(slow)
        await write(*args, **kwargs)
        await asyncio.sleep(slow)

    serialization.async_serialize_from_host = slowly
    tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), min_bytes=0)

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        return {"layers": jax.random.normal(keys[0], (4, WIDTH, WIDTH)) / WIDTH**0.5, "scale": jnp.ones(WIDTH)}

    def loss(params: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, batch * params["scale"], params["layers"])
        return jnp.mean((x - jnp.sin(batch)) ** 2)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(params: Any, state: Any, i: Any) -> Any:
        batch = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (2048, WIDTH))
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), jax.eval_shape(init))
    with open(folder / "marks", "r+b") as file:
        marks = mmap.mmap(file.fileno(), 16)  # pages of the kernel: they outlive the process
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        start = manager.latest_step() or 0
        if start:
            tree = jo.restore(manager, {"params": shapes, "state": jo.abstract_state(tx, shapes)})
            params, state = tree["params"], tree["state"]
        else:
            params = jax.jit(init, out_shardings=on_device)()
            at = jax.tree.map(lambda x: x.sharding, jo.abstract_state(tx, shapes))
            state = jax.jit(tx.init, out_shardings=at)(params)
        with open(folder / "log", "a") as log:
            log.write(f"{start}\n")
        for i in range(start, steps):
            marks[STEP] = i.to_bytes(8, "little")
            marks[IN_STEP] = 1
            params, state = jax.block_until_ready(train(params, state, i))
            marks[IN_STEP] = 0
            marks[LOADED] = 1
            time.sleep(PAUSE)
            if (i + 1) % SAVE_EVERY == 0 and i + 1 < steps:
                manager.save(i + 1, args=jo.save_args({"params": params, "state": state}))
        manager.wait_until_finished()
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim]
    assert set(kinds) == {"pinned_host"}, kinds
    leaves = [np.asarray(x) for x in jax.tree.leaves((params, state))]
    np.savez(folder / "result.tmp.npz", *leaves)
    os.rename(folder / "result.tmp.npz", folder / "result.npz")


def start(folder: Path, steps: int, slow: float) -> subprocess.Popen[bytes]:
    """A new life of the job; its marks are blank until it has made a step."""
    folder.mkdir(exist_ok=True)
    (folder / "marks").write_bytes(bytes(16))
    env = os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    env["XLA_FLAGS"] = ""  # one device
    command = [sys.executable, "-m", "tests.faults", "--job", str(folder), "--steps", str(steps), "--slow", str(slow)]
    with open(folder / "errors", "ab") as errors:
        return subprocess.Popen(command, env=env, stderr=errors, cwd=Path(__file__).parent.parent)


def complete(folder: Path) -> list[int]:
    """The steps of which there are complete checkpoints."""
    return sorted(int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit())


def checked(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.returncode:
        raise RuntimeError(f"the job failed by itself:\n{(folder / 'errors').read_text()[-3000:]}")


def killed(folder: Path, steps: int, slow: float, wait: float) -> dict[str, Any] | None:
    """What a kill hit ``wait`` seconds after the first step of a life; ``None`` if the job was done before."""
    process = start(folder, steps, slow)
    try:
        while process.poll() is None and not (folder / "marks").read_bytes()[LOADED]:
            time.sleep(0.01)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        if process.poll() is None:
            process.kill()
    if process.returncode != -signal.SIGKILL:
        checked(process, folder)
        return None
    marks = (folder / "marks").read_bytes()
    return {
        "step": bool(marks[IN_STEP]),
        "save": any("tmp" in p.name for p in (folder / "checkpoints").glob("*")),
        "at": int.from_bytes(marks[STEP], "little"),
        "complete": complete(folder),
    }


def run(
    folder: Path, kills: int, steps: int, slow: float = 0.05, longest: float = 1.0, seed: int = 0
) -> dict[str, Any]:
    """Trains undisturbed and killed ``kills`` times, and compares.

    Args:
      folder: for all that the runs write.
      kills: how often.
      steps: of the whole training; enough for all kills.
      slow: seconds by which each save is prolonged, twice.
      longest: seconds after its first step by which a life is over.
      seed: of the times of the kills.

    Returns:
      How many kills hit what, how many steps they cost, and whether the run ended alike.

    Raises:
      RuntimeError: the job failed by itself; it was done before it was killed often enough; or it did not go on from
        the last complete checkpoint.
    """
    alone, disturbed = folder / "undisturbed", folder / "killed"
    process = start(alone, steps, 0.0)
    process.wait()
    checked(process, alone)
    rng, hits, began = random.Random(seed), [], [0]
    while len(hits) < kills:
        hit = killed(disturbed, steps, slow, rng.uniform(0.0, longest))
        if hit is None:
            raise RuntimeError(f"the job was done after {len(hits)} kills: more --steps")
        hits.append(hit)
        began.append(max(hit["complete"], default=0))
    process = start(disturbed, steps, slow)
    process.wait()
    checked(process, disturbed)
    resumed = [int(x) for x in (disturbed / "log").read_text().split()]
    if resumed != began:
        raise RuntimeError(f"did not go on from the last complete checkpoint: {resumed} instead of {began}")
    ends = [np.load(x / "result.npz") for x in (alone, disturbed)]
    equal = ends[0].files == ends[1].files and all(ends[0][k].tobytes() == ends[1][k].tobytes() for k in ends[0].files)
    names = {(1, 0): "in a step", (0, 1): "in a save", (1, 1): "in a step and a save", (0, 0): "in neither"}
    return {
        "kills": len(hits),
        "hit": dict(Counter(names[hit["step"], hit["save"]] for hit in hits)),
        "steps": steps,
        "steps done twice": sum(hit["at"] + 1 - max(hit["complete"], default=0) for hit in hits),
        "leaves compared": len(ends[0].files),
        "bitwise equal to the undisturbed run": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--slow", type=float, default=0.05, help="seconds by which each save is prolonged, twice")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job, args.steps, args.slow)
        return
    import jax
    import optax
    import orbax.checkpoint as ocp

    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args.kills, args.steps, args.slow)
    machine = f"{os.cpu_count()} cores of {platform.processor() or platform.machine()}"
    versions = f"jax {jax.__version__}, optax {optax.__version__}, orbax-checkpoint {ocp.__version__}"
    result |= {
        "seconds": round(time.time() - began),
        "command": f"python -m tests.faults --kills {args.kills} --steps {args.steps} --slow {args.slow}",
        "about": f"{machine}, Python {platform.python_version()}, {versions}",
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["bitwise equal to the undisturbed run"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
