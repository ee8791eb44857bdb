"""Unrolled layers: which updates stand among the passes, which follow them, and what ``placement`` says of both."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support import steps
from tests.support.steps import ADAMW, apart
from tests.support.trees import assert_close, in_scope, kinds
from tests.support.words import words

LAYERS, WIDTH = 6, 128
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
OPTIONS = {"min_bytes": 1024, "window": 2**20}  # a window that is given: pieces this small would run apart


def parameters(width=WIDTH):
    return apart(LAYERS, width) | {"bias": jnp.zeros(width, device=jax.devices()[0])}


def batch(rows=64, width=WIDTH):
    return jax.random.normal(jax.random.key(100), (rows, width))


def loss(params, x):
    for name in sorted(params.keys() - {"bias"}):
        x = jnp.tanh(x @ params[name])
    return ((x + params["bias"]) ** 2).mean()


step_of = functools.partial(steps.step_of, loss=loss)


def test_counts_that_arrive_in_host_memory():
    """As where a trainer moves a whole state there: an update is in pieces all the same, and gives the same numbers."""
    tx, params = jo.offload(ADAMW, **OPTIONS), parameters()
    step, state = jo.jit(step_of(tx)), tx.init(params)
    moved = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), state)
    plain, other = (jo.placement(step, params, each, batch()) for each in (state, moved))
    assert not other.stays and not plain.stays
    large = [[leaf.streams for leaf in table.leaves if leaf.nbytes > 1024] for table in (plain, other)]
    assert large[0] == large[1]
    assert_close(step(params, moved, batch()), step(params, state, batch()), 1e-6)


def descended(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def scaled(inner):
    def update(grads, state, params=None, *, scale):
        return inner.update(jax.tree.map(lambda g: g * scale, grads), state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


IN_CHUNKS = {"min_bytes": 1024, "window": 2**16}
UPDATES = {  # the optimizer, options, and an update by (tx, gradients, state, parameters)
    # an average of the parameters is updated with them twice: its pieces, in chunks, have an operand less
    "new parameters twice": (ADAMW, IN_CHUNKS, lambda tx, g, s, p: tx.update(new := descended(p, g), s, new)),
    "gradients twice": (ADAMW, IN_CHUNKS, lambda tx, g, s, p: tx.update(g, s, g)),
    # a constant among the arguments of an update is no variable of the step
    "a number that the trace knows": (
        scaled(optax.sgd(0.1, momentum=0.9)), OPTIONS, lambda tx, g, s, p: tx.update(g, s, p, scale=jnp.float32(0.5))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_unusual_arguments_of_an_update_in_pieces(name):
    inner, options, update = UPDATES[name]
    tx, params = jo.offload(inner, **options), parameters()
    plain, step = (lambda p, s, x, tx=tx: update(tx, jax.grad(loss)(p, x), s, p) for tx in (inner, tx))
    args = params, tx.init(params), batch()
    table = jo.placement(jo.jit(step), *args)
    how = [leaf.streams for leaf in table.leaves if leaf.host]
    assert not table.stays and all(("chunks of axis 0" in each) == (options is IN_CHUNKS) for each in how)
    got = jo.jit(step)(*args)
    assert_close(got, jax.jit(plain)(params, inner.init(params), batch()), 1e-6)
    assert kinds(got[1]).count("pinned_host") == len(how) >= LAYERS


def printing(tx):
    def update(grads, state, params=None):
        jax.debug.callback(lambda g: None, grads["bias"][0])
        return tx.update(grads, state, params)

    return optax.GradientTransformation(tx.init, update)


STAYS = {
    "there only at once: a number needs all": (CLIPPED, OPTIONS, lambda params: params),
    "fewer than 4 places": (ADAMW, OPTIONS, lambda params: {k: params[k] for k in ("layer_1", "bias")}),
    "takes a pass of its own": (optax.lamb(1e-2), OPTIONS | {"window": 2**15}, lambda params: params),
    "in a loop of its own, as pieces this small": (ADAMW, {"min_bytes": 1024}, lambda params: params),
    "it has effects": (printing(ADAMW), OPTIONS, lambda params: params),
}


@pytest.mark.parametrize("said", STAYS)
def test_why_an_update_is_left_in_one_piece(said):
    inner, options, of = STAYS[said]
    given = {"params": of(parameters()), "batches": [batch()], "rtol": 1e-6}
    table = steps.assert_as_plain(step_of, jo.offload(inner, **options), inner, **given)
    assert len(table.stays) == 1 and said in table.stays[0], table.stays
    assert f"not updated within the passes of the step: {table.stays[0]}" in words(table)


def in_groups(params, x):
    """Two layers in each ``jax.checkpoint``."""
    group = jax.checkpoint(lambda x, *ws: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))
    for k in range(1, LAYERS, 2):
        x = group(x, params[f"layer_{k}"], params[f"layer_{k + 1}"])
    return ((x + params["bias"]) ** 2).mean()


def of_words(params, x):
    return loss({k: w for k, w in params.items() if k != "words"}, params["words"][jnp.argsort(x[:, 0])])


EXPOSED = {
    "a jax.checkpoint around several arrays makes the last gradients": (in_groups, lambda params: params),
    "the last gradients have a large state": (of_words, lambda params: params | {"words": jnp.ones((512, WIDTH))}),
}


@pytest.mark.parametrize("said", EXPOSED)
def test_why_the_last_transfers_of_a_step_are_exposed(said):
    """All pieces have their places, and placement says so of a step that has too many of them at its end."""
    loss, of = EXPOSED[said]
    given = {"params": jax.device_put(of(parameters()), jax.devices()[0]), "batches": [batch()], "rtol": 1e-6}
    make = functools.partial(steps.step_of, loss=loss)
    (why,) = steps.assert_as_plain(make, jo.offload(ADAMW, **OPTIONS), ADAMW, **given).stays
    assert said in why and re.search(r"tests/(test_unrolled|support/steps)\.py:", why)


def each(change):
    return functools.partial(jax.tree.map, change)


NAMES = ["b", "d", "a", "c"]  # in the order of the forward pass
ORDERS = {  # what happens to the gradients, and the order in which leaves are loaded: the last layer first
    "nothing": (each(lambda g: g), "cadb"),
    "a cast and a scale": (each(lambda g: (g * 0.5).astype(jnp.bfloat16) / 7), "cadb"),
    "a strong number": (each(lambda g: g * jnp.float32(2)), "cadb"),
    "a choice": (each(lambda g: jnp.where(jnp.isfinite(g), g, 0)), "cadb"),
    "a clip by value": (each(lambda g: jnp.clip(g, -1, 1)), "cadb"),
    "nan_to_num": (each(jnp.nan_to_num), "cadb"),
    "one equation of all, so that paths decide": (
        lambda grads: jax.lax.scan(lambda g, _: (jax.tree.map(jnp.negative, g), None), grads, length=2)[0],
        "dcba",
    ),
}


@pytest.mark.parametrize("jit", [jax.jit, jo.jit], ids=["jax", "jo"])
@pytest.mark.parametrize("case", ORDERS)
def test_leaves_are_loaded_in_the_order_of_their_gradients(case, jit):
    """Whatever the names; casts and scales come in the order of the tree, and are looked through."""
    change, expected = ORDERS[case]
    tx = jo.offload(optax.sgd(0.1, momentum=0.9), **OPTIONS)
    params = dict(zip(NAMES, [p for p in parameters().values() if p.ndim > 1], strict=False))

    def step(params, state, x):
        def loss(params):
            y = x
            for name in NAMES:
                y = jnp.tanh(y @ params[name])
            return (y**2).mean()

        return jo.update_params(tx, change(jax.grad(loss)(params)), state, params)

    loads = in_scope(jit(step).trace(params, tx.init(params), batch()), "prefetch")
    found = [re.search("[abcd]$", leaf)[0] for leaf, text in loads if "annotate_device_placement" in text]
    assert "".join(dict.fromkeys(found)) == expected


MESHES = {
    "divided": (P("data"), {}),
    "divided, half": (P("data"), {"fraction": 0.5}),
    "ZeRO-1": (P(), {"shard_over": "data"}),
    "replicated": (P(), {}),
}


@pytest.mark.parametrize("name", MESHES)
def test_nothing_is_said_of_what_moves_on_a_mesh(name):
    spec, options = MESHES[name]
    place = NamedSharding(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), spec)
    params = jax.device_put(parameters(2 * WIDTH), place)
    x = jax.device_put(batch(width=2 * WIDTH), NamedSharding(place.mesh, P("data")))
    tx = jo.offload(ADAMW, **OPTIONS, **options)
    assert jo.placement(jo.jit(step_of(tx)), params, jo.abstract_state(tx, params), x).stays == ()


def test_nothing_is_said_of_a_state_on_the_device():
    params, tx = parameters(), jo.offload(CLIPPED, min_bytes=2**40)
    with pytest.warns(UserWarning, match="leaves the whole optimizer state on the device"):
        state = tx.init(params)
    assert jo.placement(jo.jit(step_of(tx)), params, state, batch()).stays == ()


HIDES, OVER = "jax_offload.jit can hide these transfers", "once the backward pass is over"
CLIPPED_OUTSIDE = optax.chain(optax.clip_by_global_norm(0.1), jo.offload(ADAMW, **OPTIONS))


@pytest.mark.parametrize(
    ("tx", "rows", "says", "apart"),
    [
        (jo.offload(ADAMW, **OPTIONS), 64, HIDES, False),
        (jo.offload(ADAMW, **OPTIONS), 4096, HIDES, False),  # the copies hold the matmuls back
        (jo.offload(ADAMW, **OPTIONS), 65536, HIDES, True),  # the copies are too short for that
        (jo.offload(ADAMW, fraction=0.5, **OPTIONS), 64, HIDES, False),
        (jo.offload(ADAMW, fraction=0.5, **OPTIONS), 4096, HIDES, True),
        (jo.offload(CLIPPED, **OPTIONS), 4096, HIDES, True),
        pytest.param(CLIPPED_OUTSIDE, 4096, OVER, True, marks=pytest.mark.daily("clipping is seen in the trace")),
        (CLIPPED_OUTSIDE, 64, OVER, False),
    ],
)
def test_where_an_update_runs_under_plain_jit(tx, rows, says, apart):
    """With many tokens it runs after the backward pass, and ``placement`` says so; under ``jo.jit`` it never does."""
    form = "update" if says is OVER else "update_params"
    for jit in jax.jit, jo.jit:
        params, x = parameters(256), jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        own = tx if jit is jax.jit else jo.offload(ADAMW, **OPTIONS)
        said = words(jo.placement(jit(step_of(own, form)), params, jo.abstract_state(own, params), x))
        assert (says in said) == (apart and jit is jax.jit)


@pytest.mark.parametrize("inner", [ADAMW, CLIPPED])
def test_on_a_cpu_nothing_orders_transfers(inner):
    """The program has no more loops and barriers than the plain one, so that XLA compiles it as fast."""
    params, count = parameters(192), {}
    for tx in inner, jo.offload(inner):
        text = jax.jit(step_of(tx)).lower(params, tx.init(params), batch(width=192)).compile().as_text()
        count[tx] = [text.count(what) for what in (" while(", " call(", " fusion(")]
    plain, offloaded = count.values()
    assert offloaded == plain and plain[:2] == [0, 0]


@pytest.mark.parametrize("inner", [ADAMW, CLIPPED])
def test_what_is_lowered_for_a_gpu_computes_the_same(inner):
    """Small leaves are updated in a loop there that runs once and overwrites them. Its program runs on a CPU too."""
    tx, params, x = jo.offload(inner), parameters(192), batch(width=192)
    state, step = tx.init(params), step_of(tx)
    no_checks = jax.export.DisabledSafetyCheck
    checks = [no_checks.platform(), no_checks.custom_call("annotate_device_placement")]
    exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)(params, state, x)
    assert exported.mlir_module().count("stablehlo.while") == 1
    want = jax.jit(step_of(inner))(params, inner.init(params), x)
    assert_close(jax.jit(exported.call)(params, state, x), want, 1e-6)
