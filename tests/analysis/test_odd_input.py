"""What a newcomer may give to ``plan``, ``inspect`` and ``verify``: it is taken, or told with the value and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo

ADAMW = optax.adamw(1e-3)
TX = jo.offload(ADAMW, min_bytes=0)
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def params():
    return {"w": jax.device_put(jnp.ones((64, 64)), jax.devices()[0])}


def loss(p, x):
    return jnp.tanh(x @ p["w"]).sum()


def step_of(tx):
    return lambda p, s, x: jo.update_params(tx, jax.grad(loss)(p, x), s, p)


@pytest.mark.parametrize(
    "tree",
    [
        {"w": np.ones((64, 64), np.float32)},
        {"a": {1: {("x", 2): jax.ShapeDtypeStruct((64, 64), jnp.float32)}}},
    ],
)
def test_parameters_of_other_kinds(tree):
    assert jo.plan(TX, tree)["as given"].host == 2 * 64 * 64 * 4


def test_keywords_static_arguments_and_side_effects():
    """All of them trace as they run: the same state comes and goes."""
    state = TX.init(params())
    step, modes = step_of(TX), []

    def fun(p, s, *, x, mode="a"):
        modes.append(mode)
        jax.debug.print("{}", x.sum())
        return step(p, s, x)

    static = jax.jit(fun, static_argnames="mode", donate_argnums=(0, 1))
    assert jo.verify(static, params(), state, x=X, mode="b").parts["parameters"] == 64 * 64 * 4
    assert {*modes} == {"b"}


def test_arguments_that_were_donated_are_looked_at_all_the_same():
    step, given, state = jax.jit(step_of(TX), donate_argnums=(0, 1)), params(), TX.init(params())
    step(given, state, jnp.ones((8, 64)))
    assert given["w"].is_deleted()
    assert jo.inspect(step, given, state, X).peak == jo.inspect(step, params(), TX.init(params()), X).peak


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jo.plan(optax.adamw, params()), TypeError, r"tx: expected .*adamw.*Call it first: adamw\("),
        (lambda: jo.plan(TX, "abc"), ValueError, "params: expected how many there are, .* got 'abc'"),
        (lambda: jo.inspect(step_of(TX), target=5), TypeError, 'target: expected .* "v5e:2x2"; got 5'),
        (
            lambda: jo.verify(lambda p, s, x: None, params(), TX.init(params()), X), ValueError,
            "what no result needs is left out by the compiler. Give the step a state, and return the new one",
        ),
    ],
)  # fmt: skip
def test_what_is_told(call, error, says):
    with pytest.raises(error, match=says):
        call()
