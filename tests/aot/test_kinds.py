"""Each kind of step hides what ``docs/what_hides.md`` says, and needs no more memory than the resident step."""

import pytest

from tests.aot.harness import H200, require
from tests.aot.kinds import KINDS, MARK, PAGE, compiled, installed, stored, table, worse


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_a_kind_of_step_hides_what_it_did(kind):
    require(H200)
    if not installed(kind):
        pytest.skip(f"{kind.package} is not installed")
    assert kind.key in stored(), "a new kind; store it with python -m tests.aot.kinds --write"
    before = stored()[kind.key]
    assert worse(compiled(kind, before["resident"]), before) == []


def test_the_page_has_the_stored_table():
    assert PAGE.read_text().partition(MARK)[2].strip() == table(stored())
