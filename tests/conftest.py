"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def pytest_addoption(parser):
    parser.addoption("--all-modes", action="store_true", help="every optimizer also eagerly, in scan, cond and vmap")
    parser.addoption(
        "--subset",
        action="store_true",
        help="leave out what is long and does not depend on the jax version much (used for the oldest jax)",
    )


_LONG = ("test_trees.py", "test_stream.py", "test_models.py", "test_examples.py")
_MODES = ("test_eagerly", "test_scan", "test_cond", "test_vmap", "test_traces_where", "test_injected", "test_losses_of")


def pytest_collection_modifyitems(config, items):
    """With ``--subset``, every fourth test of the long files; the conformance suite has a subset of its own.

    The table of optimizers runs eagerly, in scan, cond and vmap only with ``--all-modes``: it is long, and its entry
    for ``selective_transform`` does not fit the smaller parameters of these tests yet.
    """
    subset, modes = config.getoption("--subset"), config.getoption("--all-modes")
    left_out, long = [], 0
    for item in items:
        long += item.path.name in _LONG
        if item.path.name == "test_numbers.py" and not modes:
            if subset or item.name.startswith(_MODES):
                left_out.append(item)
        elif subset and item.path.name in _LONG and long % 4:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config):
    if not config.getoption("--all-modes"):
        return "left out: the optimizers eagerly, in scan, cond and vmap (run with --all-modes; long)"
    return None
