"""An update under the transformations of jax, inside loops and branches, and beside other updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo

pytestmark = pytest.mark.oldest("the update's equation: binding, transformations, lowering")

TX = jo.offload(optax.adamw(1e-2), min_bytes=0)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def model():
    return jax.device_put(
        {name: jnp.full((8, 8), 0.1 * k, jnp.float32) for k, name in enumerate("abc", 1)}, jax.devices()[0]
    )


def loss(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def step(params, state, x, through="update_params"):
    value, grads = jax.value_and_grad(loss)(params, x)
    norm = optax.global_norm(grads)
    if through == "update_params":
        params, state = jo.update_params(TX, grads, state, params)
    else:
        updates, state = TX.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, {"loss": value, "norm": norm, "size": optax.global_norm(params), "one": 1.0}


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=1e-7)
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)  # the kind of memory too


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_jitted_update_under_vmap_and_derivatives(axes):
    """A rule of the equation: inside of ``jit`` it is bound before the transformation is known."""
    params = model()
    update = lambda tx: jax.jit(lambda g: tx.update(g, tx.init(params), params)[0])  # noqa: E731
    grads = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)
    plain = optax.adamw(1e-2)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        grads = jax.device_put(grads, NamedSharding(mesh, PartitionSpec()))
        got, want = (jax.jit(jax.vmap(update(tx)))(grads) for tx in (TX, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    one = jax.tree.map(lambda g: np.asarray(g[1]), grads)
    total = lambda tx: lambda g: sum(u.sum() for u in jax.tree.leaves(update(tx)(g)))  # noqa: E731
    for derive in jax.grad, jax.jacfwd:
        got, want = (jax.jit(derive(total(tx)))(one) for tx in (TX, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), got, want)


def test_a_learning_rate_from_outside_is_no_constant_of_the_equation():
    params = model()
    state = TX.init(params)

    def update(make):
        return jax.jit(lambda lr, g: make(optax.adamw(lr)).update(g, state, params)[0])

    with jax.checking_leaks():
        got = update(lambda tx: jo.offload(tx, min_bytes=0))(0.1, params)
    plain = jo.to_device(state)
    same(got, jax.jit(lambda lr, g: optax.adamw(lr).update(g, plain, params)[0])(0.1, params))


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_an_axis_of_vmap_is_known_inside(around):
    mean = optax.stateless(lambda updates, params: jax.tree.map(lambda g: jax.lax.pmean(g, "i"), updates))
    inner, params = optax.chain(mean, optax.adamw(1e-2)), model()
    grads = jax.tree.map(lambda p: jnp.stack([p, 3 * p]), params)

    def updates(tx):
        state = tx.init(params)
        return jax.jit(jax.vmap(around(lambda g: tx.update(g, state, params)[0]), axis_name="i"))(grads)

    got, want = updates(jo.offload(inner, min_bytes=0)), updates(inner)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def windows_of(step, *args):
    """For every leaf of the state how it streams: where the window is too small for it, that it is less than a tile."""
    return {leaf.path: leaf.streams for leaf in jo.placement(step, *args).leaves if leaf.host}


def both(inner=lambda tx: tx):
    """Two offloads with windows of their own: of a, less than it takes, and of the others."""
    offloads = {"small": jo.offload(optax.adamw(1e-2), min_bytes=0, window=200), "large": TX}
    labels = {"a": "small", "b": "large", "c": "large"}
    return inner(optax.partition(offloads, labels)), inner(
        optax.partition(dict.fromkeys(offloads, optax.adamw(1e-2)), labels)
    )


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
    tx, plain = both(AROUND[around])
    params, grads = model(), jax.grad(loss)(model(), X)
    state = tx.init(params)
    update = functools.partial(jo.update_params, tx)
    streams = windows_of(update, grads, state, params)
    assert len(streams) == 6
    assert all(("tile" in how) == ("'a'" in path) for path, how in streams.items()), streams
    step = jax.jit(update)
    want, wanted = params, plain.init(params)
    for _ in range(3):
        params, state = step(grads, state, params)
        updates, wanted = jax.jit(plain.update)(grads, wanted, want)
        want = optax.apply_updates(want, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), (params, jo.to_device(state)),
                 (want, wanted))  # fmt: skip


def test_a_jitted_update_is_the_same_inside_and_outside():
    """jax traces it once, wherever it is first: then it must not matter what stands around it."""
    params = model()
    tx = jo.offload(optax.adamw(1e-2), min_bytes=0, window=200)
    jitted = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    state = tx.init(params)
    for _ in range(2):
        for call in functools.partial(jo.update_params, jitted), jitted.update:
            streams = windows_of(lambda g, s, p, call=call: call(g, s, p), params, state, params)
            assert len(streams) == 6
            assert all("tile" in how for how in streams.values())


def test_one_update_twice_in_a_recipe():
    """The same equation in two places: neither may take the other's values."""
    params, inner = model(), optax.sgd(1e-1, momentum=0.9)
    tx = jo.offload(inner, min_bytes=0)
    states = tx.init(params), tx.init(jax.tree.map(jnp.ones_like, params))

    def twice(update):
        def both(updates, states, params=None):
            first, a = update(updates, states[0], params)
            second, b = update(jax.tree.map(jnp.negative, first), states[1], params)
            return second, (a, b)

        return optax.GradientTransformation(lambda p: states, both)

    got = jax.jit(functools.partial(jo.update_params, twice(jax.jit(tx.update))))(params, states, params)
    updates, wanted = twice(inner.update).update(params, jo.to_device(states), params)
    want = optax.apply_updates(params, updates), wanted
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jo.to_device(got), want)


def test_a_learning_rate_under_vmap_around_update_params():
    params = model()

    def new(make, lr):
        tx = make(optax.adamw(lr))
        return jo.update_params(tx, params, tx.init(params), params)[0]

    rates = jnp.array([1e-1, 1e-2, 1e-3])
    got, want = (
        jax.vmap(functools.partial(new, make))(rates)
        for make in (functools.partial(jo.offload, min_bytes=0), lambda tx: tx)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_mutable_arrays_in_an_optimizer(through):
    params, calls = model(), jax.new_ref(jnp.float32(0.0))

    def update(updates, state, params=None):
        calls[...] += 1.0
        return jax.tree.map(lambda g, m: g + m, updates, state), updates

    tx = jo.offload(optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update), min_bytes=0)
    run = tx.update if through == "update" else functools.partial(jo.update_params, tx)
    new, _ = jax.jit(run)(params, tx.init(params), params)
    assert calls[...] == 1.0
    jax.tree.map(
        lambda a, p: np.testing.assert_allclose(a, (1 if run is tx.update else 2) * p + 1, rtol=1e-6), new, params
    )


@pytest.mark.parametrize("window", [None, 2**12])
def test_64_bits_where_it_is_traced_and_not_where_it_is_lowered(window):
    tx = jo.offload(optax.adamw(1e-2), min_bytes=0, window=window)
    with jax.enable_x64(True):
        params = jax.device_put({"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64), jnp.float32)}, jax.devices()[0])
        traced = jax.jit(tx.update).trace(params, tx.init(params), params)
        inside = traced.lower().as_text()
    assert traced.lower().as_text() == inside
