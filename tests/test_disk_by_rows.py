"""Leaves on disk of which some rows are a group: values, what is in the files and in memory, and what stays whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive import stages
from jax_offload._plan import by_rows
from tests.support.rows import rows
from tests.support.trees import assert_close, assert_equal, read

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
SHAPES = {"layers": (7, 32, 32), "bias": (7, 32), "embed": (160, 32)}
ROW = 2 * 32 * 32 * 4  # bytes of both moments of a layer
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Two layers are a group."""
    monkeypatch.setattr(stages, "GROUP_BYTES", 1)
    monkeypatch.setattr(by_rows, "PART_BYTES", 2 * ROW)


def network(seed=0, dtype=np.float32, mesh=None, specs=None):
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape, np.float32).astype(dtype) / 4 for name, shape in SHAPES.items()}
    if mesh is None:
        return jax.device_put(values, jax.devices()[0])
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in values.items()}


def step_of(tx, donate=(0, 1), **extra):
    def step(params, state, grads):
        return jo.update_params(tx, grads, state, params, **extra)

    return jo.jit(step, donate_argnums=donate)


def run(tx, params, grads, n=3, state=None, step=None):
    params = jax.tree.map(jnp.copy, params)
    state, step = tx.init(params) if state is None else state, step or step_of(tx)
    for _ in range(n):
        params, state = step(params, state, grads)
    return params, state


def groups_in(step):
    """Of each leaf's gradient, by its shape, how many groups read it."""
    ((driven, _),) = step._driven._programs.values()
    groups = [task for task, _ in driven._tasks if task.stage.name == "group"]
    return {name: sum(any(v.aval.shape == shape for v in task.inputs) for task in groups)
            for name, shape in SHAPES.items()}  # fmt: skip


def programs_in(step):
    ((driven, _),) = step._driven._programs.values()
    return len({id(run) for task, run in driven._tasks if task.stage.name == "group"})


OPTIMIZERS = {  # and how many groups the layers are, in all passes over their state
    "adamw": (optax.adamw(1e-2), 4),
    "sgd": (optax.sgd(1e-2, momentum=0.9), 2),
    "lamb": (optax.lamb(1e-2), 1),
    "means of columns": (optax.chain(optax.trace(0.9), optax.stateless(lambda g, _: jax.tree.map(
        lambda x: x - x.mean(axis=0, keepdims=True), g)), optax.scale(-1e-2)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", rows(list(OPTIMIZERS), "alike", daily=["adamw", "lamb"]))
def test_which_leaves_go_by_parts(name, disk):
    """Those whose rows the update keeps apart, by one program for all parts of a size. disk/test_values.py has the
    numbers."""
    inner, parts = OPTIMIZERS[name]
    tx = jo.offload(inner, min_bytes=256, disk=disk)
    step = step_of(tx)
    run(tx, network(), network(100), 1, step=step)
    assert groups_in(step)["layers"] == parts
    if name == "adamw":
        assert groups_in(step) == {"layers": 4, "bias": 1, "embed": 3}
        assert programs_in(step) == 5  # of two layers and of one, of 64 rows and of 32, and of the biases


@pytest.mark.long("more kinds of parts")
def test_a_step_that_is_skipped_changes_nothing(disk):
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=disk)
    params, grads = network(), network(100)
    state = tx.init(params)

    def step(params, state, grads, skip):
        return jo.update_params(tx, grads, state, params, skip=skip)

    step = jo.jit(step, donate_argnums=(0, 1))
    params, state = step(params, state, grads, False)
    before = read((params, state))
    params, state = step(params, state, grads, True)
    assert_equal(read((params, state)), before)
    params, state = step(params, state, grads, False)
    assert_close(params, run(optax.adamw(1e-2), network(), grads, 2)[0], 1e-6)


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
    ((driven, _),) = step._driven._programs.values()
    groups = [task for task, _ in driven._tasks if task.stage.name == "group"]
    sizes = [[v.aval.shape[0] for v in task.inputs if is_host_aval(v.aval)] for task in groups]
    assert sizes == [[4, 4], [4, 4], [1, 1]]
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


def test_parts_are_written_while_later_ones_are_read(disk, monkeypatch):
    """Else all of a leaf would be in host memory."""
    tx, params, grads = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=disk), network(), network(100)
    state, step, events = tx.init(params), step_of(tx), []
    fetch, put = disk.fetch, disk.put
    monkeypatch.setattr(
        disk, "fetch", lambda name, *rest: events.append(("read", name, rest[-1])) or fetch(name, *rest)
    )
    monkeypatch.setattr(disk, "put", lambda name, *rest: events.append(("write", name, rest[-1])) or put(name, *rest))
    step(params, state, grads)
    name = "[0].mu['layers']"
    assert {rows for _, each, rows in events if each == name} == {(0, 2), (2, 4), (4, 6), (6, 7)}
    assert events.index(("write", name, (0, 2))) < events.index(("read", name, (6, 7)))
    assert disk.store.buffers.most <= 7 * 4 * ROW  # groups of two layers, of as many bytes or less, in whole pages


def test_rows_in_a_part(monkeypatch):
    assert [by_rows.rows_in_part(n, 3, 100) for n in (ROW, ROW + 1, ROW // 3, 3 * ROW)] == [2, 2, 8, 1]
    assert by_rows.rows_in_part(ROW // 16, 3, 32) == 0 and by_rows.rows_in_part(ROW // 16, 3, 33) == 32
    assert by_rows.rows_in_part(ROW, 2, 100) == 32 and by_rows.rows_in_part(ROW, 1, 2**20) == 1024  # tiles


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
        other = jo.offload(OPTIMIZERS["means of columns"][0], min_bytes=256, window=window, disk=jo.disk("unused"))
        said = str(jo.placement(other, network())).replace("\n    ", " ")
        assert words in said, said


@pytest.mark.long("more kinds of parts")
def test_the_step_turned_round(disk):
    def loss(params, x):
        return sum(((p * x.mean()) ** 2).sum() for p in jax.tree.leaves(params))

    def step(tx):
        return lambda params, state, x: jo.update_params(tx, jax.grad(loss)(params, x), state, params)

    tx, params, x = jo.offload(CLIPPED, min_bytes=256, disk=disk), network(), jnp.linspace(1, 2, 8)
    want = params, CLIPPED.init(params)
    for k in range(4):
        want = jax.jit(step(CLIPPED))(*want, x * (k + 1))
    train = jo.pipelined(step(tx), donate_argnames=("params", "state"), gradients="device")
    carry, _ = train.start(jax.tree.map(jnp.copy, params), tx.init(params), x)
    for k in range(1, 4):
        carry, _ = train(carry, x * (k + 1))
    assert len(disk.ends("[1][0].mu['layers']")) == 4
    got, state = train.finish(carry)
    assert_close((read(got), jax.tree.leaves(read(state))), (read(want[0]), jax.tree.leaves(read(want[1]))), 1e-5)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.long("more kinds of parts")
def test_a_leaf_is_a_group_of_the_store_for_each_part(disk):
    """Of two layers, of 64 rows; the bias, of less bytes, is one."""
    params = network()
    state = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=disk).init(params)
    found = {}
    for entry in disk.store.entries:
        found.setdefault(entry.path, []).append((entry.begin[0], entry.shape[0]))
    for moment in "mu", "nu":
        assert found[f"[0].{moment}['layers']"] == [(0, 2), (2, 2), (4, 2), (6, 1)]
        assert found[f"[0].{moment}['bias']"] == [(0, 7)]
        assert found[f"[0].{moment}['embed']"] == [(0, 64), (64, 64), (128, 32)]
    assert disk.ends("[0].mu['layers']") == (2, 4, 6, 7)
    for x in jax.tree.leaves(state, is_leaf=is_on_disk):
        if is_on_disk(x):
            np.testing.assert_array_equal(np.asarray(x), np.zeros(x.shape, x.dtype))


@pytest.mark.long("more kinds of parts", but=["larger"])
@pytest.mark.parametrize("then", ["as before", "larger", "whole", "smaller"])
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
    assert groups_in(step)["layers"] == len(ranges)

    onto = jo.disk(tmp_path / "other")  # in the ranges of now
    new = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=onto)
    moved = jo.to_host(new, got[1])
    assert_equal(read(moved), read(got[1]))
    assert len(onto.ends("[0].mu['layers']")) == {"as before": 4, "larger": 2, "whole": 1, "smaller": 4}[then]
    for each in again, onto:
        each.close()


@pytest.mark.long("more kinds of parts")
def test_a_checkpoint_of_it(disk, tmp_path):
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=disk)
    params, state = run(tx, network(), network(100), 2)
    disk.commit(2, {"params": params, "state": state})
    plain = jo.offload(optax.adamw(1e-2), min_bytes=256)
    tree = jo.restore(disk, {"params": params, "state": jo.abstract_state(plain, params)})
    assert_equal(read(tree["state"]), read(state))


# ---- several devices -------------------------------------------------------------------------------------------------


SPECS = {
    "minor axes": {"layers": P(None, "fsdp", "tensor"), "bias": P(None, "tensor"), "embed": P(None, "fsdp")},
    "rows": {"layers": P(None, "tensor"), "bias": P(), "embed": P(("data", "fsdp"), "tensor")},
    "replicated": {"layers": P(), "bias": P(), "embed": P()},
}


def mesh_of(axes=AxisType.Auto, shape=(2, 2, 2), devices=None):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(axes,) * 3, devices=devices)


@pytest.mark.long("more kinds of parts")
@pytest.mark.parametrize("other", rows(["fewer devices", "other axes", "one device"], "alike", daily=["other axes"]))
def test_resumed_in_another_sharding(other, tmp_path):
    """By rows, where its first axis is divided as before; else whole."""
    mesh, specs = mesh_of(), SPECS["rows"]
    params, grads = network(mesh=mesh, specs=specs), network(100, mesh=mesh, specs=specs)
    files = jo.disk(tmp_path)
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=files)
    params, state = run(tx, params, grads, 2)
    files.commit(2, {"params": params, "state": state})
    committed, after = read((params, state)), read(run(tx, params, grads, 2, state))
    files.close()
    m = {"fewer devices": mesh_of(shape=(1, 2, 2), devices=jax.devices()[:4]), "other axes": mesh}.get(other)
    there = SPECS["minor axes"]
    again = jo.disk(tmp_path)
    tx = jo.offload(optax.adamw(1e-2), min_bytes=256, disk=again)
    given, grads = network(mesh=m, specs=there), network(100, mesh=m, specs=there)
    tree, _ = again.resume({"params": given, "state": jo.abstract_state(tx, given)})
    assert_equal(read((tree["params"], tree["state"])), committed)
    step = step_of(tx)
    got = run(tx, tree["params"], grads, 2, tree["state"], step)
    assert_close(read(got), after, 2e-5)
    assert groups_in(step)["layers"] == 4 and groups_in(step)["embed"] == 1
    again.close()
