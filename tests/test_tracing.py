"""Tracing an update takes time in proportion to the number of leaves, and slices that do the same share one trace."""

import collections
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.trees import assert_close, kinds

PACKAGE = str(pathlib.Path(jo.__file__).parent)


def clip_adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def in_turn(params):
    return {name: ("even", "odd")[i % 2] for i, name in enumerate(params)}


def jitted(inner):
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


def finite(inner):
    return optax.apply_if_finite(inner, 3)


CASES = {
    "clip, adamw": clip_adamw,
    "apply_if_finite": lambda: finite(clip_adamw()),
    "apply_if_finite, twice": lambda: finite(finite(clip_adamw())),
    "apply_if_finite, a jit inside": lambda: finite(jitted(clip_adamw())),
    "MultiSteps": lambda: optax.MultiSteps(clip_adamw(), 4),
    "MultiSteps that may skip": lambda: optax.MultiSteps(clip_adamw(), 4, should_skip_update_fn=optax.skip_not_finite),
    "multi_transform": lambda: optax.multi_transform({"even": clip_adamw(), "odd": optax.sgd(0.1, 0.9)}, in_turn),
    "masters, bfloat16": lambda: jo.with_master_params(clip_adamw()),
    "8 bits": clip_adamw,
}
OPTIONS = {"8 bits": {"storage": {"mu": "int8", "nu": "uint8"}}}


def model(leaves, dtype=jnp.float32):
    return jax.device_put({f"layers_{i}": jnp.ones((8, 8), dtype) for i in range(leaves)}, jax.devices()[0])


def lines(run):
    """How many lines of this package, and of what jax cuts equations with, ``run`` executes."""
    count = collections.Counter()

    def in_function(frame, event, arg):
        count[frame.f_code] += event == "line"
        return in_function

    def calls(frame, event, arg):
        code = frame.f_code
        return in_function if code.co_filename.startswith(PACKAGE) or "dce" in code.co_name else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        run()
    finally:
        sys.settrace(before)
    return sum(count.values())


@pytest.mark.parametrize("case", CASES)
def test_twice_the_leaves_are_twice_the_work(case):
    tx = jo.offload(CASES[case](), min_bytes=0, **OPTIONS.get(case, {}))

    def work(leaves):
        params = model(leaves, jnp.bfloat16 if "bfloat16" in case else jnp.float32)
        state = tx.init(params)
        return lines(lambda: jax.jit(lambda *args: tx.update(*args)).trace(params, state, params).lower())

    _, once, twice = map(work, (2, 20, 40))  # the first run includes one-time work
    assert twice <= 2.1 * once


def layer(x, weights):
    for w in weights.values():
        x = jnp.tanh(x @ w)
    return x


def unrolled(params, x):
    return (layer(x, params) ** 2).mean()


def scanned(params, x):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "way"),
    [
        pytest.param(unrolled, jo.jit, id="unrolled-jit"),
        pytest.param(scanned, jo.pipelined, id="scanned-pipelined"),
        pytest.param(unrolled, jo.pipelined, id="unrolled-pipelined"),
        pytest.param(scanned, jo.jit, id="scanned-jit"),
    ],
)
def test_a_step_of_twice_the_leaves_is_twice_the_work(loss, way):
    """Where an update moves into a scan of the step, or between its passes, or the step is turned round."""
    inner = optax.adam(1e-3) if way is jo.jit else clip_adamw()
    tx = jo.offload(inner, min_bytes=0, window=2**24)

    def step(params, state, x):
        return jo.update_params(tx, jax.grad(loss)(params, x), state, params)

    def work(leaves):
        shape = (3, 64, 64) if loss is scanned else (64, 64)
        params = {f"layers_{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(leaves)}
        args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return lines(lambda: jo.placement(way(step, donate_argnums=(0, 1)), *args))

    _, once, twice = map(work, (2, 12, 24))  # the first run includes one-time work
    assert twice <= 2.1 * once


def test_the_table_of_twice_the_leaves_is_twice_the_work():
    tx = jo.offload(clip_adamw(), min_bytes=0)
    few, once, twice = (lines(lambda n=n: str(jo.placement(tx, model(n)))) for n in (2, 20, 40))
    assert few < once < twice <= 2.05 * once


def slices(tx, params):
    """How many different functions the program of an update calls for its slices, and how often."""
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    return text.count("func private @update_slice"), text.count("call @update_slice")


@pytest.mark.parametrize("inner", [optax.adamw(1e-3), finite(clip_adamw())])
def test_layers_of_one_shape_are_traced_once(inner):
    params = jax.device_put(model(6) | {"head": jnp.ones((8, 4))}, jax.devices()[0])  # which is like no other
    assert slices(jo.offload(inner, min_bytes=0, window=2**20), params) == (1, 6)


@pytest.mark.parametrize("differ", ["constant", "operand", "nothing"])
def test_slices_that_differ_keep_their_own_numbers(differ):
    def scaled(name, g):
        if differ == "operand":
            return g * g if name == "layers_3" else g + g
        return g * (2.0 if (differ, name) == ("constant", "layers_3") else 3.0)

    scale = optax.stateless(lambda updates, params: {name: scaled(name, g) for name, g in updates.items()})
    inner = optax.chain(scale, optax.sgd(0.1, momentum=0.9))
    tx, params = jo.offload(inner, min_bytes=0), model(6)
    grads = jax.tree.map(jnp.cos, params)
    assert slices(tx, params) == ((1, 6) if differ == "nothing" else (1, 5))
    got = jax.jit(tx.update)(grads, tx.init(params), params)
    assert_close(got, jax.jit(inner.update)(grads, inner.init(params), params), 1e-6)
    assert set(kinds(got[1])) == {"pinned_host"}
