"""Step times of unrolled models with biases and norms: ours beside resident. ``python -m tests.aot.table biases``."""

from __future__ import annotations

from collections.abc import Iterator

import jax

import jax_offload as jo
from tests.aot.cases import device_sharding, in_float32, measure_update
from tests.aot.harness import H200
from tests.aot.model import ADAMW
from tests.aot.zoo import MODELS

NAMES = {"mlp": "MLP, 8 layers of 4096", "vit": "ViT, 8 blocks of 1024"}


def biases() -> None:
    """Prints the table, in ten minutes."""
    print("| model | tokens | resident | `jo.jit` | beside resident |\n|---|---:|---:|---:|---:|")
    for row in _rows():
        print(row, flush=True)
    print(
        f"\nAdamW in float32, bfloat16 parameters. Compiled for an H200 and simulated, not run. jax {jax.__version__}."
    )


def _rows() -> Iterator[str]:
    tx, how = in_float32(ADAMW), {"update_params": True, "options": jo.compiler_options("cuda")}
    for name, called in NAMES.items():
        for tokens in 4096, 16384:
            model = MODELS[name]()
            params, batch = model.abstract(tokens, device_sharding(H200))
            resident = measure_update(H200, tx, params, model.loss, batch, **how)
            ours = measure_update(H200, jo.offload(tx), params, model.loss, batch, whole=True, **how)
            theirs, own = resident.timeline(H200), ours.timeline(H200)
            yield (
                f"| {called} | {tokens} | {resident.peak:.0f} / {1e3 * theirs.step:.1f} | {ours.peak:.0f} / "
                f"{1e3 * own.step:.1f} / {own.exposed_share:.2f} | {own.step / theirs.step - 1:+.0%} |"
            )
