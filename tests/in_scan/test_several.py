"""Steps with several updates: each moves where its gradients are made, with the numbers of optax.

Two networks, each with an optimizer: tests/test_equivalence.py, and which of them move: test_moves.py.
"""

import jax
import optax
import pytest

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIPPED,
    IN_BACKWARD,
    LAYERS,
    WIDTH,
    assert_as_plain,
    batch,
    committed,
    layer,
    offloaded,
)
from tests.support.trees import assert_close, copied


def network(w, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def new(seed):
    return committed(jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH, WIDTH)) / 24)


def both(a, b, x):
    return (network(b, network(a, x)) * x).mean()


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


def test_one_jitted_update_that_is_called_twice_moves_twice():
    tx = offloaded(ADAMW)
    update = jax.jit(tx.update)

    def step(a, b, s, t, x):
        ga, gb = jax.grad(both, (0, 1))(a, b, x)
        (ua, s), (ub, t) = update(ga, s, a), update(gb, t, b)
        return optax.apply_updates(a, ua), optax.apply_updates(b, ub), s, t

    a, b = new(0), new(1)
    args = a, b, tx.init(a), tx.init(b), batch(0)["x"]
    table = jo.placement(jo.jit(step), *args)
    assert all(IN_BACKWARD in leaf.streams for leaf in table.leaves if leaf.host) and not table.stays
    got, want = jo.jit(step)(*args), jax.jit(step)(*args)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, want)
    assert_close(got, want, 1e-3)


@pytest.mark.parametrize("inner", [ADAMW, CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("order", ["in turn", "in turn, update_params", "both gradients first"])
def test_one_state_updated_twice_in_a_step(order, inner, recwarn):
    """Each update moves into the backward pass that makes its gradients, and loads what the first one has stored."""

    def make(tx):
        def step(params, state, batch):
            slopes = [jax.grad(lambda p, x=x: (network(p["w"], x) * x).mean()) for x in (batch["x"], 2 * batch["x"])]
            first = [] if "in turn" in order else [slope(params) for slope in slopes]
            for k, slope in enumerate(slopes):
                grads = first[k] if first else slope(params)
                if "update_params" in order:
                    params, state = jo.update_params(tx, grads, state, params)
                else:
                    updates, state = tx.update(grads, state, params)
                    params = optax.apply_updates(params, updates)
            return params, state, ()

        return step

    wide = committed(jax.random.normal(jax.random.key(0), (3, 128, 128)) / 24)  # rows that a scan loads again
    batches = [{"x": jax.random.normal(jax.random.key(k), (4, 128))} for k in range(3)]
    table = assert_as_plain(make, offloaded(inner), inner, params={"w": wide}, batches=batches)
    assert not [str(w.message) for w in recwarn if "Please report" in str(w.message)]
    if inner is ADAMW and "in turn" in order:
        assert all(IN_BACKWARD in leaf.streams for leaf in table.leaves if leaf.host), table


@pytest.mark.parametrize("share", ["host", 0.5])
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
