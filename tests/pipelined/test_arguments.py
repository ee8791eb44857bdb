"""Arguments of every kind, and how often steps of ``jo.pipelined`` are compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    advance,
    assert_close,
    batch,
    loop,
    model,
    now,
    offloaded,
    parameters,
    pipelined,
    step_of,
)
from tests.support.trees import FAST


def step_of_many(params, state, batch, rate, *more, tx, power=2, kind="square", scaled=False, **rest):
    """A step with every kind of argument; ``rate`` is read by the update, one call after it was given."""

    def loss(params):
        error = model(params, batch["x"]) - batch["y"]
        value = (error**power if kind == "square" else jnp.abs(error)).mean()
        return value * sum(more) if scaled else value

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    updates = jax.tree.map(lambda u: u * rate * rest.get("extra", 1.0), updates)
    return optax.apply_updates(params, updates), state, value


@pytest.mark.long("more kinds of steps")
@pytest.mark.parametrize("numpy", [False, True])
def test_arguments_of_every_kind(numpy):
    """None is donated but what is carried: a rate and a batch are given again and again."""
    rate = np.float32(0.5) if numpy else jax.device_put(jnp.float32(0.5), jax.devices()[0])
    data = jax.tree.map(np.asarray, batch(0)) if numpy else batch(0)
    calls = [
        (data, rate), (data, rate, 1.0, 2.0), (data, rate), (data, rate), (data, 0.25)
    ]  # fmt: skip
    named = [{}, {"scaled": True}, {"kind": "abs"}, {"kind": "square"}, {"extra": rate}]
    tx, plain_tx = offloaded(), ADAMW
    wanted, state = parameters(), plain_tx.init(parameters())
    losses = []
    static = ("kind", "scaled", "power")
    jitted = jax.jit(functools.partial(step_of_many, tx=plain_tx), static_argnames=static, compiler_options=FAST)
    train = jo.pipelined(
        functools.partial(step_of_many, tx=tx), donate_argnames=("params", "state"), static_argnames=static
    )
    carry, returned = None, []
    for args, kwargs in zip(calls, named, strict=True):
        wanted, state, value = jitted(wanted, state, *args, **kwargs)
        losses.append(value)
        if carry is None:
            carry, aux = train.start(parameters(), tx.init(parameters()), *args, **kwargs)
        else:
            carry, aux = train(carry, *args, **kwargs)
        returned.append(aux.now)
    np.testing.assert_allclose(returned, losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted, 1e-5)
    assert np.isfinite(rate) and np.isfinite(data["x"]).all()


def test_another_batch_shape_and_one_compile_of_each(caplog):
    tx = offloaded()
    batches = [batch(k, size=8 if k % 3 else 4) for k in range(7)]
    wanted, losses = loop(step_of(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_of(tx))
    with jax.log_compiles():
        carry, returned = advance(train, (parameters(), tx.init(parameters())), batches)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train") == 3  # 4 then 8, 8 then 8, 8 then 4
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-5)


def test_settings_of_jax_make_another_program():
    tx = offloaded()
    seen = []

    def step(params, state, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        value, grads = jax.value_and_grad(lambda p: model(p, batch["x"]).mean())(params)
        return *jo.update_params(tx, grads, state, params), value

    train = pipelined(step)
    carry, _ = train.start(parameters(), tx.init(parameters()), batch(0))
    for precision in (None, "float32", "float32", None):
        with jax.default_matmul_precision(precision):
            carry, _ = train(carry, batch(0))
    train.finish(carry)
    assert seen == [None, "float32"]
