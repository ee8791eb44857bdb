"""What ``jo.pipelined`` carries beside parameters and state, and in which containers."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    CLIP,
    HOST,
    LAYERS,
    STEPS,
    WIDTH,
    advance,
    assert_close,
    assert_placed,
    batch,
    copied,
    in_the_scan,
    loop,
    loss_of,
    model,
    new_params,
    now,
    offloaded,
    parameters,
)
from tests.support.rows import rows
from tests.support.trees import FAST


class Beside(NamedTuple):
    mean: Any
    key: Any
    count: Any


def beside():
    return jax.device_put(Beside(jnp.zeros(WIDTH), jax.random.key(3), jnp.int32(0)), jax.devices()[0])


def step_beside(tx, form):
    """Statistics of the batch, a random key and a counter; one more result needs the new parameters."""

    def step(params, state, more, batch):
        key, use = jax.random.split(more.key)
        x = batch["x"] - more.mean + 0.1 * jax.random.normal(use, batch["x"].shape)
        value, grads = jax.value_and_grad(loss_of)(params, batch | {"x": x})
        old = params
        params, state = new_params(tx, form, grads, state, params)
        more = Beside(0.9 * more.mean + 0.1 * batch["x"].mean(0), key, more.count + 1)
        change = optax.tree.norm(jax.tree.map(jnp.subtract, params, old))
        metrics = {"loss": value, "norms": {"gradient": optax.tree.norm(grads), "update": change}}
        return params, state, more, (metrics, optax.tree.norm(params))

    return step


def test_beside_and_late_results():
    """Nothing of what the step returns is lost, or of another step than it says."""
    tx, batches = offloaded(), list(map(batch, range(STEPS)))
    wanted, others = loop(step_beside(ADAMW, "update"), (parameters(), ADAMW.init(parameters()), beside()), batches)
    train = jo.pipelined(step_beside(tx, "update_params"), donate_argnames=["params", "state", "more"])
    carry, returned = advance(train, (parameters(), tx.init(parameters()), beside()), batches)
    got, last = train.finish(carry, with_late=True)
    assert_close(got[0], wanted[-1][0], 1e-4)
    assert_close(got[2], wanted[-1][2], 1e-6)
    assert [aux.step for aux in returned] == list(range(STEPS))
    assert returned[0].late is None
    late = [aux.late for aux in returned[1:]] + [last]
    for aux, after, (metrics, norm) in zip(returned, late, others, strict=True):
        known, later = aux.now[0], after[0]
        assert aux.now[1] is None and known["norms"]["update"] is None
        assert later["loss"] is None and later["norms"]["gradient"] is None
        for got, want in (
            (known["loss"], metrics["loss"]),
            (known["norms"]["gradient"], metrics["norms"]["gradient"]),
            (later["norms"]["update"], metrics["norms"]["update"]),
            (after[1], norm),
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4)


def train_states(tx):
    state = TrainState.create(apply_fn=model, params=parameters(), tx=tx)
    return state.replace(step=jax.device_put(jnp.int32(0), jax.devices()[0]))


def step_of_train_state(state, batch):
    def loss(params):
        return ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "step": state.step}


def test_train_state_params_and_compiles(caplog):
    """Three programs, each compiled once; a look at the parameters is a fourth, and leaves the carry as it was."""
    tx, batches = offloaded(), list(map(batch, range(STEPS)))
    wanted, others = loop(step_of_train_state, (train_states(ADAMW),), batches)
    train = jo.pipelined(step_of_train_state, donate_argnames="state")
    state = train_states(tx)
    home = state.opt_state
    with jax.log_compiles():
        carry, returned = advance(train, (copied(state),), batches)
        got = train.finish(carry)
        again, _ = advance(train, (got,), batches[:2])
        now_ = train.finish(again)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    mine = [name for name in compiled if name in ("_before", "train", "_after")]
    assert sorted(mine) == ["_after", "_before", "train"], compiled
    assert int(now_.step) == STEPS + 2
    np.testing.assert_allclose([x["loss"] for x in now(returned)], [x["loss"] for x in others], rtol=0, atol=1e-4)
    assert [int(x["step"]) for x in now(returned)] == list(range(STEPS))
    carry, _ = advance(train, (copied(state),), batches)
    looked, again = train.params(carry), train.params(carry)
    got = train.finish(carry)
    assert int(got.step) == STEPS and got.apply_fn is model
    assert_close(looked, got.params, 1e-6)
    assert_close(again, looked, 0)
    assert_close(got.params, wanted[-1][0].params, 1e-4)
    assert_placed(got.opt_state, home)
    assert in_the_scan(train, state, batch(0))


def test_nnx_optimizer_inside_a_chain():
    """Module and optimizer are carried as one state; the offload is one part of the optimizer's chain."""

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.fork(split=LAYERS))

        def __call__(self, x):
            body = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(x, self.layers)

    def build(tx):
        model = Layers(nnx.Rngs(0))
        graph, both = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

        def step(both, x):
            model, optimizer = nnx.merge(graph, both)
            value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return nnx.split((model, optimizer))[1], value

        return step, jax.device_put(both, jax.tree.map(lambda x: x.sharding, both))

    batches = [batch(k)["x"] for k in range(5)]
    (step, both), (plain, start) = (
        build(optax.chain(CLIP, tx)) for tx in (offloaded(optax.adamw(1e-2)), optax.adamw(1e-2))
    )
    wanted, losses = loop(plain, (start,), batches)
    train = jo.pipelined(step, donate_argnames="both")
    assert in_the_scan(train, both, batches[0])
    carry, returned = advance(train, copied((both,)), batches)
    got = train.finish(carry)
    np.testing.assert_allclose(now(returned), losses, rtol=1e-5)
    assert_placed(got, both)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(got)}
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(wanted[-1][0]), 1e-5)


class Both(NamedTuple):
    params: Any
    state: Any


@pytest.mark.parametrize("kind", [Both, lambda p, s: (p, s), lambda p, s: [p, s], lambda p, s: {"params": p, "s": s}])
@pytest.mark.parametrize("alone", rows([True, False], "compiles a turned step", daily=[True]))
def test_one_carried_argument_that_holds_both(kind, alone):
    tx = offloaded()

    def step(both, batch):
        params, state = both.values() if isinstance(both, dict) else both
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        both = kind(*jo.update_params(tx, grads, state, params))
        return both if alone else [both, value]

    both = kind(parameters(), tx.init(parameters()))
    train = jo.pipelined(step, donate_argnames="both")
    carry, aux = train.start(copied(both), batch(0))
    assert aux.now == () if alone else float(aux.now) > 0
    got = train.finish(carry)
    wanted = jax.jit(step, compiler_options=FAST)(both, batch(0))
    assert_close(got, wanted if alone else wanted[0], 1e-6)
