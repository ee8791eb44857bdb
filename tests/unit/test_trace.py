"""What a trace under way tells an update: the order of its gradients, the passes that made them, and marks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._base import private
from jax_offload._base.own_primitives import MARK, mark, mark_of, marks_in
from jax_offload._ir.trace import are_constrained, backward_of, production_order

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def asked(ask, fun, *args):
    """What ``ask`` says of the results of ``fun`` while it is traced."""
    said = []
    jax.jit(lambda *args: said.append(ask(fun(*args)))).trace(*args)
    return said[0]


# ---- the order in which gradients are made

layer = jax.jit(lambda w: jnp.tanh(w) * 2)
AFTER = {
    "nothing": lambda x: x,
    "cast": lambda x: x.astype(jnp.bfloat16),
    "all": lambda x: (x * 0.5).astype(jnp.bfloat16) / 7,
    "a strong scalar": lambda x: x * jnp.float32(2),
    "where": lambda x: jnp.where(jnp.isfinite(x), x, 0),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "nan_to_num": jnp.nan_to_num,
}


@pytest.mark.parametrize("after", AFTER)
def test_casts_and_scales_are_looked_through(after):
    """They come in the order of the tree, once all gradients are there."""

    def fun(x, y):
        early, late = jnp.tanh(x), jnp.sin(y)
        return [AFTER[after](late), AFTER[after](early)]

    assert asked(production_order, fun, X, X) == [1, 0]


@pytest.mark.parametrize(
    ("fun", "order"),
    [
        (lambda x, y: [layer(y), layer(x)], [0, 1]),  # one that gives gradients may take parameters of their shape
        (lambda x, y: [jnp.sin(x) * jnp.cos(y)], [2]),  # which of both it would be is not known
        (lambda x, y: [jnp.sin(x) + 1.0], [1]),
        (lambda x, y: [jnp.sin(x), y], None),
        (lambda x, y: [jnp.ones(3)], None),
        (lambda x, y: [], None),
    ],
)
def test_what_is_not_looked_through(fun, order):
    found = asked(production_order, fun, X, X)
    assert found == order or (order is None and found == [0])  # a constant is made by an equation of the trace


def test_gradients_are_produced_last_layer_first():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    found = asked(production_order, jax.grad(loss), [X, X, X], X)
    assert sorted(range(3), key=found.__getitem__) == [2, 1, 0]


def test_a_sharding_that_was_said_is_seen_through_casts_too():
    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), PartitionSpec())

    def fun(x):
        said = jax.lax.with_sharding_constraint(jnp.sin(x), sharding)
        return said, said.astype(jnp.bfloat16) * 2, said + 1, jnp.cos(x), x

    assert asked(are_constrained, fun, X) == [True, True, False, False, False]
    assert are_constrained([jnp.ones(3)]) == [False]


# ---- the passes that made them

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


def passes(grads_of, params=PARAMS):
    return asked(lambda grads: backward_of(jax.tree.leaves(grads)), grads_of, params, jnp.ones((ROWS, WIDTH)))


def clipped(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


@pytest.mark.parametrize(
    "change", [lambda g: g, clipped, lambda g: jax.tree.map(lambda x: 2 * x.astype("bfloat16"), g)]
)
@pytest.mark.parametrize("loss", [loss, jax.jit(loss)])
def test_each_gradient_holds_an_activation_and_a_cotangent(loss, change):
    found = passes(lambda p, x: change(jax.grad(loss)(p, x)))
    assert found.held == 2 * LAYERS * ACTIVATION
    assert found.flops == (3 * LAYERS - 1) * MATMUL
    assert found.scaled == (change is clipped)


def test_what_is_computed_again_is_held_too_and_what_a_loop_makes_is_not():
    again, looped = passes(jax.grad(checkpointed)), passes(jax.grad(scanned), {"w": jnp.ones((LAYERS, WIDTH, WIDTH))})
    assert LAYERS * ACTIVATION <= again.held <= 2 * LAYERS * ACTIVATION and looped.held == 0
    assert again.flops > (3 * LAYERS - 1) * MATMUL <= looped.flops


def test_a_scale_that_needs_no_gradient():
    """Though the call that makes it makes the gradients too."""

    def scaled(of):
        @jax.jit
        def both(params, x):
            grads = jax.grad(loss)(params, x)
            return grads, 1.0 / jnp.sqrt(1.0 + of(grads, x))

        def grads_of(params, x):
            grads, scale = both(params, x)
            return [g * scale for g in grads.values()]

        return passes(grads_of)

    free, norm = scaled(lambda grads, x: jnp.abs(x).max()), scaled(lambda grads, x: optax.global_norm(grads))
    assert (free.scaled, norm.scaled) == (False, True)
    assert free.held == norm.held == 2 * LAYERS * ACTIVATION


def test_one_call_for_two_gradients():
    """The same jaxpr is there twice: what one call makes is told from what the other does."""
    one = jax.jit(lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))
    assert passes(lambda p, x: [one(p["w0"], x), one(p["w1"], 2.0 * x)]).held == 4 * ACTIVATION


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


def test_arguments_and_arrays_tell_nothing():
    known = [np.ones((WIDTH, WIDTH), np.float32), jnp.ones(3)]
    assert passes(lambda p, x: p) is None and backward_of(known) is None
    found = asked(lambda grads: backward_of([*known, *grads.values()]), jax.grad(loss), PARAMS, jnp.ones((ROWS, WIDTH)))
    assert found.held == 2 * LAYERS * ACTIVATION


@pytest.mark.parametrize("moved", ["parent", "in_tracers", "val"])
def test_loud_where_jax_has_moved(moved, monkeypatch):
    """Without this an update under plain ``jit`` would run among the matmuls again, and nobody would know."""
    part_of = private._part_of
    monkeypatch.setattr(
        private, "_part_of", lambda x, *names: part_of(x, *(f"no {n}" if n == moved else n for n in names))
    )
    with pytest.raises(RuntimeError, match=f"no 'no {moved}' in"):
        passes(lambda p, x: clipped(jax.grad(loss)(p, x)))


# ---- marks


def marked_twice(x):
    y = mark(x * 2, "double")
    return y, mark(y + 1, "more") * 3


def test_marks_are_in_the_trace_and_in_nothing_that_runs():
    step = jax.make_jaxpr(marked_twice)(1.0)
    assert [marks_in(step).get(v) for v in step.jaxpr.outvars] == ["double", None]
    assert asked(lambda xs: [*map(mark_of, xs)], lambda x: (x, *marked_twice(x)), 1.0) == [None, "double", None]
    assert MARK not in jax.jit(marked_twice).lower(1.0).as_text()
    assert (jax.vmap(jax.grad(lambda x: marked_twice(x)[1]))(jnp.ones(3)) == 6).all()
