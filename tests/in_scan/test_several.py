"""Steps with several updates: each moves where its gradients are made, with the numbers of optax."""

import jax
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    IN_BACKWARD,
    LAYERS,
    WIDTH,
    assert_as_plain,
    assert_placed,
    batch,
    committed,
    finished,
    layer,
    offloaded,
)
from tests.support.trees import assert_close, copied

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)


def network(w, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def new(seed):
    return committed(jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH, WIDTH)) / 24)


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


# the step, the optimizers, how many of the four leaves move, and what is said; of Adam each leaf moves by itself
CASES = {
    "at once": (simultaneous, ADAMW, ADAMW, 4, ""),
    "at once, one clipped": (simultaneous, CLIPPED, ADAMW, 2, "norm"),
    "in turn": (alternating, ADAMW, ADAMW, 4, ""),
    "a target": (with_a_target, ADAMW, ADAMW, 2, None),  # the average has no gradient of its own
    "one in a branch": (one_in_a_branch, ADAMW, CLIPPED, 2, None),
}


@pytest.mark.parametrize("way", ["jo.jit", "pipelined", "pipelined, host", "plain optax beside"])
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_the_plain_step(case, way):
    make, one, other, moves, said = CASES[case]
    if way.startswith("pipelined") and make is not simultaneous:
        pytest.skip("a pass between two updates cannot be turned round: test_pipelined_errors")
    tx, ty = offloaded(one), other if way == "plain optax beside" else offloaded(other)
    a, b, names = new(0), new(1), ("a", "b", "s", "t")
    home = a, b, tx.init(a), jax.device_put(ty.init(b), a.sharding) if ty is other else ty.init(b)
    plain, want, expected = jax.jit(make(one, other)), (a, b, one.init(a), other.init(b)), []
    for k in range(3):
        *want, value = plain(*want, batch(k)["x"])
        expected.append(value)
    got, values = copied(home), []
    if way.startswith("pipelined"):
        train = jo.pipelined(make(tx, ty), donate_argnames=names, gradients="host" if "host" in way else "device")
        carry, aux = train.start(*got, batch(0)["x"])
        returned = [aux]
        for k in (1, 2):
            carry, aux = train(carry, batch(k)["x"])
            returned.append(aux)
        got, values = finished(train, carry, returned)
    else:
        step = jo.jit(make(tx, ty), donate_argnames=names)
        if way == "jo.jit":
            table = jo.placement(step, *got, batch(0)["x"])
            assert sum(IN_BACKWARD in leaf.streams for leaf in table.leaves if leaf.host) >= moves
            assert said is None or (said in " ".join(table.stays) if said else not table.stays)
        for k in range(3):
            *got, value = step(*got, batch(k)["x"])
            values.append(value)
        assert step._cache_size() == 1
    assert_placed(tuple(got), home)
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4)
    assert_close(tuple(got), tuple(want), 1e-3)


@pytest.mark.parametrize("inner", [ADAMW, CLIPPED], ids=["adam", "clipped"])
def test_two_offloads_by_group(inner):
    """``optax.partition`` around two offloads, as large runs have Muon and Adam."""
    lion = optax.lion(1e-3)
    grouped = lambda one, two: optax.partition({"one": one, "two": two}, {"a": "one", "b": "two"})  # noqa: E731

    def make(tx):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(lambda p: both(p["a"], p["b"], batch["x"]))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    params = {"a": new(0), "b": new(1)}
    tx, plain = grouped(offloaded(inner), offloaded(lion)), grouped(inner, lion)
    table = assert_as_plain(make, tx, plain, params=params, rtol=1e-3)
    assert sum(IN_BACKWARD in leaf.streams for leaf in table.leaves if leaf.host) == (3 if inner is ADAMW else 1)


@pytest.mark.parametrize("share", ["host", pytest.param(0.5, marks=pytest.mark.long("more shares"))])
def test_the_cores_update_one_state_twice_in_a_step(share):
    def make(tx):
        def step(params, state, batch):
            for _ in range(2):
                grads = jax.grad(lambda p: network(p["w"], batch["x"]).var())(params)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params, state, ()

        return step

    inner = optax.lamb(1e-2)
    tx = offloaded(inner, update_on=share)
    params, state = {"w": new(0)}, tx.init({"w": new(0)})
    want, step, plain = (params, inner.init(params)), jo.jit(make(tx), donate_argnums=(0, 1)), jax.jit(make(inner))
    got = copied((params, state))
    for k in range(3):
        *got, _ = step(*got, batch(k))
        *want, _ = plain(*want, batch(k))
    assert_close(tuple(got), tuple(want), 1e-3)
