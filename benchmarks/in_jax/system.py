"""The worker of the JAX systems: runs one case in this process and prints a line of JSON.

python -m benchmarks.in_jax.system "$CASE"
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.cases import ADAMW, Case
from benchmarks.harness.clock import clocked
from benchmarks.harness.machine import peak_rss, report, take_the_device

if __name__ == "__main__":
    take_the_device()

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_offload as jo
from benchmarks.in_jax import gpt
from benchmarks.in_jax.recipe import usual_recipe
from examples import _data
from jax_offload._analysis.profiled import measured, segments_of


def optimizer(case: Case) -> optax.GradientTransformation:
    options = {k: v for k, v in case.options.items() if k not in ("whole", "gradients")}
    tx = optax.adamw(**ADAMW)
    if case.clip:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    if options.pop("masters", False):
        tx = jo.with_master_params(tx)
    if options.pop("recipe", False):
        return usual_recipe(tx)
    return jo.offload(tx, **options) if options.pop("offload", False) else tx


def training_step(tx: optax.GradientTransformation, loss: Callable[[Any, Any], jax.Array], *, masters: bool) -> Any:
    """(params, state, batch) -> (params, state, loss)."""

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if masters:  # they write the parameters themselves
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, value
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


class Program(NamedTuple):
    """A training step of a case, and what it takes.

    Attributes:
      params, tokens: shapes, with shardings.
      init: () -> params.
      step: (params, state, tokens) -> (params, state, loss); the first two are donated.
      shardings: of the step's results.
    """

    tx: optax.GradientTransformation
    params: Any
    tokens: jax.ShapeDtypeStruct
    init: Callable[[], Any]
    step: Callable[[Any, Any, Any], Any]
    shardings: Any

    @property
    def state(self) -> Any:
        return jo.abstract_state(self.tx, self.params)


def program(case: Case, sharding: jax.sharding.Sharding, dtype: Any, attention: str | None) -> Program:
    tx = optimizer(case)

    def init() -> Any:
        params = gpt.init(case.shape, case.scans)
        return jax.tree.map(lambda p: p.astype(dtype), params) if case.options.get("masters") else params

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    params = place(jax.eval_shape(init))
    tokens = place(jax.ShapeDtypeStruct((case.batch, case.shape.context + 1), jnp.int32))
    loss = partial(gpt.loss, case.shape, attention, dtype)

    step = training_step(tx, loss, masters=case.options.get("masters", False))
    shardings = jax.tree.map(lambda a: a.sharding, (params, jo.abstract_state(tx, params))), sharding
    return Program(tx, params, tokens, init, step, (*shardings[0], sharding))


class Loop(NamedTuple):
    """How a case's step is run, again and again.

    Attributes:
      jitted, args: what jax compiles, of which arguments.
      stepper: of that compiled, parameters, state and batches, what runs the step of a number and returns its loss.
    """

    jitted: Any
    args: tuple[Any, ...]
    stepper: Callable[[Any, Any, Any, Callable[[int], jax.Array]], Callable[[int], jax.Array]]


def loop_of(it: Program, case: Case) -> Loop:
    """Under ``jax.jit``, or as ``case.options["whole"]`` says: ``"jit"`` (``jo.jit``) or ``"pipelined"``."""
    types = it.params, it.state, it.tokens
    if case.options.get("whole") == "pipelined":
        gradients = case.options.get("gradients", "device")
        train = jo.pipelined(it.step, donate_argnames=("params", "state"), gradients=gradients)
        turned, args, _ = train.turned(*types)

        def turned_stepper(_: Any, params: Any, state: Any, batch: Any) -> Callable[[int], jax.Array]:
            carried: list[Any] = [(params, state)]

            def one_step(i: int) -> jax.Array:
                carry, aux = train(carried.pop(), batch(i))
                carried.append(carry)
                return aux.now

            return one_step

        return Loop(turned, args, turned_stepper)

    def stepper(compiled: Any, params: Any, state: Any, batch: Any) -> Callable[[int], jax.Array]:
        carried = [params, state]

        def one_step(i: int) -> jax.Array:
            *carried[:], loss = compiled(*carried, batch(i))
            return loss

        return one_step

    jit = jo.jit if case.options.get("whole") == "jit" else jax.jit
    return Loop(jit(it.step, donate_argnums=(0, 1), out_shardings=it.shardings), types, stepper)


def fused_attention() -> str | None:
    """cuDNN's attention where it runs: XLA's own keeps all scores. Tried on something small."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    try:
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        jax.block_until_ready(jax.jit(jax.grad(lambda q: attend(q, q, q).astype(jnp.float32).sum()))(x))
    except Exception:  # whatever it lacks, the benchmark can do without and says so
        return None
    return "cudnn"


def run(case: Case) -> dict[str, Any]:
    """Trains for some steps. Returns seconds and losses of each, and peaks."""
    device = jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")
    attention = fused_attention() if on_gpu else None
    sharding = jax.sharding.SingleDeviceSharding(device)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    it = program(case, sharding, dtype, attention)

    began = time.perf_counter()
    # a step that is seen whole brings its own
    plain = on_gpu and case.options.get("offload") and "whole" not in case.options
    options = jo.compiler_options("cuda") if plain else None
    looped = loop_of(it, case)
    compiled = looped.jitted.lower(*looped.args).compile(compiler_options=options)
    compile_seconds = time.perf_counter() - began

    params = jax.jit(it.init, out_shardings=it.shardings[0])()
    state = jax.jit(it.tx.init, out_shardings=it.shardings[1])(params)
    after_init = peak(device)
    data = _data.load()

    def batch(i: int) -> Any:
        tokens = _data.batch(data, i, case.batch, case.shape.context)
        return jax.device_put(tokens.astype(np.int32), sharding)

    one_step = looped.stepper(compiled, params, state, batch)
    del params, state  # they are donated

    seconds, losses = clocked(one_step, case.warmup, case.steps)
    peak_bytes = peak(device)

    def two_more_steps() -> None:
        jax.block_until_ready([one_step(i) for i in range(2)])

    return {
        "step_seconds": seconds,
        "losses": losses,
        "device_peak_bytes": peak_bytes,
        "device_peak_bytes_after_init": after_init,
        "device_limit_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        **predicted(compiled),
        **(profiled(two_more_steps, 2) if on_gpu else {}),
        "state_bytes": nbytes(it.state, host=False),
        "host_state_bytes": nbytes(it.state, host=True),
        "host_peak_rss_bytes": peak_rss(),
        "compile_seconds": compile_seconds,
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "notes": [f"attention: {attention or 'xla'}"],
    }


def profiled(run: Callable[[], None], steps: int) -> dict[str, Any]:
    """What the link did meanwhile, as far as the profiler works here."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run()
            (trace,) = Path(folder).glob("**/*.xplane.pb")
            found = measured(segments_of(jax.profiler.ProfileData.from_file(str(trace))), steps)
            return {
                "loading_seconds": found.loading,
                "storing_seconds": found.storing,
                "copying_seconds": found.overlap + found.exposed,
                "both_ways_seconds": found.loading + found.storing - found.overlap - found.exposed,
                "computing_seconds": found.compute,
                "exposed_seconds": found.exposed,
            }
    except Exception as error:  # the times that were measured without it stand
        return {"profiler_error": f"{type(error).__name__}: {error}"[:200]}


def predicted(compiled: Any) -> dict[str, Any]:
    """The peak of a compiled step, its bytes each way, and for a chip with known figures its simulated time."""
    seen = jo.inspect(compiled)
    found = {"compiled_peak_bytes": seen.peak, "predicted_step_seconds": seen.timeline and seen.timeline.step}
    if seen.target != "cpu":
        found |= {"loaded_bytes": seen.loaded, "stored_bytes": seen.stored}
    return found


def duplex(played: jo.types.Timeline) -> float:
    """The share of the copies' time in which the other direction of the link is busy too."""
    loads, stores = ([(s.begin, s.end) for s in played.segments if s.lane == lane] for lane in ("load", "store"))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in loads for b in stores)
    busy = sum(end - begin for begin, end in loads + stores)
    return 2 * both / busy if busy else 0.0


def peak(device: jax.Device) -> int | None:
    """The most bytes that the allocator has had in use; a CPU does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def nbytes(state: Any, *, host: bool) -> int:
    """Bytes of a state's leaves; ``host``: of those in host memory."""
    leaves = jax.tree.leaves(state)
    return sum(a.size * a.dtype.itemsize for a in leaves if not host or a.sharding.memory_kind == "pinned_host")


if __name__ == "__main__":
    report(run, Case.from_json(sys.argv[1]))
