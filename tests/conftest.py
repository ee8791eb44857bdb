"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os

# A CPU that computes in bfloat16 itself rounds where a fusion ends, and so differently in two programs: 2 units in the
# last place between streamed and resident. With older instructions XLA computes in float32 and rounds once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX512"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="also what takes long and repeats with other dtypes")
    parser.addoption("--subset", action="store_true", help="a part of the long files (used for the oldest jax)")
    parser.addoption("--trainers", action="store_true", help="also tests/trainers (make trainers)")
    parser.addoption("--short", action="store_true", help="a third of the long files, or of their part")


_LONG = {"test_trees.py": 6, "test_stream.py": 6, "test_examples.py": 4, "test_numbers.py": 16, "test_peak.py": 6}
_LONG |= {
    "test_models.py": 2,
    "test_donation.py": 4,
    "test_sharded.py": 3,
    "test_sharded_peak.py": 4,
    "test_flax.py": 3,
    "test_clipping.py": 3,
    "test_storage.py": 3,
    "test_programs.py": 3,
    "test_skip.py": 3,
    "test_precision.py": 4,
}
_LONG |= {
    "test_convert.py": 2,
    "test_run.py": 4,
    "test_master.py": 3,
    "test_checkpoint.py": 6,
    "test_multihost.py": 2,
    "test_faults.py": 2,
    "test_damage.py": 4,
    "test_defaults.py": 3,
    "test_trainers.py": 2,
    "test_pipelined.py": 3,
    "test_turned.py": 4,
    "test_in_scan.py": 4,
    "test_random_steps.py": 4,
}


def pytest_ignore_collect(collection_path, config):
    """The trainers are a test of their own, with packages of their own."""
    return True if collection_path.name == "trainers" and not config.getoption("--trainers") else None


def pytest_collection_modifyitems(config, items):
    """What is marked as long runs with ``--everything`` only; with ``--subset``, every n-th test of the long files."""
    left_out, seen = [], dict.fromkeys(_LONG, 0)
    short = 3 if config.getoption("--short") else 1
    for item in items:
        if item.path.parent.name == "unit":  # each proves a rule of its own, in milliseconds
            continue
        name = item.path.name
        if ("long" in item.keywords and not config.getoption("--everything")) or (
            name == "test_conformance.py" and short > 1
        ):
            left_out.append(item)
        elif name in _LONG:
            seen[name] += 1
            if seen[name] % (short * (_LONG[name] if config.getoption("--subset") else 1)):
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter, config):
    """Not in the header, which ``-q`` leaves out."""
    said = []
    if not config.getoption("--everything"):
        said.append(
            "left out: every optimizer eagerly, a fraction, optax's repetitions for other dtypes, killing a job "
            "50 times, a thousand random damages to a checkpoint, most of 200 random steps (--everything: all)"
        )
    if config.getoption("--short"):
        said.append("left out: optax's own tests, and two in three of the long files (make test FULL=1: none)")
    for line in said:
        terminalreporter.write_line(line)
