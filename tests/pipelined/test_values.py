"""``jo.pipelined``: the values and placements of the plain loop, by optimizer and by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    CLIP,
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
    plain_tx = optax.chain(CLIP, optax.inject_hyperparams(optax.adamw)(1e-2))
    tx = offloaded(plain_tx)
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


WAITS = ["device", pytest.param("host", marks=pytest.mark.long("trains plain and turned"))]


@pytest.mark.parametrize("gradients", WAITS)
def test_a_skipped_update_in_the_forward_pass_changes_no_bit(gradients):
    """Though the state moves: each slice of the update chooses, and the codes of its moments are as they were."""
    tx = offloaded(storage={"mu": "int8", "nu": "bfloat16"})

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        bad = ~jnp.isfinite(optax.tree.norm(grads))
        return *jo.update_params(tx, grads, state, params, skip=bad), value

    train = pipelined(step, gradients=gradients)
    params, state = parameters(), tx.init(parameters())
    table = jo.placement(train, params, state, batch(0))
    assert any("in the scan that reads the parameters" in leaf.streams for leaf in table.leaves), table
    carry, _ = train.start(params, state, batch(0))
    carry, _ = train(carry, jax.tree.map(lambda x: x * jnp.inf, batch(2)))
    before = jax.tree.map(np.asarray, carry.kept[0])
    places = jax.tree.map(lambda x: x.sharding, carry.kept[0])
    carry, _ = train(carry, batch(3))
    after = carry.kept[0]
    assert {*after} == {*before} and len(before) > 6
    for name, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[name].dtype, np.asarray(after[name]).tobytes()), name
    assert jax.tree.map(lambda x: x.sharding, after) == places
    carry, _ = train(carry, batch(4))
    assert any(x.tobytes() != np.asarray(carry.kept[0][name]).tobytes() for name, x in before.items())
