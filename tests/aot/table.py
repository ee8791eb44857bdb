"""Prints tables of peaks as Markdown. Compiled, not run: the figures are the compiler's for the named chip.

``python -m tests.aot.table [h200] [v5e]`` prints those of notes/results.md, and ``python -m tests.aot.table sharded``
those of docs/sharding.md, per device, on four of them. Each takes a few minutes on two cores.
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import sys

import jax
import optax

import jax_offload as jo
from benchmarks.in_jax.recipe import usual_recipe
from jax.sharding import PartitionSpec as P

from tests.aot.cases import (
    measure_sharded,
    measure_step,
)
from tests.aot.harness import H200, V5E, V5E_2X2
from tests.aot.model import ADAMW, CLIPPED
from tests.aot.model import ROWS as ON_A_GPU

NAMES = {H200: "H200", V5E: "TPU v5e", V5E_2X2: "v5e 2×2"}

_, _, STACKED, CLIPPED_INSIDE, _ = ON_A_GPU
# target, model, stacked, resident optimizer, ours
ROWS = [
    *((H200, *row) for row in ON_A_GPU),
    (V5E, "stacked layers", *STACKED[1:]),
    (V5E, *CLIPPED_INSIDE),
]


# model, stacked, inner optimizer
SHARDED = [
    ("unrolled", False, ADAMW),
    ("unrolled, clipping inside", False, CLIPPED),
    ("stacked", True, ADAMW),
    ("stacked, clipping inside", True, CLIPPED),
    ("stacked, MultiSteps", True, optax.MultiSteps(ADAMW, 2).gradient_transformation()),
]


def sharded() -> None:
    print(
        "| compiled for | model | parameters | resident | `update` | `update_params` | in + out | collectives |\n"
        "|---|---|---|---:|---:|---:|---:|---|"
    )
    for target in H200, V5E_2X2:
        for model, stacked, inner in SHARDED:
            if target == V5E_2X2 and not stacked:
                continue  # minutes to compile
            fsdp = P(None, "data") if stacked else P("data")
            for name, spec, tx in [
                ("replicated", P(), jo.offload(inner)),
                ("replicated, ZeRO-1", P(), jo.offload(inner, shard_over="data")),
                ("sharded", fsdp, jo.offload(inner)),
            ]:
                resident, plain, own = (
                    measure_sharded(target, each, spec, stacked=stacked, update_params=last)
                    for each, last in ((inner, False), (tx, False), (tx, True))
                )
                said = ", ".join(f"{n} {kind}" for kind, n in sorted(own.collectives.items()))
                moved = f"{own.loaded:.0f} + {own.stored:.0f}"
                peaks = f"{resident.peak:.0f} | {plain.peak:.0f} | {own.peak:.0f}"
                host = "4×H200" if target == H200 else NAMES[target]
                print(f"| {host} | {model} | {name} | {peaks} | {moved} | {said} |", flush=True)
    print(
        "\nAdamW, float32, 24 layers of 4096×4096, batch 512 per device; MiB per device. "
        f"jax {jax.__version__}, optax {optax.__version__}."
    )


def main(targets: list[str]) -> None:
    print("| compiled for | model | resident | usual recipe | `jax_offload` |\n|---|---|---:|---:|---:|")
    for target, model, stacked, inner, ours in ROWS:
        if targets and target.split(":")[0] not in targets:
            continue
        peaks = [measure_step(target, tx, stacked=stacked).peak for tx in (inner, usual_recipe(inner), ours)]
        resident, recipe, own = (f"{peak:.0f}" for peak in peaks)
        print(f"| {NAMES[target]} | {model} | {resident} | {recipe} | **{own}** |", flush=True)
    print(
        f"\nAdamW, float32, 24 layers of 4096×4096, batch 512; MiB. jax {jax.__version__}, optax {optax.__version__}."
    )


if __name__ == "__main__":
    sharded() if sys.argv[1:2] == ["sharded"] else main(sys.argv[1:])
