"""``jo.pipelined``: the values and placements of the plain loop, by optimizer and by step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved
from tests.support.pipelined import (
    ADAMW,
    CLIP,
    OPTIMIZERS,
    STEPS,
    advance,
    assert_close,
    batch,
    check,
    loop,
    loss_of,
    new_params,
    now,
    offloaded,
    parameters,
    pipelined,
    step_of,
)
from tests.support.rows import rows


@pytest.mark.parametrize(
    ("share", "gradients"),
    rows(
        [("host", "host"), (0.5, "host"), ("host", "device"), (0.5, "device")],
        "trains plain and turned",
        daily=[("host", "host")],
    ),
)
def test_the_cores_update(share, gradients):
    """A turned step is cut at its update as any other; gradients that wait in host memory are there already."""
    tx = offloaded(update_on=share)
    check(step_of(tx), step_of(ADAMW, "update"), tx.init, ADAMW.init, scan=False, gradients=gradients)


def summed_up(tx, form, count=4, **how):
    """A step that sums gradients up over ``count`` microbatches, in a scan."""

    def step(params, state, batch):
        def add(total, microbatch):
            value, grads = jax.value_and_grad(functools.partial(loss_of, **how))(params, microbatch)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        params, state = new_params(tx, form, jax.tree.map(lambda g: g / count, grads), state, params)
        return params, state, values.mean()

    return step


@pytest.mark.parametrize(
    ("form", "how", "gradients"),
    rows(
        [
            ("update", {}, "device"),
            ("update_params", {}, "host"),
            ("update_params", {"unrolled": True}, "device"),
            ("update", {"count": 2}, "device"),
        ],
        "trains plain and turned",
        daily=[("update", {}, "device")],
    ),
)
def test_microbatches(form, how, gradients):
    """The first one's forward pass hosts the update for all of the batch before."""
    tx = offloaded()
    ours, plain = (summed_up(each, f, **how) for each, f in ((tx, form), (ADAMW, "update")))
    train, _ = check(ours, plain, tx.init, ADAMW.init, scan="unrolled" not in how, gradients=gradients)
    turned, args, _ = train.turned(parameters(), tx.init(parameters()), batch(0))
    lengths = [eqn.params["length"] for eqn in turned.trace(*args).jaxpr.eqns if eqn.primitive.name == "scan"]
    assert (3 in lengths) == (how == {})  # else the layers are unrolled, or one is left


def test_a_forward_scan_with_updates_is_not_unrolled():
    """Two iterations in one would not overlap; the backward pass is unrolled as it was asked to be."""
    tx, params = offloaded(), parameters()

    def loss(params, batch):
        body = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
        return (jax.lax.scan(body, batch["x"], params["layers"], unroll=2)[0] ** 2).mean()

    turned, args, _ = pipelined(step_of(tx, loss=loss)).turned(params, tx.init(params), batch(0))
    trace = turned.trace(*args).jaxpr
    (ahead,) = (each.update for each in updates_in(trace) if isinstance(each.update, Moved))
    backward = [eqn.params["unroll"] for eqn in trace.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert {*re.findall(r"\bunroll=(\d+)", str(ahead.jaxpr))} == {"1"} and backward == [2]


def test_reduce_on_plateau_and_extra_arguments():
    """The value that scales a pending update is that of its own batch."""

    def chain(wrap):
        plateau = optax.contrib.reduce_on_plateau(0.5, patience=1, cooldown=0)
        return optax.chain(CLIP, wrap(optax.adamw(1e-2)), plateau)

    def step(tx, form="update"):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            updates, state = tx.update(grads, state, params, value=-value)  # which falls: the rate is reduced
            return optax.apply_updates(params, updates), state, value

        return step

    tx, plain_tx = chain(offloaded), chain(lambda tx: tx)
    wanted, losses = loop(step(plain_tx), (parameters(), plain_tx.init(parameters())), map(batch, range(STEPS)))
    train = pipelined(step(tx))
    carry, returned = advance(train, (parameters(), tx.init(parameters())), list(map(batch, range(STEPS))))
    params, state = train.finish(carry)
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-4)
    assert_close(params, wanted[-1][0], 1e-4)
    assert float(optax.tree.get(state, "scale")) == float(optax.tree.get(wanted[-1][1], "scale")) < 0.5


def test_a_hyperparameter_changed_between_finish_and_start():
    tx, plain_tx = OPTIMIZERS["injected"][:2]
    batches = list(map(batch, range(6)))

    def changed(state):
        return optax.tree.set(state, learning_rate=jax.device_put(jnp.float32(1e-4), jax.devices()[0]))

    (*_, (wanted, state)), losses = loop(
        step_of(plain_tx, "update"), (parameters(), plain_tx.init(parameters())), batches[:3]
    )
    (*_, (wanted, _)), more = loop(step_of(plain_tx, "update"), (wanted, changed(state)), batches[3:])
    train = pipelined(step_of(tx))
    carry, returned = advance(train, (parameters(), tx.init(parameters())), batches[:3])
    params, state = train.finish(carry)
    carry, rest = advance(train, (params, changed(state)), batches[3:])
    np.testing.assert_allclose(now(returned + rest), losses + more, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted, 1e-5)


def test_two_updates_and_unordered_effects():
    """Two optimizers in a step: both wait, and both are right. What is printed is of the batch of the call."""
    one, two = offloaded(), offloaded(optax.chain(CLIP, optax.lion(1e-3)))
    printed = []

    def step_of_two(form, ours, other):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            jax.debug.callback(lambda x: printed.append(float(x)), value)
            layers, rest = {"layers": params["layers"]}, {k: params[k] for k in ("head", "bias")}
            pick = lambda like: {k: grads[k] for k in like}  # noqa: E731
            layers, first = new_params(ours, form, pick(layers), state[0], layers)
            rest, second = new_params(other, form, pick(rest), state[1], rest)
            return layers | rest, (first, second), value

        return step

    def init(ours, other):
        params = parameters()
        return params, (ours.init({"layers": params.pop("layers")}), other.init(params))

    batches = list(map(batch, range(4)))
    plain_two = optax.chain(CLIP, optax.lion(1e-3))
    state = init(ADAMW, plain_two)[1]
    wanted, losses = loop(step_of_two("update", ADAMW, plain_two), (parameters(), state), batches)
    train = pipelined(step_of_two("update_params", one, two))
    del printed[:]
    carry, returned = advance(train, (parameters(), init(one, two)[1]), batches)
    jax.effects_barrier()
    assert sorted(printed) == sorted(map(float, now(returned)))
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-5)
