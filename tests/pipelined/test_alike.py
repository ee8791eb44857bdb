"""Carried arguments of the same tree, shapes and dtypes: ``jo.pipelined`` never takes one for another."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    CLIP,
    advance,
    assert_close,
    assert_placed,
    batch,
    copied,
    loss_of,
    new_params,
    offloaded,
    parameters,
)
from tests.support.trees import FAST

BATCHES = [batch(k) for k in range(3)]
FINITE = optax.apply_if_finite(ADAMW, 3)
FORMS = {  # offloaded, plain, how the update is called
    "update": (offloaded(), ADAMW, "update", {}),
    "update_params": (offloaded(), ADAMW, "update_params", {}),
    "clipping outside": (optax.chain(CLIP, offloaded(optax.adamw(1e-2))), ADAMW, "update", {}),
    "skip": (offloaded(), ADAMW, "update", {"skip": jnp.bool_(False)}),
    "apply_if_finite": (offloaded(FINITE), FINITE, "update_params", {}),
    "apply_if_finite outside": (optax.apply_if_finite(offloaded(), 3), FINITE, "update", {}),
    "no parameters": (offloaded(optax.sgd(1e-2, 0.9)), optax.sgd(1e-2, 0.9), "update", {}),
}


def averaged(tx: Any, form: str, extra: Any, order: Any) -> Any:
    """A step with a target network, which pulls the parameters; its results in this order."""

    def loss(params: Any, target: Any, batch: Any) -> Any:
        apart = sum(jnp.vdot(p - t, p - t) for p, t in zip(*map(jax.tree.leaves, (params, target)), strict=True))
        return loss_of(params, batch) + 1e-3 * apart

    def step(params: Any, target: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, target, batch)
        params, state = new_params(tx, form, grads, state, params, **extra)
        target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, target, params)
        results = {"params": params, "target": target, "state": state, "loss": value}
        return tuple(results[name] for name in order)

    return step


def plain(step: Any, carried: dict[str, Any], order: Any) -> tuple[dict[str, Any], list[Any]]:
    """The plain loop; ``order``: the names of what the step returns."""
    jitted, losses = jax.jit(step, compiler_options=FAST), []
    for each in BATCHES:
        results = dict(zip(order, jitted(*carried.values(), each), strict=True))
        losses.append(results.pop("loss"))
        carried = {name: results[name] for name in carried}
    return carried, losses


def check(step: Any, wanted: dict[str, Any], init: dict[str, Any], *names: str, **options: Any) -> list[Any]:
    """``step``, pipelined, gives each argument its own next value; ``names``: in the order of ``finish``."""
    train = jo.pipelined(step, **(options or {"donate_argnames": names}))
    carry, returned = advance(train, copied(tuple(init.values())), BATCHES)
    got = dict(zip(names, train.finish(carry), strict=True))
    for name in names:
        assert_placed(got[name], init[name])
        if not name.startswith("state"):  # of the plain one it is in another memory
            assert_close(got[name], wanted[name], 1e-4)
    return [aux.now for aux in returned]


ORDERS = [("params", "target", "state"), ("target", "state", "params"), ("state", "target", "params")]


@pytest.mark.parametrize(("form", "names", "returned"), [
    *((form, ORDERS[1], (*ORDERS[0], "loss")) for form in FORMS),
    *(("update", *each) for each in itertools.product(ORDERS, [(*ORDERS[0], "loss"), ("loss", *ORDERS[1])])),
])  # fmt: skip
def test_order_of_names_and_of_results(form, names, returned):
    """Neither the order of ``donate_argnames`` nor that of the results matters, as under ``jax.jit``."""
    tx, plain_tx, how, extra = FORMS[form]
    start = {"params": parameters(), "target": jax.tree.map(jnp.zeros_like, parameters())}
    plain_step = averaged(plain_tx, "update", {}, returned)
    wanted, losses = plain(plain_step, start | {"state": plain_tx.init(start["params"])}, returned)
    ours = start | {"state": tx.init(start["params"])}
    now = check(averaged(tx, how, extra, returned), wanted, ours, *names)
    assert_close(now, losses, 1e-5)


def test_donate_argnums():
    order = (*ORDERS[0], "loss")
    start = {"params": parameters(), "target": jax.tree.map(jnp.zeros_like, parameters())}
    wanted, _ = plain(averaged(ADAMW, "update", {}, order), start | {"state": ADAMW.init(start["params"])}, order)
    tx = offloaded()
    step = averaged(tx, "update", {}, order)
    ours = start | {"state": tx.init(start["params"])}
    check(step, wanted, ours, *ORDERS[0], donate_argnums=(0, 1, 2))
    check(step, wanted, ours, "state", "params", "target", donate_argnums=(-2, 0), donate_argnames="target")
    for bad in (4, (0, -5)):
        with pytest.raises(ValueError, match="donate_argnums: expected positions among the step's 4 parameters"):
            jo.pipelined(step, donate_argnums=bad)
    with pytest.raises(ValueError, match=r"donate_argnames: \*rest stands for several arguments"):
        jo.pipelined(lambda params, *rest: step(params, *rest), donate_argnums=(0, 1))
    with pytest.raises(ValueError, match="static_argnames: a carried argument cannot be static"):
        jo.pipelined(step, donate_argnums=(0, 1, 2), static_argnums=1)


def two_networks(one: Any, other: Any, form: str) -> Any:
    """Both players of a game, with an optimizer each; results and arguments in different orders."""

    def step(left: Any, right: Any, state_left: Any, state_right: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(left, batch)
        gap, others = jax.value_and_grad(lambda p: 2 * loss_of(p, batch))(right)
        left, state_left = new_params(one, form, grads, state_left, left)
        right, state_right = new_params(other, form, others, state_right, right)
        return value + gap, state_right, right, state_left, left

    return step


@pytest.mark.parametrize("form", ["update", "update_params"])
def test_two_networks(form):
    order = ("loss", "state_right", "right", "state_left", "left")
    start = {"left": parameters(), "right": jax.tree.map(lambda p: 0.5 * p, parameters())}
    states = {"state_left": ADAMW.init(start["left"]), "state_right": ADAMW.init(start["right"])}
    wanted, _ = plain(two_networks(ADAMW, ADAMW, "update"), start | states, order)
    tx = offloaded()
    ours = start | {"state_left": tx.init(start["left"]), "state_right": tx.init(start["right"])}
    check(two_networks(tx, tx, form), wanted, ours, "state_left", "right", "left", "state_right")


def test_the_parameters_of_the_step_before():
    """A result that is an argument as it was belongs to the argument that is left, not to itself."""

    def step_of(tx: Any) -> Any:
        def step(before: Any, params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            value += optax.tree.norm(jax.tree.map(jnp.subtract, params, before))
            updates, state = tx.update(grads, state, params)
            return params, optax.apply_updates(params, updates), state, value

        return step

    tx, start = offloaded(), {"before": jax.tree.map(jnp.zeros_like, parameters()), "params": parameters()}
    wanted, losses = plain(
        step_of(ADAMW), start | {"state": ADAMW.init(parameters())}, ("before", "params", "state", "loss")
    )
    ours = start | {"state": tx.init(parameters())}
    assert_close(check(step_of(tx), wanted, ours, "params", "before", "state"), losses, 1e-5)


class Named(NamedTuple):
    slow: Any
    loss: Any
    params: Any
    state: Any
    fast: Any


def test_what_cannot_be_told_apart_is_named():
    """Two averages are alike, and no update makes them: only names tell which is which."""

    def step_of(tx: Any, results: Any) -> Any:
        def step(params: Any, fast: Any, slow: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            params, state = new_params(tx, "update", grads, state, params)
            fast, slow = (
                jax.tree.map(lambda a, p, k=k: k * a + (1 - k) * p, a, params) for a, k in ((fast, 0.5), (slow, 0.9))
            )
            return results(slow=slow, loss=value, params=params, state=state, fast=fast)

        return step

    tx, order = offloaded(), ("params", "fast", "slow", "state")
    zeros = jax.tree.map(jnp.zeros_like, parameters())
    start = {"params": parameters(), "fast": zeros, "slow": jax.tree.map(jnp.ones_like, zeros)}
    wanted, losses = plain(step_of(ADAMW, Named), start | {"state": ADAMW.init(parameters())}, Named._fields)
    ours = start | {"state": tx.init(parameters())}
    for results in (Named, dict):
        now = check(step_of(tx, results), wanted, ours, "slow", "params", "state", "fast")
        assert_close(now, [{"loss": x} for x in losses], 1e-5)
    train = jo.pipelined(step_of(tx, lambda **found: tuple(found.values())), donate_argnames=order)
    with pytest.raises(
        ValueError, match=r"'fast' and 'slow', and the update does not tell.* Return a dict with the carried"
    ):
        train.start(*ours.values(), BATCHES[0])
    train = jo.pipelined(step_of(tx, lambda **found: found | {"slow": found["loss"]}), donate_argnames=order)
    with pytest.raises(ValueError, match="its result 'slow' differs from the carried argument in tree"):
        train.start(*ours.values(), BATCHES[0])


def test_more_results_than_arguments():
    """Of results that look like the parameters, the new parameters are those that the update makes."""

    def step_of(tx: Any) -> Any:
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            updates, state = tx.update(grads, state, params)
            return updates, grads, optax.apply_updates(params, updates), state, value

        return step

    params, state, grads = parameters(), ADAMW.init(parameters()), []
    for each in BATCHES:
        _, gradient, params, state, _ = jax.jit(step_of(ADAMW))(params, state, each)
        grads.append(gradient)
    wanted = {"params": params, "state": state}
    tx = offloaded()
    now = check(step_of(tx), wanted, {"params": parameters(), "state": tx.init(parameters())}, "state", "params")
    assert_close([found[1] for found in now], grads, 1e-5)
