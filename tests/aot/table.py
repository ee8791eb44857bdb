"""Prints the peak table of the README as Markdown: ``python -m tests.aot.table [h200] [v5e]``.

Compiled, not run: the figures are the compiler's for the named chip. Takes a few minutes on two cores.
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import sys

import jax
import optax

import jax_offload as jo
from tests.aot.cases import measure_step, usual_recipe
from tests.aot.harness import H200, V5E

ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
NAMES = {H200: "H200", V5E: "TPU v5e"}

# target, model, stacked, resident optimizer, ours
ROWS = [
    (H200, "unrolled layers", False, ADAMW, jo.offload(ADAMW)),
    (H200, "unrolled, global-norm clipping", False, CLIPPED, jo.offload(CLIPPED)),
    (H200, "stacked layers (`lax.scan`)", True, ADAMW, jo.offload(ADAMW)),
    (H200, "stacked, clipping inside `offload`", True, CLIPPED, jo.offload(CLIPPED)),
    (
        H200,
        "stacked, clipping outside `offload`",
        True,
        CLIPPED,
        optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW)),
    ),
    (V5E, "stacked layers", True, ADAMW, jo.offload(ADAMW)),
    (V5E, "stacked, clipping inside `offload`", True, CLIPPED, jo.offload(CLIPPED)),
]


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
    main(sys.argv[1:])
