"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def pytest_addoption(parser):
    parser.addoption(
        "--subset",
        action="store_true",
        help="leave out what is long and does not depend on the jax version much (used for the oldest jax)",
    )


_LONG = ("test_numbers.py", "test_trees.py", "test_stream.py", "test_models.py", "test_examples.py")


def pytest_collection_modifyitems(config, items):
    """With ``--subset``, every fourth test of the long files; the conformance suite has a subset of its own."""
    if not config.getoption("--subset"):
        return
    long = [item for item in items if item.path.name in _LONG]
    left_out = [item for k, item in enumerate(long) if k % 4]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
