"""optax's own tests, run on offloaded optimizers: what passes with plain ones passes with ours.

``make conformance`` runs all of them, and CI a part.
"""

import os

import pytest

from tests.conformance.run import SUBSET, count_on_host, differing, failed, run


@pytest.mark.long("optax's own tests: minutes")
def test_what_passes_with_plain_optax_passes_offloaded():
    jobs = os.cpu_count() or 1
    ours = run("offload", jobs=jobs, part="" if os.environ.get("CONFORMANCE") == "all" else SUBSET)
    assert count_on_host(ours) > len(ours) / 3, "tests should have updated a state in host memory"
    # Plain optax fails a few of its own; it need only say which of ours those are.
    plain = run("plain", jobs=jobs, only=failed(ours)) if failed(ours) else {}
    wrong = differing(ours, plain)
    assert not wrong, "\n".join(f"{label}: {cause}" for label, cause in wrong.items())
