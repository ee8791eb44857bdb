"""A training run whose state is on disk, one for each file of tests."""

import pytest

from tests.disk.faulty import Run, no_fault
from tests.support.sizes import set_sizes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(patch.setattr, group=1)
        found = Run(tmp_path_factory.mktemp("run"))
        yield found
        found.files.fault = no_fault
        found.disk.close()
