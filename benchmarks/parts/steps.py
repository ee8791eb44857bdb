"""Steps of a GPT, resident and offloaded: times, the allocator's peaks, and what the compiled program predicts."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from benchmarks.parts import gpt
from benchmarks.parts.recipe import usual_recipe
from examples import _data

ALONE = True  # the allocator's peak is a process's
TIMED = True
WARMUP, STEPS, TOY_STEPS = 3, 10, 2
MIB = 2**20
INT8 = {"mu": "int8", "nu": "uint8"}
JITTED, TURNED = "jo.jit", "jo.pipelined"


class System(NamedTuple):
    """How a step is offloaded.

    Attributes:
      offload: the options of ``jo.offload``; ``None``: the state stays on the device, or moves by the usual recipe.
      way: the function that runs the step.
      gradients: where they wait under ``jo.pipelined``.
      masters: whether parameters are bfloat16, with float32 masters in the state.
      recipe: whether the state moves by the usual recipe.
    """

    offload: dict[str, Any] | None = None
    way: str = "jax.jit"
    gradients: Any = "device"
    masters: bool = False
    recipe: bool = False


SYSTEMS = {
    "optax": System(),
    "jax_offload, jo.jit": System({}, JITTED),
    "usual recipe": System(recipe=True),
    "jax_offload": System({}),
    "jax_offload, jo.pipelined": System({}, TURNED),
    "jax_offload, jo.pipelined, gradients on the host": System({}, TURNED, "host"),
    "jax_offload, jo.pipelined, bfloat16 state": System({"storage": "bfloat16"}, TURNED),
    "jax_offload, bfloat16 state": System({"storage": "bfloat16"}),
    "jax_offload, int8 state": System({"storage": INT8}),
    "jax_offload, bfloat16 parameters": System({}, masters=True),
    "jax_offload, fraction 0.5": System({"fraction": 0.5}),
    "jax_offload, window 3200 MiB": System({"window": 3200 * MIB}),
}
SHAPES = {"1.3b": gpt.Shape(24, 2048, 16), "6.7b": gpt.Shape(32, 4096, 32)}
TOY = gpt.Shape(3, 96, 2, vocab=256, context=32)
SCANS = {"one scan": 1, "unrolled": 0, "6 scans": 6}
TOKENS = (16384, 8192, 32768, 2048, 65536)


class Case(NamedTuple):
    """A step; ``scans``: in how many groups blocks are stacked and scanned, 0 for an array per layer."""

    system: System
    shape: gpt.Shape
    batch: int
    scans: int
    clip: bool


def table(toy: bool) -> dict[str, Case]:
    """Return each case by its name, the most telling ones first."""
    models = {"toy": TOY} if toy else SHAPES
    found = {}
    for (model, shape), tokens, clip, scans, system in itertools.product(
        models.items(), [64] if toy else TOKENS, (False, True), SCANS, SYSTEMS
    ):
        if not shape.layers % (SCANS[scans] or 1):
            name = f"{model}, {scans}, {tokens} tokens{', clipped' * clip}; {system}"
            found[name] = Case(SYSTEMS[system], shape, tokens // shape.context, SCANS[scans], clip)
    return found


def cases(toy: bool) -> list[str]:
    return list(table(toy))


def optimizer(case: Case) -> optax.GradientTransformation:
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), tx) if case.clip else tx
    tx = jo.with_master_params(tx) if case.system.masters else tx
    if case.system.recipe:
        return usual_recipe(tx)
    return tx if case.system.offload is None else jo.offload(tx, **case.system.offload)


def training_step(tx: optax.GradientTransformation, loss: Callable[[Any, Any], jax.Array], *, masters: bool) -> Any:
    """(params, state, batch) -> (params, state, loss)."""

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if masters:  # these steps write the parameters themselves
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, value
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


class Program(NamedTuple):
    """A case's step.

    Attributes:
      init: () -> (params, state), on their places.
      jitted, args: what jax compiles, and shapes of its arguments.
      train: the step of ``jo.pipelined``, from which ``jitted`` comes; ``None`` under the other ways.
      state: its shapes.
    """

    init: Callable[[], Any]
    jitted: Any
    args: tuple[Any, ...]
    train: Any
    state: Any


def program(case: Case, sharding: jax.sharding.Sharding, dtype: Any, attention: str | None, *, gpu: bool) -> Program:
    tx, system = optimizer(case), case.system

    def init() -> Any:
        params = gpt.init(case.shape, case.scans)
        return jax.tree.map(lambda p: p.astype(dtype), params) if system.masters else params

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    params = place(jax.eval_shape(init))
    tokens = place(jax.ShapeDtypeStruct((case.batch, case.shape.context + 1), jnp.int32))
    args = params, jo.abstract_state(tx, params), tokens
    step = training_step(tx, partial(gpt.loss, case.shape, attention, dtype), masters=system.masters)
    shardings = jax.tree.map(lambda a: a.sharding, args[:2])

    def begin() -> Any:
        params = jax.jit(init, out_shardings=shardings[0])()
        return params, jax.jit(tx.init, out_shardings=shardings[1])(params)

    if system.way == TURNED:
        train = jo.pipelined(step, donate_argnames=("params", "state"), gradients=system.gradients)
        jitted, given, _ = train.turned(*args)
        return Program(begin, jitted, given, train, args[1])
    how: dict[str, Any] = {"donate_argnums": (0, 1), "out_shardings": (*shardings, sharding)}
    if system.way == JITTED:
        jitted = jo.jit(step, **how)
    else:  # jo.jit and jo.pipelined set their own options
        options = jo.compiler_options("cuda") if gpu and system.offload is not None else None
        jitted = jax.jit(step, **how, compiler_options=options)
    return Program(begin, jitted, args, None, args[1])


def fused_attention() -> str | None:
    """Return cuDNN's attention if it runs, which a small trial shows, because XLA's own keeps all scores."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    try:
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        jax.block_until_ready(jax.jit(jax.grad(lambda q: attend(q, q, q).astype(jnp.float32).sum()))(x))
    except Exception:  # whatever is missing, the benchmark goes on without it and says so
        return None
    return "cudnn"


def clocked(step: Callable[[int], jax.Array], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each timed step, and the numbers that all steps return.

    It enqueues a step before it waits for the one before: the time to start a step is no part of it, as in training.
    """
    clock, found = [], []
    pending = step(0)
    for i in range(1, warmup + steps + 1):
        following = step(i) if i < warmup + steps else None
        found.append(float(pending))
        clock.append(time.perf_counter())
        pending = following
    return np.diff(clock)[warmup - 1 :].tolist(), found


def peak(device: jax.Device) -> int | None:
    """Return the most bytes that the allocator has had in use; a CPU does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def nbytes(state: Any, *, host: bool) -> int:
    """Return the bytes of a state's leaves; ``host``: of those in host memory."""
    leaves = jax.tree.leaves(state)
    return sum(a.size * a.dtype.itemsize for a in leaves if not host or a.sharding.memory_kind == "pinned_host")


def predicted(seen: Any, state: Any) -> dict[str, Any]:
    """Return the figures of the compiled program."""
    moved, simulated = seen.loaded + seen.stored, seen.timeline
    return {
        "peak_bytes": seen.peak,
        "host_bytes": seen.host,
        "host_state_bytes": nbytes(state, host=True),
        "state_bytes": nbytes(state, host=False),
        "loaded_bytes": seen.loaded,
        "stored_bytes": seen.stored,
        "hidden": sum(t.nbytes * t.hidden for t in seen.transfers) / moved if moved else 0.0,
        "step_seconds": simulated and simulated.step,
        "exposed_seconds": simulated and simulated.exposed,
    }


def run(name: str, toy: bool) -> dict[str, Any]:
    """Train for some steps: seconds, losses, peaks, and the profiler's figures."""
    case, device = table(toy)[name], jax.devices()[0]
    gpu = device.platform in ("gpu", "cuda")
    attention = fused_attention() if gpu else None
    sharding = jax.sharding.SingleDeviceSharding(device)
    it = program(case, sharding, jnp.bfloat16 if gpu else jnp.float32, attention, gpu=gpu)
    with tempfile.TemporaryDirectory() as folder:
        if gpu:
            jax.config.update("jax_compilation_cache_dir", folder)  # inspected, run and profiled, it compiles once
        about = {
            "predicted": predicted(jo.inspect(it.jitted, *it.args), it.state),
            "device_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "attention": attention or "xla",
        }
        limit, needed = about["device_limit_bytes"], about["predicted"]["peak_bytes"]
        if limit is not None and needed > limit:
            return {**about, "left_out": f"needs {needed} bytes of {limit}"}
        carried = [it.init()]
        after_init = peak(device)
        data = _data.load()

        def batch(i: int) -> Any:
            tokens = _data.batch(data, i, case.batch, case.shape.context)
            return jax.device_put(tokens.astype(np.int32), sharding)

        def one_step(i: int) -> jax.Array:
            if it.train is None:
                *state, loss = it.jitted(*carried.pop(), batch(i))
                carried.append(state)
                return loss
            carry, aux = it.train(carried.pop(), batch(i))
            carried.append(carry)
            return aux.now

        seconds, losses = clocked(one_step, WARMUP, TOY_STEPS if toy else STEPS)
        found = {
            **about,
            "step_seconds": seconds,
            "median_step_seconds": statistics.median(seconds),
            "losses": losses,
            "device_peak_bytes": peak(device),
            "device_peak_bytes_after_init": after_init,
        }
        if not gpu:
            return found
        try:
            given = carried.pop()
            args = (given,) if it.train is not None else given
            profile = jo.profile(it.train or it.jitted, *args, batch(0), steps=2)
            return found | {"profile": profile.to_dict()}
        except Exception as error:  # the times measured without the profiler remain valid
            return found | {"profiler_error": f"{type(error).__name__}: {error}"[:200]}
