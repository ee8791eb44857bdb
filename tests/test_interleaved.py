"""Unrolled layers under ``jo.jit`` and ``jo.pipelined``: pieces of the update between the passes, and gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved
from jax_offload._ir.program import Var, flat
from jax_offload._ir.slices import Slice
from jax_offload._plan.gates import Gate, Piece
from jax_offload._step.parts import parts_of
from tests.support.rows import rows
from tests.support.trees import assert_close
from tests.support.words import words

pytestmark = pytest.mark.oldest("pieces and gates of an unrolled step")

LAYERS, WIDTH, ROWS = 6, 128, 64
STEPS = 20
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
OPTIONS = {"min_bytes": 1024, "window": 2**20}  # a window that is given: pieces this small would run apart


def parameters():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"layer_{k}": 0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for k, key in enumerate(keys)}
    return jax.device_put(params | {"bias": jnp.zeros(WIDTH)}, jax.devices()[0])


def batch(k):
    return jax.random.normal(jax.random.key(100 + k), (ROWS, WIDTH))


def loss(params, x):
    for k in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{k}"])
    return ((x + params["bias"]) ** 2).mean()


def checkpointed(params, x):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    for k in range(LAYERS):
        x = layer(x, params[f"layer_{k}"].astype(jnp.bfloat16).astype(jnp.float32))
    return ((x + params["bias"]) ** 2).mean()


def step_of(tx, loss, update_params):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        if update_params:
            params, state = jo.update_params(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state, value

    return step


def offloaded(clip, fraction):
    tx = jo.offload(CLIPPED if clip == "inside" else ADAMW, fraction=fraction, **OPTIONS)
    return optax.chain(optax.clip_by_global_norm(0.1), tx) if clip == "outside" else tx


@functools.cache
def resident(clip, loss, steps):
    tx = ADAMW if clip == "none" else CLIPPED
    step, params = jax.jit(step_of(tx, loss, False)), parameters()
    state = tx.init(params)
    for k in range(steps):
        params, state, value = step(params, state, batch(k))
    return params, state, value


def parts(step, *args):
    """How many parts the step's update is in."""
    return sum(isinstance(each.update, Moved) for each in updates_in(step.trace(*args).jaxpr))


def barriers(step, *args):
    """How many there are in the step as it is lowered, and parts of its update."""
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("stablehlo.optimization_barrier"), parts(step, *args)


def read_by(part):
    if isinstance(part, Gate):
        return {*part.held, *part.waits_for}
    return {*part.inputs} if isinstance(part, Slice) else {v for v in part.operands if isinstance(v, Var)}


@pytest.mark.parametrize("loss", [loss, checkpointed])
@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_what_a_gate_holds_is_read_behind_it(loss, fraction):
    """The loss is one of the results: made of the last activation, which the backward pass needs no more."""
    tx, params = offloaded("none", fraction), parameters()
    step = step_of(tx, loss, True)
    parts = parts_of(flat(jax.make_jaxpr(step)(params, tx.init(params), batch(0)))).parts
    gates = [k for k, part in enumerate(parts) if isinstance(part, Gate)]
    assert len(gates) >= LAYERS - 1
    for k in gates:
        later = set().union(*map(read_by, parts[k + 1 :]))
        assert [v.aval for v in parts[k].held if v not in later] == []


def with_biases(params, x):
    """They stay on the device."""
    for k in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{k}"] + params[f"b{k}"])
    return (x**2).mean()


def schedule():
    """Of each gate: how many numbers of state are loaded behind it, and those of the pieces that it waits for."""
    params = {f"w{k}": jnp.full((WIDTH, WIDTH), 0.01) for k in range(LAYERS)}
    params |= {f"b{k}": jnp.zeros(WIDTH) for k in range(LAYERS)}
    tx = jo.offload(ADAMW, min_bytes=4 * 1024, window=2**20)
    parts = parts_of(flat(jax.make_jaxpr(step_of(tx, with_biases, True))(params, tx.init(params), batch(0)))).parts
    pieces = [part for part in parts if isinstance(part, Piece)]
    moved = {v: sum(x.aval.size for x in part.loads) for part in pieces for v in part.token}
    found = []
    for gate in (part for part in parts if isinstance(part, Gate)):
        loads = sum(v.aval.size for v in gate.held if v.aval.memory_space == jax.memory.Space.Host)
        found.append((loads, sum({id(p): moved[v] for v in gate.waits_for for p in pieces if v in p.token}.values())))
    return [pair for pair in found if any(pair)]


def test_biases_leave_a_store_its_time():
    """A layer is loaded while the one before is stored, for which only the gate after that waits: mu and nu of each."""
    layer = 2 * WIDTH * WIDTH
    assert schedule() == [(layer, 0), (layer, 0), *[(layer, layer)] * (LAYERS - 2)]


@pytest.mark.parametrize("loss", [loss, checkpointed])
def test_the_backward_pass_waits_for_every_gradient(loss):
    """Each piece reads its gradient behind a gate that the pass goes on through; the last is made when it is over.

    Ahead of the gate nothing but the piece waits for the gradient, and XLA puts both off.
    """
    tx, params = offloaded("none", 1.0), parameters()
    parts = parts_of(flat(jax.make_jaxpr(step_of(tx, loss, True))(params, tx.init(params), batch(0)))).parts
    waited, early = set(), []
    for part in parts:
        if isinstance(part, Gate):
            waited |= {*part.waits_for}
        elif isinstance(part, Slice):
            for eqn in part.jaxpr.eqns:
                if eqn.primitive.name in ("transpose", "convert_element_type") and eqn.invars[0] in waited:
                    waited |= {*eqn.outvars}
        elif isinstance(part, Piece) and part.loads:
            early += [waited.isdisjoint(part.operands)]
    assert len(early) == LAYERS and sum(early) <= 1


def test_counts_that_arrive_in_host_memory():
    """As where a trainer moves a whole state there: an update is in pieces all the same, and gives the same numbers."""
    tx, params = jo.offload(ADAMW, **OPTIONS), parameters()
    step = jo.jit(step_of(tx, loss, True))
    state = tx.init(params)
    moved = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), state)
    plain, other = (jo.placement(step, params, each, batch(0)) for each in (state, moved))
    assert not other.stays and not plain.stays
    large = [[leaf.streams for leaf in table.leaves if leaf.nbytes > 1024] for table in (plain, other)]
    assert large[0] == large[1]
    assert_close(step(params, moved, batch(0)), step(params, state, batch(0)), 1e-6)


@pytest.mark.long("more kinds of steps", but=["outside-0.5-True"])
@pytest.mark.parametrize("update_params", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("clip", ["none", "inside", "outside"])
def test_the_numbers_of_the_plain_step(clip, fraction, update_params):
    tx = offloaded(clip, fraction)
    step = jo.jit(step_of(tx, loss, update_params), donate_argnums=(0, 1))
    params = parameters()
    state = tx.init(params)
    placed = jax.tree.map(lambda x: x.sharding, state)
    gates, parts = barriers(step, params, state, batch(0))
    plain, _ = barriers(jax.jit(step_of(tx, loss, update_params)), params, state, batch(0))
    assert gates != plain  # what the passes go on with waits
    table = jo.placement(step, params, state, batch(0))
    streams = [leaf.streams for leaf in table.leaves if "layer" in leaf.path]
    assert streams and all("whole" in each for each in streams), table
    assert parts == (0 if clip != "none" else LAYERS if fraction == 1 else LAYERS // 2)
    for k in range(STEPS):
        params, state, value = step(params, state, batch(k))
        if k == 0:
            assert_close(params, resident(clip, loss, 1)[0], 1e-6)
    want, _, value_wanted = resident(clip, loss, STEPS)
    assert_close((params, value), (want, value_wanted), 1e-4)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state)) == jax.tree.leaves(placed)
    assert any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state))


@pytest.mark.long("more kinds of steps", but=["inside-loss"])
@pytest.mark.parametrize("model", [loss, checkpointed])
@pytest.mark.parametrize("clip", ["inside", "outside"])
def test_the_step_turned_round(clip, model):
    """Each layer's update stands before its forward pass: a part of its own, held back by what enters the layer."""
    tx = offloaded(clip, 1.0)
    train = jo.pipelined(step_of(tx, model, True), donate_argnames=("params", "state"))
    params = parameters()
    state = tx.init(params)
    table = jo.placement(train, params, state, batch(0))
    assert sum("2 leaves together" in leaf.streams for leaf in table.leaves) == 2 * LAYERS
    _, parts = barriers(jax.jit(train.whole_step), params, state, batch(0))
    assert parts >= LAYERS
    carry, aux = train.start(params, state, batch(0))
    steps = STEPS if model is loss else 3  # later a weight may fall to the next number in bfloat16
    for k in range(1, steps):
        carry, aux = train(carry, batch(k))
    params, state = train.finish(carry)
    want, _, value = resident(clip, model, steps)
    assert_close((params, aux.now), (want, value), 1e-4)
    hosts = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"]
    assert len(hosts) == 2 * LAYERS


@pytest.mark.parametrize("given", ["new parameters", "gradients"])
def test_one_array_as_gradient_and_as_parameter(given):
    """An average of the parameters is updated with them twice: its pieces, in chunks, have an operand less."""
    tx = jo.offload(ADAMW, min_bytes=1024, window=2**16)

    def step_of(tx):
        def step(params, state, x):
            grads = jax.grad(loss)(params, x)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            twice = params if given == "new parameters" else grads
            updates, state = tx.update(twice, state, twice)
            return params, updates, state

        return step

    params, step = parameters(), jo.jit(step_of(tx))
    state, plain = tx.init(params), ADAMW.init(params)
    table = jo.placement(step, params, state, batch(0))
    assert sum("chunks of axis 0, 2 leaves together" in leaf.streams for leaf in table.leaves) == 2 * LAYERS
    assert barriers(step, params, state, batch(0))[1] == LAYERS
    for k in range(2):
        got, want = step(params, state, batch(k)), jax.jit(step_of(ADAMW))(params, plain, batch(k))
        assert_close(got, want, 1e-6)
        (params, _, state), (_, _, plain) = got, want
    assert sum(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state)) == 2 * LAYERS


def stacked(params, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0] ** 2).mean()


@pytest.mark.parametrize("model", [loss, stacked])
def test_bytes_on_one_device(model):
    """A part of the update names its leaves as the step does, and knows by these names how they are divided."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params = {k: v for k, v in parameters().items() if v.ndim == 2}
    params = {"layers": jnp.stack([*params.values()])} if model is stacked else params | {"bias": jnp.zeros(WIDTH)}
    specs = {1: P(), 2: P("data"), 3: P(None, "data")}
    params = {k: jax.device_put(v, NamedSharding(mesh, specs[v.ndim])) for k, v in params.items()}
    tx = jo.offload(ADAMW, **OPTIONS)
    state, x = tx.init(params), jax.device_put(batch(0), NamedSharding(mesh, P("data")))
    trace = jo.jit(step_of(tx, model, True)).trace(params, state, x).jaxpr
    parts = [each.update for each in updates_in(trace) if isinstance(each.update, Moved)]
    moments = 2 * LAYERS * WIDTH * WIDTH * 4
    assert sum(p.slice.loaded_bytes for part in parts for p in part.planned) == moments // 4


def printing(tx):
    def update(grads, state, params=None):
        jax.debug.callback(lambda g: None, grads["bias"][0])
        return tx.update(grads, state, params)

    return optax.GradientTransformation(tx.init, update)


STAYS = {
    "there only at once: a number needs all": (CLIPPED, OPTIONS, parameters),
    "fewer than 4 places": (
        ADAMW,
        OPTIONS,
        lambda: {k: v for k, v in parameters().items() if k in ("layer_0", "bias")},
    ),
    "takes a pass of its own": (optax.lamb(1e-2), OPTIONS | {"window": 2**15}, parameters),
    "in a loop of its own, as pieces this small": (ADAMW, {"min_bytes": 1024}, parameters),
    "it has effects": (printing(ADAMW), OPTIONS, parameters),
}


@pytest.mark.parametrize("said", STAYS)
def test_why_an_update_is_left_in_one_piece(said):
    inner, options, make = STAYS[said]
    params, tx = make(), jo.offload(inner, **options)
    step = jo.jit(step_of(tx, layers, True))
    args = params, tx.init(params), batch(0)
    table = jo.placement(step, *args)
    assert len(table.stays) == 1 and said in table.stays[0], table.stays
    assert f"not updated within the passes of the step: {table.stays[0]}" in words(table)
    assert any(leaf.host for leaf in table.leaves) and parts(step, *args) == 0
    got, want = step(*args), jax.jit(step_of(inner, layers, False))(params, inner.init(params), args[2])
    assert_close((got[0], got[2]), (want[0], want[2]), 1e-6)


MESHES = {
    "divided": (P("data"), {}),
    "divided, half": (P("data"), {"fraction": 0.5}),
    "ZeRO-1": (P(), {"shard_over": "data"}),
    "replicated": (P(), {}),
}


@pytest.mark.parametrize("name", rows(MESHES, "more shardings", daily=["divided, half", "ZeRO-1"]))
def test_on_a_mesh(name):
    """Gradients that are large, and divided between devices, are updated where they are made, too."""
    spec, options = MESHES[name]
    place = NamedSharding(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), spec)
    params = jax.device_put(jax.tree.map(lambda x: jnp.tile(x, (2,) * x.ndim), parameters()), place)
    x = jax.device_put(jax.random.normal(jax.random.key(9), (ROWS, 2 * WIDTH)), NamedSharding(place.mesh, P("data")))
    tx = jo.offload(ADAMW, **OPTIONS, **options)
    step, args = jo.jit(step_of(tx, layers, True)), (params, tx.init(params), x)
    gates, parts = barriers(step, *args)
    assert gates >= LAYERS and parts >= options.get("fraction", 1) * LAYERS and jo.placement(step, *args).stays == ()
    got, want = step(*args), jax.jit(step_of(ADAMW, layers, False))(params, ADAMW.init(params), x)
    assert_close(jax.tree.map(np.asarray, (got[0], got[2])), jax.tree.map(np.asarray, (want[0], want[2])), 1e-6)
    for before, after in zip(jax.tree.leaves(args[:2]), jax.tree.leaves(got[:2]), strict=True):
        assert before.sharding.memory_kind == after.sharding.memory_kind
        assert before.ndim == 0 or before.sharding.is_equivalent_to(after.sharding, before.ndim)


def layers(params, x):
    for name in sorted(params.keys() - {"bias"}):
        x = jnp.tanh(x @ params[name])
    return ((x + params["bias"]) ** 2).mean()


def test_nothing_is_said_of_what_moves():
    params, tx = parameters(), jo.offload(ADAMW, **OPTIONS)
    assert jo.placement(jo.jit(step_of(tx, layers, True)), params, tx.init(params), batch(0)).stays == ()


def test_nothing_is_said_of_a_state_on_the_device():
    params, tx = parameters(), jo.offload(CLIPPED, min_bytes=2**40)
    with pytest.warns(UserWarning, match="leaves the whole optimizer state on the device"):
        state = tx.init(params)
    assert jo.placement(jo.jit(step_of(tx, layers, True)), params, state, batch(0)).stays == ()


def test_pieces_with_a_number_that_the_trace_knows():
    """A constant among the arguments of an update is no variable of the step."""

    def scaled(inner):
        def update(grads, state, params=None, *, scale):
            grads = jax.tree.map(lambda g: g * scale, grads)
            return inner.update(grads, state, params)

        return optax.GradientTransformationExtraArgs(inner.init, update)

    def step_of(tx):
        def step(params, state, x):
            updates, state = tx.update(jax.grad(loss)(params, x), state, params, scale=jnp.float32(0.5))
            return optax.apply_updates(params, updates), state

        return step

    tx, params = jo.offload(scaled(optax.sgd(0.1, momentum=0.9)), **OPTIONS), parameters()
    step = jo.jit(step_of(tx))
    args = params, tx.init(params), batch(0)
    update = next(eqn for eqn in jax.make_jaxpr(step_of(tx))(*args).jaxpr.eqns if "update" in eqn.params)
    assert any(isinstance(v, Literal) for v in update.invars)
    assert barriers(step, *args)[1] == LAYERS
    plain = scaled(optax.sgd(0.1, momentum=0.9))
    assert_close(step(*args), jax.jit(step_of(plain))(params, plain.init(params), batch(0)), 1e-6)
