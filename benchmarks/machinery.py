"""Measure the cost of the machinery itself, without an accelerator: tracing, lowering and compiling.

    python -m benchmarks.machinery [--leaves 100 400] [--cases NAME ...] [--json FILE]

The same optimizer without offload and offloaded, and the same step under ``jax.jit`` and ``jo.jit``, in turn, in one
process: CPU time, medians, and ratios of neighbouring runs.

XLA's CPU compiler makes one LLVM function of a loop that it takes for small, and so of the one in which small pieces
run apart from the backward pass, and then takes time with the square of the leaves: 8.9 s instead of 0.9 for 100 leaves
of 64x64. That is turned off here (``SMALL_LOOPS``); a GPU's compiler has no such pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_offload as jo

SMALL_LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SMALL_LOOPS}"  # read when the first program compiles

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MASTERS = jo.with_master_params(ADAMW)
IN_8_BITS = {"mu": "int8", "nu": "uint8"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step before and after: without and with ``offload``, or under ``jax.jit`` and ``jo.jit``.

    Attributes:
      plain, ours: the optimizer.
      dtype: the dtype of the parameters.
      jits: what jits the step.
      layers: whether to make the gradients by a backward pass through unrolled layers, or by cheap arithmetic.
    """

    plain: optax.GradientTransformation
    ours: optax.GradientTransformation
    dtype: Any = jnp.float32
    jits: tuple[Any, Any] = (jax.jit, jax.jit)
    layers: bool = False


def case(tx: optax.GradientTransformation, dtype: Any = jnp.float32, **options: Any) -> Case:
    return Case(tx, jo.offload(tx, min_bytes=0, **options), dtype)


def halves(params: Any) -> Any:
    """Label the parameters ``even`` and ``odd`` in turn."""
    return {name: ("even", "odd")[i % 2] for i, name in enumerate(params)}


PLAIN = "clip, adamw"
CASES = {
    PLAIN: case(ADAMW),
    "apply_if_finite": case(optax.apply_if_finite(ADAMW, 3)),
    "MultiSteps": case(optax.MultiSteps(ADAMW, 4).gradient_transformation()),
    "MultiSteps that may skip": case(
        optax.MultiSteps(ADAMW, 4, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
    ),
    "multi_transform": case(optax.multi_transform({"even": ADAMW, "odd": optax.sgd(1e-3, momentum=0.9)}, halves)),
    "with_master_params, bfloat16": case(MASTERS, jnp.bfloat16),
    "moments in 8 bits": case(ADAMW, storage=IN_8_BITS),
    "moments in 8 bits, beside the same on the device": dataclasses.replace(
        case(ADAMW, storage=IN_8_BITS), plain=jo.offload(ADAMW, storage=IN_8_BITS, min_bytes=0, fraction=0)
    ),
}
for name, inner in ("unrolled layers", optax.adamw(1e-3)), ("unrolled layers, clipped", ADAMW):
    ours = jo.offload(inner, min_bytes=0)
    CASES[f"{name}, jo.jit beside plain"] = Case(inner, ours, jits=(jax.jit, jo.jit), layers=True)
    CASES[f"{name}, jo.jit beside jax.jit"] = Case(ours, ours, jits=(jax.jit, jo.jit), layers=True)


def parameters(n: int, width: int, each: Case) -> Any:
    """``n`` matrices, of five different shapes where no layer needs the one before."""
    more = 0 if each.layers else 8
    params = {f"layers_{i}": jnp.ones((width, width + more * (i % 5)), each.dtype) for i in range(n)}
    return jax.device_put(params, jax.devices()[0])


def loss_of_layers(params: Any) -> Any:
    x = jnp.ones_like(params["layers_0"])
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def stages(each: Case, ours: bool, params: Any, state: Any, and_compile: bool) -> dict[str, float]:
    """Seconds of CPU time for each stage of a step."""
    tx = each.ours if ours else each.plain

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(loss_of_layers)(params) if each.layers else jax.tree.map(jnp.sin, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = time.process_time()
    lowered = each.jits[ours](step, donate_argnums=(0, 1)).trace(params, state).lower()
    found = {"trace and lower": time.process_time() - start}
    if and_compile:
        start = time.process_time()
        lowered.compile()
        found["compile"] = time.process_time() - start
    return found


def machinery(name: str, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the time that ``offload`` adds to each stage of a case."""
    each = CASES[name]
    for n in sizes:
        params = parameters(n, 64, each)
        states = each.plain.init(params), each.ours.init(params)
        given = [(each, ours, params, states[ours], name == PLAIN or each.layers) for ours in (False, True)]
        both = [[stages(*of) for of in given] for _ in range(repeats + 1)][1:]  # the first fills jax's own caches
        for stage in both[0][0]:
            times = [(a[stage], b[stage]) for a, b in both]
            yield {"what": f"{name}: {stage}, {n} leaves, s", **compare(times)}


def compare(pairs: list[Any]) -> dict[str, float]:
    plain, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"plain": plain, "ours": ours, "ratio": statistics.median(b / a for a, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("| | without offload | offloaded | ratio |\n|---|---:|---:|---:|", flush=True)
    rows_of = (machinery(name, args.leaves, args.repeats) for name in args.cases)
    for row in itertools.chain.from_iterable(rows_of):  # each row is printed at once, because all of them take minutes
        print(f"| {row['what']} | {row['plain']:.3f} | {row['ours']:.3f} | {row['ratio']:.2f} |", flush=True)
        rows.append(row)
    about = (
        f"tracing, lowering and compiling; {os.cpu_count()} cores of {platform.processor() or platform.machine()}, "
        f"jax {jax.__version__}, optax {optax.__version__}"
    )
    print(f"\n{about}; load {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "load": os.getloadavg(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
