"""Steps of ``jo.jit`` with the update inside of a scan, beside plain optax: what ``tests/in_scan`` shares."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jax_offload as jo
from tests.support.steps import FAST, MODELS, Case, Model, batch, difference, moved, scans

STEPS = 20
ADAMW = optax.adamw(1e-2)
MODEL = "bias, embedding, head"
WHY = "trains for 20 steps, plain and rewritten"


@functools.cache
def model_of(name: str) -> Model:
    return MODELS[name]()


def batches(model: Model, n: int) -> list[Any]:
    return [jax.device_put(batch(k, model.width), jax.devices()[0]) for k in range(n)]


def trained(step: Callable[..., Any], params: Any, state: Any, xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Parameters and state before every step, and after the last; and what else each step returned."""
    found, results = [(params, state)], []
    for x in xs:
        params, state, *rest = step(params, state, x)
        found.append((params, state))
        results.append(rest)
    return found, results


@functools.cache
def resident(case: Case) -> tuple[list[Any], list[Any]]:
    """Plain optax; where the state is in fewer bits, the same arithmetic around it, on the device."""
    model, tx = model_of(case.model), case.inner()
    if case.options:
        ((_, formats),) = case.options
        tx = jo.offload(tx, storage=dict(formats), min_bytes=0, fraction=0)
    params = model.init(case.dtype)
    step = jax.jit(dataclasses.replace(case, update=True).step(tx, model.loss), compiler_options=FAST)
    return trained(step, params, tx.init(params), batches(model, STEPS))


def assert_close(got: Any, want: Any, rtol: float) -> None:
    errors = difference(got, want)
    assert all(error <= rtol for error in errors.values()), errors


def assert_moved(step: Any, *args: Any, stays: Sequence[str] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """That what is stacked is updated in the scan that makes its gradients, and nothing else; and no gradient is kept.

    ``stays``: parts of the paths of leaves that have no rows.
    """
    for path, inside in moved(step, *args, **(kwargs or {})).items():
        expected = "layers" in path and not any(each in path for each in stays)
        assert inside == expected, (path, reasons(step, *args, **(kwargs or {})))
    found = scans(step, *args, **(kwargs or {}))
    assert found and all(not scan.kept for scan in found)


def reasons(step: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    return jo.placement(step, *args, **kwargs).stays


def check(case: Case, stays: Sequence[str] = ()) -> None:
    """20 steps of ``jo.jit``: values, shardings and memory kinds of plain optax, the update inside, one compile."""
    model, tx = model_of(case.model), case.tx()
    params = model.init(case.dtype)
    state = tx.init(params)
    step = jo.jit(case.step(tx, model.loss), donate_argnums=(0, 1), compiler_options=FAST)
    xs = batches(model, STEPS)
    assert_moved(step, params, state, xs[0], stays=stays)
    fewer_bits = tuple(option for option in case.options if option[0] == "storage")
    want, results = resident(dataclasses.replace(case, options=fewer_bits, update=False))
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    for k in (0, STEPS - 1):  # one update from the same state
        got = step(*jax.device_put(jax.tree.map(np.asarray, want[k]), places), xs[k])
        assert_close(got, (*want[k + 1], *results[k]), 2e-6)
        assert jax.tree.map(lambda x: x.sharding, got[:2]) == places
    found, rest = trained(step, params, state, xs)
    np.testing.assert_allclose(np.array([x for x, _ in rest]), np.array([x for x, _ in results]), rtol=1e-4)
    assert_close(found[-1][0], want[-1][0], 1e-3)  # after steps of its own, of which each rounds a little otherwise
    assert jax.tree.map(lambda x: x.sharding, found[-1]) == places
    assert step._cache_size() == 1


def same_steps(
    step: Callable[..., Any],
    plain: Callable[..., Any],
    tx: Any,
    inner: optax.GradientTransformation,
    params: Any,
    n: int = STEPS,
) -> None:
    """That a step of an offload makes of the same state what the plain one makes of it, ``n`` times."""
    plain, state = jax.jit(plain, compiler_options=FAST), inner.init(params)
    places = jax.tree.map(lambda x: x.sharding, (params, tx.init(params)))
    for k in range(n):
        x = batch(k)
        got = step(*jax.device_put(jax.tree.map(np.asarray, (params, state)), places), x)
        want = plain(params, state, x)
        assert_close(got, want, 2e-6)
        assert jax.tree.map(lambda x: x.sharding, got[1]) == places[1]
        params, state = want[:2]
