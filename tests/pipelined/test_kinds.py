"""Optimizers and results of odd kinds through ``jo.pipelined`` and ``jo.jit``: against the plain step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.pipelined import ADAMW, advance, assert_close, assert_placed, batch, copied, loop, now
from tests.support.trees import FAST

BATCHES = [batch(k) for k in range(3)]
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)
HEAVY = optax.sgd(0.1, 0.9)
STEPS = {  # offloaded, plain, how gradients wait, whether a layer and a microbatch return constants
    "factored rows on the device": (jo.offload(FACTORED), FACTORED, "host", False),
    "branches around it": (
        optax.apply_if_finite(jo.offload(HEAVY, min_bytes=0), 3), optax.apply_if_finite(HEAVY, 3), "device", False),
    "constants": (jo.offload(ADAMW, min_bytes=0), ADAMW, "device", True),
    "constants, gradients on the host": (jo.offload(ADAMW, min_bytes=0), ADAMW, "host", True),
}  # fmt: skip


def parameters():
    w = np.random.default_rng(0).standard_normal((4, 128, 128), np.float32) / 12
    return jax.device_put({"w": w, "bias": np.zeros(128, np.float32)}, jax.devices()[0])


def step_of(tx, update_params, constants):
    def layer(carry, w):
        x, _ = carry
        return (x + jnp.tanh(x @ w), True), (0.0, x.mean()) if constants else (x.sum(), x.mean())

    def loss(params, batch):
        x = jnp.concatenate([batch["x"], batch["x"]], axis=1)
        (x, _), aux = jax.lax.scan(layer, (x, False), params["w"])
        return ((x + params["bias"]) ** 2).mean(), aux

    def step(params, state, batch):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        if update_params:
            params, state = jo.update_params(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        rest = (1.0, True, 3, value, batch["y"]) if constants else ()
        return params, state, (value, aux, *rest)

    return step


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("update_params", [False, True])
def test_against_the_plain_step(kind, update_params):
    tx, plain, gradients, constants = STEPS[kind]
    params, state = parameters(), tx.init(parameters())
    wanted, results = loop(step_of(plain, False, constants), (params, plain.init(params)), BATCHES)
    step = step_of(tx, update_params, constants)
    train = jo.pipelined(step, donate_argnums=(0, 1), gradients=gradients)
    carry, returned = advance(train, copied((params, state)), BATCHES)
    got, after = train.finish(carry)
    jitted, ours = jo.jit(step, donate_argnums=(0, 1), compiler_options=FAST), copied((params, state))
    others = []
    for each in BATCHES:
        *ours, other = jitted(*ours, each)
        others.append(other)
    for new, old in ((got, after), (ours[0], ours[1])):
        assert_close(new, wanted[-1][0], 1e-4)
        assert_placed(new, params)
        assert_placed(old, state)
    assert_close(now(returned), results, 1e-4)
    assert_close(others, results, 1e-4)


def test_static_arguments_of_equal_values_and_other_types():
    """``1`` does not take the program of ``True``, nor one precision or width that of another."""
    tx = jo.offload(ADAMW, min_bytes=0)

    def step(params, state, batch, *, how=()):
        (value, _), grads = jax.value_and_grad(lambda p: ((p["w"][0] @ batch["x"].T).mean(), 0.0), has_aux=True)(params)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, (value, {bool: jnp.int8, int: jnp.int16, float: jnp.float16}[type(how)](1))

    train = jo.pipelined(step, donate_argnums=(0, 1), static_argnames="how")
    wide = {"x": jnp.ones((8, 128)), "y": jnp.ones(8)}
    carry, aux = train.start(parameters(), tx.init(parameters()), wide, how=True)
    types = [aux.now[1].dtype]
    for how in (1, 1.0, True):
        carry, aux = train(carry, wide, how=how)
        types.append(aux.now[1].dtype)
    assert types == [jnp.int8, jnp.int16, jnp.float16, jnp.int8]
    train.finish(carry)


def test_settings_of_jax_make_another_program():
    tx = jo.offload(ADAMW, min_bytes=0)
    seen = []

    def step(params, state, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        value, grads = jax.value_and_grad(lambda p: (p["w"][0] @ batch["x"]).mean())(params)
        return *jo.update_params(tx, grads, state, params), value

    train = jo.pipelined(step, donate_argnums=(0, 1))
    x = {"x": jnp.ones((128, 8))}
    carry, _ = train.start(parameters(), tx.init(parameters()), x)
    for precision in (None, "float32", "float32", None):
        with jax.default_matmul_precision(precision):
            carry, _ = train(carry, x)
    train.finish(carry)
    assert seen == [None, "float32"]
