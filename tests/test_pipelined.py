"""``jo.pipelined``: the numbers, placements and programs of the plain loop, for an unchanged step."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved
from jax_offload._interop import jit as interop_jit
from jax_offload._precision.storage import rules_of
from tests.support.rows import rows
from tests.support.steps import scans
from tests.support.storage import resident
from tests.support.trees import FAST
from tests.support.words import words

HOST, DEVICE = "pinned_host", "device"
STEPS, LAYERS, WIDTH = 20, 4, 64
CLIP = optax.clip_by_global_norm(0.5)
ADAMW = optax.chain(CLIP, optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def compile_fast(monkeypatch):
    monkeypatch.setattr(interop_jit, "compiler_options", lambda platform: FAST)


def offloaded(tx=ADAMW, **options):
    return jo.offload(tx, **{"min_bytes": 1024} | options)


def parameters(axis=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    layers = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    head = jax.random.normal(keys[1], (WIDTH, 8)) / WIDTH**0.5
    params = {"layers": jnp.moveaxis(layers, 0, axis), "head": head, "bias": jnp.zeros(8)}
    return jax.device_put(jax.tree.map(lambda p: p.astype(dtype), params), jax.devices()[0])


def batch(k, size=8):
    x = np.random.default_rng(k).standard_normal((size, WIDTH), np.float32)
    return jax.device_put({"x": x, "y": np.sin(x[:, :8])}, jax.devices()[0])


def model(params, x, axis=0, unrolled=False):
    def layer(h, w):
        return h + jnp.tanh(h @ w.astype(h.dtype)), None

    layers = jnp.moveaxis(params["layers"], axis, 0)
    if unrolled:
        for w in layers:
            x, _ = layer(x, w)
    else:
        x, _ = jax.lax.scan(layer, x, layers)
    return x @ params["head"].astype(x.dtype) + params["bias"].astype(x.dtype)


def loss_of(params, batch, **how):
    return ((model(params, batch["x"], **how) - batch["y"]) ** 2).mean()


def new_params(tx, form, grads, state, params, **extra):
    if form == "update_params":
        return jo.update_params(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def step_of(tx, form="update_params", loss=loss_of, **how):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(functools.partial(loss, **how))(params, batch)
        params, state = new_params(tx, form, grads, state, params)
        return params, state, value

    return step


def copied(tree):
    """Each array in the memory in which it is."""

    def copy(x):
        return x if isinstance(x, int) else jo.to_host(y) if (y := jnp.copy(x)).sharding != x.sharding else y

    return jax.tree.map(copy, tree)


def loop(step, carried, batches):
    """The plain loop: what is carried after every step, and the other results of each."""
    jitted = jax.jit(step, compiler_options=FAST)
    every, others = [], []
    for each in batches:
        *carried, other = jitted(*carried, each)
        every.append(tuple(carried))
        others.append(other)
    return every, others


def advance(train, carried, batches):
    """The same through ``pipelined``, not finished yet: the carry and every ``Aux``."""
    carry, aux = train.start(*carried, batches[0])
    seen = [aux]
    for each in batches[1:]:
        carry, aux = train(carry, each)
        seen.append(aux)
    return carry, seen


def now(seen):
    return [aux.now for aux in seen]


def assert_placed(got, like):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.sharding.memory_kind == y.sharding.memory_kind
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def assert_close(got, want, atol):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=atol)


def pipelined(step, **options):
    return jo.pipelined(step, donate_argnames=("params", "state"), **options)


def in_the_scan(train, *args):
    return "in the scan that reads the parameters" in words(jo.placement(train, *args))


def check(
    ours, plain, init, plain_init, params=None, steps=STEPS, loss_atol=1e-4, one=1e-6, atol=1e-3, scan=True, **options
):
    """The step ``ours`` through ``pipelined``, against ``plain`` in a loop: after one step, and after all."""
    params = parameters() if params is None else params
    batches = [batch(k) for k in range(steps)]
    wanted, losses = loop(plain, (params, plain_init(params)), batches)
    train, state = pipelined(ours, **options), init(params)
    for n in (1, steps):
        carry, seen = advance(train, copied((params, state)), batches[:n])
        got, after = train.finish(carry)
        np.testing.assert_allclose(now(seen), losses[:n], rtol=0, atol=loss_atol)
        assert_close(got, wanted[n - 1][0], one if n == 1 else atol)
        assert_placed(got, params)
        assert_placed(after, state)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(after)}
    counts = [[int(x) for x in jax.tree.leaves(s) if x.dtype == jnp.int32 and not x.ndim]
              for s in (after, wanted[-1][1])]  # fmt: skip
    assert counts[0] == counts[1] and counts[0]
    assert in_the_scan(train, params, state, batch(0)) == scan
    assert float(losses[-1]) < float(losses[0]) / 2
    return train, seen


# Numbers and placement, by optimizer and by step


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("update", {}),
        ("update_params", {}),
        ("update_params", {"unrolled": True}),
        ("update", {"unrolled": True}),
        ("update_params", {"axis": 1}),
        ("update", {"axis": 1}),
    ],
)
def test_clipped_adamw(form, how):
    tx = offloaded()
    params = parameters(how.get("axis", 0))
    scan = "unrolled" not in how
    check(step_of(tx, form, **how), step_of(ADAMW, "update", **how), tx.init, ADAMW.init, params, scan=scan)


SCHEDULE = optax.chain(CLIP, optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-2, 5, STEPS)))
OPTIMIZERS = {  # offloaded, plain, form, whether the update moves into the scan
    "clipping outside": (optax.chain(CLIP, offloaded(optax.adamw(1e-2))), ADAMW, "update", True),
    "half": (offloaded(fraction=0.5), ADAMW, "update_params", True),
    "a schedule": (offloaded(SCHEDULE), SCHEDULE, "update_params", True),
    # clips the sum of gradients, in host memory: all of that is needed first
    "MultiSteps": (offloaded(optax.MultiSteps(ADAMW, 3)), optax.MultiSteps(ADAMW, 3), "update", False),
    "apply_if_finite": (
        offloaded(optax.apply_if_finite(ADAMW, 3)), optax.apply_if_finite(ADAMW, 3), "update_params", True),
    "injected": (
        offloaded(optax.chain(CLIP, optax.inject_hyperparams(optax.adamw)(1e-2))),
        optax.chain(CLIP, optax.inject_hyperparams(optax.adamw)(1e-2)), "update_params", True),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", rows(OPTIMIZERS, "trains plain and turned", daily=["clipping outside", "half", "MultiSteps"])
)
def test_optimizers(name):
    tx, plain, form, scan = OPTIMIZERS[name]
    check(step_of(tx, form), step_of(plain, "update"), tx.init, plain.init, scan=scan)


def test_storage():
    """Fusion may change a last bit of a moment, and with it, once in a while, which way a number is rounded."""
    tx, plain_tx = offloaded(storage="bfloat16"), resident(ADAMW, rules_of("bfloat16"), 1024)
    check(step_of(tx), step_of(plain_tx, "update"), tx.init, plain_tx.init, loss_atol=3e-4, atol=1e-2)


def test_masters_of_bfloat16_parameters():
    """bfloat16 keeps 8 bits: where a parameter rounds apart once, losses differ by more than those of float32."""
    inner = jo.with_master_params(ADAMW)
    tx, params = offloaded(inner), parameters(dtype=jnp.bfloat16)
    check(
        step_of(tx), step_of(inner, "update_params"), tx.init, inner.init, params, loss_atol=5e-3, one=4e-3, atol=2e-2
    )


@pytest.mark.parametrize(
    ("share", "gradients"),
    rows(
        [("host", "host"), (0.5, "host"), ("host", "device"), (0.5, "device")],
        "trains plain and turned",
        daily=[("host", "host")],
    ),
)
def test_the_cores_update(share, gradients):
    """A turned step is cut at its update as any other; gradients that wait in host memory are there already."""
    tx = offloaded(update_on=share)
    check(step_of(tx), step_of(ADAMW, "update"), tx.init, ADAMW.init, scan=False, gradients=gradients)


def summed_up(tx, form, count=4, **how):
    """A step that sums gradients up over ``count`` microbatches, in a scan."""

    def step(params, state, batch):
        def add(total, microbatch):
            value, grads = jax.value_and_grad(functools.partial(loss_of, **how))(params, microbatch)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        params, state = new_params(tx, form, jax.tree.map(lambda g: g / count, grads), state, params)
        return params, state, values.mean()

    return step


@pytest.mark.parametrize(
    ("form", "how", "gradients"),
    rows(
        [
            ("update", {}, "device"),
            ("update_params", {}, "host"),
            ("update_params", {"unrolled": True}, "device"),
            ("update", {"count": 2}, "device"),
        ],
        "trains plain and turned",
        daily=[("update", {}, "device")],
    ),
)
def test_microbatches(form, how, gradients):
    """The first one's forward pass hosts the update for all of the batch before."""
    tx = offloaded()
    ours, plain = (summed_up(each, f, **how) for each, f in ((tx, form), (ADAMW, "update")))
    train, _ = check(ours, plain, tx.init, ADAMW.init, scan="unrolled" not in how, gradients=gradients)
    turned, args, _ = train.turned(parameters(), tx.init(parameters()), batch(0))
    lengths = [eqn.params["length"] for eqn in turned.trace(*args).jaxpr.eqns if eqn.primitive.name == "scan"]
    assert (3 in lengths) == (how == {})  # else the layers are unrolled, or one is left


def test_masters_of_three_matmuls():
    """Three equal leaves take turns in three phases of an iteration."""
    inner = jo.with_master_params(ADAMW)
    tx, params = offloaded(inner), parameters(dtype=jnp.bfloat16)

    def loss(params, batch):
        def layer(h, w):
            for _ in range(3):
                h = h + jnp.tanh(h @ w.astype(h.dtype)) / 3
            return h, None

        return ((jax.lax.scan(layer, batch["x"], params["layers"])[0][:, :8] - batch["y"]) ** 2).mean()

    train, _ = check(
        step_of(tx, loss=loss), step_of(inner, "update_params", loss=loss), tx.init, inner.init, params,
        loss_atol=5e-3, one=4e-3, atol=2e-2,
    )  # fmt: skip
    turned, args, _ = train.turned(params, tx.init(params), batch(0))
    (scan,) = scans(turned, *args)
    assert scan.ahead and [len(group) for group in scan.groups] == [1, 1, 1]


def test_a_forward_scan_with_updates_is_not_unrolled():
    """Two iterations in one would not overlap; the backward pass is unrolled as it was asked to be."""
    tx, params = offloaded(), parameters()

    def loss(params, batch):
        body = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
        return (jax.lax.scan(body, batch["x"], params["layers"], unroll=2)[0] ** 2).mean()

    turned, args, _ = pipelined(step_of(tx, loss=loss)).turned(params, tx.init(params), batch(0))
    trace = turned.trace(*args).jaxpr
    (ahead,) = (each.update for each in updates_in(trace) if isinstance(each.update, Moved))
    backward = [eqn.params["unroll"] for eqn in trace.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert {*re.findall(r"\bunroll=(\d+)", str(ahead.jaxpr))} == {"1"} and backward == [2]


def test_reduce_on_plateau_and_extra_arguments():
    """The value that scales a pending update is that of its own batch."""

    def chain(wrap):
        plateau = optax.contrib.reduce_on_plateau(0.5, patience=1, cooldown=0)
        return optax.chain(CLIP, wrap(optax.adamw(1e-2)), plateau)

    def step(tx, form="update"):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            updates, state = tx.update(grads, state, params, value=-value)  # which falls: the rate is reduced
            return optax.apply_updates(params, updates), state, value

        return step

    tx, plain_tx = chain(offloaded), chain(lambda tx: tx)
    wanted, losses = loop(step(plain_tx), (parameters(), plain_tx.init(parameters())), map(batch, range(STEPS)))
    train = pipelined(step(tx))
    carry, seen = advance(train, (parameters(), tx.init(parameters())), list(map(batch, range(STEPS))))
    params, state = train.finish(carry)
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-4)
    assert_close(params, wanted[-1][0], 1e-4)
    assert float(optax.tree.get(state, "scale")) == float(optax.tree.get(wanted[-1][1], "scale")) < 0.5


def test_a_hyperparameter_changed_between_finish_and_start():
    tx, plain_tx = OPTIMIZERS["injected"][:2]
    batches = list(map(batch, range(6)))

    def changed(state):
        return optax.tree.set(state, learning_rate=jax.device_put(jnp.float32(1e-4), jax.devices()[0]))

    (*_, (wanted, state)), losses = loop(
        step_of(plain_tx, "update"), (parameters(), plain_tx.init(parameters())), batches[:3]
    )
    (*_, (wanted, _)), more = loop(step_of(plain_tx, "update"), (wanted, changed(state)), batches[3:])
    train = pipelined(step_of(tx))
    carry, seen = advance(train, (parameters(), tx.init(parameters())), batches[:3])
    params, state = train.finish(carry)
    carry, rest = advance(train, (params, changed(state)), batches[3:])
    np.testing.assert_allclose(now(seen + rest), losses + more, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted, 1e-5)


# Skipped steps


def with_a_bad_one(k):
    """Batches of which some overflow: the last one, too."""
    return jax.tree.map(lambda x: x * jnp.where(k in (2, 5), jnp.inf, 1.0), batch(k))


def step_that_skips(tx, form="update_params"):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        finite = jnp.isfinite(optax.tree.norm(grads))
        if form == "update_params":
            params, state = jo.update_params(tx, grads, state, params, skip=~finite)
        else:
            updates, after = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), (new, after), (params, state))
        return params, state, (value, finite)

    return step


WAITS = ["device", pytest.param("host", marks=pytest.mark.long("trains plain and turned"))]


@pytest.mark.parametrize("gradients", WAITS)
def test_skip(gradients):
    tx, batches = offloaded(), [with_a_bad_one(k) for k in range(6)]
    wanted, others = loop(step_that_skips(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_that_skips(tx), gradients=gradients)
    carry, seen = advance(train, (parameters(), tx.init(parameters())), batches)
    assert [bool(f) for _, f in now(seen)] == [bool(f) for _, f in others] == [k not in (2, 5) for k in range(6)]
    params, state = train.finish(carry)
    assert_close(params, wanted[-1][0], 1e-5)
    assert int(optax.tree.get(state, "count")) == 4


@pytest.mark.parametrize("gradients", WAITS)
def test_a_skipped_update_in_the_forward_pass_changes_no_bit(gradients):
    """Though the state moves: each slice of the update chooses, and the codes of its moments are as they were."""
    tx = offloaded(storage={"mu": "int8", "nu": "bfloat16"})
    train = pipelined(step_that_skips(tx), gradients=gradients)
    params, state = parameters(), tx.init(parameters())
    table = jo.placement(train, params, state, batch(0))
    assert any("in the scan that reads the parameters" in leaf.streams for leaf in table.leaves), table
    carry, _ = train.start(params, state, batch(0))
    carry, _ = train(carry, with_a_bad_one(2))
    before = jax.tree.map(np.asarray, carry.kept[0])
    places = jax.tree.map(lambda x: x.sharding, carry.kept[0])
    carry, _ = train(carry, batch(3))
    after = carry.kept[0]
    assert {*after} == {*before} and len(before) > 6
    for name, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[name].dtype, np.asarray(after[name]).tobytes()), name
    assert jax.tree.map(lambda x: x.sharding, after) == places
    carry, _ = train(carry, batch(4))
    assert any(x.tobytes() != np.asarray(carry.kept[0][name]).tobytes() for name, x in before.items())


def test_dynamic_scale_is_carried_beside():
    def step(tx):
        def step(params, state, scale, batch):
            scale, finite, value, grads = scale.value_and_grad(loss_of)(params, batch)
            params, state = jo.update_params(tx, grads, state, params, skip=~finite)
            return params, state, scale, {"loss": value, "finite": finite}

        return step

    tx = offloaded()
    batches = [with_a_bad_one(k) for k in range(6)]
    scale = jax.device_put(DynamicScale(growth_interval=2, scale=2.0**10), jax.devices()[0])
    wanted, others = loop(step(tx), (parameters(), tx.init(parameters()), scale), batches)
    train = jo.pipelined(step(tx), donate_argnames=("params", "state", "scale"))
    carry, seen = advance(train, copied((parameters(), tx.init(parameters()), scale)), batches)
    assert [bool(x["finite"]) for x in now(seen)] == [bool(x["finite"]) for x in others]
    assert False in [bool(x["finite"]) for x in others]
    got = train.finish(carry)
    assert float(got[2].scale) == float(wanted[-1][2].scale) == 2.0**8
    assert_close(got[:2], wanted[-1][:2], 1e-5)


# What is carried beside parameters and state, and how


class Beside(NamedTuple):
    mean: Any
    key: Any
    count: Any


def beside():
    return jax.device_put(Beside(jnp.zeros(WIDTH), jax.random.key(3), jnp.int32(0)), jax.devices()[0])


def step_beside(tx, form):
    """Statistics of the batch, a random key and a counter; one more result needs the new parameters."""

    def step(params, state, more, batch):
        key, use = jax.random.split(more.key)
        x = batch["x"] - more.mean + 0.1 * jax.random.normal(use, batch["x"].shape)
        value, grads = jax.value_and_grad(loss_of)(params, batch | {"x": x})
        old = params
        params, state = new_params(tx, form, grads, state, params)
        more = Beside(0.9 * more.mean + 0.1 * batch["x"].mean(0), key, more.count + 1)
        change = optax.tree.norm(jax.tree.map(jnp.subtract, params, old))
        metrics = {"loss": value, "norms": {"gradient": optax.tree.norm(grads), "update": change}}
        return params, state, more, (metrics, optax.tree.norm(params))

    return step


def test_beside_and_late_results():
    """Nothing of what the step returns is lost, or of another step than it says."""
    tx, batches = offloaded(), list(map(batch, range(STEPS)))
    wanted, others = loop(step_beside(ADAMW, "update"), (parameters(), ADAMW.init(parameters()), beside()), batches)
    train = jo.pipelined(step_beside(tx, "update_params"), donate_argnames=["params", "state", "more"])
    carry, seen = advance(train, (parameters(), tx.init(parameters()), beside()), batches)
    got, last = train.finish(carry, with_late=True)
    assert_close(got[0], wanted[-1][0], 1e-4)
    assert_close(got[2], wanted[-1][2], 1e-6)
    assert [aux.step for aux in seen] == list(range(STEPS))
    assert seen[0].late is None
    late = [aux.late for aux in seen[1:]] + [last]
    for aux, after, (metrics, norm) in zip(seen, late, others, strict=True):
        known, later = aux.now[0], after[0]
        assert aux.now[1] is None and known["norms"]["update"] is None
        assert later["loss"] is None and later["norms"]["gradient"] is None
        for got, want in (
            (known["loss"], metrics["loss"]),
            (known["norms"]["gradient"], metrics["norms"]["gradient"]),
            (later["norms"]["update"], metrics["norms"]["update"]),
            (after[1], norm),
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4)


def train_states(tx):
    state = TrainState.create(apply_fn=model, params=parameters(), tx=tx)
    return state.replace(step=jax.device_put(jnp.int32(0), jax.devices()[0]))


def step_of_train_state(state, batch):
    def loss(params):
        return ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "step": state.step}


def test_train_state_params_and_compiles(caplog):
    """Three programs, each compiled once; a look at the parameters is a fourth, and leaves the carry as it was."""
    tx, batches = offloaded(), list(map(batch, range(STEPS)))
    wanted, others = loop(step_of_train_state, (train_states(ADAMW),), batches)
    train = jo.pipelined(step_of_train_state, donate_argnames="state")
    state = train_states(tx)
    home = state.opt_state
    with jax.log_compiles():
        carry, seen = advance(train, (copied(state),), batches)
        got = train.finish(carry)
        again, _ = advance(train, (got,), batches[:2])
        now_ = train.finish(again)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    mine = [name for name in compiled if name in ("_before", "train", "_after")]
    assert sorted(mine) == ["_after", "_before", "train"], compiled
    assert int(now_.step) == STEPS + 2
    np.testing.assert_allclose([x["loss"] for x in now(seen)], [x["loss"] for x in others], rtol=0, atol=1e-4)
    assert [int(x["step"]) for x in now(seen)] == list(range(STEPS))
    carry, _ = advance(train, (copied(state),), batches)
    looked, again = train.params(carry), train.params(carry)
    got = train.finish(carry)
    assert int(got.step) == STEPS and got.apply_fn is model
    assert_close(looked, got.params, 1e-6)
    assert_close(again, looked, 0)
    assert_close(got.params, wanted[-1][0].params, 1e-4)
    assert_placed(got.opt_state, home)
    assert in_the_scan(train, state, batch(0))


def test_nnx():
    """The graph and what is no parameter stay apart; the step carries the parameters' state."""
    graph, params = nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    params = jax.device_put(params, jax.devices()[0])

    def step_of(tx, form):
        def step(params, state, x):
            value, grads = jax.value_and_grad(lambda p: (nnx.merge(graph, p)(x) ** 2).mean())(params)
            return *new_params(tx, form, grads, state, params), value

        return step

    tx, batches = offloaded(), [batch(k)["x"] for k in range(4)]
    wanted, losses = loop(step_of(ADAMW, "update"), (params, ADAMW.init(params)), batches)
    train = pipelined(step_of(tx, "update_params"))
    carry, seen = advance(train, copied((params, tx.init(params))), batches)
    np.testing.assert_allclose(now(seen), losses, rtol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-6)


def test_nnx_optimizer_inside_a_chain():
    """Module and optimizer are carried as one state; the offload is one part of the optimizer's chain."""

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.fork(split=LAYERS))

        def __call__(self, x):
            body = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(x, self.layers)

    def build(tx):
        model = Layers(nnx.Rngs(0))
        graph, both = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

        def step(both, x):
            model, optimizer = nnx.merge(graph, both)
            value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return nnx.split((model, optimizer))[1], value

        return step, jax.device_put(both, jax.tree.map(lambda x: x.sharding, both))

    batches = [batch(k)["x"] for k in range(5)]
    (step, both), (plain, start) = (
        build(optax.chain(CLIP, tx)) for tx in (offloaded(optax.adamw(1e-2)), optax.adamw(1e-2))
    )
    wanted, losses = loop(plain, (start,), batches)
    train = jo.pipelined(step, donate_argnames="both")
    assert in_the_scan(train, both, batches[0])
    carry, seen = advance(train, copied((both,)), batches)
    got = train.finish(carry)
    np.testing.assert_allclose(now(seen), losses, rtol=1e-5)
    assert_placed(got, both)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(got)}
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(wanted[-1][0]), 1e-5)


class Both(NamedTuple):
    params: Any
    state: Any


@pytest.mark.parametrize("kind", [Both, lambda p, s: (p, s), lambda p, s: [p, s], lambda p, s: {"params": p, "s": s}])
@pytest.mark.parametrize("alone", rows([True, False], "compiles a turned step", daily=[True]))
def test_one_carried_argument_that_holds_both(kind, alone):
    tx = offloaded()

    def step(both, batch):
        params, state = both.values() if isinstance(both, dict) else both
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        both = kind(*jo.update_params(tx, grads, state, params))
        return both if alone else [both, value]

    both = kind(parameters(), tx.init(parameters()))
    train = jo.pipelined(step, donate_argnames="both")
    carry, aux = train.start(copied(both), batch(0))
    assert aux.now == () if alone else float(aux.now) > 0
    got = train.finish(carry)
    wanted = jax.jit(step, compiler_options=FAST)(both, batch(0))
    assert_close(got, wanted if alone else wanted[0], 1e-6)


# Stopping, going on, checkpoints


def test_finish_and_start_at_any_step():
    tx, batches = offloaded(), list(map(batch, range(6)))
    wanted, losses = loop(step_of(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train, carried, seen = pipelined(step_of(tx)), (parameters(), tx.init(parameters())), []
    for part in (batches[:1], batches[1:4], batches[4:]):
        carry, some = advance(train, carried, part)
        carried = train.finish(carry)
        seen += some
        assert_close(carried[0], wanted[len(seen) - 1][0], 1e-5)  # early stopping
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-5)
    assert [aux.step for aux in seen] == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("what", ["the carry", "what finish gives"])
def test_resume_from_a_checkpoint(what, tmp_path):
    """In a process of its own the restored carry has a program of that process: here, another ``pipelined``."""
    tx, batches = offloaded(), list(map(batch, range(6)))
    start = parameters(), tx.init(parameters())
    wanted, losses = loop(step_of(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_of(tx))
    carry, seen = advance(train, copied(start), batches[:3])
    saved = carry if what == "the carry" else train.finish(carry)
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(3, args=jo.save_args(saved))
    fresh = pipelined(step_of(tx))
    like = fresh.start(*start, batches[0])[0] if what == "the carry" else start
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        back = jo.restore(manager, like)
    assert_placed(back.kept if what == "the carry" else back, saved.kept if what == "the carry" else saved)
    if what == "the carry":
        carry = back
        for each in batches[3:]:
            carry, aux = fresh(carry, each)
            seen.append(aux)
        assert [aux.step for aux in seen] == list(range(6))
        assert type(seen[-1].step) is int
    else:
        carry, rest = advance(fresh, back, batches[3:])
        seen += rest
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-5)
    assert_close(fresh.finish(carry)[0], wanted[-1][0], 1e-5)


def test_a_copy_of_a_carry_goes_on_by_itself():
    tx, batches = offloaded(), list(map(batch, range(3)))
    train = pipelined(step_of(tx))
    carry, _ = train.start(parameters(), tx.init(parameters()), batches[0])
    other = copied(carry)
    for each in batches[1:]:
        carry, _ = train(carry, each)
        other, aux = train(other, each)
    assert aux.step == 2
    assert_close(train.finish(carry), train.finish(other), 0)


# Arguments


def step_of_many(params, state, batch, rate, *more, tx, power=2, kind="square", scaled=False, **rest):
    """A step with every kind of argument; ``rate`` is read by the update, one call after it was given."""

    def loss(params):
        error = model(params, batch["x"]) - batch["y"]
        value = (error**power if kind == "square" else jnp.abs(error)).mean()
        return value * sum(more) if scaled else value

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = tx.update(grads, state, params)
    updates = jax.tree.map(lambda u: u * rate * rest.get("extra", 1.0), updates)
    return optax.apply_updates(params, updates), state, value


@pytest.mark.parametrize("numpy", [False, True])
def test_arguments_of_every_kind(numpy):
    """None is donated but what is carried: a rate and a batch are given again and again."""
    rate = np.float32(0.5) if numpy else jax.device_put(jnp.float32(0.5), jax.devices()[0])
    data = jax.tree.map(np.asarray, batch(0)) if numpy else batch(0)
    calls = [
        (data, rate), (data, rate, 1.0, 2.0), (data, rate), (data, rate), (data, 0.25)
    ]  # fmt: skip
    named = [{}, {"scaled": True}, {"kind": "abs"}, {"kind": "square"}, {"extra": rate}]
    tx, plain_tx = offloaded(), ADAMW
    wanted, state = parameters(), plain_tx.init(parameters())
    losses = []
    static = ("kind", "scaled", "power")
    jitted = jax.jit(functools.partial(step_of_many, tx=plain_tx), static_argnames=static, compiler_options=FAST)
    train = jo.pipelined(
        functools.partial(step_of_many, tx=tx), donate_argnames=("params", "state"), static_argnames=static
    )
    carry, seen = None, []
    for args, kwargs in zip(calls, named, strict=True):
        wanted, state, value = jitted(wanted, state, *args, **kwargs)
        losses.append(value)
        if carry is None:
            carry, aux = train.start(parameters(), tx.init(parameters()), *args, **kwargs)
        else:
            carry, aux = train(carry, *args, **kwargs)
        seen.append(aux.now)
    np.testing.assert_allclose(seen, losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted, 1e-5)
    assert np.isfinite(rate) and np.isfinite(data["x"]).all()


def test_another_batch_shape_and_one_compile_of_each(caplog):
    tx = offloaded()
    batches = [batch(k, size=8 if k % 3 else 4) for k in range(7)]
    wanted, losses = loop(step_of(ADAMW, "update"), (parameters(), ADAMW.init(parameters())), batches)
    train = pipelined(step_of(tx))
    with jax.log_compiles():
        carry, seen = advance(train, (parameters(), tx.init(parameters())), batches)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train") == 3  # 4 then 8, 8 then 8, 8 then 4
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-5)


# Errors


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


def broken(kind):
    tx = offloaded()
    if kind == "line search":
        tx = offloaded(optax.chain(optax.adamw(1e-2), optax.scale_by_backtracking_linesearch(3)))

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        if kind == "line search":
            again = functools.partial(loss_of, batch=batch)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=again)
            return optax.apply_updates(params, updates), state, value
        if kind == "no update":
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

    return step, tx


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


def test_bad_names():
    step = step_of(offloaded())
    for names in ((), "nothing", ("params", "weights")):
        with pytest.raises(ValueError, match=r"donate_argnames: expected names among \['params', 'state', 'batch'\]"):
            jo.pipelined(step, donate_argnames=names)
    with pytest.raises(ValueError, match=r"static_argnames: expected names among .* got 'kind'"):
        jo.pipelined(step, donate_argnames="params", static_argnames="kind")
    with pytest.raises(ValueError, match="static_argnames: what is carried is not static"):
        jo.pipelined(step, donate_argnames="params", static_argnames="params")
    train = jo.pipelined(lambda w, s, x: step(w, s, x), donate_argnames=("w", "s"))
    carry, _ = train.start(parameters(), offloaded().init(parameters()), batch(0))
    with pytest.raises(ValueError, match="params: no carried argument is called 'params'"):
        train.params(carry)


def test_two_updates_and_unordered_effects():
    """Two optimizers in a step: both wait, and both are right. What is printed is of the batch of the call."""
    one, two = offloaded(), offloaded(optax.chain(CLIP, optax.lion(1e-3)))
    printed = []

    def step_of_two(form, ours, other):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            jax.debug.callback(lambda x: printed.append(float(x)), value)
            layers, rest = {"layers": params["layers"]}, {k: params[k] for k in ("head", "bias")}
            pick = lambda like: {k: grads[k] for k in like}  # noqa: E731
            layers, first = new_params(ours, form, pick(layers), state[0], layers)
            rest, second = new_params(other, form, pick(rest), state[1], rest)
            return layers | rest, (first, second), value

        return step

    def init(ours, other):
        params = parameters()
        return params, (ours.init({"layers": params.pop("layers")}), other.init(params))

    batches = list(map(batch, range(4)))
    plain_two = optax.chain(CLIP, optax.lion(1e-3))
    state = init(ADAMW, plain_two)[1]
    wanted, losses = loop(step_of_two("update", ADAMW, plain_two), (parameters(), state), batches)
    train = pipelined(step_of_two("update_params", one, two))
    del printed[:]
    carry, seen = advance(train, (parameters(), init(one, two)[1]), batches)
    jax.effects_barrier()
    assert sorted(printed) == sorted(map(float, now(seen)))
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-5)
    assert_close(train.finish(carry)[0], wanted[-1][0], 1e-5)


def test_nothing_of_start_is_donated_before_the_first_call():
    tx = offloaded()
    params, state = parameters(), tx.init(parameters())
    train = pipelined(step_of(tx))
    carry, _ = train.start(params, state, batch(0))
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    pending = jax.tree.leaves(carry.kept[1])
    following, _ = train(carry, batch(1))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, pending)))
    kept = [x for x in jax.tree.leaves(following.kept[:1]) if x.ndim]
    assert not any(x.is_deleted() for x in jax.tree.leaves(following.kept))
    train.finish(following)
    assert kept and all(x.is_deleted() for x in kept)


# On a mesh


FSDP = {"layers": P(None, "data"), "head": P("data"), "bias": P()}
TWO_AXES = {"layers": P(None, "data", "model"), "head": P("model"), "bias": P()}


@pytest.mark.parametrize(
    ("axis_type", "specs", "gradients"),
    rows(
        [
            (AxisType.Auto, FSDP, "device"),
            (AxisType.Explicit, FSDP, "device"),
            (AxisType.Auto, TWO_AXES, "device"),
            (AxisType.Explicit, TWO_AXES, "host"),
            (AxisType.Auto, TWO_AXES, "host"),
        ],
        "trains on eight devices",
        daily=[(AxisType.Auto, FSDP, "device"), (AxisType.Explicit, TWO_AXES, "host")],
    ),
)
def test_fully_sharded(axis_type, specs, gradients):
    """The numbers of one device; every leaf of parameters and state stays divided as it was, over all steps."""
    shape, names = ((8,), ("data",)) if specs is FSDP else ((4, 2), ("data", "model"))
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in parameters().items()}
    tx = offloaded()
    plain_tx = ADAMW

    def step_on(tx, form):
        def step(params, state, batch):
            def loss(params):
                whole = jax.tree.map(lambda p: gathered(p, mesh, axis_type), params)
                return loss_of(whole, batch)

            value, grads = jax.value_and_grad(loss)(params)
            return *new_params(tx, form, grads, state, params), value

        return step

    batches = [jax.device_put(batch(k), NamedSharding(mesh, P("data"))) for k in range(5)]
    wanted, losses = loop(step_of(plain_tx, "update"), (parameters(), ADAMW.init(parameters())), map(batch, range(5)))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init, out_shardings=jo.state_shardings(tx, params))(params)
        train = pipelined(step_on(tx, "update_params"), gradients=gradients)
        carry, seen = advance(train, (params, state), batches[:3])
        for each in batches[3:]:
            before = jax.tree.map(lambda x: x.sharding, carry.kept)
            carry, aux = train(carry, each)
            seen.append(aux)
            assert jax.tree.map(lambda x: x.sharding, carry.kept) == before
        got, after = train.finish(carry)
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, wanted[-1][0]), 1e-3)
    like = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    assert all(got[k].sharding.is_equivalent_to(like[k], got[k].ndim) for k in like)
    moments = optax.tree.get(after, "mu")
    for k in ("layers", "head"):
        assert moments[k].sharding.memory_kind == HOST
        assert moments[k].sharding.is_equivalent_to(like[k].with_memory_kind(HOST), moments[k].ndim)


def gathered(p, mesh, axis_type):
    if axis_type == AxisType.Explicit:
        return jax.reshard(p, NamedSharding(mesh, P()))
    return jax.lax.with_sharding_constraint(p, NamedSharding(mesh, P()))


@pytest.mark.parametrize(
    ("axis_type", "form", "fraction"),
    rows(
        [
            (AxisType.Explicit, "update", 1.0),
            (AxisType.Auto, "update", 0.25),
            (AxisType.Explicit, "update_params", 0.25),
            (AxisType.Auto, "update_params", 0.25),
        ],
        "trains on eight devices",
        daily=[(AxisType.Explicit, "update", 1.0), (AxisType.Auto, "update", 0.25)],
    ),
)
def test_a_state_divided_further_than_its_parameters(axis_type, form, fraction):
    """New parameters are whole on every device, as the old ones, and what is made of them: also what ``params`` shows.

    A row of the new ones is not written into a gradient that is divided. They are not left divided as their state,
    where XLA would gather all layers in each iteration.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = offloaded(shard_over="data", fraction=fraction)

    def step_on(tx, form):
        def step(params, state, batch):
            old, average = params
            value, grads = jax.value_and_grad(loss_of)(old, batch)
            new, state = new_params(tx, form, grads, state, old)
            return (new, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new)), state, value

        return step

    def begun(place):
        return jax.device_put((parameters(), jax.tree.map(jnp.ones_like, parameters())), place)

    start = begun(jax.devices()[0]), ADAMW.init(parameters())
    wanted, losses = loop(step_on(ADAMW, "update"), start, map(batch, range(3)))
    batches = [jax.device_put(batch(k), NamedSharding(mesh, P("data"))) for k in range(3)]
    with jax.set_mesh(mesh):
        params = begun(NamedSharding(mesh, P()))
        carried = params, tx.init(params[0])
        places = jax.tree.map(lambda x: x.sharding, carried)
        train = pipelined(step_on(tx, form))
        turned, args, _ = train.turned(*carried, batches[0])
        text = turned.lower(*args).compile().as_text()
        assert " all-gather" in text and not re.findall(rf"\[{LAYERS},{WIDTH},{WIDTH}\]\S* all-gather", text)
        carry, seen = advance(train, carried, batches)
        assert turned._cache_size() == 1
        for name, x in carry.kept[1].items():  # what waits lies as it was said to, where arguments are abstract say
            assert x.nbytes < 2**16 or args[1][name].sharding.is_equivalent_to(x.sharding, x.ndim), name
        assert_sharded(train.params(carry), places[0])
        got = train.finish(carry)
    assert_sharded(got, places)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(got[1])}
    np.testing.assert_allclose(now(seen), losses, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, got[0]), jax.tree.map(np.asarray, wanted[-1][0]), 1e-3)


def assert_sharded(got, places):
    for place, x in zip(jax.tree.leaves(places), jax.tree.leaves(got), strict=True):
        assert place.memory_kind == x.sharding.memory_kind and place.is_equivalent_to(x.sharding, x.ndim)
