"""A pytest plugin under which optax's own tests meet offloaded optimizers.

``tests/test_conformance.py`` starts it.

Every optax function that returns a ``GradientTransformation`` is replaced, in every optax module and before
the test modules are imported, by one whose result is wrapped by ``jax_offload.offload``; in the column "plain" by none.

The outermost transformation that a test makes is the one that is wrapped, as ``offload(chain(...))``. The other order
is compared with plain optax by ``tests/test_equivalence.py``.
"""

from __future__ import annotations

import collections
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
import optax.contrib
import pytest
from optax._src import base

import jax_offload

METHOD = os.environ["CONFORMANCE_COLUMN"]
SELECT = os.environ["CONFORMANCE_SELECT"]  # a regular expression: tests in whose label it is found run
# The tests that fail offloaded and pass plain, and why. A key is a regular expression: each test in whose label it is
# found may fail, with its subtests.
SCHEDULE_FREE = "schedule_free_eval_params(state, params) computes with the state's z, outside update"
NAMED = {
    r"ContribTest::test_optimizers\(opt_name='schedule_free": SCHEDULE_FREE,
    r"ContribTest::test_optimizers\(.*wrapper_name='schedule_free'": SCHEDULE_FREE,
    r"MonitoringTest::test_monitor$": "optax.monitor wraps an optimizer that the suite has wrapped: two offloads",
}

_depth = 0  # above 0 while optax itself is running: what it makes then is part of something larger
_counts: collections.Counter[str] = collections.Counter()
_plain: dict[base.GradientTransformation, base.GradientTransformation] = {}  # what each wrapped one wraps


# Wrapping


def wrap(inner: base.GradientTransformation) -> base.GradientTransformation:
    """``inner`` offloaded, counting the updates that are handed host memory."""
    # A transformation may make others in its own ``init`` and ``update``.
    quiet = type(inner)(within_optax(inner.init), within_optax(inner.update))
    tx = jax_offload.offload(quiet, min_bytes=0)

    @functools.wraps(tx.update)
    def update(updates, state, params=None, **extra_args):
        _counts["updates with host state"] += any(map(on_host, jax.tree.leaves(state)))
        return tx.update(updates, state, params, **extra_args)

    wrapped = tx._replace(update=update)
    _plain[wrapped] = inner
    return wrapped


def on_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host


def is_wrapped(x: object) -> bool:
    return isinstance(x, base.GradientTransformation) and x in _plain


def within_optax(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args, **kwargs):
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1

    return call


def patched(factory: Callable[..., Any]) -> Callable[..., Any]:
    """``factory``, its result wrapped where the test itself called it."""
    plain_factory = within_optax(factory)

    @functools.wraps(factory)
    def make(*args, **kwargs):
        args, kwargs = jax.tree.map(
            lambda x: _plain.get(x, x) if is_wrapped(x) else x, (args, kwargs), is_leaf=is_wrapped
        )
        result = plain_factory(*args, **kwargs)
        return result if _depth else wrap(result)

    return make


def patch_multi_steps() -> None:
    """``MultiSteps`` is a class: wrap the two methods of each instance. An ``offload`` inside it is refused, so it is
    always wrapped whole."""
    plain_init = optax.MultiSteps.__init__

    @functools.wraps(plain_init)
    def __init__(self, opt, *args, **kwargs):
        outside = is_wrapped(opt)
        plain_init(self, _plain[opt] if outside else opt, *args, **kwargs)
        if outside:
            tx = wrap(base.GradientTransformationExtraArgs(self.init, self.update))
            self.init, self.update = tx.init, tx.update

    optax.MultiSteps.__init__ = __init__


def patch_optax() -> None:
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "optax"]
    replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not inspect.isfunction(value) or name.startswith("_") or value.__module__ == base.__name__:
                continue  # ``base`` holds converters (``with_extra_args_support``), not optimizers
            returns = str(inspect.signature(value).return_annotation)
            if name == "inject_hyperparams":  # it returns a factory, which calls its inner one in init and update
                replaced[value] = functools.wraps(value)(lambda *args, of=value, **how: patched(of(*args, **how)))
            elif "GradientTransformation" in returns and "Callable" not in returns:
                replaced[value] = patched(value)
    for module in modules:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in replaced:
                setattr(module, name, replaced[value])
    patch_multi_steps()


# The pytest side


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()  # before sharding_test.py sets XLA_FLAGS to the same end
    # sharding_test.py compares version *strings* and would skip most of itself: '0.12' < '0.7.2'.
    jax.__version__ = "0.99.0"
    if METHOD != "plain":
        patch_optax()


@pytest.fixture(autouse=True)
def one_device_mesh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Commits every array: jax commits the outputs of whatever touches host memory, so inputs that are not
    would compile a second time, on the second call."""
    if "pmap" in request.node.name:  # pmap brings a mesh of its own and refuses this one
        yield
        return
    kinds = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), kinds, devices=jax.devices()[:1])):
        yield


def label(item: pytest.Item) -> str:
    """The test with its parameters instead of absl's running number: a name that says which case it is."""
    params = getattr(item.cls, "_test_params_reprs", {}).get(item.name, "")
    params = re.sub(r"<function (\w+) at 0x\w+>|<class '([\w.]+)'>", r"\1\2", params)
    name = re.sub(r"\d+$", "", item.nodeid) if params else item.nodeid
    return name.removeprefix("optax/") + params


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if re.search(SELECT, label(item))]
    for item in items if METHOD != "plain" else []:
        for pattern, reason in NAMED.items():
            if re.search(pattern, label(item)):
                item.add_marker(pytest.mark.xfail(reason=reason))


def pytest_runtest_setup() -> None:
    _counts.clear()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("updates with host state", _counts["updates with host state"]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ended = [r for rs in terminalreporter.stats.values() for r in rs if getattr(r, "when", "") == "teardown"]
    on_host = sum(dict(r.user_properties)["updates with host state"] > 0 for r in ended)
    terminalreporter.write_line(f"{on_host} of {len(ended)} tests updated a state in host memory")
