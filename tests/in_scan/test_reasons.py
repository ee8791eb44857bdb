"""Why an update does not move into a scan: the step says so, with the line of the user's program."""

import warnings
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIPPED,
    IN_BACKWARD,
    IN_FORWARD,
    all_moved,
    apart,
    batch,
    committed,
    layer,
    loss_of,
    moved,
    new_params,
    offloaded,
    placement,
    step_of,
)

pytestmark = pytest.mark.daily("each is a reason")

TX = offloaded(ADAMW, min_bytes=0)
DROPPED = "nothing that the step returns is made by its update"
# Each case: the step's results, chosen from new values (parameters, state, norm of the change, a loss) and old ones;
# the reason that placement gives; and whether jo.jit warns.
UNRETURNED = {
    "old state": (lambda new, old: (new[0], old[1], new[3]), "and 5 more of the state as before", True),
    "old parameters": (lambda new, old: (old[0], new[1]), "the new state, and the parameters as they were", True),
    "old ones and a loss": (lambda new, old: (*old, new[3]), DROPPED, True),
    "a loss": (lambda new, old: new[3], DROPPED, True),
    "old ones and a norm": (lambda new, old: (*old, new[2]), "its state as it was, and of its update only", False),
    "a norm": (lambda new, old: new[2], "", False),
    "old parameters beside": (lambda new, old: (*new, old[0]), "", False),
}


@pytest.mark.parametrize("form", ["update_params", "update"])
@pytest.mark.parametrize("kind", UNRETURNED)
def test_an_update_that_is_not_returned(kind, form):
    """The step runs as written, says so, and warns where that is hardly meant."""
    returned, expected, warns = UNRETURNED[kind]

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss_of)(params, x)
        new, after = new_params(TX, form, grads, state, params)
        norm = optax.tree.norm(jax.tree.map(jnp.subtract, new, params))
        return returned((new, after, norm, value), (params, state))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        why = " ".join(placement(jo.jit(step), TX).stays)
    assert expected in why if expected else "return" not in why
    assert len(said) == warns
    assert all(str(each.message).startswith("jo.jit: ") and expected in str(each.message) for each in said)


def by_index(params, batch):
    """The batch decides which layers run, and the gradients of all are summed up in a whole stack."""
    first = (batch["x"][0, 0] > 1e6).astype(jnp.int32)
    layer = lambda x, i: (jnp.tanh(x @ params["layers"][(i + first) % 4]), None)  # noqa: E731
    return (jax.lax.scan(layer, batch["x"], jnp.arange(4))[0] ** 2).mean()


def recurrent(params, batch):
    layer = lambda x, _: (jnp.tanh(jnp.einsum("bi,lij->bj", x, params["layers"])), None)  # noqa: E731
    return (jax.lax.scan(layer, batch["x"], None, length=3)[0] ** 2).mean()


def over_microbatches(change=lambda grads: grads, also=lambda x: None):
    """Gradients of ``loss``; ``change``: of their sum; ``also``: of every microbatch."""

    def gradients_of(loss):
        def gradients(params, batch):
            def add(total, x):
                also(x)
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

            parts = jax.tree.map(lambda x: x.reshape(len(x), 1, *x.shape[1:]), batch)
            return change(jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0])

        return gradients

    return gradients_of


def ending_with_it(params, batch):
    """The backward scan carries the gradient of ``layers`` as the gradient of its first activations."""
    layer = lambda x, _: (jnp.tanh(x @ jnp.eye(64)), None)  # noqa: E731
    return (jax.lax.scan(layer, params["layers"], None, length=3)[0] * batch["x"][0]).mean()


def by_norm(grads):
    return jax.tree.map(lambda g, norm=optax.tree.norm(grads): g / norm, grads)


def changed_by(change):
    """The gradients, changed leaf by leaf."""
    return lambda loss: lambda params, x: jax.tree.map(change, jax.grad(loss)(params, x))


def scaled_by_the_cotangent(loss):
    """By a number that the backward scan carries out: the batch's gradient."""

    def gradients(params, batch):
        grads, of_x = jax.grad(lambda p, x: loss(p, batch | {"x": x}), argnums=(0, 1))(params, batch["x"])
        return jax.tree.map(lambda g: g / (1 + jnp.abs(of_x).max()), grads)

    return gradients


def unrolled(params, batch):
    return loss_of(params, batch, unrolled=True)


HOSTS, EFFECT = "cannot host the update: ", over_microbatches(also=lambda x: jax.debug.callback(lambda v: None, x["x"]))
STAYS = {  # the reason, and the fix behind a semicolon
    "sums their gradients up; scan over": (jax.grad, by_index),
    "tied layers, a recurrent net); keep it on the device": (jax.grad, recurrent),
    HOSTS + "something that needs all gradients": (over_microbatches(by_norm), loss_of),
    HOSTS + "it has effects": (EFFECT, loss_of),
    HOSTS + "it runs in a loop of its own": (over_microbatches(), unrolled),
    "ends with its gradient, so nothing is left": (jax.grad, ending_with_it),
    "their update; jax_offload.pipelined hides it": (scaled_by_the_cotangent, loss_of),
    "something that needs all gradients": (lambda loss: lambda p, x: by_norm(jax.grad(loss)(p, x)), loss_of),
    "keep layers apart: cumsum": (changed_by(lambda g: jnp.cumsum(g, 0)), loss_of),
    "keep layers apart: rev": (changed_by(lambda g: g[::-1]), loss_of),
}


@pytest.mark.parametrize("expected", STAYS)
def test_why_nothing_moves(expected):
    make, loss = STAYS[expected]
    gradients = make(loss)
    table = placement(jo.jit(lambda p, s, x: jo.update_params(TX, gradients(p, x), s, p)), TX)
    assert not any(inside for path, inside in moved(table).items() if "layers" in path)
    assert any(expected in why and "; " in why for why in table.stays), table.stays


def test_only_the_first_cause_is_a_reason():
    """The reason names the equation that mixes rows, not a number of all gradients made after it."""
    step = jo.jit(lambda p, s, x: jo.update_params(TX, changed_by(lambda g: g * g[::-1])(loss_of)(p, x), s, p))
    (why,) = placement(step, TX).stays
    assert "keep layers apart: rev" in why


def per_layer(tx):
    """Return an optimizer that makes its numbers for each layer separately."""
    return optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))


STATEFUL = {
    "a factored moment": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "a trust ratio": optax.lamb(1e-2),
    "a mean of each row": optax.chain(optax.centralize(), CLIPPED),
}


@pytest.mark.parametrize("way", [jo.jit, jo.pipelined])
@pytest.mark.parametrize("kind", STATEFUL)
def test_the_fix_for_a_number_of_all_layers(kind, way):
    """``pipelined`` does not hide it either, so the reason does not offer it. A number of one layer does not wait."""
    params = committed({"layers": jnp.ones((4, 128, 128))})  # rows just large enough to move
    loss = lambda params, x: (jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])[0] ** 2).mean()  # noqa: E731
    for tx, fixed in (STATEFUL[kind], False), (per_layer(STATEFUL[kind]), True):
        tx = offloaded(tx, min_bytes=1024)
        table = placement(way(step_of(tx, loss=loss), donate_argnums=(0, 1)), tx, jnp.ones((8, 128)), params=params)
        if fixed:
            assert all_moved(table, IN_BACKWARD if way is jo.jit else IN_FORWARD), table
        else:
            (why,) = table.stays
            assert "jax.vmap the init and update" in why, why


def needing_all(params, state, x):
    """A pipelined update stays ahead of a pass that begins with all layers."""
    scaled = lambda p: x | {"x": x["x"] / optax.tree.norm(p["layers"])}  # noqa: E731
    return jo.update_params(TX, jax.grad(lambda p: loss_of(p, scaled(p)))(params), state, params)


def in_both_branches(params, state, x):
    """Transfers stay in the branch that runs, because outside both updates would load and store the state."""
    grads = jax.grad(loss_of)(params, x)
    half = lambda: jo.update_params(TX, jax.tree.map(lambda g: g / 2, grads), state, params)  # noqa: E731
    return jax.lax.cond(x["x"][0, 0] > 0, lambda: jo.update_params(TX, grads, state, params), half)


def with_effects_in_order(params, state, x):
    """jax cannot run these with host memory (0.12: a result too many), so the step runs as written."""
    value, grads = jax.value_and_grad(loss_of)(params, x)
    jax.experimental.io_callback(lambda x: None, None, value, ordered=True)
    return jo.update_params(TX, grads, state, params)


AS_WRITTEN = {
    "needed as a whole before": (needing_all, jo.pipelined),
    "outside of it, with the gradients that jnp.where chooses": (in_both_branches, jo.jit),
    "effects whose order": (with_effects_in_order, jo.jit),
    "no update of an offload was seen in it": (lambda params, state, x: (params, state, loss_of(params, x)), jo.jit),
}


@pytest.mark.parametrize("expected", AS_WRITTEN)
def test_why_no_leaf_moves(expected):
    step, way = AS_WRITTEN[expected]
    table = placement(way(step, donate_argnums=(0, 1)), TX)
    assert not any(moved(table, "in the scan").values()) and expected in " ".join(table.stays), table


@pytest.mark.parametrize("kind", ["one microbatch", "a dtype among the arguments"])
def test_what_is_no_reason(kind):
    """A scan over one is its iteration; a dtype is static, and no mutable array."""
    gradients = over_microbatches()(loss_of)

    def step(params, state, x, dtype):
        x = jax.tree.map(lambda x: x.astype(dtype)[:1], x) if kind == "one microbatch" else x
        grads = gradients(params, x) if kind == "one microbatch" else jax.grad(loss_of)(params, x)
        return jo.update_params(TX, grads, state, params)

    assert all_moved(placement(jo.jit(step, static_argnums=3), TX, batch(0), jnp.float32))


def test_a_reason_names_the_line_of_the_users_program():
    clipping = offloaded(CLIPPED)

    def normed(params, state, x):
        grads = jax.grad(loss_of)(params, x)
        norm = optax.tree.norm(grads)
        return jo.update_params(TX, jax.tree.map(lambda g: g / norm, grads), state, params)  # normed

    def clipped(params, state, x):
        grads = jax.grad(loss_of)(params, x)
        return jo.update_params(clipping, grads, state, params)  # clipped

    def merged_loss(params, x):
        layers = params["layers"].reshape(2, 2, 64, 64)  # merged
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x["x"], layers)[0] ** 2).mean()

    def merged(params, state, x):
        return jo.update_params(TX, jax.grad(merged_loss)(params, x), state, params)

    def looping(params, state, x):
        def one(carry):
            k, params, state = carry
            return k + 1, *jo.update_params(TX, jax.grad(loss_of)(params, x), state, params)

        return jax.lax.while_loop(lambda carry: carry[0] < 2, one, (0, params, state))  # looping

    lines = Path(__file__).read_text().splitlines()
    for step, tx in (normed, TX), (clipped, clipping), (merged, TX), (looping, TX):
        line = 1 + next(k for k, text in enumerate(lines) if text.endswith(f"  # {step.__name__}"))
        why = placement(jo.jit(step), tx).stays
        assert why and all(each.endswith(f"tests/in_scan/test_reasons.py:{line})") for each in why), why


def shared(params, batch):
    """Every layer uses the head too."""
    layer = lambda x, w: (jnp.tanh(x @ w + (x @ params["head"]).mean()), None)  # noqa: E731
    return (jax.lax.scan(layer, batch["x"], params["layers"])[0] ** 2).mean()


@pytest.mark.parametrize("loss", [shared, recurrent])
def test_a_leaf_that_every_iteration_uses_says_so_until_select_keeps_it_on_the_device(loss):
    """The reason appears whether or not other leaves move into that scan."""
    name = "head" if loss is shared else "layers"
    for tx, says in (TX, True), (offloaded(ADAMW, min_bytes=0, select=f"^(?!{name})"), False):
        table = placement(jo.jit(step_of(tx, loss=loss)), tx)
        assert any("every iteration of a scan uses it" in why for why in table.stays) == says, table
        assert "jax_offload.jit can hide" not in str(table)


def stacked(params, x):
    layers = jnp.stack([*params.values()])
    return jax.lax.map(lambda x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0], x).mean()


def recomputed(params, x):
    first, *others = params.values()
    x = jax.checkpoint(lambda w, x: jax.lax.map(lambda x: jnp.tanh(x @ w), x))(first, x)
    return sum((x @ w).mean() for w in others)


@pytest.mark.parametrize("loss", [stacked, recomputed])
def test_a_scan_over_a_batch_stays_as_it_is(loss):
    """Each iteration uses whole layers, and the scan would take more memory if it were unrolled or recomputed early."""
    step = jo.jit(lambda p, s, x: jo.update_params(TX, jax.grad(loss)(p, x), s, p))
    (why,) = placement(step, TX, jnp.ones((4, 2, 64)), params=apart()).stays
    assert "loop of its own" in why, why
