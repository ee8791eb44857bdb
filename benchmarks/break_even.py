"""Compute how many tokens per step hide the transfers: the chart of docs/plan.md and its table.

    python -m benchmarks.break_even docs/break_even.svg

By the model of ``jo.plan``, with the figures of ``jo.chip``. Of a dense model its size drops
out: both the bytes and the operations of a step grow with the number of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax_offload as jo
from jax_offload._look.answer import FORWARD, OPERATIONS
from jax_offload._look.timeline import compute_time, link_time

# bytes of a parameter's state that cross the link in each direction, in each step
STORAGES = {"float32 moments, masters": 12.0, "float32 moments": 8.0, "bfloat16": 4.0, "int8": 2.0625}
CHIPS = ("a100", "h100", "gh200", "v5e")
BACKWARD = 1 - FORWARD / OPERATIONS


def overhead(chip: jo.types.Chip, nbytes: float, tokens: float, share: float) -> float:
    """Return the overhead of a step in bfloat16, for each parameter on a device."""
    compute = compute_time(chip, OPERATIONS * tokens, "bfloat16")
    link = link_time(chip, nbytes, nbytes) if share else 2 * link_time(chip, nbytes, 0)  # the directions take turns
    return max(0.0, link - share * compute) / compute


def rows() -> Iterator[str]:
    """Yield the table: the tokens per step and device from which `jo.jit` adds nothing."""
    yield "| | " + " | ".join(STORAGES) + " |\n|---|" + "---:|" * len(STORAGES)
    for name in CHIPS:
        chip = jo.chip(name)
        each = compute_time(chip, OPERATIONS, "bfloat16")
        found = [-int(-link_time(chip, nbytes, nbytes) // (BACKWARD * each)) for nbytes in STORAGES.values()]
        yield f"| {name} | " + " | ".join(f"{n:,}" for n in found) + " |"


def draw(path: str | Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "break-even"  # so that the file is the same every time
    from matplotlib import pyplot

    tokens = [2 ** (10 + k / 16) for k in range(16 * 8 + 1)]
    figure, axes = pyplot.subplots(1, len(CHIPS), figsize=(12, 3.9), sharey=True, layout="constrained")
    for axis, name in zip(axes, CHIPS, strict=True):
        chip = jo.chip(name)
        for k, (storage, nbytes) in enumerate(STORAGES.items()):
            for share, style in (BACKWARD, "-"), (0.0, ":"):
                ys = [100 * overhead(chip, nbytes, n, share) for n in tokens]
                axis.plot(tokens, ys, style, color=f"C{k}", label=storage if share else None)
        axis.set(
            xscale="log",
            ylim=(0, 100),
            xlabel="tokens per step and device",
            title=f"{name}, {chip.host_link / 1e9:.0f} GB/s",
        )
        axis.set_xticks([2**k for k in (10, 12, 14, 16, 18)], ["1K", "4K", "16K", "64K", "256K"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("added to the step, %")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, title="solid: jo.jit; dotted: nothing hidden")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    print(*rows(), sep="\n")
    if sys.argv[1:]:
        draw(sys.argv[1])
