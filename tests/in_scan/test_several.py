"""Steps with several updates under ``jo.jit``: each moves where its gradients are made, with the numbers of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.steps import IN_SCAN

LAYERS, WIDTH = 4, 64  # a gradient is large enough to wait on the host
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def network(params, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)[0]


def new(seed):
    return jax.device_put(jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH, WIDTH)) / 24, jax.devices()[0])


def batch(seed):
    return np.random.default_rng(seed).normal(size=(4, WIDTH)).astype(np.float32)


def both(a, b, x):
    return (network(b, network(a, x)) * x).mean()


def simultaneous(tx, ty):
    def step(a, b, s, t, x):
        value, (ga, gb) = jax.value_and_grad(both, (0, 1))(a, b, x)
        (ua, s), (ub, t) = tx.update(ga, s, a), ty.update(gb, t, b)
        return optax.apply_updates(a, ua), optax.apply_updates(b, ub), s, t, value

    return step


def alternating(tx, ty):
    """The second network's gradient is taken where the first one is new already, as a GAN's generator takes it."""

    def step(a, b, s, t, x):
        u, s = tx.update(jax.grad(both)(a, b, x), s, a)
        a = optax.apply_updates(a, u)
        value, g = jax.value_and_grad(both, 1)(a, b, x)
        u, t = ty.update(g, t, b)
        return a, optax.apply_updates(b, u), s, t, value

    return step


def with_a_target(tx, ty):
    """The second network follows a moving average of the first; its own update is small."""

    def step(a, b, s, t, x):
        value, g = jax.value_and_grad(both)(a, jax.lax.stop_gradient(b), x)
        u, s = tx.update(g, s, a)
        a = optax.apply_updates(a, u)
        u, t = ty.update(a - b, t, b)
        return a, optax.apply_updates(b, u), s, t, value

    return step


def one_in_a_branch(tx, ty):
    def step(a, b, s, t, x):
        value, (ga, gb) = jax.value_and_grad(both, (0, 1))(a, b, x)
        u, s = tx.update(ga, s, a)

        def updated():
            u, new = ty.update(gb, t, b)
            return optax.apply_updates(b, u), new

        b, t = jax.lax.cond(value > 0, updated, lambda: (b, t))
        return optax.apply_updates(a, u), b, s, t, value

    return step


def unrolled(tx, ty):
    """A list of layers each, no scan."""

    def loss(a, b, x):
        for w in (*jnp.unstack(a), *jnp.unstack(b)):
            x = x + jnp.tanh(x @ w)
        return x.var()

    def step(a, b, s, t, x):
        value, (ga, gb) = jax.value_and_grad(loss, (0, 1))(a, b, x)
        (ua, s), (ub, t) = tx.update(ga, s, a), ty.update(gb, t, b)
        return optax.apply_updates(a, ua), optax.apply_updates(b, ub), s, t, value

    return step


STEPS = [simultaneous, alternating, with_a_target, one_in_a_branch, unrolled]
PAIRS = {"adam, adam": (ADAM, ADAM), "clipped, clipped": (CLIPPED, CLIPPED), "clipped, adam": (CLIPPED, ADAM)}


def close(got, want):
    """Whether each leaf differs by little in norm: Adam divides rounding by rounding where a gradient is small."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.linalg.norm(np.subtract(x, y)) <= 1e-3 * np.linalg.norm(y) + 1e-9 for x, y in leaves)


def offloaded(inner):
    return jo.offload(inner, min_bytes=0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("make", STEPS)
@pytest.mark.parametrize("wrap", [(offloaded, offloaded), (offloaded, lambda inner: inner)], ids=["both", "one"])
def test_the_numbers_of_the_plain_step(make, pair, wrap):
    inner = PAIRS[pair]
    tx, ty = (wrapped(each) for wrapped, each in zip(wrap, inner, strict=True))
    step, plain = jo.jit(make(tx, ty), donate_argnums=(0, 1, 2, 3)), jax.jit(make(*inner))
    a, b = new(0), new(1)
    want = (a + 0, b + 0, inner[0].init(a), inner[1].init(b))
    got = jax.tree.map(lambda x: x if x.committed else jax.device_put(x, a.sharding), (a, b, tx.init(a), ty.init(b)))
    places = jax.tree.map(lambda x: x.sharding, got)
    for k in range(3):
        *got, value = step(*got, batch(k))
        *want, expected = plain(*want, batch(k))
        assert jax.tree.map(lambda x: x.sharding, tuple(got)) == places
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)
    assert close(got, want)
    assert step._cache_size() == 1


def shown(make, *inner):
    tx, ty = map(offloaded, inner)
    a, b = new(0), new(1)
    return jo.placement(jo.jit(make(tx, ty)), a, b, tx.init(a), ty.init(b), batch(0))


@pytest.mark.parametrize("make", [simultaneous, alternating, with_a_target])
def test_updates_move_into_the_scans_that_make_their_gradients(make):
    table = shown(make, ADAM, ADAM)
    moved = {row.path: IN_SCAN in row.streams for row in table.leaves if row.host}
    assert len(moved) == 4
    if make is with_a_target:  # the average has no gradient of its own
        assert any(moved.values())
    else:
        assert all(moved.values()) and not table.stays


def test_one_that_needs_a_norm_stays_and_says_so():
    table = shown(simultaneous, CLIPPED, ADAM)
    moved = [row for row in table.leaves if row.host and IN_SCAN in row.streams]
    assert len(moved) == 2 and any("norm" in why for why in table.stays)


@pytest.mark.parametrize("inner", [ADAM, CLIPPED], ids=["adam", "clipped"])
def test_two_offloads_by_group(inner):
    """``optax.partition`` around two offloads, as large runs have Muon and Adam."""
    groups = {"a": "one", "b": "two"}
    tx = optax.partition({"one": offloaded(inner), "two": offloaded(optax.lion(1e-3))}, groups)
    resident = optax.partition({"one": inner, "two": optax.lion(1e-3)}, groups)

    def step_of(tx):
        def step(params, state, x):
            value, grads = jax.value_and_grad(lambda p: both(p["a"], p["b"], x))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    params = {"a": new(0), "b": new(1)}
    got, want = (params, tx.init(params)), (params, resident.init(params))
    step, plain = jo.jit(step_of(tx)), jax.jit(step_of(resident))
    table = jo.placement(step, *got, batch(0))
    assert sum(IN_SCAN in row.streams for row in table.leaves if row.host) == (3 if inner is ADAM else 1)
    for k in range(3):
        *got, value = step(*got, batch(k))
        *want, expected = plain(*want, batch(k))
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)
    assert close(got, want)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_pipelined(gradients):
    tx, ty = offloaded(CLIPPED), offloaded(CLIPPED)
    carried = {"donate_argnames": ("a", "b", "s", "t")}
    train, plain = (
        jo.pipelined(simultaneous(tx, ty), **carried, gradients=gradients),
        jax.jit(simultaneous(CLIPPED, CLIPPED)),
    )
    a, b = new(0), new(1)
    want = (a + 0, b + 0, CLIPPED.init(a), CLIPPED.init(b))
    carry, aux = train.start(a, b, tx.init(a), ty.init(b), batch(0))
    for k in range(1, 4):
        *want, _ = plain(*want, batch(k - 1))
        carry, aux = train(carry, batch(k)) if k < 3 else (carry, aux)
    got = train.finish(carry)
    assert close(got, want)


def test_a_pass_between_two_updates_cannot_be_pipelined():
    tx, ty = offloaded(CLIPPED), offloaded(CLIPPED)
    train = jo.pipelined(alternating(tx, ty), donate_argnames=("a", "b", "s", "t"))
    a, b = new(0), new(1)
    with pytest.raises(ValueError, match=r"or jax_offload\.jit"):
        train.start(a, b, tx.init(a), ty.init(b), batch(0))


def test_one_jitted_update_that_is_called_twice_moves_twice():
    tx = offloaded(ADAM)
    update = jax.jit(tx.update)

    def step(a, b, s, t, x):
        ga, gb = jax.grad(both, (0, 1))(a, b, x)
        (ua, s), (ub, t) = update(ga, s, a), update(gb, t, b)
        return optax.apply_updates(a, ua), optax.apply_updates(b, ub), s, t

    a, b = new(0), new(1)
    args = a, b, tx.init(a), tx.init(b), batch(0)
    table = jo.placement(jo.jit(step), *args)
    assert all(IN_SCAN in row.streams for row in table.leaves if row.host) and not table.stays
    assert close(jo.jit(step)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("donated", [(), (0, 1)])
@pytest.mark.parametrize("share", ["host", 0.5])
def test_the_cores_update_one_state_twice_in_a_step(share, donated):
    def step_of(tx):
        def step(params, state, x):
            for _ in range(2):
                updates, state = tx.update(jax.grad(lambda p: network(p, x).var())(params), state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        return step

    inner = optax.lamb(1e-2)
    tx = jo.offload(inner, min_bytes=0, update_on=share)
    got, want = (new(0), tx.init(new(0))), (new(0), inner.init(new(0)))
    step, plain = jo.jit(step_of(tx), donate_argnums=donated), jax.jit(step_of(inner))
    for k in range(3):
        got, want = step(*got, batch(k)), plain(*want, batch(k))
    assert close(got, want)
