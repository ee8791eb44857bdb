"""``jo.pipelined`` has the values and placements of the plain loop, for optimizers, steps and carried values.

Random steps (tests/test_random_steps.py) have the rest.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIPPED,
    IN_FORWARD,
    advance,
    assert_as_plain,
    assert_placed,
    batch,
    finished,
    loop,
    loss_of,
    moved,
    now,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, copied, shardings_in

BATCHES = [batch(k) for k in range(5)]


@pytest.mark.oldest("the turned step")
def test_what_waits_is_updated_on_the_cores():
    """tests/test_equivalence.py covers the other paths."""
    assert_as_plain(
        step_of, offloaded(CLIPPED, update_on="host"), CLIPPED, jo.pipelined, batches=BATCHES, gradients="host"
    )


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_a_skipped_update_in_the_forward_pass_changes_no_bit(gradients):
    """Though the state moves: each slice of the update chooses, and the codes of its moments are as they were."""
    tx = offloaded(CLIPPED, storage={"mu": "int8", "nu": "bfloat16"})

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        bad = ~jnp.isfinite(optax.tree.norm(grads))
        return *jo.update_params(tx, grads, state, params, skip=bad), value

    train = jo.pipelined(step, donate_argnums=(0, 1), gradients=gradients)
    params, state = parameters(), tx.init(parameters())
    assert any(moved(jo.placement(train, params, state, batch(0)), IN_FORWARD).values())
    carry, _ = train((params, state), batch(0))
    carry, _ = train(carry, jax.tree.map(lambda x: x * jnp.inf, batch(2)))
    before, places = jax.tree.map(np.asarray, carry.kept[0]), shardings_in(carry.kept[0])
    carry, _ = train(carry, batch(3))
    after = carry.kept[0]
    assert {*after} == {*before} and len(before) > 6 and shardings_in(after) == places
    for name, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[name].dtype, np.asarray(after[name]).tobytes()), name
    carry, _ = train(carry, batch(4))
    assert any(x.tobytes() != np.asarray(carry.kept[0][name]).tobytes() for name, x in before.items())


# ---- carried values and late results


def test_what_is_known_late():
    """Of each result the call returns what it knows, and the next one the rest."""
    tx = offloaded(CLIPPED)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        new, state = jo.update_params(tx, grads, state, params)
        change = optax.tree.norm(jax.tree.map(jnp.subtract, new, params))
        return new, state, {"loss": value, "norms": {"gradient": optax.tree.norm(grads), "update": change}}

    train = jo.pipelined(step, donate_argnums=(0, 1))
    carry, returned = advance(train, (parameters(), tx.init(parameters())), BATCHES)
    assert [aux.step for aux in returned] == list(range(5)) and returned[0].late is None
    assert all(aux.now["norms"]["update"] is None and aux.now["loss"] > 0 for aux in returned)
    assert all(aux.late["loss"] is None and aux.late["norms"]["gradient"] is None for aux in returned[1:])
    _, results = finished(train, carry, returned)
    assert all(found["norms"]["update"] > 0 for found in results)


def test_a_look_at_the_parameters():
    """It leaves the carry as it was, and sees what ``finish`` returns."""
    tx = offloaded(CLIPPED)
    train = jo.pipelined(step_of(tx), donate_argnums=(0, 1))
    carry, _ = advance(train, (parameters(), tx.init(parameters())), BATCHES[:2])
    looked, again = train.params(carry), train.params(carry)
    assert_close(again, looked, 0)
    assert_close(train.finish(carry)[0], looked, 1e-6)


def test_the_state_stays_divided_as_it_came(caplog):
    """On Auto axes, where XLA would divide the moments of a replicated parameter as those beside them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    layers, everywhere = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())
    tx, params = offloaded(optax.adamw(1e-2)), {"layers": jnp.full((4, 128, 128), 0.01), "bias": jnp.zeros(128)}
    params = jax.device_put(params, {"layers": layers, "bias": everywhere})

    def step(params, state, x):
        def loss(params):
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
            return ((h + params["bias"] - 1) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return *jo.update_params(tx, grads, state, params), value

    state = tx.init(params)
    train = jo.pipelined(step, donate_argnums=(0, 1))
    with jax.log_compiles():
        carry, _ = advance(train, (copied(params), copied(state)), [jax.device_put(jnp.ones((8, 128)), everywhere)] * 3)
    assert len(re.findall(r"Finished XLA compilation of jit\(train\)", caplog.text)) == 1
    assert_placed(train.finish(carry), (params, state))


def test_another_batch_shape_and_one_compile_of_each(caplog):
    tx, batches = offloaded(CLIPPED), [batch(k, size=8 if k % 3 else 4) for k in range(7)]
    wanted, losses = loop(step_of(CLIPPED), (parameters(), CLIPPED.init(parameters())), batches)
    train = jo.pipelined(step_of(tx), donate_argnums=(0, 1))
    with jax.log_compiles():
        carry, returned = advance(train, (parameters(), tx.init(parameters())), batches)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train") == 3  # 4 then 8, 8 then 8, 8 then 4
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-4)


def test_settings_of_jax_make_another_program():
    tx, seen = offloaded(ADAMW), []

    def step(params, state, batch):
        seen.append(jax.config.jax_default_matmul_precision)
        return step_of(tx)(params, state, batch)

    train = jo.pipelined(step, donate_argnums=(0, 1))
    carry, _ = train((parameters(), tx.init(parameters())), batch(0))
    for precision in (None, "float32", "float32", None):
        with jax.default_matmul_precision(precision):
            carry, _ = train(carry, batch(1))
    train.finish(carry)
    assert seen == [None, "float32"]


class Both(NamedTuple):
    params: Any
    state: Any


@pytest.mark.parametrize("alone", [True, False])
def test_one_carried_argument_that_holds_both(alone):
    tx = offloaded(ADAMW)

    def step(both, batch):
        *new, value = step_of(tx)(*both, batch)
        return Both(*new) if alone else [Both(*new), value]

    both = Both(parameters(), tx.init(parameters()))
    train = jo.pipelined(step, donate_argnames="both")
    carry, aux = train(copied(both), batch(0))
    assert aux.now == () if alone else float(aux.now) > 0
    wanted = jax.jit(step)(both, batch(0))
    assert_close(train.finish(carry), wanted if alone else wanted[0], 1e-5)
