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
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIP,
    CLIPPED,
    HOST,
    IN_FORWARD,
    LAYERS,
    WIDTH,
    advance,
    assert_as_plain,
    assert_placed,
    batch,
    committed,
    finished,
    loop,
    loss_of,
    model,
    moved,
    new_params,
    now,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, copied, kinds, shardings_in

BATCHES = [batch(k) for k in range(5)]


@pytest.mark.oldest("the turned step")
def test_what_waits_is_updated_on_the_cores():
    """tests/test_equivalence.py covers the other paths."""
    assert_as_plain(
        step_of, offloaded(CLIPPED, update_on="host"), CLIPPED, jo.pipelined, batches=BATCHES, gradients="host"
    )


def test_a_hyperparameter_changed_between_finish_and_start():
    plain_tx = optax.chain(CLIP, optax.inject_hyperparams(optax.adamw)(1e-2))
    tx = offloaded(plain_tx)

    def changed(state):
        return optax.tree.set(state, learning_rate=committed(jnp.float32(1e-4)))

    (*_, (wanted, state)), losses = loop(step_of(plain_tx), (parameters(), plain_tx.init(parameters())), BATCHES[:3])
    (*_, (wanted, _)), more = loop(step_of(plain_tx), (wanted, changed(state)), BATCHES[3:])
    train = jo.pipelined(step_of(tx), donate_argnums=(0, 1))
    carry, returned = advance(train, (parameters(), tx.init(parameters())), BATCHES[:3])
    params, state = train.finish(carry)
    carry, rest = advance(train, (params, changed(state)), BATCHES[3:])
    np.testing.assert_allclose(now(returned + rest), losses + more, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted, 1e-4)


def test_two_updates_and_unordered_effects():
    """Two optimizers in a step: both wait, and both are right. What is printed is of the batch of the call."""
    other, printed = optax.chain(CLIP, optax.lion(1e-3)), []

    def step_of_two(ours, theirs):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            jax.debug.callback(lambda x: printed.append(float(x)), value)
            (layers, rest), (of_layers, of_rest) = parted(params), parted(grads)
            layers, first = new_params(ours, "update", of_layers, state[0], layers)
            rest, second = new_params(theirs, "update", of_rest, state[1], rest)
            return layers | rest, (first, second), value

        return step

    def parted(tree):
        return {"layers": tree["layers"]}, {"head": tree["head"], "bias": tree["bias"]}

    def init(ours, theirs):
        layers, rest = parted(parameters())
        return layers | rest, (ours.init(layers), theirs.init(rest))

    wanted, losses = loop(step_of_two(CLIPPED, other), init(CLIPPED, other), BATCHES)
    one, two = offloaded(CLIPPED), offloaded(other)
    train = jo.pipelined(step_of_two(one, two), donate_argnums=(0, 1))
    del printed[:]
    carry, returned = advance(train, init(one, two), BATCHES)
    jax.effects_barrier()
    assert sorted(printed) == sorted(map(float, now(returned)))
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-4)


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


class Beside(NamedTuple):
    mean: Any
    key: Any
    count: Any


def step_beside(tx):
    """Statistics of the batch, a random key and a counter; some results need the new parameters, or both."""

    def step(params, state, more, batch):
        key, use = jax.random.split(more.key)
        x = batch["x"] - more.mean + 0.1 * jax.random.normal(use, batch["x"].shape)
        value, grads = jax.value_and_grad(loss_of)(params, batch | {"x": x})
        new, state = new_params(tx, "update", grads, state, params)
        more = Beside(0.9 * more.mean + 0.1 * batch["x"].mean(0), key, more.count + 1)
        change = jax.tree.map(jnp.subtract, new, params)
        metrics = {"loss": value, "norms": {"gradient": optax.tree.norm(grads), "update": optax.tree.norm(change)}}
        return new, state, more, (metrics, optax.tree.vdot(grads, change))

    return step


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_what_is_known_late(gradients):
    """Nothing of what the step returns is lost, or of another step than it says."""
    beside = committed(Beside(jnp.zeros(WIDTH), jax.random.key(3), jnp.int32(0)))
    wanted, others = loop(step_beside(CLIPPED), (parameters(), CLIPPED.init(parameters()), beside), BATCHES)
    tx = offloaded(CLIPPED)
    train = jo.pipelined(step_beside(tx), donate_argnames=["params", "state", "more"], gradients=gradients)
    carry, returned = advance(train, (parameters(), tx.init(parameters()), copied(beside)), BATCHES)
    assert [aux.step for aux in returned] == list(range(5)) and returned[0].late is None
    for aux in returned:
        assert aux.now[1] is None and aux.now[0]["norms"]["update"] is None
    assert all(aux.late[0]["loss"] is None and aux.late[0]["norms"]["gradient"] is None for aux in returned[1:])
    got, results = finished(train, carry, returned)
    assert_close((got[0], got[2]), (wanted[-1][0], wanted[-1][2]), 1e-4)
    assert_close(results, others, 1e-3)


def test_train_state_params_and_compiles(caplog):
    """Three programs, each compiled once; a look at the parameters is a fourth, and leaves the carry as it was."""

    def made(tx):
        state = TrainState.create(apply_fn=model, params=parameters(), tx=tx)
        return state.replace(step=committed(jnp.int32(0)))

    def step(state, batch):
        loss = lambda params: ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value, "step": state.step}

    wanted, others = loop(step, (made(CLIPPED),), BATCHES)
    train, state = jo.pipelined(step, donate_argnames="state"), made(offloaded(CLIPPED))
    with jax.log_compiles():
        carry, returned = advance(train, (copied(state),), BATCHES)
        got = train.finish(carry)
        again = train.finish(advance(train, (got,), BATCHES[:2])[0])
    mine = [name for name in re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
            if name in ("_before", "train", "_after")]  # fmt: skip
    assert sorted(mine) == ["_after", "_before", "train"] and int(again.step) == 7
    assert_close([x["loss"] for x in now(returned)], [x["loss"] for x in others], 1e-4)
    assert [int(x["step"]) for x in now(returned)] == list(range(5))
    carry, _ = advance(train, (copied(state),), BATCHES)
    looked, again = train.params(carry), train.params(carry)
    got = train.finish(carry)
    assert int(got.step) == 5 and got.apply_fn is model
    assert_close(again, looked, 0)
    assert_close(got.params, looked, 1e-6)
    assert_close(got.params, wanted[-1][0].params, 1e-4)
    assert_placed(got.opt_state, state.opt_state)


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

    batches = [batch(k)["x"] for k in range(3)]
    (step, both), (plain, start) = (build(optax.chain(CLIP, tx)) for tx in (offloaded(ADAMW), ADAMW))
    wanted, losses = loop(plain, (start,), batches)
    train = jo.pipelined(step, donate_argnames="both")
    assert any(moved(jo.placement(train, both, batches[0]), IN_FORWARD).values())
    carry, returned = advance(train, copied((both,)), batches)
    got = train.finish(carry)
    np.testing.assert_allclose(now(returned), losses, rtol=1e-5)
    assert_placed(got, both)
    assert HOST in kinds(got)
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(wanted[-1][0]), 1e-4)


class Both(NamedTuple):
    params: Any
    state: Any


@pytest.mark.parametrize(
    ("kind", "alone"), [(Both, True), (lambda p, s: [p, s], False), (lambda p, s: {"params": p, "s": s}, True)]
)
def test_one_carried_argument_that_holds_both(kind, alone):
    tx = offloaded(ADAMW)

    def step(both, batch):
        params, state = both.values() if isinstance(both, dict) else both
        params, state, value = step_of(tx)(params, state, batch)
        return kind(params, state) if alone else [kind(params, state), value]

    both = kind(parameters(), tx.init(parameters()))
    train = jo.pipelined(step, donate_argnames="both")
    carry, aux = train(copied(both), batch(0))
    assert aux.now == () if alone else float(aux.now) > 0
    wanted = jax.jit(step)(both, batch(0))
    assert_close(train.finish(carry), wanted if alone else wanted[0], 1e-5)


def test_placement_sees_the_update_of_an_embedding():
    """The first pass reads it before any scan, so its update runs first, and its state is loaded whole."""
    params = {"embed": jnp.full((512, 128), 0.01), "layers": jnp.full((4, 128, 128), 0.01)}
    params = jax.device_put(params, jax.devices()[0])
    tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    def loss(params, x):
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), params["embed"][x], params["layers"])[0] ** 2).mean()

    def step(params, state, x):
        return jo.update_params(tx, jax.grad(loss)(params, x), state, params)

    table = jo.placement(jo.pipelined(step, donate_argnums=(0, 1)), params, tx.init(params), jnp.arange(64))
    (how,) = {leaf.streams for leaf in table.leaves if "embed" in leaf.path and leaf.host}
    assert "not loaded" not in how and how
