"""A small training run whose state is on disk, in a process of its own, which says how much it grows.

python -m tests.support.on_disk FOLDER WIDTH LAYERS
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jax_offload as jo
from tests.support.sizes import set_sizes
from tests.support.steps import apart, loss_apart, step_of

WITH_MASTERS = jo.with_master_params(optax.adamw(1e-2))  # of parameters in two bytes a state in twelve


def memory(what: str) -> int:
    """MiB of this process: ``VmRSS``, or the most since ``grown`` began, ``VmHWM``."""
    return int(re.findall(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[0]) // 1024


def grown(run: Callable[..., Any], *args: Any) -> Any:
    """What a function returns; prints by how much this process grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = memory("VmRSS")
    returned = jax.block_until_ready(run(*args))
    print("MiB", memory("VmHWM") - before, flush=True)
    return returned


def main(folder: Path, width: int, layers: int) -> None:
    """A state is made, trained, saved, and restored onto another disk."""
    files, other = jo.disk(folder / "disk"), jo.disk(folder / "other")
    tx, onto = (jo.offload(WITH_MASTERS, min_bytes=1024, disk=each) for each in (files, other))
    params, x = apart(layers, width, jnp.bfloat16), jnp.ones((4, width))
    state = grown(tx.init, params)
    params, state, _ = grown(jo.jit(step_of(tx, loss=loss_apart), donate_argnums=(0, 1)), params, state, x)
    with ocp.CheckpointManager(folder / "orbax") as manager:

        def save() -> None:
            manager.save(0, args=jo.save_args({"state": state}))
            manager.wait_until_finished()

        grown(save)
        files.close()
        grown(jo.restore, manager, {"state": jo.abstract_state(onto, params)})


if __name__ == "__main__":
    set_sizes(group=2**22)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
