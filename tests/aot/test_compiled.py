"""No compiled step may become worse than the stored table says; ``python -m tests.aot.compiled --write`` renews it."""

import pytest

from tests.aot.compiled import ROWS, V5E, compiled, stored, worse
from tests.aot.harness import require
from tests.aot.kinds import MARK, PAGE, Kind, table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_row_is_worse(row):
    require("v5e:1x1" if row.target == V5E else row.target)
    if isinstance(row, Kind) and not row.installed:
        pytest.skip(f"{row.package} is not installed")
    assert row.name in stored(), "a new row; store it with python -m tests.aot.compiled --write"
    before = stored()[row.name]
    assert worse(compiled(row, before), before) == []


def test_the_page_has_the_stored_table():
    assert PAGE.read_text().partition(MARK)[2].strip() == table(stored())
