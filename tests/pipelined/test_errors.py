"""What ``jo.pipelined`` says of steps, names and carries that do not fit."""

import jax
import jax.numpy as jnp
import pytest

import jax_offload as jo
from tests.support.pipelined import WIDTH, assert_close, batch, broken, offloaded, parameters, pipelined, step_of


def started(step=None, tx=None, **options):
    tx = offloaded() if tx is None else tx
    train = jo.pipelined(step or step_of(tx), **{"donate_argnames": ("params", "state")} | options)
    return train, train.start(parameters(), tx.init(parameters()), batch(0))[0]


def test_a_carry_is_used_once():
    train, carry = started()
    following, _ = train(carry, batch(1))
    with pytest.raises(ValueError, match="carry: was used already"):
        train(carry, batch(1))
    with pytest.raises(ValueError, match="carry: was used already"):
        train.params(carry)
    train.finish(following)
    for use in (train.finish, train.params, lambda carry: train(carry, batch(1))):
        with pytest.raises(ValueError, match="carry: was used already"):
            use(following)
        with pytest.raises(TypeError, match="carry: expected what start or a call has returned, got a dict"):
            use(parameters())
    with pytest.raises(ValueError, match="carry: is of another pipelined step"):
        pipelined(step_of(offloaded())).finish(train.start(parameters(), offloaded().init(parameters()), batch(0))[0])


def test_a_call_that_fails_leaves_the_carry():
    train, carry = started()
    with pytest.raises(TypeError):
        train(carry)
    with pytest.raises(TypeError, match="batch: a str is no array; name it in static_argnames"):
        train(carry, "abc")
    with pytest.raises(KeyError):
        train(carry, {"x": jnp.ones((2, WIDTH))})
    train.finish(train(carry, batch(1))[0])


ERRORS = {
    "line search": "update calls the loss again, as a line search does.*use jax_offload.jit",
    "no update": "has no update of an offload",
    "ordered": "effects whose order a cut would lose: OrderedIOEffect",
    "state not returned": "no result has the tree, shapes and dtypes of the carried argument 'state'",
    "state twice": "2 results have the tree, shapes and dtypes of the carried argument 'state'",
    "dtype": "no result has the tree, shapes and dtypes of the carried argument 'params'",
    "as they were": "returns params, state as they were",
    "old state": "returns .* of the state as before the update.*Return new params, state",
    "old parameters": "returns the new state, and the parameters as they were",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_steps_that_cannot_be_turned_around(kind):
    with pytest.raises(ValueError, match=ERRORS[kind]):
        started(*broken(kind))


WITHIN = {  # a step that runs as a whole in something, and what the error calls that
    "a lax.cond": lambda step, p, s, x: jax.lax.cond(
        x["x"].sum() < 1e9, step, lambda p, s, x: (p, s, jnp.zeros(())), p, s, x
    ),
    "a jax.checkpoint": lambda step, p, s, x: jax.checkpoint(step)(p, s, x),
    "a lax.scan": lambda step, p, s, x: jax.lax.fori_loop(
        0, 1, lambda _, c: step(c[0], c[1], x), (p, s, jnp.zeros(()))
    ),
    "a lax.while_loop": lambda step, p, s, x: jax.lax.while_loop(
        lambda c: c[2] < 1e9, lambda c: step(c[0], c[1], x), (p, s, jnp.zeros(()))
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_an_update_beside_the_model_in_one_equation(name):
    """The reason is where the update runs, and no line search is blamed."""
    tx = offloaded()

    def step(params, state, batch):
        return WITHIN[name](step_of(tx), params, state, batch)

    with pytest.raises(ValueError, match=f"its update runs in {name} together with the passes through the model"):
        started(step, tx)


def test_two_networks_in_turn():
    """The error says which update is for which gradients; gradients that are taken first are turned round."""
    tx = offloaded()

    def loss(g, d, x):
        return (jnp.tanh(x @ g) @ d).mean()

    def step(g, g_state, d, d_state, x, *, first=False):
        grads, ahead = jax.grad(loss)(g, d, x), jax.grad(loss, 1)(g, d, x)
        g, g_state = jo.update_params(tx, grads, g_state, g)
        grads = ahead if first else jax.grad(loss, 1)(g, d, x)
        d, d_state = jo.update_params(tx, grads, d_state, d)
        return {"g": g, "g_state": g_state, "d": d, "d_state": d_state}

    g, d = (jax.device_put(jnp.eye(WIDTH) * k, jax.devices()[0]) for k in (1, 2))
    given = g, tx.init(g), d, tx.init(d), jnp.ones((2, WIDTH))
    train = jo.pipelined(step, donate_argnums=range(4), static_argnames="first")
    late = r"gradients for the update of 'd_state' and 'd' are taken after the update of 'g_state' and 'g', .* Fix: "
    with pytest.raises(ValueError, match=late):
        train.start(*given)
    want = jax.jit(step, static_argnames="first")(*given, first=True)
    got = train.finish(train.start(*given, first=True)[0])
    for name, x in zip(("g", "g_state", "d", "d_state"), got, strict=True):
        assert_close(x, want[name], 1e-6)


def test_bad_names():
    step = step_of(offloaded())
    for names in ((), "nothing", ("params", "weights")):
        with pytest.raises(ValueError, match=r"donate_argnames: expected names among \['params', 'state', 'batch'\]"):
            jo.pipelined(step, donate_argnames=names)
    with pytest.raises(ValueError, match=r"static_argnames: expected names among .* got 'kind'"):
        jo.pipelined(step, donate_argnames="params", static_argnames="kind")
    with pytest.raises(ValueError, match="static_argnames: a carried argument cannot be static"):
        jo.pipelined(step, donate_argnames="params", static_argnames="params")
    train = jo.pipelined(lambda w, s, x: step(w, s, x), donate_argnames=("w", "s"))
    carry, _ = train.start(parameters(), offloaded().init(parameters()), batch(0))
    with pytest.raises(ValueError, match="params: no carried argument is called 'params'"):
        train.params(carry)
