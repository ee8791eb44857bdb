"""What trainers do around an ``offload``: moving its state, ``pmap``, ``optax.MultiSteps``."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jax_offload as jo
from tests.support.trees import assert_same, shardings_in

OLDEST, DAILY = pytest.mark.oldest("wrappers around an offload"), pytest.mark.daily("each begins otherwise")

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
BATCHES = [np.asarray(jax.random.normal(jax.random.key(i), (8, 32))) for i in range(7)]


def params():
    tree = {"up": jnp.full((32, 64), 0.1), "down": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.ones(64)}
    return jax.device_put(tree, jax.devices()[0])


def gradients(params, x):
    return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"] + p["b"]) @ p["down"] - x) ** 2))(params)


def step_of(tx, moved=lambda state: state):
    """``moved``: what a trainer does to the state before its update."""

    def step(params, state, x):
        updates, state = tx.update(gradients(params, x), moved(state), params)
        return optax.apply_updates(params, updates), state

    return step


def train(step, trained, state):
    for x in BATCHES:
        trained, state = step(trained, state, jax.device_put(x, jax.devices()[0]))
        assert at_home(state)


def at_home(state):
    """Whether the moments are on the host, and nothing else is."""
    moments = jax.tree.leaves([optax.tree.get(state, "mu"), optax.tree.get(state, "nu")])
    on_host = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == "pinned_host"]
    return len(moments) == len(on_host) and {id(x) for x in moments} == {id(x) for x in on_host}


LOOKS = {
    "abstract_state": jo.abstract_state,
    "placement": jo.placement,
    "to_host": lambda tx, p: jo.to_host(tx, tx.init(p), p),
    "update_params": lambda tx, p: jo.update_params(tx, p, tx.init(p), p),
    "jitted": lambda tx, p: jax.jit(lambda s, p: jo.update_params(tx, p, s, p))(tx.init(p), p),
}


@OLDEST
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_multi_steps_around_is_refused(look):
    """It selects between the old state and the new one where both are whole; inside, it streams."""
    tx, tree = jo.offload(INNER, min_bytes=0), params()
    for around in optax.MultiSteps(tx, 2), optax.MultiSteps(tx, 2).gradient_transformation():
        with pytest.raises(ValueError, match=r"tx: optax.MultiSteps is around.*jo.offload\(optax.MultiSteps\(opt"):
            look(around, tree)
    look(jo.offload(optax.MultiSteps(INNER, 2), min_bytes=0), tree)
    look(optax.MultiSteps(jo.offload(INNER, min_bytes=2**20), 2), tree)


def warnings_of(do):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(w.message) for w in caught if "were in host memory" in str(w.message)]


def test_a_state_that_was_moved_is_named():
    tx = jo.offload(INNER, min_bytes=0)
    step, moved = jax.jit(step_of(tx)), jo.to_device(tx.init(params()))
    text = warnings_of(lambda: train(step, params(), moved))[0]
    said = "6 leaves of the optimizer state", "[1][0].mu['b']", "arrive at update in device memory", "docs/trainers.md"
    assert all(words in text for words in said)
    # A state that is moved back after a step that a resident state began has a new type, and is traced again.
    tx = jo.offload(INNER, min_bytes=0)
    step = jax.jit(step_of(tx))
    trained, state = step(*step(params(), INNER.init(params()), BATCHES[0]), BATCHES[1])
    assert warnings_of(lambda: step(trained, jo.to_device(state), BATCHES[2]))


@OLDEST
def test_a_state_that_was_moved_is_named_without_jit():
    tx, tree = jo.offload(INNER, min_bytes=0), params()
    state = tx.init(tree)
    assert warnings_of(lambda: tx.update(tree, state, tree)) == []
    assert warnings_of(lambda: tx.update(tree, jo.to_device(state), tree))
    assert at_home(tx.update(tree, jo.to_device(state), tree)[1])


def replicated(tree):
    return jax.tree.map(lambda x: jnp.stack([np.asarray(x)] * 8), tree)


@OLDEST
def test_pmap_is_told_of():
    """It returns all of a state in device memory, as a ``jit`` does whose ``out_shardings`` name none."""
    tx, tree = jo.offload(INNER, min_bytes=0), replicated(params())
    with pytest.warns(UserWarning, match=r"are returned in device memory.*instead of jax.pmap.*jax.jit over a mesh"):
        jax.pmap(tx.init)(tree)
    state = replicated(INNER.init(params()))
    for update in (jo.offload(INNER, min_bytes=0).update, jax.jit(jo.offload(INNER, min_bytes=0).update)):
        step = jax.pmap(lambda g, s, p, update=update: update(jax.lax.pmean(g, "i"), s, p), axis_name="i")
        with pytest.warns(UserWarning, match="are returned in device memory.*instead of jax.pmap"):
            results = step(tree, state, tree)
        assert_same(results, jax.pmap(INNER.update)(tree, state, tree), "update")


def anywhere(tree):
    """Shardings that name no memory, of one device, for every leaf."""
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    return jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, PartitionSpec()), tree)


@OLDEST
@pytest.mark.parametrize(
    ("way", "jit"),
    [("out", jo.jit), ("init and out", jax.jit), ("move", jax.jit), ("init and move", jo.jit),
     ("resident and out", jax.jit)],
)  # fmt: skip
def test_who_brings_the_state_to_the_device_is_told_once(way, jit):
    tx, mine = jo.offload(INNER, min_bytes=0), jax.device_put(params(), anywhere(params()))
    home = shardings_in(jo.abstract_state(tx, mine))
    given = anywhere(home) if way.endswith("out") else home
    if way.startswith("resident"):
        state = INNER.init(mine)
    elif "init" not in way:
        state = tx.init(mine)
    elif "out" in way:
        with pytest.warns(UserWarning, match=r"were in host memory.*result\[1\]\[0\].mu.* jit of the init"):
            state = jax.jit(tx.init, out_shardings=given)(mine)
    else:
        state = jax.jit(tx.init, out_shardings=given)(mine)

    moved = (lambda state: jax.device_put(state, anywhere(state))) if "move" in way else (lambda state: state)
    step = jit(step_of(tx, moved), out_shardings=(anywhere(mine), given))
    (message,) = warnings_of(lambda: functools.reduce(lambda carried, x: step(*carried, x), BATCHES[:3], (mine, state)))
    assert "6 leaves" in message and "abstract_state(tx, params)" in message and ".mu['b']" in message


def only_looks(tx):
    tx.init(params())
    for state in INNER.init(params()), jo.abstract_state(tx, params()):
        table = jo.placement(lambda p, s: tx.update(p, s, p), params(), state)
    assert len(table.leaves) == len(jax.tree.leaves(state)) - 1


LEFT = {  # a look before the steps of a new offload, the function that makes the state, and the jit
    "resident": (lambda tx: None, lambda tx: INNER.init, jax.jit),  # steps offload it
    "resident, after a look at shapes": (lambda tx: jax.eval_shape(tx.init, params()), lambda tx: INNER.init, jax.jit),
    "resident, after a look at init": (lambda tx: jax.jit(tx.init).lower(params()), lambda tx: INNER.init, jax.jit),
    "resident, after a table": (lambda tx: jo.placement(tx, params()), lambda tx: INNER.init, jax.jit),
    "eager": (only_looks, lambda tx: tx.init, jo.jit),
    "jit": (lambda tx: None, lambda tx: jax.jit(tx.init), jax.jit),
}


@OLDEST
@pytest.mark.parametrize(
    "start", [pytest.param(k, marks=DAILY if k in ("eager", "resident, after a table") else []) for k in LEFT]
)
def test_nobody_is_told_who_leaves_the_state_in_host_memory(start):
    """No warning if a state starts resident or comes from a jit, or if steps return a part of it or only look."""
    (look, init, jit), tx, mine = LEFT[start], jo.offload(INNER, min_bytes=0), params()
    step = step_of(tx)

    def run():
        look(tx)
        state = init(tx)(mine)
        jit(lambda *args: step(*args)[0])(mine, state, BATCHES[0])  # an update that is only looked at
        jit(lambda *args: jo.to_device(step(*args)[1][1][0].mu))(mine, state, BATCHES[0])
        train(jit(step), mine, state)

    assert not warnings_of(run)
