"""The rows of docs/inspect.md that were played by a second simulator too: ours of them, by one command.

``python -m tests.aot.table played``. The other script is no part of this repository.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.aot.steps import Model, mixture, toys, vit

CHOSEN = (
    ("24×4096², stacked", "jo.jit"),
    ("24×4096², unrolled", "jo.jit"),
    ("24×4096², stacked, clipped", "jax.jit"),
)


def steps() -> Iterator[tuple[Model, str]]:
    by_name = {model.name: model for model in toys() if model.tokens == 16384}
    yield from ((by_name[name], way) for name, way in CHOSEN)
    yield mixture(), "jo.jit"
    yield vit(), "jo.jit"


def played() -> None:
    print("| | step | exposed | link |\n|---|---:|---:|---:|")
    for model, way in steps():
        t = model.compiled(way).timeline(model.chip)
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (t.step, t.exposed, t.link))
        print(f"| {model.name}, {model.tokens:,} tokens, `{way}` | {times} |", flush=True)
