"""Ways to call a step of ``jo.jit`` whose update moves into a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.in_scan import ADAMW, MODEL, STEPS, assert_close, assert_moved, model_of, same_steps
from tests.support.steps import FAST, L, N, batch, moved, training_step


def steps_of_people():
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    return model, tx, model.init(), training_step(tx, model.loss), training_step(ADAMW, model.loss)


def test_static_arguments_and_keywords():
    _model, tx, params, step, plain = steps_of_people()

    def named(activation, params, state, *, x, scale=1.0, verbose=False):
        assert activation is jnp.tanh and verbose
        return step(params, state, activation(x) * scale)

    jitted = jo.jit(
        named, static_argnums=0, static_argnames="verbose", donate_argnames=("params", "state"), compiler_options=FAST
    )
    state = tx.init(params)
    assert_moved(jitted, jnp.tanh, params, state, kwargs={"x": batch(), "scale": 2.0, "verbose": True})
    x = jax.device_put(batch(), jax.devices()[0])
    want = jax.jit(plain)(params, ADAMW.init(params), jnp.tanh(x) * 2.0)
    for scale in (2.0, 1.0, jnp.float32(2.0)):
        got = jitted(jnp.tanh, jax.tree.map(jnp.copy, params), tx.init(params), x=x, scale=scale, verbose=True)
    assert_close(got, want, 2e-6)
    donated = jax.tree.map(jnp.copy, params)
    jitted(jnp.tanh, donated, tx.init(params), x=x, verbose=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))


def test_method():
    _model, tx, params, step, plain = steps_of_people()

    class Trainer:
        @functools.partial(jo.jit, static_argnums=0, compiler_options=FAST)
        def step(self, params, state, x):
            return step(params, state, x)

    trainer = Trainer()
    same_steps(trainer.step, plain, tx, ADAMW, params, n=1)
    assert any(moved(trainer.step, params, tx.init(params), batch()).values())


def test_closure():
    """A step that closes over parameters, state and batch."""
    _model, tx, params, step, plain = steps_of_people()
    state, x = tx.init(params), batch()
    got = jo.jit(lambda: step(params, state, x), compiler_options=FAST)()
    assert_close(got, jax.jit(plain)(params, ADAMW.init(params), x), 2e-6)


def test_vmap():
    """Of several models at once, their state in host memory."""
    _model, tx, params, step, plain = steps_of_people()
    many = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    state, resident = jax.vmap(tx.init)(many), jax.vmap(ADAMW.init)(many)
    got = jax.jit(jax.vmap(jo.jit(step), (0, 0, None)))(many, state, batch())
    assert_close(got, jax.jit(jax.vmap(plain, (0, 0, None)))(many, resident, batch()), 2e-6)


def test_derivative():
    """Of the loss after a step, by a factor of the batch; not of Adam's, whose first step does not depend on it."""
    model, inner = model_of(MODEL), optax.sgd(1e-1, momentum=0.9)
    params, tx = model.init(), jo.offload(inner, min_bytes=0)

    def loss_after(step, state, scale):
        return model.loss(step(params, state, scale * batch())[0], batch())

    step, plain = jo.jit(training_step(tx, model.loss)), training_step(inner, model.loss)
    got = jax.jit(jax.grad(functools.partial(loss_after, step, tx.init(params))))(2.0)
    want = jax.jit(jax.grad(functools.partial(loss_after, plain, inner.init(params))))(2.0)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_results_of_the_step():
    """Numbers, nothing, and arguments handed on."""
    _model, tx, params, step, _ = steps_of_people()

    @functools.partial(jo.jit, compiler_options=FAST)
    def several(params, state, x):
        params, new, loss, _ = step(params, state, x)
        return {"params": params, "state": new, "x": x, "old": state, "nothing": None, "one": 1, "loss": (loss, loss)}

    out = several(params, state := tx.init(params), batch())
    assert out["nothing"] is None and out["one"] == 1 and (out["x"] == batch()).all()
    assert_close(out["old"], state, 0)
    assert optax.tree.get(out["old"], "mu")["layers_w"].sharding.memory_kind == "pinned_host"


def test_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    model = model_of("flax axis 0")
    params, tx = model.init(), jo.offload(ADAMW, min_bytes=0)

    def step(state, x):
        value, grads = jax.value_and_grad(model.loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    def train(step, tx):
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        state = state.replace(step=jax.device_put(jnp.int32(0), jax.devices()[0]))
        if tx is not ADAMW:
            assert_moved(step, state, batch())
        for k in range(STEPS):
            state, value = step(state, batch(k))
        return state.params, state.opt_state, state.step, value

    assert_close(train(jo.jit(step, compiler_options=FAST), tx), train(jax.jit(step), ADAMW), 1e-5)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(N, N, rngs=rngs)
            create = nnx.vmap(lambda rngs: nnx.Linear(N, N, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = create(rngs.fork(split=L))

        def __call__(self, x):
            body = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(self.embed(x), self.layers)

    def loss(model, x):
        return (model(x) ** 2).mean()

    def step(parts, x):
        model, optimizer = nnx.merge(*parts)
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], value

    def train(jit, tx):
        model = Model(nnx.Rngs(0))
        graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
        state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
        of_graph = jit(lambda state, x: step((graph, state), x))
        if tx is not ADAMW:
            assert_moved(of_graph, state, batch())
        for k in range(STEPS):
            state, value = of_graph(state, batch(k))
        return state, value

    assert_close(train(functools.partial(jo.jit, compiler_options=FAST), jo.offload(ADAMW, min_bytes=0)),
                 train(jax.jit, ADAMW), 1e-5)  # fmt: skip
