"""Scanned layers in every framework: equal losses, and what hides."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_offload as jo
from tests.support.words import words
from tests.trainers._common import INNER, STEPS, assert_same_losses

LAYERS, WIDTH = 4, 32
BATCHES = [jax.random.normal(jax.random.key(i), (16, WIDTH)) for i in range(STEPS)]


def committed(tree):
    return jax.device_put(tree, jax.devices()[0])


def loss_of(y, x):
    return jnp.mean((y - x[::-1]) ** 2)


def of_nnx(tx):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(Block, in_axes=(0,), out_axes=0)
            self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def through(x, layer):
                return x + layer.down(nnx.relu(layer.up(x)))

            return through(self.norm(x), self.layers)

    model = Model(nnx.Rngs(0))
    nnx.update(model, committed(nnx.state(model)))
    optimizer = nnx.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)
    graph, arrays = nnx.split((model, optimizer))

    def step(arrays, x):
        model, optimizer = both = nnx.merge(graph, arrays)
        loss, grads = nnx.value_and_grad(lambda model: loss_of(model(x), x))(model)
        optimizer.update(model, grads)
        return nnx.state(both), loss

    return step, arrays


def of_linen(tx):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(64)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scanned()(x, None)[0]

    params = committed(Model().init(jax.random.key(0), BATCHES[0])["params"])
    train_state = TrainState.create(apply_fn=Model().apply, params=params, tx=tx)

    def step(train_state, x):
        def loss(params):
            return loss_of(train_state.apply_fn({"params": params}, x), x)

        value, grads = jax.value_and_grad(loss)(train_state.params)
        return train_state.apply_gradients(grads=grads), value

    return step, train_state.replace(step=committed(jnp.int32(0)))


def of_haiku(tx):
    hk = pytest.importorskip("haiku")

    def block(x):
        return x + hk.Linear(WIDTH)(jax.nn.relu(hk.Linear(64)(x)))

    network = hk.without_apply_rng(hk.transform(lambda x: hk.experimental.layer_stack(LAYERS)(block)(x)))
    params = committed(network.init(jax.random.key(0), BATCHES[0]))

    def step(carried, x):
        params, state = carried
        value, grads = jax.value_and_grad(lambda params: loss_of(network.apply(params, x), x))(params)
        return jo.update_params(tx, grads, state, params), value

    return step, (params, tx.init(params))


def of_equinox(tx):
    eqx = pytest.importorskip("equinox")
    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 64, 1, key=key))
    layers = make(jax.random.split(jax.random.key(0), LAYERS))

    def model_of(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (x + eqx.combine(layer, static)(x), None), x, arrays)[0]

    arrays, static = eqx.partition(layers, eqx.is_array)
    layers = eqx.combine(committed(arrays), static)
    state = tx.init(eqx.filter(layers, eqx.is_inexact_array))
    arrays, static = eqx.partition((layers, state), eqx.is_array)

    def step(arrays, x):
        layers, state = eqx.combine(arrays, static)
        forward = jax.vmap(model_of, in_axes=(None, 0))
        loss, grads = eqx.filter_value_and_grad(lambda layers: loss_of(forward(layers, x), x))(layers)
        updates, state = tx.update(grads, state, eqx.filter(layers, eqx.is_inexact_array))
        return eqx.filter((eqx.apply_updates(layers, updates), state), eqx.is_array), loss

    return step, arrays


def losses_of(step, carried):
    losses = []
    for x in BATCHES:
        carried, loss = step(carried, x)
        losses.append(float(loss))
    return losses, carried


@pytest.mark.parametrize("entry", ["jit", "pipelined"])
@pytest.mark.parametrize("framework", [of_nnx, of_linen, of_haiku, of_equinox])
def test_scanned_layers(framework, entry):
    inner = INNER if entry == "pipelined" else optax.adamw(1e-2)
    step, carried = framework(inner)
    expected, wanted = losses_of(jax.jit(step), carried)
    step, carried = framework(jo.offload(inner, min_bytes=0))
    if entry == "jit":
        train = jo.jit(step, donate_argnums=0)
        assert "in the scan that makes their gradients" in words(jo.placement(train, carried, BATCHES[0]))
        losses, carried = losses_of(train, carried)
    else:
        train = jo.pipelined(step, donate_argnums=0)
        assert "in the scan that reads the parameters" in words(jo.placement(train, carried, BATCHES[0]))
        carry, aux = train(carried, BATCHES[0])
        losses = [float(aux.now)]
        for x in BATCHES[1:]:
            carry, aux = train(carry, x)
            losses.append(float(aux.now))
        carried = train.finish(carry)
    assert_same_losses(losses, expected)
    host = [x for x in jax.tree.leaves(carried) if x.sharding.memory_kind == "pinned_host"]
    layers = [x for x in jax.tree.leaves(wanted) if x.shape[:1] == (LAYERS,)]
    assert sum(x.nbytes for x in host if x.shape[:1] == (LAYERS,)) * 3 == 2 * sum(x.nbytes for x in layers)
    for x, y in zip(jax.tree.leaves(carried), jax.tree.leaves(wanted), strict=True):
        assert jnp.allclose(jo.to_device(x), y, atol=1e-5)
