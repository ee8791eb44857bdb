"""A training job that is killed goes on from its last complete checkpoint, as if it had never been."""

import pytest

from tests import faults


def check(result, kills):
    assert result["bitwise equal to the undisturbed run"]
    assert result["kills"] == kills
    assert result["leaves compared"] == 7  # two parameters, two moments of each, and a count


@pytest.mark.long("kills a job five times")
def test_killed_a_few_times(tmp_path):
    check(faults.run(tmp_path, kills=3, steps=110, longest=0.5), 3)


@pytest.mark.exhaustive("kills a job 50 times")
def test_killed_often(tmp_path):
    result = faults.run(tmp_path, kills=50, steps=1500)
    check(result, 50)
    assert sum(n for what, n in result["hit"].items() if "step" in what) >= 5
    assert sum(n for what, n in result["hit"].items() if "save" in what) >= 5
