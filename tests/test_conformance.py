"""optax's own tests, run on offloaded optimizers: what passes with plain ones passes with ours.

``make conformance`` runs all of them, and CI a part. How optimizers are replaced: ``tests/support/conformance.py``.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

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


def run(column, part, *options):
    """The exit code of optax's tests and what pytest says of them.

    Args:
      column: "plain" or "offload".
      part: a regular expression: only tests in whose label it is found.
      options: of pytest.
    """
    env = os.environ | {
        "CONFORMANCE_COLUMN": column,
        "CONFORMANCE_SELECT": part,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", *options),
        *("-c", os.devnull, "--rootdir", str(OPTAX.parent), "--import-mode=importlib"),
        *("-p", "tests.support.conformance", "-n", str(os.cpu_count() or 1), "--dist", "worksteal"),
        *(str(OPTAX / file) for file in FILES),
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), f"{column}: pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.returncode, done.stdout


@pytest.mark.long("optax's own tests: minutes")
def test_what_passes_with_plain_optax_passes_offloaded(tmp_path):
    """Or it is named in ``NAMED``, with the reason, and fails."""
    part, cache = "" if os.environ.get("CONFORMANCE") == "all" else SUBSET, f"cache_dir={tmp_path}"
    failed, ours = run("offload", part, "-o", cache)
    on_host, tests = map(int, re.search(r"(\d+) of (\d+) tests updated a state in host memory", ours).groups())
    assert on_host > tests / 3
    if failed:  # plain optax fails a few of its own
        _, plain = run("plain", part, "-o", cache, "--last-failed", "-rp")
        assert "\nPASSED" not in plain, f"{plain}\n{ours}"
