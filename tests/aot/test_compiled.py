"""No compiled step may become worse than the stored table says; ``python -m tests.aot.compiled --write`` renews it."""

import pytest

from tests.aot.compiled import ROWS, V5E, compiled, stored, worse
from tests.aot.harness import require


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_row_is_worse(row):
    require("v5e:1x1" if row.target == V5E else row.target)
    assert row.name in stored(), "a new row; store it with python -m tests.aot.compiled --write"
    assert worse(compiled(row), stored()[row.name]) == []
