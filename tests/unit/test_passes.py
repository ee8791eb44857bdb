"""What the trace around an update tells of the passes through the network."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_offload._base.passes import passes_of

LAYERS, WIDTH, ROWS = 3, 256, 64
PARAMS = {f"w{k}": jnp.ones((WIDTH, WIDTH)) for k in range(LAYERS)}
ACTIVATION, MATMUL = ROWS * WIDTH * 4, 2 * ROWS * WIDTH**2


def loss(params, x, layer=lambda x, w: jnp.tanh(x @ w)):
    for name in sorted(params):
        x = layer(x, params[name])
    return (x**2).mean()


def checkpointed(params, x):
    return loss(params, x, jax.checkpoint(lambda x, w: jnp.tanh(x @ w)))


def scanned(params, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2).mean()


def found(loss, change=lambda grads: grads, params=PARAMS):
    seen = []

    def step(params, x):
        grads = change(jax.grad(loss)(params, x))
        seen.append(passes_of(jax.tree.leaves(grads)))
        return grads

    jax.jit(step).trace(params, jnp.ones((ROWS, WIDTH)))
    return seen[0]


def clipped(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


@pytest.mark.parametrize("change", [None, clipped, lambda g: jax.tree.map(lambda x: 2 * x.astype(jnp.bfloat16), g)])
@pytest.mark.parametrize(("loss", "matmuls"), [(loss, 3 * LAYERS - 1), (jax.jit(loss), 3 * LAYERS - 1)])
def test_each_gradient_holds_an_activation_and_a_cotangent(loss, matmuls, change):
    passes = found(loss, *([change] if change else []))
    assert passes.held == 2 * LAYERS * ACTIVATION
    assert passes.flops == matmuls * MATMUL
    assert passes.scaled == (change is clipped)


def test_what_is_computed_again_is_held_too():
    passes = found(checkpointed)
    assert LAYERS * ACTIVATION <= passes.held <= 2 * LAYERS * ACTIVATION
    assert passes.flops > (3 * LAYERS - 1) * MATMUL


def test_what_a_loop_makes_is_not_put_off():
    passes = found(scanned, params={"w": jnp.ones((LAYERS, WIDTH, WIDTH))})
    assert passes.held == 0 and passes.flops >= (3 * LAYERS - 1) * MATMUL


def test_a_scale_that_needs_no_gradient_is_none():
    assert not found(loss, lambda g: jax.tree.map(lambda x: x / jnp.sqrt(PARAMS["w0"].sum()), g)).scaled


def test_arguments_tell_nothing():
    seen = []
    jax.jit(lambda grads: seen.append(passes_of(jax.tree.leaves(grads)))).trace(PARAMS)
    assert seen == [None]
