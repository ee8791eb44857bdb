"""Losses that were reported of models which no test had, as cells of the matrix, beside what was reported.

``python -m tests.aot.table quoted`` compiles them, an hour or more, and prints the table of docs/overlap.md: losses
first, those that were worst when they were reported before others. ``quoted model=gpt-12 way=jit`` compiles a part of
them again, ``quoted show`` none. What was compiled stands in benchmarks/results/matrix.json, with its versions.

The reports name a model by a line ("12 GQA blocks of width 2048"), so the resident figures differ; a cell is what such
a line says, in this repository's models.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from tests.aot.matrix import AXES, SLACK, Cell, chosen

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "matrix.json"
COMMAND = "python -m tests.aot.table quoted"


@dataclasses.dataclass(frozen=True)
class Reported:
    """MiB, of a model like it; ``None``: of a cell that stands beside such ones."""

    resident: int | None = None
    ours: int | None = None

    def __str__(self) -> str:
        return "" if self.ours is None else f"{self.resident} → {self.ours} ({self.loss:+.0%})"

    @property
    def loss(self) -> float:
        return 0.0 if self.resident is None or self.ours is None else self.ours / self.resident - 1


def _cell(model: str, tokens: int, fraction: float, way: str = "jit", **others: str) -> Cell:
    return Cell(
        model, tokens, fraction, **{"clip": "none", "storage": "parameters'", "form": "update"} | others, way=way
    )


GPT, VIT, FUSED = ("gpt-12", 16384), ("vit-12-checkpoint", 16384), ("vit-12-checkpoint-fused", 16384)
CONVNET, MIXED, TOY = ("convnet-dense", 16384), ("mixed", 65536), ("toy", 16384)  # 128 images; 64K tokens
WHOLE = "jo.jit+options"
QUOTED: dict[Cell, Reported] = {
    _cell(*GPT, 0.1): Reported(10576, 18989),
    _cell(*CONVNET, 1.0, storage="bfloat16"): Reported(50243, 96576),
    _cell(*CONVNET, 0.25): Reported(50243, 134669),
    _cell(*MIXED, 1.0, storage="bfloat16"): Reported(16002, 34014),
    _cell(*MIXED, 0.25): Reported(16002, 31668),
    _cell(*VIT, 0.5): Reported(3008, 5503),
    _cell(*VIT, 0.1): Reported(3008, 8020),
    _cell(*FUSED, 1.0, clip="inside"): Reported(3105, 3563),
    _cell(*TOY, 0.1, WHOLE): Reported(3200, 3268),
    _cell(*TOY, 0.1, WHOLE, form="update_params"): Reported(3264, 3268),
    _cell(*GPT, 0.5): Reported(10576, 18354),
    _cell(*GPT, 0.5, clip="inside"): Reported(10576, 11610),
    _cell(*GPT, 1.0, clip="outside"): Reported(10576, 17745),
    _cell(*GPT, 0.25): Reported(10576, 18593),
    _cell(*GPT, 0.75): Reported(10576, 13830),
    _cell(*GPT, 1.0): Reported(10576, 8717),
    _cell(*GPT, 1.0, "jit+options"): Reported(10576, 9101),
    _cell(*VIT, 1.0): Reported(3008, 1867),
    # beside them, and the same under jo.jit
    _cell("convnet", 16384, 1.0, storage="bfloat16"): Reported(),
    _cell(*GPT, 0.1, WHOLE): Reported(),
    _cell(*CONVNET, 0.25, WHOLE): Reported(),
    _cell(*MIXED, 0.25, WHOLE): Reported(),
    _cell(*MIXED, 1.0, WHOLE, storage="bfloat16"): Reported(),
    _cell(*CONVNET, 1.0, WHOLE, storage="bfloat16"): Reported(),
    _cell(*GPT, 0.5, WHOLE): Reported(),
    _cell(*GPT, 1.0, WHOLE, clip="outside"): Reported(),
    _cell(*GPT, 0.5, WHOLE, clip="inside"): Reported(),
    _cell(*GPT, 1.0, WHOLE): Reported(),
    _cell(*GPT, 0.25, WHOLE): Reported(),
    _cell(*GPT, 0.75, WHOLE): Reported(),
    _cell(*VIT, 0.1, WHOLE): Reported(),
    _cell(*VIT, 0.5, WHOLE): Reported(),
    _cell(*VIT, 1.0, WHOLE): Reported(),
    _cell(*FUSED, 1.0, WHOLE, clip="inside"): Reported(),
}


def quoted(arguments: Sequence[str]) -> None:
    """Compiles the cells asked for, all if none are, and prints all that were."""
    if [*arguments] != ["show"]:
        axes = chosen(dict(argument.partition("=")[::2] for argument in arguments))
        for cell in QUOTED:
            if not all(getattr(cell, axis) in values for axis, values in axes.items()):
                continue
            resident, ours = map(round, cell.peaks())
            row = {"resident": resident, "ours": ours, "jax": jax.__version__, "optax": optax.__version__}
            _keep(kept() | {cell: row})
            print(_line(cell, row), file=sys.stderr, flush=True)
    rows = kept()
    print(table({cell: rows[cell] for cell in QUOTED if cell in rows}))


def table(rows: dict[Cell, dict[str, Any]]) -> str:
    """As Markdown, losses first."""

    def ratio(cell: Cell) -> float:
        return rows[cell]["ours"] / rows[cell]["resident"]

    losses = [cell for cell in rows if ratio(cell) > SLACK]
    others = [cell for cell in rows if cell not in losses]
    lines = [f"| {' | '.join(AXES)} | resident | ours | | reported |", f"|{'---|' * 7}---:|---:|---:|---|"]
    lines += [_line(cell, rows[cell]) for cell in sorted(losses, key=ratio, reverse=True)]
    lines += [_line(cell, rows[cell]) for cell in sorted(others, key=lambda cell: (-QUOTED[cell].loss, -ratio(cell)))]
    versions = sorted({f"jax {row['jax']}, optax {row['optax']}" for row in rows.values()})
    said = f"{len(losses)} of {len(rows)} above resident by more than 1 %. Compiled for an H200, not run; MiB."
    return "\n".join([*lines, "", f"{said} {'; '.join(versions)}."])


def _line(cell: Cell, row: dict[str, Any]) -> str:
    resident, ours = row["resident"], row["ours"]
    return f"| {cell} | {resident} | {ours} | {ours / resident - 1:+.0%} | {QUOTED[cell]} |"


def kept() -> dict[Cell, dict[str, Any]]:
    """What was compiled, by cell."""
    if not RESULTS.exists():
        return {}
    names = [field.name for field in dataclasses.fields(Cell)]
    rows = json.loads(RESULTS.read_text())["rows"]
    return {Cell(*(row.pop(name) for name in names)): row for row in rows}


def _keep(rows: dict[Cell, dict[str, Any]]) -> None:
    about = "Peaks in MiB of steps compiled for an H200, not run"
    found = [dataclasses.asdict(cell) | row for cell, row in rows.items()]
    RESULTS.write_text(json.dumps({"about": about, "command": COMMAND, "rows": found}, indent=1) + "\n")
