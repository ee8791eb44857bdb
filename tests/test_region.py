"""An update under the transformations of jax, inside loops and branches, and beside other updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.support.trees import assert_close

pytestmark = [
    pytest.mark.oldest("the update's equation: binding, transformations, lowering"),
    pytest.mark.daily("each is a transformation"),
]

ADAMW = optax.adamw(1e-2)
offloaded = functools.partial(jo.offload, min_bytes=0)


def model():
    return jax.device_put(
        {name: jnp.full((8, 8), 0.1 * k, jnp.float32) for k, name in enumerate("abc", 1)}, jax.devices()[0]
    )


def updates_of(make, inner=ADAMW):
    """From gradients to updates, in a jit: the update is bound before what stands around the jit is known."""
    tx, params = make(inner), model()
    return jax.jit(lambda g: tx.update(g, tx.init(params), params)[0])


def three(mesh=None):
    grads = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), model())
    return grads if mesh is None else jax.device_put(grads, NamedSharding(mesh, PartitionSpec()))


def under_vmap(axes, make):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        return jax.jit(jax.vmap(updates_of(make)))(three(mesh))


def differentiated(derive, make):
    update = updates_of(make)
    return jax.jit(derive(lambda g: sum(u.sum() for u in jax.tree.leaves(update(g)))))(model())


def checked_by_jax(make):
    with jax.enable_checks(True):
        return updates_of(make)(model())


def reading_an_axis(around, make):
    mean = optax.stateless(lambda updates, params: jax.tree.map(lambda g: jax.lax.pmean(g, "i"), updates))
    update = around(updates_of(make, optax.chain(mean, ADAMW)))
    return jax.jit(jax.vmap(update, axis_name="i"))(three())


def learning_rate_from_outside(make):
    params, state = model(), make(ADAMW).init(model())
    with jax.checking_leaks():
        return jax.jit(lambda lr, g: make(optax.adamw(lr)).update(g, state, params)[0])(0.1, params)


def learning_rates_under_vmap(make):
    def new(lr):
        tx = make(optax.adamw(lr))
        return jo.update_params(tx, model(), tx.init(model()), model())[0]

    return jax.vmap(new)(jnp.array([1e-1, 1e-2, 1e-3]))


def one_jitted_update_twice(make):
    """The same equation in two places of a recipe: neither may take the other's values."""
    params, tx = model(), make(optax.sgd(1e-1, momentum=0.9))
    states, update = (tx.init(params), tx.init(jax.tree.map(jnp.ones_like, params))), jax.jit(tx.update)

    def both(updates, states, params=None):
        first, a = update(updates, states[0], params)
        second, b = update(jax.tree.map(jnp.negative, first), states[1], params)
        return second, (a, b)

    twice = optax.GradientTransformation(lambda p: states, both)
    return jax.jit(functools.partial(jo.update_params, twice))(params, states, params)


def counting_in_a_mutable_array(through, make):
    calls = jax.new_ref(jnp.float32(0.0))

    def update(updates, state, params=None):
        calls[...] += 1.0
        return jax.tree.map(lambda g, m: g + m, updates, state), updates

    tx = make(optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update))
    run = tx.update if through == "update" else functools.partial(jo.update_params, tx)
    return jax.jit(run)(model(), tx.init(model()), model()), calls[...]


PROGRAMS = {
    "vmap": functools.partial(under_vmap, AxisType.Auto),
    "vmap, Explicit axes": functools.partial(under_vmap, AxisType.Explicit),
    "grad": functools.partial(differentiated, jax.grad),
    "jacfwd": functools.partial(differentiated, jax.jacfwd),
    "jax's own checks": checked_by_jax,
    "an axis of vmap, known inside a jit": functools.partial(reading_an_axis, jax.jit),
    "an axis of vmap, known inside a checkpoint": functools.partial(reading_an_axis, jax.checkpoint),
    "a learning rate from outside": learning_rate_from_outside,
    "learning rates under vmap": learning_rates_under_vmap,
    "one jitted update twice": one_jitted_update_twice,
    "a mutable array": functools.partial(counting_in_a_mutable_array, "update"),
    "a mutable array, update_params": functools.partial(counting_in_a_mutable_array, "update_params"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_update_is_as_the_plain_one(program):
    """The plain one goes through ``jo.update_params`` too, which takes any transformation."""
    got, want = (PROGRAMS[program](make) for make in (offloaded, lambda inner: inner))
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), 2e-6)


def windows_of(step, *args):
    """For every leaf of the state how it streams: where the window is too small for it, that it is less than a tile."""
    return {leaf.path: leaf.streams for leaf in jo.placement(step, *args).leaves if leaf.host}


def two():
    """Two offloads with windows of their own: of a, less than it takes, and of the others."""
    offloads = {"small": offloaded(ADAMW, window=200), "large": offloaded(ADAMW)}
    return optax.partition(offloads, {"a": "small", "b": "large", "c": "large"})


AROUND = {
    "a chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "a cond inside a cond": lambda tx: optax.conditionally_transform(
        optax.apply_if_finite(tx, 3), lambda step: step != 1
    ),
    "a jit": lambda tx: optax.GradientTransformation(tx.init, jax.jit(tx.update)),
}


@pytest.mark.parametrize("around", AROUND)
def test_each_offload_keeps_its_window(around):
    """Their numbers, by group: tests/test_equivalence.py."""
    tx, params = AROUND[around](two()), model()
    streams = windows_of(functools.partial(jo.update_params, tx), params, tx.init(params), params)
    assert len(streams) == 6
    assert all(("tile" in how) == ("'a'" in path) for path, how in streams.items()), streams


def test_a_jitted_update_is_the_same_inside_and_outside():
    """jax traces it once, wherever it is first: then it must not matter what stands around it."""
    params, tx = model(), offloaded(ADAMW, window=200)
    jitted = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    state = tx.init(params)
    for _ in range(2):
        for call in functools.partial(jo.update_params, jitted), jitted.update:
            streams = windows_of(lambda g, s, p, call=call: call(g, s, p), params, state, params)
            assert len(streams) == 6
            assert all("tile" in how for how in streams.values())


@pytest.mark.parametrize("window", [None, 2**12])
def test_64_bits_where_it_is_traced_and_not_where_it_is_lowered(window):
    tx = offloaded(ADAMW, window=window)
    with jax.enable_x64(True):
        params = jax.device_put({"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64), jnp.float32)}, jax.devices()[0])
        traced = jax.jit(tx.update).trace(params, tx.init(params), params)
        inside = traced.lower().as_text()
    assert traced.lower().as_text() == inside
