"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os

# A CPU that computes in bfloat16 itself rounds where a fusion ends, and so differently in two programs: 2 units in the
# last place between streamed and resident. With older instructions XLA computes in float32 and rounds once.
# XLA's passes are those of any program; only LLVM does less, and a quarter of the time of all tests is saved.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX512"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
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
    from jax_offload._drive import stages

    monkeypatch.setattr(stages, "GROUP_BYTES", 1)


@pytest.fixture(autouse=True)
def mappings():
    """Forget compiled programs in time: each maps memory several times, and a process dies without more mappings.

    Linux gives a process 65,530 of them (``vm.max_map_count``).
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption("--daily", action="store_true", help="without what is long (make test)")
    parser.addoption("--oldest", action="store_true", help="only what is marked for the oldest jax (make test)")
    parser.addoption("--everything", action="store_true", help="also what is exhaustive: hours")
    parser.addoption("--trainers", action="store_true", help="also tests/trainers (make trainers)")


def pytest_ignore_collect(collection_path, config):
    """The trainers are a test of their own, with packages of their own."""
    return True if collection_path.name == "trainers" and not config.getoption("--trainers") else None


def pytest_collection_modifyitems(config, items):
    """Leaves out what is ``long`` or ``exhaustive``, and what the oldest jax need not run."""
    left_out = [is_left_out(item, config) for item in items]
    config.hook.pytest_deselected(items=[item for item, out in zip(items, left_out, strict=True) if out])
    items[:] = [item for item, out in zip(items, left_out, strict=True) if not out]


def is_left_out(item, config):
    everything, daily = config.getoption("--everything"), config.getoption("--daily")
    marks = [*([] if everything else ["exhaustive"]), *(["long"] if daily else [])]
    return any(marked(item, mark) for mark in marks) or (config.getoption("--oldest") and not marked(item, "oldest"))


def marked(item, name):
    """Whether a mark is meant for a case: for ``only`` some, or all ``but`` some, by their ids, or how those begin."""
    case = item.callspec.id if hasattr(item, "callspec") else ""

    def named(cases):
        return any(case.startswith(each[:-1]) if each.endswith("*") else case == each for each in cases)

    return any(
        ("only" not in mark.kwargs or named(mark.kwargs["only"])) and not named(mark.kwargs.get("but", ()))
        for mark in item.iter_markers(name)
    )
