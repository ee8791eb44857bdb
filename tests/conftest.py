"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os

# A CPU that computes in bfloat16 itself rounds where a fusion ends, and so differently in two programs: 2 units in the
# last place between streamed and resident. With older instructions XLA computes in float32 and rounds once.
# XLA runs all of its passes. LLVM optimizes less, and in one piece, which saves a third of the time of all tests.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX512"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gc
from pathlib import Path

import jax
import pytest


@pytest.fixture
def disk(tmp_path):
    """Files for a state."""
    import jax_offload as jo

    with_files = jo.disk(tmp_path / "state")
    yield with_files
    with_files.close()


@pytest.fixture
def small_groups(monkeypatch):
    """Each slice of a driven update is a group of its own."""
    from tests.support.sizes import set_sizes

    set_sizes(monkeypatch.setattr, group=1)


@pytest.fixture(autouse=True)
def mappings():
    """Forget compiled programs in time: each maps memory several times, and a process dies without more mappings.

    Linux gives a process 65,530 of them (``vm.max_map_count``).
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    """Keep Python's collector off the modules, which it would walk again and again, for a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption("--daily", action="store_true", help="the first case of each test that is not long (make test)")
    parser.addoption("--oldest", action="store_true", help="only tests marked for the oldest jax (make test)")
    parser.addoption("--trainers", action="store_true", help="also tests/trainers (make trainers)")


def pytest_ignore_collect(collection_path, config):
    """The trainers are a test of their own, with packages of their own."""
    return True if collection_path.name == "trainers" and not config.getoption("--trainers") else None


def pytest_collection_modifyitems(config, items):
    """Selects the tests of ``make test``: the first case of each test, and what is marked ``daily``, but nothing long.

    ``--oldest`` selects from these the tests that are marked for the oldest jax.
    """
    daily, oldest = config.getoption("--daily"), config.getoption("--oldest")
    seen, chosen, left_out = set(), [], []
    for item in items:
        marks, test = {mark.name for mark in item.iter_markers()}, item.nodeid.partition("[")[0]
        out = daily and ("long" in marks or (test in seen and "daily" not in marks))
        out = out or (oldest and "oldest" not in marks)
        if out:
            left_out.append(item)
        else:
            seen.add(test)
            chosen.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
