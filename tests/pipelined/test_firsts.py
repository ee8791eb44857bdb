"""The first rows of a state that is updated in the forward pass: handed on from call to call, and never stale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.pipelined import (
    ADAMW,
    DEVICE,
    WIDTH,
    advance,
    assert_close,
    batch,
    copied,
    loop,
    loss_of,
    new_params,
    now,
    offloaded,
    parameters,
    pipelined,
    step_of,
)
from tests.support.rows import rows

LAYERS = 8  # a row of which stays on the device


def deep(axis=0):
    layers = jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    return parameters() | {"layers": jax.device_put(jnp.moveaxis(layers, 0, axis), jax.devices()[0])}


def rows_of(carry):
    return {key: x for key, x in carry.kept[1].items() if key.startswith("first/")}


def assert_current(carry, axis=0, first=0):
    """They are the first rows of the state that waits, bit for bit, on the device."""
    found = rows_of(carry)
    assert sorted(key.rpartition("/")[2] for key in found if "/layers" in key)
    for key, row in found.items():
        leaf = carry.kept[0][key.removeprefix("first/")]
        assert leaf.sharding.memory_kind == "pinned_host" and row.sharding.memory_kind == DEVICE
        assert row.nbytes == leaf.nbytes // LAYERS
        np.testing.assert_array_equal(np.take(np.asarray(leaf), [first], axis), np.asarray(row))


def reverse(params, batch):
    body = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
    x, _ = jax.lax.scan(body, batch["x"], params["layers"], reverse=True)
    return ((x @ params["head"] - batch["y"]) ** 2).mean()


@pytest.mark.parametrize(
    "how",
    rows(
        ["plain", "axis 1", "reverse", "int8", "half", "another batch", "microbatches"],
        "trains plain and turned",
        daily=["plain", "reverse", "another batch"],
    ),
)
def test_they_are_those_of_the_state_that_waits(how):
    """After every call, whatever the call before was; the numbers are those of the plain loop."""
    axis = 1 if how == "axis 1" else 0
    loss = {"loss": reverse} if how == "reverse" else {"axis": axis}
    options = {"int8": {"storage": {"mu": "int8", "nu": "uint8"}}, "half": {"fraction": 0.5}}.get(how, {})
    tx, batches = offloaded(**options), [batch(k, 4 if how == "another batch" and k > 2 else 8) for k in range(5)]

    def step(tx, form):
        one = step_of(tx, form, **loss)
        return one if how != "microbatches" else summed_up(tx, form)

    train, start = pipelined(step(tx, "update_params")), (deep(axis), tx.init(deep(axis)))
    wanted, losses = loop(step(ADAMW, "update"), (deep(axis), ADAMW.init(deep(axis))), batches)
    carry, aux = train.start(*start, batches[0])
    got = [aux.now]
    assert_current(carry, axis, LAYERS - 1 if how == "reverse" else 0)
    for each in batches[1:]:
        carry, aux = train(carry, each)
        got.append(aux.now)
        assert_current(carry, axis, LAYERS - 1 if how == "reverse" else 0)
    coarse = how == "int8"
    np.testing.assert_allclose(got, losses, rtol=0, atol=1e-1 if coarse else 1e-4)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-1 if coarse else 1e-4)


def summed_up(tx, form):
    def step(params, state, batch):
        def add(total, x):
            value, grads = jax.value_and_grad(loss_of)(params, {"x": x, "y": jnp.ones((x.shape[0], 8))})
            return jax.tree.map(jnp.add, total, grads), value

        parts = batch["x"].reshape(2, -1, WIDTH)
        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return *new_params(tx, form, grads, state, params), values.mean()

    return step


def test_the_update_reads_them():
    """Others in their place change the first layer, and no other: nothing of it is loaded again."""
    tx = offloaded()
    train = pipelined(step_of(tx))
    carry, _ = train.start(deep(), tx.init(deep()), batch(0))
    carry, _ = train(carry, batch(1))
    other = copied(carry)
    for key, x in rows_of(other).items():
        other.kept[1][key] = x + 1
    one, two = (train(each, batch(2))[0].kept[0]["params/layers"] for each in (carry, other))
    changed = np.any(np.asarray(one) != np.asarray(two), axis=(1, 2))
    assert changed.tolist() == [True] + [False] * (LAYERS - 1)


def test_a_skipped_step_hands_them_on_as_they_were():
    tx = offloaded(optax.apply_if_finite(ADAMW, 3))
    train = pipelined(step_of(tx))
    carry, _ = advance(train, (deep(), tx.init(deep())), [batch(0), batch(1)])
    carry, _ = train(carry, jax.tree.map(lambda x: x * jnp.nan, batch(2)))  # whose update is skipped
    before = {key: np.asarray(x) for key, x in rows_of(carry).items()}
    carry, _ = train(carry, batch(3))
    assert before and all(np.array_equal(before[key], x) for key, x in rows_of(carry).items())
    assert_current(carry)


def test_three_programs_with_them(caplog):
    """What ``start`` makes and what a call makes are of the same types."""
    tx = offloaded()
    train = pipelined(step_of(tx))
    with jax.log_compiles():
        carry, _ = advance(train, (deep(), tx.init(deep())), [batch(k) for k in range(3)])
        train.finish(carry)
    assert all(caplog.text.count(f"Finished XLA compilation of jit({name})") == 1 for name in ("_before", "train"))


def test_few_layers_and_gradients_on_the_host_hand_on_none():
    """A row of few is much of the state; and gradients wait on the host where memory is short."""
    tx = offloaded()
    few, _ = pipelined(step_of(tx)).start(parameters(), tx.init(parameters()), batch(0))
    away, _ = pipelined(step_of(tx), gradients="host").start(deep(), tx.init(deep()), batch(0))
    assert not rows_of(few) and not rows_of(away)


@pytest.mark.parametrize(("width", "worth"), [(16, True), (512, False)])
def test_not_beside_as_much_that_is_updated_before(width, worth):
    """An embedding's stores are beside the first loads of the layers, if it is larger than one of these."""

    def loss(params, batch):
        x = batch["x"] @ params["embedding"] @ params["embedding"].T / width
        return loss_of(params, batch | {"x": x})

    tx, params = offloaded(), deep() | {"embedding": jax.device_put(jnp.ones((WIDTH, width)), jax.devices()[0])}
    _, (_, produced, *_), _ = pipelined(step_of(tx, loss=loss)).turned(params, tx.init(params), batch(0))
    assert any(key.startswith("first/") for key in produced) == worth


@pytest.mark.parametrize("over", rows([None, "data"], "trains on eight devices", daily=[None]))
def test_divided_as_their_state(over):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"layers": P() if over else P(None, "data"), "head": P(), "bias": P()}
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in deep().items()}
    tx, batches = offloaded(shard_over=over), [batch(k) for k in range(3)]
    wanted, losses = loop(step_of(ADAMW, "update"), (deep(), ADAMW.init(deep())), batches)
    put = [jax.device_put(each, NamedSharding(mesh, P("data"))) for each in batches]
    with jax.set_mesh(mesh):
        train = pipelined(step_of(tx))
        state = tx.init(params)
        turned, _, _ = train.turned(params, state, put[0])
        carry, returned = advance(train, (params, state), put)
        assert turned._cache_size() == 1
        assert_current(carry)
        for key, row in rows_of(carry).items():
            leaf = carry.kept[0][key.removeprefix("first/")]
            assert row.sharding.is_equivalent_to(leaf.sharding.with_memory_kind(DEVICE), row.ndim)
        got = train.finish(carry)
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, got[0]), jax.tree.map(np.asarray, wanted[-1][0]), 1e-3)
