"""Runs optax's own tests on plain and on offloaded optimizers. How optimizers are replaced: ``plugin.py``."""

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

ROOT = Path(__file__).parents[2]
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


def run(column: str, *, jobs: int = 2, part: str = "", only: Collection[str] = ()) -> Results:
    """Outcome, cause, label and counts of every test by its pytest id.

    Args:
      column: "plain" or "offload".
      jobs: processes.
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
            *("-c", os.devnull, "--rootdir", str(OPTAX.parent), "--import-mode=importlib"),
            *("-p", "tests.conformance.plugin", "-n", str(jobs), "--dist", "worksteal", f"--junitxml={report}"),
            *(str(OPTAX / file) for file in FILES),
        ]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"{column}: pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        results = dict(map(_result, ElementTree.parse(report).iter("testcase")))
    if column != "plain" and not count_on_host(results):
        raise RuntimeError(f"{column}: no test updated a state in host memory, so this says nothing")
    return results


def _result(case: ElementTree.Element) -> tuple[str, dict[str, Any]]:
    """A test's id, and what pytest wrote of it; of one that did not import, nothing but its name."""
    said = {found.get("name"): found.get("value") for found in case.iter("property")}
    fault = next((found for kind in ("failure", "error") for found in case.iter(kind)), None)
    cause = "" if fault is None else fault.get("message", "")
    label = said.get("label", case.get("name"))
    on_host = int(said.get("updates with host state", 0))
    return said.get("id", label), {"failed": fault is not None, "cause": cause, "label": label, "on host": on_host}


def failed(results: Results) -> set[str]:
    return {test for test, result in results.items() if result["failed"]}


def count_on_host(results: Results) -> int:
    return sum(result["on host"] > 0 for result in results.values())


def reason(label: str) -> str | None:
    """Why this test is named as one that fails offloaded."""
    return next((why for pattern, why in NAMED.items() if re.search(pattern, label)), None)


def differing(ours: Results, plain: Results) -> dict[str, str]:
    """What is wrong, by label: tests that fail in ``ours``, not in ``plain``, and are not named above;
    and what is named there in vain."""
    fails = {
        result["label"]: result["cause"].strip()
        for test, result in ours.items()
        if result["failed"] and not plain.get(test, {}).get("failed")
    }
    labels = {result["label"] for result in ours.values()}
    wrong = {label: cause for label, cause in fails.items() if not reason(label)}
    wrong |= {label: "named, but does not fail" for label in labels - fails.keys() if reason(label)}
    for pattern in NAMED:
        if not any(re.search(pattern, label) for label in labels):
            wrong[pattern] = "named, but there is no such test"
    return wrong
