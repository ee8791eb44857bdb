"""Each kind of step hides what ``docs/what_hides.md`` says, and needs no more memory than the resident step."""

import pytest

from tests.aot.harness import H200, require
from tests.aot.kinds import KINDS, MARK, PAGE, compiled, installed, stored, table, worse

DAILY = {"microbatches in a scan | jo.jit", "one of two updates in a cond | jo.jit"}
LONG = pytest.mark.long("compiles the whole table")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.key, marks=[] if kind.key in DAILY else [LONG]) for kind in KINDS]
)
def test_a_kind_of_step_hides_what_it_did(kind):
    require(H200)
    if not installed(kind):
        pytest.skip(f"{kind.package} is not installed")
    assert kind.key in stored(), "a new kind; store it with python -m tests.aot.kinds --write"
    before = stored()[kind.key]
    assert worse(compiled(kind, before["resident"]), before) == []


def test_the_page_has_the_stored_table():
    assert PAGE.read_text().partition(MARK)[2].strip() == table(stored())
