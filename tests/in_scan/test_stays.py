"""Why an update does not move into a scan, and what a step does then: it says so."""

import warnings
from pathlib import Path

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.in_scan import ADAMW, MODEL, assert_close, model_of, reasons, same_steps
from tests.support.steps import FAST, L, batch, moved, of_flax, scans, training_step


def updated_and_applied(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


DROPPED = "nothing that the step returns is made by its update"
# what a step returns of what is new (parameters, state, the norm of the change, a loss) and of what is old; what is
# said of it, and whether it warns
UNRETURNED = {
    "old state": (lambda new, old: (new[0], old[1], new[3]), "0/mu/layers and 1 more of the state as before", True),
    "old parameters": (lambda new, old: (old[0], new[1]), "the new state, and the parameters as they were", True),
    "old ones and a loss": (lambda new, old: (*old, new[3]), DROPPED, True),
    "a loss": (lambda new, old: new[3], DROPPED, True),
    "old ones and a norm": (lambda new, old: (*old, new[2]), "its state as it was, and of its update only", False),
    "a norm": (lambda new, old: new[2], "", False),
    "old parameters beside": (lambda new, old: (*new, old[0]), "", False),
}


@pytest.mark.parametrize("update", [jo.update_params, updated_and_applied], ids=["update_params", "update"])
@pytest.mark.parametrize("kind", UNRETURNED)
def test_an_update_that_is_not_returned(kind, update):
    """The step runs as written, says so, and warns where that is hardly meant."""
    model, tx = model_of("scan"), jo.offload(ADAMW, min_bytes=0)
    returned, expected, warns = UNRETURNED[kind]

    def step(params, state, x):
        value, grads = jax.value_and_grad(model.loss)(params, x)
        new, after = update(tx, grads, state, params)
        norm = optax.tree.norm(jax.tree.map(jnp.subtract, new, params))
        return returned((new, after, norm, value), (params, state))

    params = model.init()
    args = params, tx.init(params), batch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        why = " ".join(reasons(jo.jit(step), *args))
    assert expected in why if expected else "return" not in why
    assert [str(each.message).startswith("jo.jit: ") and expected in str(each.message) for each in said] == [
        True
    ] * warns


def by_number(params, x):
    """The batch decides which layers run, and the gradients of all are summed up in a whole stack."""
    first = (x[0, 0] > 1e6).astype(jnp.int32)
    layer = lambda x, i: (jnp.tanh(x @ params["layers"][(i + first) % L]), None)  # noqa: E731
    return (jax.lax.scan(layer, x, jnp.arange(L))[0] ** 2).mean()


def recurrent(params, x):
    layer = lambda x, _: (jnp.tanh(jnp.einsum("bi,lij->bj", x, params["layers"])), None)  # noqa: E731
    return (jax.lax.scan(layer, x, None, length=3)[0] ** 2).mean()


def over_microbatches(change=lambda grads: grads, also=lambda x: None):
    """Gradients of ``loss``; ``change``: of their sum; ``also``: of every microbatch."""

    def gradients_of(loss):
        def gradients(params, x):
            def add(total, x):
                also(x)
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x[None])), None

            return change(jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)[0])

        return gradients

    return gradients_of


def by_norm(grads):
    return jax.tree.map(lambda g, norm=optax.tree.norm(grads): g / norm, grads)


def changed_by(change):
    """The gradients, changed."""
    return lambda loss: lambda params, x: change(jax.grad(loss)(params, x))


def scaled_by_the_cotangent(loss):
    """By a number that the backward scan carries out: the batch's gradient."""

    def gradients(params, x):
        grads, of_x = jax.grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda g: g / (1 + jnp.abs(of_x).max()), grads)

    return gradients


def of_other_layers(change):
    return lambda loss: lambda params, x: jax.tree.map(change, jax.grad(loss)(params, x))


def unrolled(params, x):
    for k in range(L):
        x = jnp.tanh(x @ params["layers"][k])
    return (x**2).mean()


@pytest.mark.parametrize(
    ("gradients_of", "loss", "expected"),
    [
        (jax.grad, by_number, "takes its layers by their index"),
        (jax.grad, recurrent, "every iteration of a scan uses it"),
        (over_microbatches(by_norm), None, "cannot host the update: something that needs all gradients"),
        (
            over_microbatches(also=lambda x: jax.debug.callback(lambda v: None, x[0])),
            None,
            "cannot host the update: it has effects",
        ),
        (over_microbatches(), unrolled, "cannot host the update: it runs in a loop of its own"),
        (scaled_by_the_cotangent, None, "a number that the same scan carries to its end"),
        (changed_by(by_norm), None, "something that needs all gradients"),
        (changed_by(lambda g: jax.tree.map(lambda g: jnp.cumsum(g, 0), g)), None, "keep layers apart: cumsum"),
        (changed_by(lambda g: jax.tree.map(lambda g: g[::-1], g)), None, "keep layers apart: rev"),
    ],
)
def test_why_nothing_moves(gradients_of, loss, expected):
    model, tx = model_of("scan"), jo.offload(ADAMW, min_bytes=0)
    params, gradients = model.init(), gradients_of(loss or model.loss)
    step = jo.jit(lambda params, state, x: jo.update_params(tx, gradients(params, x), state, params))
    args = params, tx.init(params), batch()
    assert not any(moved(step, *args).values())
    (why,) = reasons(step, *args)
    assert expected in why


def test_a_reason_names_the_line_of_the_users_program():
    model, adamw = model_of("scan"), jo.offload(ADAMW, min_bytes=0)
    clipping = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), ADAMW), min_bytes=0)
    params = model.init()

    def normed(params, state, x):
        grads = jax.grad(model.loss)(params, x)
        norm = optax.tree.norm(grads)
        return jo.update_params(adamw, jax.tree.map(lambda g: g / norm, grads), state, params)  # normed

    def clipped(params, state, x):
        grads = jax.grad(model.loss)(params, x)
        return jo.update_params(clipping, grads, state, params)  # clipped

    def looping(params, state, x):
        def one(carry):
            k, params, state = carry
            return k + 1, *jo.update_params(adamw, jax.grad(model.loss)(params, x), state, params)

        return jax.lax.while_loop(lambda carry: carry[0] < 2, one, (0, params, state))  # looping

    lines = Path(__file__).read_text().splitlines()
    for step, tx in (normed, adamw), (clipped, clipping), (looping, adamw):
        line = 1 + next(k for k, text in enumerate(lines) if text.endswith(f"  # {step.__name__}"))
        (why,) = reasons(jo.jit(step), params, tx.init(params), batch())
        assert why.endswith(f"tests/in_scan/test_stays.py:{line})"), why


def test_broadcast_variables_of_flax():
    """``nn.scan(variable_broadcast=)``: every layer uses the same ones, and their gradient is whole after the last."""
    model, tx = of_flax(0, shared=True), jo.offload(ADAMW, min_bytes=0)
    params = model.init()
    step = jo.jit(training_step(tx, model.loss), compiler_options=FAST)
    args = params, tx.init(params), batch()
    assert not any(moved(step, *args).values())
    assert "every iteration of a scan uses it" in " ".join(reasons(step, *args))
    same_steps(step, training_step(ADAMW, model.loss), tx, ADAMW, params)


def test_one_microbatch():
    """A scan over one is its iteration."""
    model, tx = model_of("scan"), jo.offload(ADAMW, min_bytes=0)
    params, gradients = model.init(), over_microbatches()(model.loss)
    steps = [
        jit(lambda p, s, x, tx=tx: jo.update_params(tx, gradients(p, x), s, p), compiler_options=FAST)
        for jit, tx in ((jo.jit, tx), (jax.jit, ADAMW))
    ]
    got, want = (step(params, tx.init(params), batch()[:1]) for step, tx in zip(steps, (tx, ADAMW), strict=True))
    assert all(moved(steps[0], params, tx.init(params), batch()[:1]).values())
    assert_close(got, want, 2e-6)


def test_prints():
    """Each is printed as often as in the plain step: before the update, in the layers, after it."""

    def printed(tx, log):
        def body(x, w):
            jax.debug.callback(lambda m: log.append(float(m)), x.mean())
            return jnp.tanh(x @ w), None

        def loss(params, x):
            return (jax.lax.scan(body, x, params["layers"])[0] ** 2).mean()

        def step(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            jax.debug.callback(lambda value: log.append(float(value)), value)
            params, state = jo.update_params(tx, grads, state, params)
            jax.debug.callback(lambda w: log.append(float(w)), params["layers"][0, 0, 0])
            return params, state

        params = model_of("scan").init()
        (jo.jit if tx is not ADAMW else jax.jit)(step)(params, tx.init(params), batch())
        jax.effects_barrier()
        return np.sort(log)

    want = printed(ADAMW, [])
    assert len(want) == L + 2
    np.testing.assert_allclose(printed(jo.offload(ADAMW, min_bytes=0), []), want, rtol=1e-5)


def reporting_in_order(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        jax.experimental.io_callback(lambda x: None, None, value, ordered=True)
        return jo.update_params(tx, grads, state, params)

    return step


def test_effects_in_order():
    """jax cannot run these with host memory (0.12: a result too many); the step is left as it is, and says so."""
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    params = model.init()
    step = jo.jit(reporting_in_order(tx, model.loss))
    args = params, tx.init(params), batch()
    assert not any(moved(step, *args).values())
    assert "effects whose order" in " ".join(reasons(step, *args))


def test_a_mutable_array_among_the_arguments():
    """What reads and writes it keeps its order: the step is left as it is, and says so."""
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    params = model.init()

    def step_of(tx):
        def step(params, state, x, total):
            value, grads = jax.value_and_grad(model.loss)(params, x)
            total[...] += value
            return jo.update_params(tx, grads, state, params)

        return step

    step, total = jo.jit(step_of(tx), compiler_options=FAST), jax.new_ref(jnp.zeros(()))
    args = params, tx.init(params), batch()
    assert "effects of mutable arrays" in " ".join(reasons(step, *args, total))
    got = step(*args, total)
    want = jax.jit(step_of(ADAMW), compiler_options=FAST)(
        params, ADAMW.init(params), batch(), jax.new_ref(jnp.zeros(()))
    )
    assert_close(got, want, 2e-6)
    np.testing.assert_allclose(total[...], model.loss(params, batch()), rtol=1e-5)


def test_a_dtype_among_the_arguments():
    """It is static, and no mutable array: the update moves."""
    model, tx = model_of("scan"), jo.offload(ADAMW, min_bytes=0)
    params = model.init()

    def step(params, state, x, dtype):
        grads = jax.grad(model.loss)(params, x.astype(dtype))
        return jo.update_params(tx, grads, state, params)

    step = jo.jit(step, static_argnums=3, compiler_options=FAST)
    args = params, tx.init(params), batch(), jnp.float32
    assert scans(step, *args)
    assert all(moved(step, *args).values())
