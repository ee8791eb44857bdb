"""No compiled step may become worse than the stored table says; ``python -m tests.aot.compiled --write`` renews it."""

import pytest

from tests.aot.compiled import ROWS, V5E, compiled, stored, worse
from tests.aot.harness import require

DAILY = {
    "24x4096^2 scanned | 512 tokens | adamw | jo.jit | h200",
    "12x(2x4096^2) scanned | 16384 tokens | clipped adamw | pipelined | h200",
    "12x4096^2 unrolled | 16384 tokens | adamw, fraction 0.5 | jo.jit | h200",
}
LONG = pytest.mark.long("compiles the whole table")


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[] if row.name in DAILY else [LONG]) for row in ROWS]
)
def test_no_row_is_worse(row):
    require("v5e:1x1" if row.target == V5E else row.target)
    assert row.name in stored(), "a new row; store it with python -m tests.aot.compiled --write"
    assert worse(compiled(row), stored()[row.name]) == []
