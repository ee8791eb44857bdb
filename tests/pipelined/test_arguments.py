"""``jo.pipelined`` matches results with arguments, and refuses steps, names and carries that do not fit.

Orders of arguments and results: tests/test_random_steps.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import io_callback

import jax_offload as jo
from tests.support.steps import CLIPPED, WIDTH, batch, committed, loss_of, new_params, offloaded, parameters, step_of
from tests.support.trees import assert_close, copied

pytestmark = pytest.mark.daily("each is an error of its own")

ZEROS = jax.tree.map(jnp.zeros_like, parameters())


@pytest.mark.parametrize(
    "kind",
    ["the old parameters", pytest.param("updates and gradients", marks=pytest.mark.long("compiles four programs"))],
)
def test_results_that_look_like_the_parameters(kind):
    """Parameters as they were belong to the argument that is left. The new ones are those that the update makes."""

    def step_with(tx):
        def step(before, params, state, batch):
            grads = jax.grad(loss_of)(params, batch)
            updates, state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            return (params, new, state) if kind == "the old parameters" else (updates, grads, new, state)

        return step

    plain, tx, batches = jax.jit(step_with(CLIPPED)), offloaded(CLIPPED), [batch(k) for k in range(2)]
    names = ("before", "params", "state") if kind == "the old parameters" else ("params", "state")
    want = {"before": ZEROS, "params": parameters(), "state": CLIPPED.init(parameters())}
    start = {"before": ZEROS, "params": parameters(), "state": tx.init(parameters())}
    train, carry = jo.pipelined(step_with(tx), donate_argnames=names), copied(tuple(start[name] for name in names))
    for each in batches:
        want |= zip(names, plain(*want.values(), each)[-len(names) :], strict=True)
        carry, _ = train(carry, batch=each, **{name: x for name, x in start.items() if name not in names})
    assert_close(train.finish(carry), tuple(want[name] for name in names), 1e-3)


def test_what_cannot_be_told_apart_is_named():
    """Two averages are alike, and no update makes them: only names tell which is which."""

    def step_of_averages(results):
        def step(params, fast, slow, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            params, state = new_params(tx, "update", grads, state, params)
            mix = lambda k, old: jax.tree.map(lambda a, p: k * a + (1 - k) * p, old, params)  # noqa: E731
            return results(slow=mix(0.9, slow), loss=value, params=params, state=state, fast=mix(0.5, fast))

        return step

    tx = offloaded(CLIPPED)
    args = (parameters(), ZEROS, jax.tree.map(jnp.ones_like, ZEROS), tx.init(parameters()), batch(0))
    names = ("params", "fast", "slow", "state")
    _, aux = jo.pipelined(step_of_averages(dict), donate_argnames=names)(copied(args[:-1]), args[-1])
    assert float(aux.now["loss"]) > 0
    train = jo.pipelined(step_of_averages(lambda **found: tuple(found.values())), donate_argnames=names)
    with pytest.raises(ValueError, match=r"'fast' and 'slow', and the update does not tell.* Return a dict with"):
        train(args[:-1], args[-1])
    train = jo.pipelined(step_of_averages(lambda **found: found | {"slow": found["loss"]}), donate_argnames=names)
    with pytest.raises(ValueError, match="its result 'slow' differs from the carried argument in tree"):
        train(args[:-1], args[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Returned:
    params: Any
    state: Any
    loss: Any


def test_names_of_arguments_and_results():
    """Attributes name results, an outer jit finds the call's arguments, and a static default may be unhashable."""
    tx = offloaded(CLIPPED)

    def step(batch, params, state, sizes=[8]):  # noqa: B006
        assert sizes == [8]
        return Returned(*step_of(tx)(params, state, batch))

    start = (parameters(), tx.init(parameters()))
    want = jax.jit(step)(batch(0), *copied(start))
    train = jo.pipelined(step, donate_argnames=("params", "state"), static_argnames="sizes")
    carry, aux = jax.jit(train, donate_argnames="carry")(start, batch=batch(0))
    assert [*aux.now] == ["loss"]
    assert_close(train.finish(carry), (want.params, want.state), 1e-5)


def test_networks_that_take_turns_are_not_taken_for_themselves():
    """By position each network becomes the other one, by the update it stays itself: only names tell."""

    def step_of_turns(results):
        def step(params, other, state, batch):
            params, state = new_params(tx, "update", jax.grad(loss_of)(params, batch), state, params)
            return results(params=other, other=params, state=state)

        return step

    tx = offloaded(CLIPPED)
    given = (parameters(), ZEROS, tx.init(parameters()))
    want = jax.jit(step_of_turns(dict))(*copied(given), batch(0))
    train = jo.pipelined(step_of_turns(dict), donate_argnums=range(3))
    got = train.finish(train(copied(given), batch(0))[0])
    assert_close(got, tuple(want[name] for name in ("params", "other", "state")), 1e-3)
    train = jo.pipelined(step_of_turns(lambda **found: tuple(found.values())), donate_argnums=range(3))
    with pytest.raises(ValueError, match=r"returns them as 'other' and 'params'\. Return a dict with the carried"):
        train(given, batch(0))


# ---- refusals


def started(step=None, tx=None, **options):
    tx = offloaded(CLIPPED) if tx is None else tx
    train = jo.pipelined(step or step_of(tx), **{"donate_argnames": ("params", "state")} | options)
    return train, train((parameters(), tx.init(parameters())), batch(0))[0]


def test_a_state_that_was_moved_to_the_device():
    tx, params = offloaded(CLIPPED), parameters()
    state = tx.init(params)
    train = jo.pipelined(step_of(tx), donate_argnames=("params", "state"))
    with pytest.raises(ValueError, match=r"^state/.*arrive in device memory.*jax_offload.to_host\(tx, state\)"):
        train((params, jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), state)), batch(0))
    with pytest.raises(ValueError, match=r"^state/.*jax_offload.abstract_state\(tx, params\)"):
        jo.verify(train, *jax.eval_shape(lambda *args: args, params, state), batch(0))


def test_a_carry_is_used_once():
    train, carry = started()
    following, _ = train(carry, batch(1))
    for use in (lambda carry: train(carry, batch(1)), train.params):
        with pytest.raises(ValueError, match="carry: was used already"):
            use(carry)
    train.finish(following)
    for use in (train.finish, train.params, lambda carry: train(carry, batch(1))):
        with pytest.raises(ValueError, match="carry: was used already"):
            use(following)
        with pytest.raises(TypeError, match=r"or at first the tuple \(params, state\), got a dict"):
            use(parameters())
    with pytest.raises(ValueError, match="carry: is of another pipelined step"):
        started()[0].finish(started()[1])


def test_the_first_carry_is_used_once():
    """The second call deletes its arrays, so a carry that another first call made of them is gone, too."""
    tx = offloaded(CLIPPED)
    train, first = jo.pipelined(step_of(tx), donate_argnums=(0, 1)), (parameters(), tx.init(parameters()))
    carry, other = (train(first, batch(k))[0] for k in range(2))
    train(carry, batch(1))
    for use in (lambda: train(first, batch(0)), lambda: train.finish(other), lambda: train.params(other)):
        with pytest.raises(ValueError, match="carry: was used already, or the one that it came from"):
            use()


def test_what_a_plain_step_takes_and_returns():
    train, carry = started()
    with pytest.raises(TypeError, match=r"at first the tuple \(params, state\), and then \(batch\)"):
        train(parameters(), (), batch(0))
    for unpack in (lambda params, state: None, lambda *each: None):
        with pytest.raises(TypeError, match=r"holds a pending update. Fix: params, state = train.finish\(carry\)"):
            unpack(*carry)


def test_where_no_update_is_pending():
    """After ``finish``, and in a loop of no batches, the carried arguments stand for a carry."""
    train, carry = started()
    carry = params, state = train.finish(carry)
    assert train.params(carry) is params
    assert train.finish(carry) == (params, state) and train.finish(carry, with_late=True) == (carry, None)
    with pytest.raises(TypeError, match=r"at first the tuple \(params, state\), got a tuple of 3"):
        train.finish((*carry, params))


def test_a_call_that_fails_leaves_the_carry():
    train, carry = started()
    with pytest.raises(TypeError):
        train(carry)
    with pytest.raises(TypeError, match=r"(?s)'str'.*rest\['batch'\].*static_argnames"):
        train(carry, "abc")
    with pytest.raises(KeyError):
        train(carry, {"x": jnp.ones((2, WIDTH))})
    train.finish(train(carry, batch(1))[0])


def refused(kind: str) -> tuple[Any, Any]:
    """A step that cannot be turned round, and its optimizer; ``kind``: why."""
    search = optax.chain(optax.adamw(1e-2), optax.scale_by_backtracking_linesearch(3))
    tx = offloaded({"line search": search, "no array": optax.sgd(0.1)}.get(kind, CLIPPED))

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        if kind == "line search":
            extra = {"value": value, "grad": grads, "value_fn": lambda p: loss_of(p, batch)}
            return *new_params(tx, "update", grads, state, params, **extra), value
        if kind == "no array":
            jo.update_params(tx, {}, tx.init({}), {})
        if kind in ("no update", "no array"):
            return jax.tree.map(jnp.subtract, params, grads), state, value
        if kind == "ordered":
            io_callback(lambda x: None, None, value, ordered=True)
        new, after = jo.update_params(tx, grads, state, params)
        return {
            "state not returned": (new, value),
            "state twice": (new, after, after, value),
            "dtype": (jax.tree.map(lambda p: p.astype(jnp.bfloat16), new), after, value),
            "as they were": (params, state, value),
            "old state": (new, state, value),
            "old parameters": (params, after, value),
        }.get(kind, (new, after, value))

    def around(params: Any, state: Any, x: Any) -> Any:
        carry = params, state, jnp.zeros(())
        if kind == "a lax.cond":
            return jax.lax.cond(x["x"].sum() < 1e9, step, lambda p, s, x: (p, s, jnp.zeros(())), params, state, x)
        if kind == "a lax.scan":
            return jax.lax.fori_loop(0, 1, lambda _, c: step(c[0], c[1], x), carry)
        if kind == "a lax.while_loop":
            return jax.lax.while_loop(lambda c: c[2] < 1e9, lambda c: step(c[0], c[1], x), carry)
        return jax.checkpoint(step)(params, state, x) if kind == "a jax.checkpoint" else step(params, state, x)

    return around, tx


MODEL = r"its update runs the model again, .* \(at .*{}:\d+\).* Fix: take all gradients before the first update"
WITHIN = ("a lax.cond", "a jax.checkpoint", "a lax.scan", "a lax.while_loop")
REFUSED = {
    "line search": MODEL.format("steps.py"),
    "no update": "has no update of an offload",
    "no array": "has no update of an offload.*, with one array or more",
    "ordered": "effects whose order a cut would lose: OrderedIOEffect",
    "state not returned": "no result has the tree, shapes and dtypes of the carried argument 'state'",
    "state twice": "2 results have the tree, shapes and dtypes of the carried argument 'state'",
    "dtype": "no result has the tree, shapes and dtypes of the carried argument 'params'",
    "as they were": "returns params, state as they were",
    "old state": "returns .* of the state as before the update.*Return new params, state",
    "old parameters": "returns the new state, and the parameters as they were",
    **dict.fromkeys(WITHIN, MODEL.format("test_arguments.py")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_steps_that_cannot_be_turned_round(kind):
    with pytest.raises(ValueError, match=REFUSED[kind]):
        started(*refused(kind))


def test_two_networks_in_turn():
    """Gradients that are taken first are turned round."""
    tx = offloaded(CLIPPED)

    def loss(g, d, x):
        return (jnp.tanh(x @ g) @ d).mean()

    def step(g, g_state, d, d_state, x, *, first=False):
        grads, ahead = jax.grad(loss)(g, d, x), jax.grad(loss, 1)(g, d, x)
        g, g_state = jo.update_params(tx, grads, g_state, g)
        grads = ahead if first else jax.grad(loss, 1)(g, d, x)
        d, d_state = jo.update_params(tx, grads, d_state, d)
        return {"g": g, "g_state": g_state, "d": d, "d_state": d_state}

    g, d = (committed(jnp.eye(WIDTH) * k) for k in (1, 2))
    given = g, tx.init(g), d, tx.init(d), jnp.ones((2, WIDTH))
    train = jo.pipelined(step, donate_argnums=range(4), static_argnames="first")
    with pytest.raises(ValueError, match=MODEL.format("test_arguments.py")):
        train(given[:-1], given[-1])
    want = jax.jit(step, static_argnames="first")(*given, first=True)
    got = train.finish(train(given[:-1], given[-1], first=True)[0])
    assert_close(got, tuple(want[name] for name in ("g", "g_state", "d", "d_state")), 1e-5)


BAD = {
    r"donate_argnames: expected names among \['params', 'state', 'batch'\], got \(\)": {},
    "invalid argnames {'nothing'} in donate_argnames": {"donate_argnames": "nothing"},
    r"donate_argnums=\(4,\), but only accepts 3": {"donate_argnums": 4},
    r"donate_argnums=\(0, -5\), but only accepts 3": {"donate_argnums": (0, -5)},
    "invalid argnames {'kind'} in static_argnames": {"donate_argnames": "params", "static_argnames": "kind"},
    "static_argnames: a carried argument cannot be static": {"donate_argnums": (0, 1, 2), "static_argnums": 1},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_names_and_numbers(said):
    with pytest.raises(ValueError, match=said):
        jo.pipelined(step_of(offloaded(CLIPPED)), **BAD[said])


def test_names_that_say_too_little():
    step = step_of(offloaded(CLIPPED))
    with pytest.raises(ValueError, match=r"donate_argnames: \*rest stands for several arguments"):
        jo.pipelined(lambda params, *rest: step(params, *rest), donate_argnums=(0, 1))
    train = jo.pipelined(lambda w, s, x: step(w, s, x), donate_argnames=("w", "s"))
    carry, _ = train((parameters(), offloaded(CLIPPED).init(parameters())), batch(0))
    with pytest.raises(ValueError, match=r"no carried argument is called 'params', and 0 .*Fix: .*train.finish"):
        train.params(carry)
