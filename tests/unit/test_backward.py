"""What the trace around an update tells of the passes through the network."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_offload._base import private
from jax_offload._base.trace import backward_of

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

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
    results = []

    def step(params, x):
        grads = change(jax.grad(loss)(params, x))
        results.append(backward_of(jax.tree.leaves(grads)))
        return grads

    jax.jit(step).trace(params, jnp.ones((ROWS, WIDTH)))
    return results[0]


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
    results = []
    jax.jit(lambda grads: results.append(backward_of(jax.tree.leaves(grads)))).trace(PARAMS)
    assert results == [None]


def test_a_scale_made_in_a_call_beside_the_gradients():
    """The call makes both, and the scale needs no gradient: nothing is clipped."""

    @jax.jit
    def scaled_grads(params, x):
        grads = jax.grad(loss)(params, x)
        return grads, 1.0 / jnp.sqrt(1.0 + jnp.abs(x).max())

    @jax.jit
    def norms(params, x):
        grads = jax.grad(loss)(params, x)
        return grads, 1.0 / jnp.sqrt(sum((g**2).sum() for g in grads.values()))

    def passes(grads_and_scale):
        results = []

        def step(params, x):
            grads, scale = grads_and_scale(params, x)
            results.append(backward_of([g * scale for g in grads.values()]))

        jax.jit(step).trace(PARAMS, jnp.ones((ROWS, WIDTH)))
        return results[0]

    assert not passes(scaled_grads).scaled and passes(norms).scaled
    assert passes(scaled_grads).held == passes(norms).held == 2 * LAYERS * ACTIVATION


def test_one_call_for_two_gradients():
    """The same jaxpr is there twice: what one call makes is told from what the other does."""
    one = jax.jit(lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))

    def both(params, x):
        return {"w0": one(params["w0"], x), "w1": one(params["w1"], 2.0 * x)}

    results = []
    jax.jit(lambda p, x: results.append(backward_of(list(both(p, x).values())))).trace(PARAMS, jnp.ones((ROWS, WIDTH)))
    assert results[0].held == 4 * ACTIVATION and not results[0].scaled


def test_gradients_of_two_traces():
    """In a branch some are made there, and others around it."""
    results = []

    def step(params, x):
        grads = jax.grad(loss)(params, x)

        def branch():
            more = jax.grad(loss)({"w0": params["w0"]}, x)
            results.append(backward_of([*grads.values(), *more.values()]))
            return 0

        return jax.lax.cond(x[0, 0] > 0, branch, lambda: 1)

    jax.jit(step).trace(PARAMS, jnp.ones((ROWS, WIDTH)))
    assert results[0].held == 2 * (LAYERS + 1) * ACTIVATION
    assert results[0].flops == (3 * LAYERS - 1 + 2) * MATMUL


def test_large_gradients_beside_arrays():
    """What is known, an array, was made by no equation of the trace; the others still tell."""
    results = []

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        results.append(backward_of([np.ones((WIDTH, WIDTH), np.float32), jnp.ones(3), *grads.values()]))

    jax.jit(step).trace(PARAMS, jnp.ones((ROWS, WIDTH)))
    assert results[0].held == 2 * LAYERS * ACTIVATION
    assert backward_of([np.ones((WIDTH, WIDTH))]) is None


@pytest.mark.parametrize("moved", ["parent", "in_tracers", "val"])
def test_loud_where_jax_has_moved(moved, monkeypatch):
    """Without this an update under plain ``jit`` would run among the matmuls again, and nobody would know."""
    part_of = private._part_of

    def without(x, *names):
        return part_of(x, *(f"{name} of another jax" if name == moved else name for name in names))

    monkeypatch.setattr(private, "_part_of", without)
    with pytest.raises(RuntimeError, match=f"no '{moved} of another jax' in"):
        found(loss, clipped)


def test_loud_where_jax_traces_with_something_else(monkeypatch):
    private._check_tracers.cache_clear()
    part_of = private._part_of

    def other(x, *names):
        return str if names == ("DynamicJaxprTracer",) else part_of(x, *names)

    monkeypatch.setattr(private, "_part_of", other)
    with pytest.raises(RuntimeError, match="a jit traces with"):
        found(loss)
