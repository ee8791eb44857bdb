"""Reports of the package on a device: ``verify``, ``profile``, ``placement``, ``inspect``, the chip, the doctor."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from tests.aot import model
from tests.support.steps import step_of

ALONE, TIMED = False, True  # ``profile`` and the chip measure
SIZE, TOY = (8, 4096, 8192), (3, 128, 8)  # layers, width, batch


def cases(toy: bool) -> list[str]:
    return ["doctor", "chip", *(f"{what}; {jit}" for jit in ("jo.jit", "jax.jit") for what in REPORTS)]


def placement(step: Any, args: Any, tx: Any) -> Any:
    return jo.placement(tx, args[0])


def inspect(step: Any, args: Any, tx: Any) -> Any:
    return jo.inspect(step, *args)


def verify(step: Any, args: Any, tx: Any) -> Any:
    return jo.verify(step, *args)


def profile(step: Any, args: Any, tx: Any) -> Any:
    return jo.profile(step, *args)


REPORTS = {"placement": placement, "inspect": inspect, "verify": verify, "profile": profile}


def run(name: str, toy: bool) -> dict[str, Any]:
    """Return the report as text; its reader decides whether something is wrong."""
    if name == "doctor":
        done = subprocess.run([sys.executable, "-m", "jax_offload", "doctor"], capture_output=True, text=True)
        return {"text": done.stdout + done.stderr[-2000:], "code": done.returncode}
    if name == "chip":
        return {"text": repr(jo.chip.measured())}
    what, way = name.split("; ")
    layers, width, rows = TOY if toy else SIZE
    tx = jo.offload(optax.adamw(1e-3))
    params = {"w": jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5}
    step = (jo.jit if way == "jo.jit" else jax.jit)(step_of(tx, loss=model.loss), donate_argnums=(0, 1))
    x = jnp.ones((rows, width), jnp.float32)
    return {"text": str(REPORTS[what](step, (params, tx.init(params), x), tx))}
