"""Set before jax starts: 8 CPU devices, which have the kinds of memory that an accelerator has.

CPU tests prove placement and values, never memory or speed: jax on CPU elides the copies. ``tests/aot`` compiles for
an H200 and a TPU that need not be there.
"""

import os
from collections import Counter, defaultdict

# A CPU that computes in bfloat16 itself rounds where a fusion ends, and so differently in two programs: 2 units in the
# last place between streamed and resident. With older instructions XLA computes in float32 and rounds once.
# XLA's passes are those of any program; only LLVM does less, and a quarter of the time of all tests is saved.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX512"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


import pytest

LEFT_OUT = pytest.StashKey[Counter[tuple[str, str]]]()
HOW = {
    "long": "make test FULL=1, or pytest without --daily",
    "exhaustive": "pytest --everything",
    "newest": "they run on the newest jax",
}


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


def pytest_addoption(parser):
    parser.addoption("--daily", action="store_true", help="without what is long (make test)")
    parser.addoption("--oldest", action="store_true", help="only what is marked for the oldest jax (make test)")
    parser.addoption("--everything", action="store_true", help="also what is exhaustive: hours")
    parser.addoption("--trainers", action="store_true", help="also tests/trainers (make trainers)")


def pytest_configure(config):
    config.stash[LEFT_OUT] = Counter()


def pytest_ignore_collect(collection_path, config):
    """The trainers are a test of their own, with packages of their own."""
    return True if collection_path.name == "trainers" and not config.getoption("--trainers") else None


def pytest_collection_modifyitems(config, items):
    """Leaves out what is ``long`` or ``exhaustive``, and what the oldest jax need not run."""
    _check_marks(items, complete=config.args == ["tests"])
    kept, left_out = [], []
    for item in items:
        why = _left_out(item, config)
        config.stash[LEFT_OUT].update([why] if why else [])
        (left_out if why else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _left_out(item, config):
    """The mark by which a test is left out, and its reason; ``None``: it runs."""
    everything, daily = config.getoption("--everything"), config.getoption("--daily")
    for mark in [*([] if everything else ["exhaustive"]), *(["long"] if daily else [])]:
        for each in item.iter_markers(mark):
            if _is_of(each, item):
                return mark, each.args[0]
    if config.getoption("--oldest") and not any(_is_of(each, item) for each in item.iter_markers("oldest")):
        return "newest", "not marked for the oldest jax"
    return None


def _is_of(mark, item):
    """Whether a mark is meant for a case: ``only`` some, or all ``but`` some."""
    only, but = mark.kwargs.get("only"), mark.kwargs.get("but", ())
    return (only is None or _named(item, only)) and not _named(item, but)


def _named(item, cases):
    """Whether a case is named, by its id, or by how that begins: ``"adamw"``, ``"adamw*"``."""
    name = item.callspec.id if hasattr(item, "callspec") else ""
    return any(name.startswith(case[:-1]) if case.endswith("*") else name == case for case in cases)


def _check_marks(items, complete):
    """Raises where a mark has no reason; or, where all tests are collected, names a case that is gone."""
    of_test = defaultdict(list)
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
        for each in (each for mark in ("long", "exhaustive", "oldest") for each in item.iter_markers(mark)):
            if len(each.args) != 1 or not isinstance(each.args[0], str):
                raise pytest.UsageError(
                    f"{item.nodeid}: {each.name} wants a reason, @pytest.mark.{each.name}('compiles 40 programs')."
                )
    for name, cases in of_test.items() if complete else ():
        marks = [each for mark in ("long", "exhaustive", "oldest") for each in cases[0].iter_markers(mark)]
        named = [case for each in marks for case in (*each.kwargs.get("only", ()), *each.kwargs.get("but", ()))]
        if gone := [case for case in named if not any(_named(item, [case]) for item in cases)]:
            raise pytest.UsageError(f"{name}: its marks name {gone}, and it has no such cases.")


def pytest_sessionfinish(session):
    """Of xdist's workers: what is left out is known where tests are collected."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = [(*k, n) for k, n in session.config.stash[LEFT_OUT].items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    found = getattr(node, "workeroutput", {}).get("left_out", ())
    node.config.stash[LEFT_OUT] = Counter({(mark, why): n for mark, why, n in found})  # each collects all tests


def pytest_terminal_summary(terminalreporter, config):
    """Not in the header, which ``-q`` leaves out."""
    found = config.stash[LEFT_OUT]
    for mark, how in HOW.items():
        reasons = {why: n for (each, why), n in found.items() if each == mark}
        if reasons:
            listed = "; ".join(f"{n} {why}" for why, n in sorted(reasons.items(), key=lambda each: -each[1]))
            terminalreporter.write_line(f"left out, {sum(reasons.values())} {mark} ({how}): {listed}")
