"""Steps as people write them: what they do beside, and whether the update moves into a scan."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.in_scan import ADAMW, MODEL, model_of, reasons, same_steps
from tests.support.steps import FAST, batch, moved, training_step


def whole_gradients(tx, loss):
    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, grads

    return step


def without_update(tx, loss):
    return lambda params, state, x: (params, state, jax.grad(loss)(params, x))


def two_updates(tx, loss):
    def step(params, state, x):
        for _ in range(2):
            params, state = jo.update_params(tx, jax.grad(loss)(params, x), state, params)
        return params, state

    return step


def in_cond(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)

        def update():
            return jo.update_params(tx, grads, state, params)

        return jax.lax.cond(value > 0, update, lambda: (params, state))

    return step


def skipping(tx, loss):
    """By a number that is known before the backward pass: each layer's update chooses."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        if isinstance(tx, type(optax.sgd(1.0))) and tx.update is ADAMW.update:
            return jo.update_params(tx, grads, state, params)
        return jo.update_params(tx, grads, state, params, skip=value < 0)

    return step


def skipping_what_is_not_finite(tx, loss):
    """Which all gradients tell: after the scan, where no update moves, none of a skipped one's bytes does."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        finite = jnp.isfinite(optax.tree.norm(grads))
        if tx.update is ADAMW.update:
            return jo.update_params(tx, grads, state, params)
        return jo.update_params(tx, grads, state, params, skip=~finite)

    return step


def accumulating(tx, loss):
    """Over microbatches, in a scan around that of the layers."""

    def step(params, state, x):
        def micro(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x[None])), None

        grads, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), x)
        return jo.update_params(tx, jax.tree.map(lambda g: g / 4, grads), state, params)

    return step


def accumulating_backwards(tx, loss):
    """The mean of the losses comes along, and each of them."""

    def step(params, state, x):
        def micro(carry, x):
            total, mean = carry
            value, grads = jax.value_and_grad(loss)(params, x[None])
            return (jax.tree.map(lambda t, g: t + g / 4, total, grads), mean + value / 4), value

        grads, mean = jax.tree.map(jnp.zeros_like, params), 0.0
        (grads, mean), values = jax.lax.scan(micro, (grads, mean), x, reverse=True)
        return (*jo.update_params(tx, grads, state, params), mean, values)

    return step


def another_in_cond(tx, loss):
    """Once more where the loss is large."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        more = lambda: jo.update_params(tx, grads, state, params)  # noqa: E731
        return (*jax.lax.cond(value > 0, more, lambda: (params, state)), value)

    return step


def in_a_loop(tx, loss):
    """Several steps in one."""

    def step(params, state, x):
        def one(carry, x):
            params, state = carry
            return jo.update_params(tx, jax.grad(loss)(params, x[None]), state, params), None

        return jax.lax.scan(one, (params, state), x)[0]

    return step


def printing(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        jax.debug.print("loss {}", value)
        params, state = jo.update_params(tx, grads, state, params)
        jax.debug.callback(lambda w: None, params["head"])
        return params, state, value

    return step


def printing_in_layers(tx, loss):
    def printed(params, x):
        def body(x, p):
            jax.debug.callback(lambda m: None, x.mean())
            return jnp.tanh(x @ p[0] + p[1]), None

        x = jax.lax.scan(body, x @ params["embed"], (params["layers_w"], params["layers_b"]))[0]
        return ((x @ params["head"]) ** 2).mean()

    return lambda params, state, x: jo.update_params(tx, jax.grad(printed)(params, x), state, params)


def with_a_ref(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        total = jax.new_ref(jnp.zeros(()))
        total[...] += value
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, total[...]

    return step


def inside_jit(tx, loss):
    step = training_step(tx, loss)
    inner = step if tx is ADAMW else jo.jit(step)
    return lambda params, state, x: inner(params, state, 2.0 * x)


def reading_after(tx, loss):
    """What only exists after the update decides about the next batch, and the old parameters are returned."""

    def step(params, state, x):
        old = params
        params, state = jo.update_params(tx, jax.grad(loss)(params, x), state, params)
        return params, state, loss(params, x), old

    return step


def raveling(tx, loss):
    """Gradients are returned in another shape, in which a layer is many rows."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, jax.tree.map(jnp.ravel, grads)

    return step


def through_a_tower(tx, loss):
    """Something that is scanned over is made of the gradients: another loop needs them whole."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        largest, _ = jax.lax.scan(lambda m, g: (jnp.maximum(m, jnp.abs(g).max()), None), 0.0, grads["layers_w"])
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, largest

    return step


STEPS_OF_PEOPLE = {
    reading_after: True,
    printing: True,
    printing_in_layers: True,
    inside_jit: True,
    whole_gradients: True,
    through_a_tower: True,
    raveling: False,
    without_update: False,
    two_updates: False,  # the first one moves into the forward pass that reads its parameters
    in_cond: True,
    another_in_cond: True,
    skipping: True,
    skipping_what_is_not_finite: False,
    accumulating: True,
    accumulating_backwards: True,
    in_a_loop: True,
    with_a_ref: True,
}


SAID = {
    without_update: "no update of an offload was seen in it",
    two_updates: "it moves to the host in this step",
    another_in_cond: "another update runs in a cond of the step, and stays there",
    raveling: "its rows are merged",
}


@pytest.mark.long("more kinds of steps", but=["skipping", "in_cond"])
@pytest.mark.oldest("steps as people write them")
@pytest.mark.parametrize("step_of", STEPS_OF_PEOPLE, ids=lambda f: f.__name__)
def test_steps(step_of):
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    params = model.init()
    step = jo.jit(step_of(tx, model.loss), compiler_options=FAST)
    args = params, tx.init(params), batch()

    same_steps(step, step_of(ADAMW, model.loss), tx, ADAMW, params)
    assert any(moved(step, *args).values()) == STEPS_OF_PEOPLE[step_of]
    if step_of in SAID:
        assert SAID[step_of] in " ".join(reasons(step, *args))


def test_a_tpu_is_told_what_runs_behind_the_gate():
    """A gradient that the gate does not need reads what is behind it, on a TPU alone: one barrier more."""
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)
    params = {"w": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)}

    def loss(params, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2).mean()

    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = jo.jit(training_step(tx, loss)).trace(*args)
    tpu, cuda = (
        traced.lower(lowering_platforms=(name,)).as_text().count("optimization_barrier") for name in ("tpu", "cuda")
    )
    assert tpu == cuda + 1
