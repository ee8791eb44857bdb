"""A sample of the matrix of whole models, compiled for an H200: none above resident by more than 1 %."""

import itertools
from dataclasses import astuple, replace

import pytest

from tests.aot.harness import H200, require
from tests.aot.matrix import AXES, SLACK, Cell, cells
from tests.aot.quoted import QUOTED, kept, table

LONG = pytest.mark.long("minutes to compile")
DAILY = [
    Cell("mlp", 65536, 0.25, "none", "bfloat16", "update", "jit"),
    Cell("vit-checkpoint-fused", 16384, 0.1, "none", "parameters'", "update", "jo.jit+options"),
]
MORE = [
    Cell("vit-checkpoint-fused", 16384, 0.1, "none", "parameters'", "update", "jit"),
    Cell("vit-checkpoint-fused", 16384, 0.5, "inside", "parameters'", "update_params", "jit"),
    # gates on values of the norms in float32: 19651, resident 19267
    Cell("mlp", 65536, 0.25, "none", "bfloat16", "update_params", "jo.jit+options"),
    Cell("gpt", 16384, 0.25, "none", "parameters'", "update", "jit"),
    Cell("gpt", 16384, 0.5, "outside", "parameters'", "update", "jit+options"),
    Cell("gpt", 16384, 0.1, "none", "parameters'", "update", "jo.jit+options"),
    Cell("mlp", 65536, 1.0, "none", "bfloat16", "update_params", "jit+options"),
    Cell("vit-checkpoint", 65536, 0.5, "outside", "parameters'", "update", "jit+options"),
    Cell("vit-checkpoint", 4096, 0.25, "none", "parameters'", "update_params", "jit+options"),
    Cell("vit", 16384, 0.25, "none", "int8", "update_params", "jit"),
    # what was reported of models that no test had: ``quoted`` has all of them
    Cell("gpt-12", 16384, 0.1, "none", "parameters'", "update", "jit"),
    Cell("mixed", 65536, 0.25, "none", "parameters'", "update", "jit"),
    Cell("toy", 16384, 0.1, "none", "parameters'", "update", "jo.jit+options"),  # a copy of each matrix: 3268, 3200
    Cell("gpt-12", 16384, 0.75, "none", "parameters'", "update", "jo.jit"),
]


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.exhaustive("compiles whole models, minutes each", but=["mlp | 65536 | 1.0*"])
@pytest.mark.parametrize("cell", [*DAILY, *(pytest.param(cell, marks=LONG) for cell in MORE)], ids=str)
def test_no_peak_is_above_resident(cell):
    require(H200)
    resident, ours = cell.peaks()
    assert ours <= SLACK * resident


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.exhaustive("compiles whole models, minutes each")
@LONG
def test_peaks_fall_with_the_fraction():
    """Where a piece read its gradient ahead of its gate: 1476, 1556, 1652, 1596 and 1727 MiB."""
    require(H200)
    rest = "none", "parameters'", "update", "jo.jit+options"
    peaks = [Cell("vit-checkpoint-fused", 16384, fraction, *rest).peaks()[1] for fraction in (1.0, 0.5, 0.25, 0.1)]
    assert peaks == sorted(peaks)


@pytest.mark.long("compiles more of the same for a chip")
def test_a_part_of_the_matrix():
    found = cells(["model=gpt,mlp", "fraction=0.5", "clip=none", "way=jit"])
    assert len(found) == 2 * 3 * 4 * 2 and {cell.model for cell in found} == {"gpt", "mlp"}
    assert cells(["sample=3"]) == cells(["sample=3"]) and len(cells(["sample=3"])) == 3
    with pytest.raises(ValueError, match="matrix: 'size' is no axis"):
        cells(["size=3"])
    with pytest.raises(ValueError, match="matrix: clip has none, inside, outside; got both"):
        cells(["clip=both"])


@pytest.mark.long("compiles more of the same for a chip")
def test_what_is_on_record_of_the_reported_losses():
    """A cell is of the matrix; none is above resident; to 1 % peaks fall with the fraction; losses come first."""
    rows = kept()
    assert all(value in values for c in QUOTED for value, values in zip(astuple(c), AXES.values(), strict=True))
    assert all(row["ours"] <= SLACK * row["resident"] for row in rows.values())
    by_cell: dict[Cell, list[tuple[float, int]]] = {}
    for c, row in rows.items():
        by_cell.setdefault(replace(c, fraction=0.0), []).append((-c.fraction, row["ours"]))
    for peaks in by_cell.values():
        falling = [ours for _, ours in sorted(peaks)]
        assert all(more >= fewer / SLACK for fewer, more in itertools.pairwise(falling))
    worse = max(rows, key=lambda c: rows[c]["resident"])
    lines = table(rows | {worse: rows[worse] | {"ours": 2 * rows[worse]["resident"]}}).splitlines()
    assert lines[2].startswith(f"| {worse} |") and lines[-1].startswith(f"1 of {len(rows)} above resident")
