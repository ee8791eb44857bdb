"""Leaves on disk of which some rows are a group: values, what is in the files and in memory, and what stays whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._drive import stages
from jax_offload._plan import transfers as by_rows
from tests.disk.faulty import Faulty
from tests.support.trees import assert_close, assert_equal, read

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
SHAPES = {"layers": (7, 32, 32), "bias": (7, 32), "embed": (160, 32)}
ROW = 2 * 32 * 32 * 4  # bytes of both moments of a layer


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two layers are a group."""
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    monkeypatch.setattr(by_rows, "PART_BYTES", 2 * ROW)


def network(seed=0):
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape, np.float32) / 4 for name, shape in SHAPES.items()}
    return jax.device_put(values, jax.devices()[0])


def step_of(tx):
    return jo.jit(lambda params, state, grads: jo.update_params(tx, grads, state, params), donate_argnums=(0, 1))


def run(tx, params, grads, n=3, state=None, step=None):
    params = jax.tree.map(jnp.copy, params)
    state, step = tx.init(params) if state is None else state, step or step_of(tx)
    for _ in range(n):
        params, state = step(params, state, grads)
    return params, state


COLUMNS = optax.stateless(lambda g, _: jax.tree.map(lambda x: x - x.mean(axis=0, keepdims=True), g))
MEANS = optax.chain(optax.trace(0.9), COLUMNS, optax.scale(-1e-2))


@pytest.mark.long("more kinds of parts")
def test_leaves_that_share_a_loop_share_their_parts(tmp_path):
    """Rows of one are three times as long as the other's: their parts are powers of two, and end together."""
    rng, results = np.random.default_rng(0), []
    shapes = {"a": (9, 96, 32), "b": (9, 32, 32)}
    values = [{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)]
    params, grads = jax.device_put(values, jax.devices()[0])
    for files in (None, jo.disk(tmp_path)):
        tx = jo.offload(optax.sgd(1e-2, momentum=0.9), min_bytes=256, window=2**15, disk=files)
        step = step_of(tx)
        results.append(run(tx, params, grads, step=step))
    assert_equal(read(results[1][1]), read(results[0][1]))
    assert_close(results[1][0], results[0][0], 1e-6)
    assert (files.ends("[0].trace['a']"), files.ends("[0].trace['b']")) == ((2, 4, 6, 8, 9), (4, 8, 9))
    files.close()


def shifting():
    """An optimizer that keeps the last gradients, which are made before any state is read, and the ones before."""

    def init(params):
        return {"last": jax.tree.map(jnp.zeros_like, params), "before": jax.tree.map(jnp.ones_like, params)}

    def update(updates, state, params=None):
        scaled = jax.tree.map(lambda g, a, b: g + a + 2 * b, updates, state["last"], state["before"])
        moved = jax.tree.map(lambda a: a + 1, state["last"])
        return scaled, {"last": updates, "before": moved}

    return optax.GradientTransformation(init, update)


@pytest.mark.long("more kinds of parts")
def test_what_is_written_whole_waits_for_all_that_read_rows_of_it(disk):
    tx, params, grads = jo.offload(shifting(), min_bytes=256, disk=disk), network(), network(100)
    got, state = run(tx, params, grads)
    want, host = run(shifting(), params, grads)
    assert_close((got, read(state)), (want, read(host)), 1e-6)


def test_a_leaf_is_written_while_its_last_rows_are_not_read(disk, monkeypatch):
    """Of seven groups, one for each layer; else all of a leaf would be in host memory."""
    monkeypatch.setattr(by_rows, "PART_BYTES", ROW)
    log, disk.files = [], Faulty()
    tx, params = jo.offload(optax.adamw(1e-2), min_bytes=256, select="layers", disk=disk), network()
    step, state = step_of(tx), tx.init(params)
    disk.files.fault = lambda name, path, *_: log.append(name) if "state" in path.name else None
    step(params, state, network(100))
    disk.wait()
    assert log.count("preadv") == log.count("pwritev") == 14
    assert log.index("pwritev") < len(log) - 1 - log[::-1].index("preadv")


def test_the_table_says_how(disk):
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=disk)
    said = str(jo.placement(tx, network()))
    for words in (
        "from disk in 4 parts of 2 rows, 2 leaves together",
        "from disk in 3 parts of 64 rows, 2 leaves together",
        "whole, 2 leaves together\n",
    ):
        assert words in said.replace("\n    ", " "), said
    why = "broadcast_in_dim of a reduction over all rows"
    for window, words in (
        (None, f"whole, from disk as a whole: {why}"),
        (2**12, f"whole: {why}, from disk as a whole too"),
    ):
        other = jo.offload(MEANS, min_bytes=256, window=window, disk=jo.disk("unused"))
        said = str(jo.placement(other, network())).replace("\n    ", " ")
        assert words in said, said


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["larger", "as before", "whole", "smaller"])
def test_the_ranges_stay(then, tmp_path, monkeypatch):
    """Files go on as they were made, whatever is the size of a group by then: bit for bit."""
    if then == "smaller":
        monkeypatch.setattr(by_rows, "PART_BYTES", 2**30)
    files = jo.disk(tmp_path)
    tx, grads = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=files), network(100)
    params, state = run(tx, network(), grads, 2)
    files.commit(2, {"params": params, "state": state})
    committed, ranges = read((params, state)), files.ends("[0].mu['layers']")
    after = read(run(tx, params, grads, 2, state))
    files.close()

    sizes = {"as before": 2 * ROW, "larger": 4 * ROW, "whole": 2**30, "smaller": 2 * ROW}
    monkeypatch.setattr(by_rows, "PART_BYTES", sizes[then])
    again = jo.disk(tmp_path)
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=again)
    tree, _ = again.resume({"params": params, "state": jo.abstract_state(tx, params)})
    assert_equal(read((tree["params"], tree["state"])), committed)
    assert again.ends("[0].mu['layers']") == ranges == ((7,) if then == "smaller" else (2, 4, 6, 7))
    step = step_of(tx)
    got = run(tx, tree["params"], grads, 2, tree["state"], step)
    assert_equal(read(got), after)

    onto = jo.disk(tmp_path / "other")  # in the ranges of now
    new = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=onto)
    moved = jo.to_host(new, got[1])
    assert_equal(read(moved), read(got[1]))
    assert len(onto.ends("[0].mu['layers']")) == {"as before": 4, "larger": 2, "whole": 1, "smaller": 4}[then]
    for each in again, onto:
        each.close()
