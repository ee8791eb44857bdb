"""Step times and the allocator's peaks on rows of notes/results.md, beside what the compiled program predicts."""

from __future__ import annotations

import gzip
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_offload as jo
from benchmarks.harness.clock import clocked
from benchmarks.in_jax.recipe import usual_recipe
from benchmarks.in_jax.system import nbytes, peak, predicted, profiled
from tests.aot import model

ALONE = True  # the allocator's peak is a process's
TIMED = True
WARMUP, STEPS, TOY_STEPS = 3, 10, 2
TOY = (3, 128, 8)  # layers, width, batch: a layer's moment is just large enough to be offloaded
# The first as in the README's table; the second with the options that let the copies overlap.
OFFLOADED, OVERLAPPING, RESIDENT, RECIPE = "offloaded", "offloaded, overlapping", "resident", "usual recipe"
JITTED, TURNED = "jo.jit", "jo.pipelined"  # the whole step is seen; they bring options of their own
WAYS = (OFFLOADED, OVERLAPPING, JITTED, TURNED, RESIDENT, RECIPE)
ROWS = {name.replace("`", ""): row for name, *row in model.ROWS}


def cases(toy: bool) -> list[str]:
    """Ours of every row, then what it is compared with; not twice where rows differ in ours alone."""
    found, seen = [], set()
    for way in WAYS:
        for name, (stacked, inner, _) in ROWS.items():
            key = (way, name) if way not in (RESIDENT, RECIPE) else (way, stacked, id(inner))
            if key not in seen:
                found.append(f"{name}; {way}")
                seen.add(key)
    return found


def initial(params: Any) -> Any:
    """Normal numbers; made a layer at a time, lest this be the peak."""

    def layers(key: jax.Array, p: jax.ShapeDtypeStruct) -> jax.Array:
        *n, width, columns = p.shape
        if not n:
            return jax.random.normal(key, p.shape, p.dtype)
        return jax.lax.map(
            partial(jax.random.normal, shape=(width, columns), dtype=p.dtype), jax.random.split(key, n[0])
        )

    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(treedef, [layers(k, p) for k, p in zip(keys, leaves, strict=True)])


def prediction(compiled: Any) -> dict[str, Any]:
    m = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_alias", "host_temp")
    names = {"compiled_peak_bytes": "peak_bytes", "predicted_step_seconds": "step_seconds"}
    return {
        **{f"{name}_bytes": getattr(m, f"{name}_size_in_bytes") for name in fields},
        **{names.get(name, name): x for name, x in predicted(compiled).items()},
    }


def keep(text: str, folder: Path | None, name: str) -> str | None:
    """The scheduled program, for whoever predicts its time later, without the device."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") + ".hlo.txt.gz")
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    return file.name


def run(name: str, toy: bool, programs: Path | None = None) -> dict[str, Any]:
    row, way = name.split("; ")
    stacked, inner, ours = ROWS[row]
    tx = {RESIDENT: inner, RECIPE: usual_recipe(inner)}.get(way, ours)
    device = jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    layers, width, rows = TOY if toy else (model.N_LAYERS, model.WIDTH, model.BATCH)
    params = model.parameters(layers, width, stacked, sharding)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=sharding)
    state = jo.abstract_state(tx, params)
    update = model.step_of(tx, model.loss)

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        # All results of a program are there when it is done. This one is not donated to the next step, and so can be
        # waited for; it adds nothing to what is measured.
        return *update(params, state, batch), batch[0, 0]

    out = (*jax.tree.map(lambda x: x.sharding, (params, state)), sharding)
    train = jo.pipelined(step, donate_argnames=("params", "state"))
    if way == TURNED:
        jitted, given, _ = train.turned(params, state, batch)
    else:
        jit, given = jo.jit if way == JITTED else jax.jit, (params, state, batch)
        jitted = jit(step, donate_argnums=(0, 1), out_shardings=out)
    extra = jo.compiler_options("cuda") if on_gpu and way == OVERLAPPING else None
    compiled = jitted.lower(*given).compile(compiler_options=extra)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    about = {
        "predicted": prediction(compiled),
        "program": keep(compiled.as_text(), programs, name),
        "device": device.device_kind,
        "device_limit_bytes": limit,
        "state_bytes": nbytes(state, host=False),
        "host_state_bytes": nbytes(state, host=True),
    }
    if limit is not None and about["predicted"]["peak_bytes"] > limit:
        return {**about, "left_out": f"needs {about['predicted']['peak_bytes']} bytes of {limit}"}

    params = jax.jit(partial(initial, params), out_shardings=out[0])()
    state = jax.jit(tx.init, out_shardings=out[1])(params)
    x = jax.device_put(jnp.ones(batch.shape, batch.dtype), sharding)
    jax.block_until_ready((params, state, x))
    after_init = peak(device)

    carried: list[Any] = [(params, state)]
    del params, state  # they are donated

    def one_step(_: int) -> jax.Array:
        if way != TURNED:
            *given, done = compiled(*carried.pop(), x)
            carried.append(given)
            return done
        carry, aux = train(carried.pop(), x)
        carried.append(carry)
        return aux.now

    seconds, _ = clocked(one_step, WARMUP, TOY_STEPS if toy else STEPS)
    return {
        **about,
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds),
        "device_peak_bytes": peak(device),
        "device_peak_bytes_after_init": after_init,
        **(profiled(lambda: jax.block_until_ready([one_step(i) for i in range(2)]), 2) if on_gpu else {}),
    }
