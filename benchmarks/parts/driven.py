"""Steps that are driven from Python, on the host's cores and with files: step times, and losses beside plain optax."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo
from benchmarks.parts import where
from benchmarks.parts.steps import clocked
from benchmarks.parts.values import LEAF, PRECISION, judged, relative
from tests.support.trees import is_on_disk

ALONE = True  # another process's pinned memory would change how fast these are
TIMED = True
WARMUP, STEPS, TOY_STEPS = 3, 10, 2
SIZE, TOY = (8, 4096, 8192), (3, 128, 8)  # layers, width, batch
ADAMW = partial(optax.adamw, 1e-4)
OPTIMIZERS = {"AdamW": ADAMW, "clip, AdamW": lambda: optax.chain(optax.clip_by_global_norm(1.0), ADAMW())}
DEVICE, DISK, LAYERS = "device", "disk", "layers"
STACKED = "host, stacked"  # the layers in one array, whose rows come down and go up in groups
# Where the update runs: all of it on the cores, a share of it, on the device from files; on the device, beside these.
WAYS: dict[str, Any] = {"host": "host", "host, 0.3": 0.3, STACKED: "host", DISK: None, DEVICE: None}


def cases(toy: bool) -> list[str]:
    return [f"{name}; {way}" for way in WAYS for name in OPTIMIZERS]


def loss(params: Any, x: jax.Array) -> jax.Array:
    if LAYERS in params:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[LAYERS])
    else:
        for w in params.values():
            x = jnp.tanh(x @ w)
    return (x**2).mean()


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, value

    return step


def first_of(size: tuple[int, int, int], stacked: bool) -> tuple[Any, jax.Array]:
    """Return the first parameters, as a matrix per layer or as one array, and a batch."""
    layers, width, rows = size
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    shapes = {f"layer_{k:02}": jax.ShapeDtypeStruct((width, width), jnp.float32) for k in range(layers)}
    shapes = {LAYERS: jax.ShapeDtypeStruct((layers, width, width), jnp.float32)} if stacked else shapes
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    params = {name: jax.random.normal(keys[name], x.shape) / width**0.5 for name, x in shapes.items()}
    return jax.device_put((params, jax.random.normal(jax.random.key(1), (rows, width))), there)


def kinds(state: Any) -> dict[str, str]:
    """Map each path to a memory kind, or to the disk."""
    flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_on_disk)[0]
    files = {jax.tree_util.keystr(path): DISK for path, x in flat if is_on_disk(x)}
    return files | where.kinds([x for _, x in flat if not is_on_disk(x)])


def places(state: Any) -> list[list[int]]:
    """Return the addresses of the leaves in host memory."""
    leaves = [x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if isinstance(x, jax.Array)]
    return [where.addresses(x) for x in leaves if x.sharding.memory_kind == "pinned_host"]


def train(tx: Any, jit: Any, toy: bool, stacked: bool) -> dict[str, Any]:
    """Donated steps: losses, seconds, and where the state ends up."""
    params, x = first_of(TOY if toy else SIZE, stacked)
    carried, losses = [params, tx.init(params)], list[jax.Array]()
    step = jit(step_of(tx), donate_argnums=(0, 1))
    del params
    began = places(carried[1])

    def one_step(_: int) -> jax.Array:
        *carried[:], value = step(*carried, x)
        losses.append(value)
        return value

    with jax.default_matmul_precision(PRECISION):
        one_step(0)
        stayed = sum(a == b for a, b in zip(places(carried[1]), began, strict=True))
        seconds, _ = clocked(one_step, WARMUP, TOY_STEPS if toy else STEPS)
    return {
        "losses": [float(x) for x in losses],
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds),
        "kinds": kinds(carried[1]),
        "stayed": f"{stayed} of {len(began)}",
    }


def run(name: str, toy: bool) -> dict[str, Any]:
    optimizer, way = name.split("; ")
    inner = OPTIMIZERS[optimizer]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        disk = jo.disk(folder) if way == DISK else None
        on = {} if WAYS[way] is None else {"update_on": WAYS[way]}
        ours = train(jo.offload(inner, disk=disk, **on), jo.jit, toy, way == STACKED)
        if disk is not None:
            disk.close()
    theirs = train(inner, jax.jit, toy, way == STACKED)
    if not {"pinned_host", DISK} & {*ours["kinds"].values()}:
        raise RuntimeError("nothing was offloaded")
    losses = relative(ours["losses"], theirs["losses"])
    return {
        "wrong": judged({}, losses, [], LEAF),
        "losses_apart": losses,
        "memory_kinds": ours["kinds"],
        "leaves_that_stayed_in_their_memory": ours["stayed"],
        "step_seconds": ours["step_seconds"],
        "median_step_seconds": ours["median_step_seconds"],
        "resident_median_step_seconds": theirs["median_step_seconds"],
    }
