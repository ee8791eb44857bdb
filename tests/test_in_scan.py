"""``jo.jit``: the update inside of the scan that makes its gradients, against plain optax."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.rows import rows
from tests.support.steps import (
    FAST,
    GRADIENTS,
    LOGS,
    MODELS,
    OPTIMIZERS,
    Case,
    L,
    N,
    batch,
    difference,
    moved,
    numbers,
    scans,
    training_step,
)

STEPS = 20
ADAMW = optax.adamw(1e-2)


@functools.cache
def model_of(name):
    return MODELS[name]()


def batches(model, n):
    return [jax.device_put(batch(k, model.width), jax.devices()[0]) for k in range(n)]


def trained(step, params, state, xs):
    """Parameters and state before every step, and after the last; and what else each step returned."""
    found, results = [(params, state)], []
    for x in xs:
        params, state, *rest = step(params, state, x)
        found.append((params, state))
        results.append(rest)
    return found, results


@functools.cache
def resident(case):
    """Plain optax; where the state is in fewer bits, the offload under ``jax.jit``."""
    model = model_of(case.model)
    tx = case.tx() if case.options else case.inner()
    params = model.init(case.dtype)
    step = jax.jit(dataclasses.replace(case, update=True).step(tx, model.loss), compiler_options=FAST)
    return trained(step, params, tx.init(params), batches(model, STEPS))


def assert_close(got, want, rtol):
    errors = difference(got, want)
    assert all(error <= rtol for error in errors.values()), errors


def assert_moved(step, *args, stays=(), kwargs=None):
    """That what is stacked is updated in the scan that makes its gradients, and nothing else; and no gradient is kept.

    ``stays``: parts of the paths of leaves that have no rows.
    """
    for path, inside in moved(step, *args, **(kwargs or {})).items():
        expected = "layers" in path and not any(each in path for each in stays)
        assert inside == expected, (path, reasons(step, *args, **(kwargs or {})))
    found = scans(step, *args, **(kwargs or {}))
    assert found and all(not scan.kept for scan in found)


def reasons(step, *args, **kwargs):
    return jo.placement(step, *args, **kwargs).stays


def check(case, stays=(), rtol=2e-6, moves=True):
    model, tx = model_of(case.model), case.tx()
    params = model.init(case.dtype)
    state = tx.init(params)
    step = jo.jit(case.step(tx, model.loss), donate_argnums=(0, 1), compiler_options=FAST)
    xs = batches(model, STEPS)
    if moves:
        assert_moved(step, params, state, xs[0], stays=stays)
    else:
        assert not scans(step, params, state, xs[0])
    storage = tuple(option for option in case.options if option[0] == "storage")
    want, results = resident(dataclasses.replace(case, options=storage, update=False))
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    for k in (0, STEPS - 1):  # one update from the same state
        got = step(*jax.device_put(jax.tree.map(np.asarray, want[k]), places), xs[k])
        assert_close(got, (*want[k + 1], *results[k]), rtol)
        assert jax.tree.map(lambda x: x.sharding, got[:2]) == places
    found, rest = trained(step, params, state, xs)
    np.testing.assert_allclose(np.array([x for x, _ in rest]), np.array([x for x, _ in results]), rtol=1e-4)
    assert jax.tree.map(lambda x: x.sharding, found[-1]) == places
    assert step._cache_size() == 1


WHY = "trains for 20 steps, plain and rewritten"
# Daily what differs in where gradients and parameters stand in the scan; in CI every model, by update_params and by
# update in turns; with --everything each by both, and every policy of jax.checkpoint.
DAILY = [
    *("bias, embedding, head", "blocks with norms", "axis 1", "flax axis 0", "unroll 2 of 3", "reverse", "one layer"),
    *("several scans", "nested", "outputs", "numbered", "custom_vjp", "cast inside", "tied", "checkpoint"),
]
POLICIES = [
    *("checkpoint: nothing_saveable", "checkpoint: dots_with_no_batch_dims_saveable", "checkpoint: all but names"),
    "checkpoint: names on the host",
]
SOME = ["lion", "multi_transform", "inject_hyperparams", "MultiSteps", "adafactor"]
IN_TURN = {name: k % 2 == 0 for table in (MODELS, OPTIMIZERS) for k, name in enumerate(table)}  # whether by update


@pytest.mark.parametrize(
    ("model", "update"),
    rows(
        itertools.product(MODELS, (True, False)),
        WHY,
        daily=lambda name, update: name in DAILY and update == IN_TURN[name],
        never=lambda name, update: (
            update != IN_TURN[name] or (name.startswith("checkpoint: ") and name not in POLICIES)
        ),
    ),
)
def test_models(model, update):
    check(Case(model, update=update))


@pytest.mark.parametrize("model", ["checkpoint: nothing_saveable", "cast before", "axis 1"])
def test_parameters_are_read_row_by_row(model):
    """Where the scan reads the parameters that it overwrites: as a whole there would be two of them."""
    case, model = Case(model), model_of(model)
    params, tx = model.init(), case.tx()
    (scan,) = scans(jo.jit(case.step(tx, model.loss)), params, tx.init(params), batch())
    (weights,) = (v for v in scan.in_place if v.aval.shape == params["layers"].shape)
    assert weights in {v for each in scan.reread.values() for v in each.slice.inputs}
    assert not any(v is weights for v in scan.scan.consts)


@pytest.mark.parametrize(
    "gradients", rows(GRADIENTS, WHY, daily=["scaled", "to float32", "clipped by layer", "behind a barrier"])
)
def test_gradients(gradients):
    check(Case(gradients=gradients, model="bias, embedding, head"))


@pytest.mark.parametrize("log", rows(LOGS, WHY, daily=["norm", "norms of layers", "old parameters"]))
def test_logs(log):
    check(Case(log=log, model="bias, embedding, head"))


@pytest.mark.parametrize(
    ("optimizer", "update"),
    rows(
        itertools.product(OPTIMIZERS, (True, False)),
        WHY,
        daily=lambda name, update: name in SOME and update != IN_TURN[name],
        never=lambda name, update: update == IN_TURN[name],
    ),
)
def test_optimizers(optimizer, update):
    # what is not factored is a leaf of one element
    stays = ("v_row['layers_b']", "v_col['layers_b']", "v['layers_w']") if optimizer == "adafactor" else ()
    check(Case(optimizer=optimizer, model="bias, embedding, head", update=update), stays)


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(formats, marks=() if formats == ("int8", "uint8") else pytest.mark.long(WHY))
        for formats in [("bfloat16", "bfloat16"), ("int8", "uint8"), ("float16", "float16"), ("float8_e4m3fn", "uint8")]
    ],
)
def test_storage(formats):
    check(Case(options=(("storage", tuple(zip(("mu", "nu"), formats, strict=True))),)))


@pytest.mark.parametrize("gradients", rows(["as they are", "to float32"], WHY, daily=["to float32"]))
@pytest.mark.parametrize("update", [False, True], ids=["update_params", "update"])
def test_masters(update, gradients):
    """bfloat16 parameters with float32 masters in the state."""
    check(Case("blocks with norms", gradients=gradients, dtype="bfloat16", update=update))


@pytest.mark.parametrize("update", [False, True], ids=["update_params", "update"])
def test_three_equal_leaves_take_turns(update):
    """A master and two moments of one parameter: while one is stored one is loaded, in three phases of an iteration."""
    case = Case("checkpoint", dtype="bfloat16", gradients="to float32", update=update)
    check(case)
    params, tx = model_of(case.model).init(case.dtype), case.tx()
    (scan,) = scans(jo.jit(case.step(tx, model_of(case.model).loss)), params, tx.init(params), batch())
    assert [len(group) for group in scan.groups] == [1, 1, 1]


@pytest.mark.parametrize("update", [False, True], ids=["update_params", "update"])
@pytest.mark.parametrize("fraction", rows([0.75, 0.5, 0.25], WHY, daily=[0.5]))
def test_fraction(fraction, update):
    """What stays on the device is updated in the scan too: no gradient is stacked."""
    case = Case("wide", options=(("fraction", fraction),), update=update)
    check(case)


def test_small_rows_stay_where_they_were():
    """On the device, and of a few bytes: they are updated together after the scan."""
    model = model_of("bias, embedding, head")
    params, tx = model.init(), jo.offload(optax.adamw(1e-2), min_bytes=L * N * N * 4)
    step = jo.jit(training_step(tx, model.loss))
    args = params, tx.init(params), batch()
    assert sum(moved(step, *args).values()) == 2  # of the weights' moments, which alone are on the host
    (scan,) = scans(step, *args)
    assert [y.aval.shape for y in scan.kept] == [(L, N)]


def test_no_layers():
    """A stack of none, as configurations have it; the other moves."""

    def loss(params, x):
        for name in ("layers_1", "layers_2"):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params[name])
        return (x**2).mean()

    params = {"layers_1": np.zeros((0, N, N), np.float32), "layers_2": numbers("w", L, N, N)}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, loss), compiler_options=FAST)
    assert sum(moved(step, params, tx.init(params), batch()).values()) == 2
    same_steps(step, training_step(ADAMW, loss), tx, ADAMW, params)


def two_stacks(params, x):
    def body(x, p):
        return x + jnp.tanh(x @ p[0]) @ p[1], None

    return (jax.lax.scan(body, x, (params["layers_1"], params["layers_2"]))[0] ** 2).mean()


def test_a_leaf_that_two_gradients_meet():
    """One of them overwrites it; the other, which would read it or be written there too, stays."""

    def log(params, grads, new):
        return params["layers_1"] + grads["layers_2"]

    params = {name: numbers(name, L, N, N) for name in ("layers_1", "layers_2")}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, two_stacks, log=log, update=True), compiler_options=FAST)
    args = params, tx.init(params), batch()
    same_steps(step, training_step(ADAMW, two_stacks, log=log, update=True), tx, ADAMW, params)
    assert sum(moved(step, *args).values()) == 2 and "two gradients" in " ".join(reasons(step, *args))


def test_what_the_scan_reads_whole_is_not_overwritten_in_it():
    def loss(params, x):
        w = params["layers"]
        others = jax.lax.stop_gradient(w)

        @jax.checkpoint
        def body(x, p):
            v, i = p
            return x + jnp.tanh(x @ v) @ others[(i + 1) % L], None

        return (jax.lax.scan(body, x, (w, jnp.arange(L)))[0] ** 2).mean()

    params = jax.device_put({"layers": numbers("w", L, N, N)}, jax.devices()[0])
    tx = jo.offload(ADAMW, min_bytes=0)
    step = jo.jit(training_step(tx, loss), compiler_options=FAST)
    (scan,) = scans(step, params, tx.init(params), batch())
    read = [v for v in scan.scan.consts if v.aval.shape == (L, N, N)]
    assert read and not {*scan.in_place} & {*read}
    same_steps(step, training_step(ADAMW, loss), tx, ADAMW, params)


def tower(layers, x):
    return (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0] ** 2).mean()


@pytest.mark.parametrize("clipped", [True, False])
def test_a_scan_that_reads_parameters_silences_no_other(clipped):
    """What the clipped gradients of one tower wait for is no reason any more once it is updated where its parameters
    are read again; that of the other tower still is."""
    clip = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
    labels = {"layers_read": "clipped", "layers_other": "clipped too" if clipped else "as they are"}
    inner = optax.partition({"clipped": clip, "clipped too": clip, "as they are": ADAMW}, labels)
    params = {"layers_read": numbers("read", L, N, N), "layers_other": numbers("other", L + 1, N, N)}
    params, tx = jax.device_put(params, jax.devices()[0]), jo.offload(inner, min_bytes=0)

    def step_of(tx):
        def step(params, state, x):
            grads = jax.grad(lambda p: tower(p["layers_read"], x) + tower(p["layers_other"], x))(params)
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, tower(params["layers_read"], x)

        return step

    step = jo.jit(step_of(tx), compiler_options=FAST)
    table = jo.placement(step, params, tx.init(params), batch())
    where = {leaf.path.split("layers_")[1]: leaf.streams for leaf in table.leaves}
    assert "in the scan that reads the parameters" in where["read']"]
    assert ("in the scan that makes" in where["other']"]) == (not clipped)
    assert any("needs all gradients" in why for why in table.stays) == clipped and len(table.stays) == clipped
    same_steps(step, step_of(inner), tx, inner, params)


# Optimizers that need something of all layers at once. What they do before that, moments say, may move.
TOGETHER = {
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), False),
    "clip_by_block_rms": (lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.adamw(1e-2)), False),
    "adaptive_grad_clip": (lambda: optax.chain(optax.adaptive_grad_clip(1e-2), optax.adamw(1e-2)), False),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adamw(1e-2), 3), False),
    "novograd": (lambda: optax.novograd(1e-2), False),
    "lamb": (lambda: optax.lamb(1e-2, weight_decay=1e-3), True),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), True),
    "muon": (lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=_matrices), True),
}


def _matrices(params):
    return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(1, 2) if p.ndim == 3 else None, params)


@pytest.mark.parametrize("name", rows(TOGETHER, WHY, daily=["clip_by_global_norm", "apply_if_finite", "lamb", "muon"]))
def test_layers_together(name):
    inner, some = TOGETHER[name]
    model = model_of("bias, embedding, head")
    params = model.init()

    def step_of(tx):
        return training_step(tx, model.loss)

    tx = jo.offload(inner(), min_bytes=0)
    step = jo.jit(step_of(tx), compiler_options=FAST)
    args = params, tx.init(params), batch()
    assert any(moved(step, *args).values()) == some
    if not some:
        assert any("needs all gradients" in why or "keep layers apart" in why for why in reasons(step, *args))
    same_steps(step, step_of(inner()), tx, inner(), params)


def same_steps(step, plain, tx, inner, params, rtol=2e-6, n=STEPS, **kwargs):
    """That a step of an offload makes of the same state what the plain one makes of it, ``n`` times."""
    plain, state = jax.jit(plain, compiler_options=FAST), inner.init(params)
    places = jax.tree.map(lambda x: x.sharding, (params, tx.init(params)))
    for k in range(n):
        x = batch(k)
        got = step(*jax.device_put(jax.tree.map(np.asarray, (params, state)), places), x, **kwargs)
        want = plain(params, state, x, **kwargs)
        assert_close(got, want, rtol)
        assert jax.tree.map(lambda x: x.sharding, got[1]) == places[1]
        params, state = want[:2]


# Steps as people write them: what they do beside, and whether the update moves.

MODEL = "bias, embedding, head"


def whole_gradients(tx, loss):
    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, grads

    return step


def without_update(tx, loss):
    return lambda params, state, x: (params, state, jax.grad(loss)(params, x))


def two_updates(tx, loss):
    def step(params, state, x):
        for _ in range(2):
            params, state = jo.update_params(tx, jax.grad(loss)(params, x), state, params)
        return params, state

    return step


def in_cond(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)

        def update():
            return jo.update_params(tx, grads, state, params)

        return jax.lax.cond(value > 0, update, lambda: (params, state))

    return step


def skipping(tx, loss):
    """By a number that is known before the backward pass: each layer's update chooses."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        if isinstance(tx, type(optax.sgd(1.0))) and tx.update is ADAMW.update:
            return jo.update_params(tx, grads, state, params)
        return jo.update_params(tx, grads, state, params, skip=value < 0)

    return step


def skipping_what_is_not_finite(tx, loss):
    """Which all gradients tell: after the scan, where no update moves, none of a skipped one's bytes does."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        finite = jnp.isfinite(optax.tree.norm(grads))
        if tx.update is ADAMW.update:
            return jo.update_params(tx, grads, state, params)
        return jo.update_params(tx, grads, state, params, skip=~finite)

    return step


def accumulating(tx, loss):
    """Over microbatches, in a scan around that of the layers."""

    def step(params, state, x):
        def micro(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x[None])), None

        grads, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), x)
        return jo.update_params(tx, jax.tree.map(lambda g: g / 4, grads), state, params)

    return step


def accumulating_backwards(tx, loss):
    """The mean of the losses comes along, and each of them."""

    def step(params, state, x):
        def micro(carry, x):
            total, mean = carry
            value, grads = jax.value_and_grad(loss)(params, x[None])
            return (jax.tree.map(lambda t, g: t + g / 4, total, grads), mean + value / 4), value

        grads, mean = jax.tree.map(jnp.zeros_like, params), 0.0
        (grads, mean), values = jax.lax.scan(micro, (grads, mean), x, reverse=True)
        return (*jo.update_params(tx, grads, state, params), mean, values)

    return step


def another_in_cond(tx, loss):
    """Once more where the loss is large."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        more = lambda: jo.update_params(tx, grads, state, params)  # noqa: E731
        return (*jax.lax.cond(value > 0, more, lambda: (params, state)), value)

    return step


def in_a_loop(tx, loss):
    """Several steps in one."""

    def step(params, state, x):
        def one(carry, x):
            params, state = carry
            return jo.update_params(tx, jax.grad(loss)(params, x[None]), state, params), None

        return jax.lax.scan(one, (params, state), x)[0]

    return step


def printing(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        jax.debug.print("loss {}", value)
        params, state = jo.update_params(tx, grads, state, params)
        jax.debug.callback(lambda w: None, params["head"])
        return params, state, value

    return step


def printing_in_layers(tx, loss):
    def printed(params, x):
        def body(x, p):
            jax.debug.callback(lambda m: None, x.mean())
            return jnp.tanh(x @ p[0] + p[1]), None

        x = jax.lax.scan(body, x @ params["embed"], (params["layers_w"], params["layers_b"]))[0]
        return ((x @ params["head"]) ** 2).mean()

    return lambda params, state, x: jo.update_params(tx, jax.grad(printed)(params, x), state, params)


def reporting_in_order(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        jax.experimental.io_callback(lambda x: None, None, value, ordered=True)
        return jo.update_params(tx, grads, state, params)

    return step


def with_a_ref(tx, loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        total = jax.new_ref(jnp.zeros(()))
        total[...] += value
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, total[...]

    return step


def inside_jit(tx, loss):
    step = training_step(tx, loss)
    inner = step if tx is ADAMW else jo.jit(step)
    return lambda params, state, x: inner(params, state, 2.0 * x)


def reading_after(tx, loss):
    """What only exists after the update decides about the next batch, and the old parameters are returned."""

    def step(params, state, x):
        old = params
        params, state = jo.update_params(tx, jax.grad(loss)(params, x), state, params)
        return params, state, loss(params, x), old

    return step


def raveling(tx, loss):
    """Gradients are returned in another shape, in which a layer is many rows."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, jax.tree.map(jnp.ravel, grads)

    return step


def through_a_tower(tx, loss):
    """Something that is scanned over is made of the gradients: another loop needs them whole."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        largest, _ = jax.lax.scan(lambda m, g: (jnp.maximum(m, jnp.abs(g).max()), None), 0.0, grads["layers_w"])
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, largest

    return step


STEPS_OF_PEOPLE = {
    reading_after: True,
    printing: True,
    printing_in_layers: True,
    inside_jit: True,
    whole_gradients: True,
    through_a_tower: True,
    raveling: False,
    without_update: False,
    two_updates: False,
    in_cond: False,
    another_in_cond: True,
    skipping: True,
    skipping_what_is_not_finite: False,
    accumulating: True,
    accumulating_backwards: True,
    in_a_loop: True,
    with_a_ref: False,
}


SAID = {
    two_updates: "the step has 2 updates",
    in_cond: "it runs in a cond",
    another_in_cond: "another update runs in a cond of the step, and stays there",
    skipping_what_is_not_finite: "it runs in a while (skip= is one)",
    raveling: "its rows are merged",
    with_a_ref: "effects of mutable arrays",
}


@pytest.mark.parametrize("step_of", STEPS_OF_PEOPLE, ids=lambda f: f.__name__)
def test_steps(step_of):
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    params = model.init()
    step = jo.jit(step_of(tx, model.loss), compiler_options=FAST)
    args = params, tx.init(params), batch()

    same_steps(step, step_of(ADAMW, model.loss), tx, ADAMW, params)
    assert any(moved(step, *args).values()) == STEPS_OF_PEOPLE[step_of]
    if step_of in SAID:
        assert SAID[step_of] in " ".join(reasons(step, *args))


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
    """The step runs as it is written, says so, and warns where that is hardly meant."""
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
    """The gradients of all layers are summed up in a whole stack, also in the last iteration."""
    layer = lambda x, i: (jnp.tanh(x @ params["layers"][i]), None)  # noqa: E731
    return (jax.lax.scan(layer, x, jnp.arange(L))[0] ** 2).mean()


def recurrent(params, x):
    layer = lambda x, _: (jnp.tanh(jnp.einsum("bi,lij->bj", x, params["layers"])), None)  # noqa: E731
    return (jax.lax.scan(layer, x, None, length=3)[0] ** 2).mean()


def over_microbatches(change=lambda grads: grads, seen=lambda x: None):
    """Gradients of ``loss``; ``change``: of their sum; ``seen``: of every microbatch."""

    def gradients_of(loss):
        def gradients(params, x):
            def add(total, x):
                seen(x)
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x[None])), None

            return change(jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)[0])

        return gradients

    return gradients_of


def by_norm(grads):
    return jax.tree.map(lambda g, norm=optax.tree.norm(grads): g / norm, grads)


def scaled_by_the_cotangent(loss):
    """By a number that the backward scan carries out: the batch's gradient."""

    def gradients(params, x):
        grads, of_x = jax.grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda g: g / (1 + jnp.abs(of_x).max()), grads)

    return gradients


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
            over_microbatches(seen=lambda x: jax.debug.callback(lambda v: None, x[0])),
            None,
            "cannot host the update: it has effects",
        ),
        (over_microbatches(), unrolled, "cannot host the update: it runs in a loop of its own"),
        (scaled_by_the_cotangent, None, "a number that the same scan carries to its end"),
        (lambda loss: lambda params, x: by_norm(jax.grad(loss)(params, x)), None, "something that needs all gradients"),
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

    def printed(tx, seen):
        def body(x, w):
            jax.debug.callback(lambda m: seen.append(float(m)), x.mean())
            return jnp.tanh(x @ w), None

        def loss(params, x):
            return (jax.lax.scan(body, x, params["layers"])[0] ** 2).mean()

        def step(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            jax.debug.callback(lambda value: seen.append(float(value)), value)
            params, state = jo.update_params(tx, grads, state, params)
            jax.debug.callback(lambda w: seen.append(float(w)), params["layers"][0, 0, 0])
            return params, state

        params = model_of("scan").init()
        (jo.jit if tx is not ADAMW else jax.jit)(step)(params, tx.init(params), batch())
        jax.effects_barrier()
        return np.sort(seen)

    want = printed(ADAMW, [])
    assert len(want) == L + 2
    np.testing.assert_allclose(printed(jo.offload(ADAMW, min_bytes=0), []), want, rtol=1e-5)


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


# Ways to call a step.


def steps_of_people():
    model, tx = model_of(MODEL), jo.offload(ADAMW, min_bytes=0)
    return model, tx, model.init(), training_step(tx, model.loss), training_step(ADAMW, model.loss)


def test_static_arguments_and_keywords():
    _model, tx, params, step, plain = steps_of_people()

    def named(activation, params, state, *, x, scale=1.0, verbose=False):
        assert activation is jnp.tanh and verbose
        return step(params, state, activation(x) * scale)

    jitted = jo.jit(
        named, static_argnums=0, static_argnames="verbose", donate_argnames=("params", "state"), compiler_options=FAST
    )
    state = tx.init(params)
    assert_moved(jitted, jnp.tanh, params, state, kwargs={"x": batch(), "scale": 2.0, "verbose": True})
    x = jax.device_put(batch(), jax.devices()[0])
    want = jax.jit(plain)(params, ADAMW.init(params), jnp.tanh(x) * 2.0)
    for scale in (2.0, 1.0, jnp.float32(2.0)):
        got = jitted(jnp.tanh, jax.tree.map(jnp.copy, params), tx.init(params), x=x, scale=scale, verbose=True)
    assert_close(got, want, 2e-6)
    donated = jax.tree.map(jnp.copy, params)
    jitted(jnp.tanh, donated, tx.init(params), x=x, verbose=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))


def test_method():
    _model, tx, params, step, plain = steps_of_people()

    class Trainer:
        @functools.partial(jo.jit, static_argnums=0, compiler_options=FAST)
        def step(self, params, state, x):
            return step(params, state, x)

    trainer = Trainer()
    same_steps(trainer.step, plain, tx, ADAMW, params, n=1)
    assert any(moved(trainer.step, params, tx.init(params), batch()).values())


def test_closure():
    """A step that closes over parameters, state and batch."""
    _model, tx, params, step, plain = steps_of_people()
    state, x = tx.init(params), batch()
    got = jo.jit(lambda: step(params, state, x), compiler_options=FAST)()
    assert_close(got, jax.jit(plain)(params, ADAMW.init(params), x), 2e-6)


def test_vmap():
    """Of several models at once, their state in host memory."""
    _model, tx, params, step, plain = steps_of_people()
    many = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    state, resident = jax.vmap(tx.init)(many), jax.vmap(ADAMW.init)(many)
    got = jax.jit(jax.vmap(jo.jit(step), (0, 0, None)))(many, state, batch())
    assert_close(got, jax.jit(jax.vmap(plain, (0, 0, None)))(many, resident, batch()), 2e-6)


def test_derivative():
    """Of the loss after a step, by a factor of the batch; not of Adam's, whose first step does not depend on it."""
    model, inner = model_of(MODEL), optax.sgd(1e-1, momentum=0.9)
    params, tx = model.init(), jo.offload(inner, min_bytes=0)

    def loss_after(step, state, scale):
        return model.loss(step(params, state, scale * batch())[0], batch())

    step, plain = jo.jit(training_step(tx, model.loss)), training_step(inner, model.loss)
    got = jax.jit(jax.grad(functools.partial(loss_after, step, tx.init(params))))(2.0)
    want = jax.jit(jax.grad(functools.partial(loss_after, plain, inner.init(params))))(2.0)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_results_of_the_step():
    """Numbers, nothing, and arguments handed on."""
    _model, tx, params, step, _ = steps_of_people()

    @functools.partial(jo.jit, compiler_options=FAST)
    def several(params, state, x):
        params, new, loss, _ = step(params, state, x)
        return {"params": params, "state": new, "x": x, "old": state, "nothing": None, "one": 1, "loss": (loss, loss)}

    out = several(params, state := tx.init(params), batch())
    assert out["nothing"] is None and out["one"] == 1 and (out["x"] == batch()).all()
    assert_close(out["old"], state, 0)
    assert optax.tree.get(out["old"], "mu")["layers_w"].sharding.memory_kind == "pinned_host"


def test_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    model = model_of("flax axis 0")
    params, tx = model.init(), jo.offload(ADAMW, min_bytes=0)

    def step(state, x):
        value, grads = jax.value_and_grad(model.loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    def train(step, tx):
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        state = state.replace(step=jax.device_put(jnp.int32(0), jax.devices()[0]))
        if tx is not ADAMW:
            assert_moved(step, state, batch())
        for k in range(STEPS):
            state, value = step(state, batch(k))
        return state.params, state.opt_state, state.step, value

    assert_close(train(jo.jit(step, compiler_options=FAST), tx), train(jax.jit(step), ADAMW), 1e-5)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(N, N, rngs=rngs)
            create = nnx.vmap(lambda rngs: nnx.Linear(N, N, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = create(rngs.fork(split=L))

        def __call__(self, x):
            body = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(self.embed(x), self.layers)

    def loss(model, x):
        return (model(x) ** 2).mean()

    def step(parts, x):
        model, optimizer = nnx.merge(*parts)
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], value

    def train(jit, tx):
        model = Model(nnx.Rngs(0))
        graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
        state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
        of_graph = jit(lambda state, x: step((graph, state), x))
        if tx is not ADAMW:
            assert_moved(of_graph, state, batch())
        for k in range(STEPS):
            state, value = of_graph(state, batch(k))
        return state, value

    assert_close(train(functools.partial(jo.jit, compiler_options=FAST), jo.offload(ADAMW, min_bytes=0)),
                 train(jax.jit, ADAMW), 1e-5)  # fmt: skip


# On a mesh of 8 devices.


def sharded_loss(params, x):
    """Layers as with FSDP: each gathers its weights where it runs. Under explicit axes jax wants that said."""
    mesh = jax.sharding.get_abstract_mesh()

    def gathered(w):
        explicit = AxisType.Explicit in mesh.axis_types
        return jax.sharding.reshard(w, P(*[None] * w.ndim)) if explicit else w

    def body(x, p):
        w, b = jax.tree.map(gathered, p)
        return x + jnp.tanh(x @ w + b), None

    return (jax.lax.scan(body, x, (params["layers_w"], params["layers_b"]))[0] ** 2).mean()


SHARDED = {
    "fsdp": ({"layers_w": P(None, "data", None), "layers_b": P(None, "data")}, {}),
    "fsdp of columns": ({"layers_w": P(None, None, "data"), "layers_b": P(None, "data")}, {}),
    "zero": ({"layers_w": P(), "layers_b": P()}, {"shard_over": "data"}),
    "two axes": ({"layers_w": P(None, "data", "model"), "layers_b": P(None, "model")}, {}),
    "fsdp and zero": ({"layers_w": P(None, "model", None), "layers_b": P()}, {"shard_over": "data"}),
}


AXES = [AxisType.Auto, AxisType.Explicit]
ON_MESHES = [(name, bool(k & 1), axes) for k, (name, axes) in enumerate(itertools.product(SHARDED, AXES))]
ON_MESHES += [(name, not update, axes) for name, update, axes in ON_MESHES]


@pytest.mark.parametrize(
    ("name", "update", "axes"),
    rows(
        ON_MESHES,
        "trains on eight devices",
        daily=[("zero", False, AxisType.Auto), ("two axes", True, AxisType.Explicit)],
        never=[case for k, case in enumerate(ON_MESHES) if k not in (0, 3, 4, 7, 9, 12)],
    ),
)
def test_sharded(name, update, axes):
    specs, options = SHARDED[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)
    plain_params = {"layers_w": numbers("w", L, 16, 16), "layers_b": numbers("b", L, 16)}
    tx = jo.offload(ADAMW, min_bytes=0, **options)
    with jax.set_mesh(mesh):
        params = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in plain_params.items()}
        state, x = tx.init(params), jax.device_put(batch(), NamedSharding(mesh, P("data")))
        places = jax.tree.map(lambda x: x.sharding, (params, state))
        step = training_step(tx, sharded_loss, update=update)
        results = (*places, None, None)
        step = jo.jit(step, donate_argnums=(0, 1), out_shardings=results, compiler_options=FAST)
        assert_moved(step, params, state, x)
        copy, found = jax.tree.map(jnp.copy, (params, state)), []
        step = step.lower(params, state, x).compile()
        gathers = [line.split(" all-gather")[0] for line in step.as_text().splitlines() if " all-gather" in line]
        assert gathers and not [line for line in gathers if "[3,16,16]" in line], gathers  # of a whole leaf
        for _ in range(STEPS):
            params, state, value, _ = step(params, state, x)
            found.append(value)
        assert jax.tree.map(lambda x: x.sharding, (params, state)) == places
        usual = jax.jit(training_step(tx, sharded_loss, update=update), out_shardings=results, compiler_options=FAST)
        for _ in range(STEPS):
            copy = usual(*copy, x)[:2]
        assert_close((params, state), copy, 1e-5)
    plain = jax.jit(training_step(ADAMW, sharded_loss), compiler_options=FAST)
    want, resident = plain_params, ADAMW.init(plain_params)
    for value in found:
        want, resident, expected, _ = plain(want, resident, batch())
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close((params, state), (want, resident), 1e-4)
