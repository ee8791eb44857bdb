"""optax's own tests, run on offloaded optimizers: what passes with plain ones passes with ours.

``make conformance`` runs all of them, and CI a part. How optimizers are replaced: ``tests/support/conformance.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
OPTAX = Path(importlib.util.find_spec("optax").origin).parent
FILES = ["_src/alias_test.py", "_src/sharding_test.py", "contrib/_common_test.py", "transforms"]
# For every day: every optimizer and every wrapper, without most repetitions for other dtypes and problems.
SUBSET = (
    r"transforms/(?!_clipping|.*mixed_precision)|sharding_test|AliasTest.*accept_extra_args|accept_extra_args.*wrap=True"
    r"|AliasTest.*hyperparams\(opt_name='ad|gradient_accumulation\(.*'float32'"
    r"|ContribTest::test_optimizers\(.*(schedule_free|mixed_tensor)"
)
# The tests that fail offloaded and pass plain, and why. A key is a regular expression: each test in whose label it is
# found must fail.
SCHEDULE_FREE = "schedule_free_eval_params(state, params) computes with the state's z, outside update"
NAMED = {
    r"ContribTest::test_optimizers\(opt_name='schedule_free": SCHEDULE_FREE,
    r"ContribTest::test_optimizers\(.*wrapper_name='schedule_free'": SCHEDULE_FREE,
    r"MonitoringTest::test_monitor$": "optax.monitor wraps an optimizer that the suite has wrapped: two offloads",
}

Results = dict[str, dict[str, Any]]


def run(column: str, *, part: str = "", only: Collection[str] = ()) -> Results:
    """The cause of a failure, the label, and the updates of a state in host memory, of every test by its pytest id.

    Args:
      column: "plain" or "offload".
      part: a regular expression: only tests in whose label it is found.
      only: only tests with these ids.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, ids = Path(folder, "report.xml"), Path(folder, "ids")
        ids.write_text("\n".join(only))
        env = os.environ | {
            "CONFORMANCE_COLUMN": column,
            "CONFORMANCE_ONLY": str(ids),
            "CONFORMANCE_SELECT": part,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", str(OPTAX.parent), "--import-mode=importlib", f"--junitxml={report}"),
            *("-p", "tests.support.conformance", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"),
            *(str(OPTAX / file) for file in FILES),
        ]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"{column}: pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return dict(map(result_of, ElementTree.parse(report).iter("testcase")))


def result_of(case: ElementTree.Element) -> tuple[str, dict[str, Any]]:
    """A test's id, and what pytest wrote of it; of one that did not import, nothing but its name."""
    said = {found.get("name"): found.get("value") for found in case.iter("property")}
    fault = next((found for kind in ("failure", "error") for found in case.iter(kind)), None)
    cause = None if fault is None else fault.get("message", "")
    label = said.get("label", case.get("name"))
    return said.get("id", label), {
        "cause": cause,
        "label": label,
        "on host": int(said.get("updates with host state", 0)),
    }


def failed(results: Results) -> set[str]:
    return {test for test, result in results.items() if result["cause"] is not None}


def differing(ours: Results, plain: Results) -> dict[str, str]:
    """What is wrong, by label: tests that fail in ``ours``, not in ``plain``, and are not named above;
    and what is named there in vain."""
    fails = {ours[test]["label"]: ours[test]["cause"] for test in failed(ours) - failed(plain)}
    labels = {result["label"] for result in ours.values()}
    named = {label for label in labels if any(re.search(pattern, label) for pattern in NAMED)}
    wrong = {label: cause for label, cause in fails.items() if label not in named}
    wrong |= dict.fromkeys(named - fails.keys(), "named, but does not fail")
    unknown = (pattern for pattern in NAMED if not any(re.search(pattern, label) for label in labels))
    return wrong | dict.fromkeys(unknown, "named, but there is no such test")


@pytest.mark.long("optax's own tests: minutes")
def test_what_passes_with_plain_optax_passes_offloaded():
    ours = run("offload", part="" if os.environ.get("CONFORMANCE") == "all" else SUBSET)
    on_host = sum(result["on host"] > 0 for result in ours.values())
    assert on_host > len(ours) / 3, "tests should have updated a state in host memory"
    # Plain optax fails a few of its own; it need only say which of ours those are.
    plain = run("plain", only=failed(ours)) if failed(ours) else {}
    wrong = differing(ours, plain)
    assert not wrong, "\n".join(f"{label}: {cause}" for label, cause in wrong.items())
