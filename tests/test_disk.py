"""State on disk, read and written group by group around a step that is driven from Python: values, placement, commits,
what is said where it cannot be, and what stands around an update."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_offload as jo
from tests.disk.faulty import Faulty
from tests.support.trees import assert_close, assert_equal, handles, read

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
NAMES = ["layer_1", "layer_2", "layer_3", "layer_4"]
MATRIX = 64 * 64 * 4


def model(dtype=jnp.float32, width=64):
    w = {name: jax.random.normal(jax.random.key(k), (width, width)) / 8 for k, name in enumerate(NAMES)}
    tree = {name: {"w": x.astype(dtype), "b": jnp.full(width, 0.1, dtype)} for name, x in w.items()}
    return jax.device_put(tree, jax.devices()[0])


def loss(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return (x.astype(jnp.float32) ** 2).mean()


def step_of(tx, **extra):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params, **extra)
        return params, state, {"loss": value, "size": optax.global_norm(params)}

    return step


def offload(inner, disk, **options):
    return jo.offload(inner, min_bytes=1024, disk=disk, **options)


# ---- values ----------------------------------------------------------------------------------------------------------


def held(disk, until, events):
    """From now on writes of the state wait for an event."""

    def fault(name, path, *_):
        if name == "pwritev" and "state" in path.name:
            assert until.wait(300)
            events.append("written")

    Faulty(disk.directory, fault)


def test_reads_run_ahead_and_writes_behind(disk):
    """Of eight groups, the fifth is being read before the first is written, and the sixth after that."""
    tx, params = offload(optax.adamw(1e-2), disk), {f"w{k}": jnp.ones((64, 64)) for k in range(8)}
    params = jax.device_put(params, jax.devices()[0])
    step, state = jo.jit(lambda p, s: jo.update_params(tx, p, s, p)), tx.init(params)
    places, events, fifth = {}, [], threading.Event()

    def fault(name, path, *arguments):
        if name in ("preadv", "pwritev") and "state" in path.name:
            group = places.setdefault(arguments[1] // MATRIX % 8, len(places))  # the files have mu, then nu
            if (name, group) == ("preadv", 4):
                fifth.set()
            if name == "pwritev":
                assert fifth.wait(300)
            events.append((name, group))

    Faulty(disk.directory, fault)
    step(params, state)
    disk.wait()
    assert len(events) == 32 and {*places.values()} == {*range(8)}
    assert events.index(("pwritev", 0)) < events.index(("preadv", 5))


def test_a_step_returns_while_its_last_writes_are_under_way(disk):
    tx, params = offload(optax.adamw(1e-2), disk, select="layer_4|layer_3"), model()
    step, state = jo.jit(step_of(tx)), tx.init(params)
    let_go = threading.Event()
    held(disk, let_go, [])
    params, state, _ = step(params, state, X)  # which else would wait for the event
    let_go.set()
    assert np.abs(np.asarray(handles(state)[0])).max() > 0  # waits for what is written


# ---- where it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "on_disk"), [(5 * MATRIX, 4), (0, 8), (2 * MATRIX - 1, 8), (2 * MATRIX, 6), (2**30, 0)]
)
def test_host_bytes(budget, on_disk, tmp_path):
    """Whole parameters stay in host memory, those whose gradients come last."""
    tx = offload(optax.adamw(1e-2), jo.disk(tmp_path, host_bytes=budget))
    params = model()
    state = tx.init(params)
    assert len(handles(state)) == on_disk
    in_memory = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.ndim == 2]
    assert sum(x.nbytes for x in in_memory) <= budget
    assert {x.sharding.memory_kind for x in in_memory} <= {"pinned_host"}
    if 0 < on_disk < 8:
        assert not handles(state[0].mu["layer_1"]) and handles(state[0].mu["layer_4"])


# ---- commits -------------------------------------------------------------------------------------------------------


def test_commit_wants_the_whole_state_and_its_own(disk, tmp_path):
    tx, params = offload(CLIPPED, disk), model()
    state = tx.init(params)
    with pytest.raises(ValueError, match="tree: lacks a part of the state"):
        disk.commit(0, {"params": params, "mu": state[1][0].mu})
    other = jo.disk(tmp_path / "other")
    theirs = offload(CLIPPED, other).init(params)
    with pytest.raises(ValueError, match=r"tree: OnDisk.* is in disk"):
        disk.commit(0, theirs)
    step = jo.jit(step_of(tx))
    step(params, state, X)
    with pytest.raises(ValueError, match="an earlier step"):
        disk.commit(0, (params, state))


def test_a_resume_without_a_commit_leaves_the_state(disk):
    tx, params = offload(CLIPPED, disk), model()
    state = tx.init(params)
    with pytest.raises(ValueError, match="disk: there is no commit in"):
        disk.resume((params, state))
    params, state, _ = jo.jit(step_of(tx))(params, state, X)
    disk.commit(1, (params, state))


# ---- errors --------------------------------------------------------------------------------------------------------


def test_what_is_stale(disk):
    tx, params = offload(CLIPPED, disk), model()
    step, state = jo.jit(step_of(tx)), tx.init(params)
    after = step(params, state, X)[1]
    with pytest.raises(ValueError, match="disk: the state is not the one that is in"):
        step(params, state, X)
    with pytest.raises(ValueError, match="disk: the state is not the one"):
        np.asarray(handles(state)[0])
    step(params, jax.block_until_ready(jax.tree.map(lambda x: x, after)), X)


def test_what_else_takes_a_state(disk):
    tx, params = offload(CLIPPED, disk), model()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"leaves of the state are on disk.*Fix: jo\.to_device\(part\)"):
        jo.to_plain(tx, state)
    for other in (lambda: pickle.dumps(state), lambda: copy.deepcopy(state)):
        with pytest.raises(TypeError, match=r"disk: .* cannot be pickled or copied"):
            other()
    with pytest.raises(TypeError):
        handles(state)[0] + 1
    assert np.asarray(handles(state)[0]).shape == handles(state)[0].shape == (64, 64)
    assert repr(handles(state)[0]) == "OnDisk([1][0].mu['layer_1']['w']: float32[64, 64])"


def test_what_a_program_cannot_do_with_it(disk):
    tx, params = offload(CLIPPED, disk), model()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"leaves on disk are read between steps.*jo\.to_device"):
        jax.jit(jo.to_device)(state)
    with pytest.raises(ValueError, match=r"disk: tx.init makes files.*Fix: state = tx.init\(params\)"):
        jax.jit(offload(CLIPPED, disk).init)(params)


@pytest.mark.parametrize("form", ["update", "update_params"])
@pytest.mark.parametrize("where", ["host memory", "zeros on the device"])
def test_a_state_in_memory(form, where, disk):
    tx, params = offload(CLIPPED, disk), model()
    state = jo.offload(CLIPPED, min_bytes=1024).init(params)
    state = jax.tree.map(jnp.zeros_like, CLIPPED.init(params)) if where.startswith("zeros") else state

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        if form == "update_params":
            return jo.update_params(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(ValueError, match=r"state: .* is in memory, and this offload keeps it on disk. Fix"):
        jo.jit(step)(params, state, X)


def test_a_leaf_that_an_update_moves_to_another_ones_place(disk):
    def init(params):
        return {"last": jax.tree.map(jnp.zeros_like, params), "before": jax.tree.map(jnp.ones_like, params)}

    shifting = optax.GradientTransformation(init, lambda u, s, p=None: (u, {"last": u, "before": s["last"]}))
    tx, params = offload(shifting, disk), model()
    with pytest.raises(
        ValueError, match=r"disk: the update moves \['last'\]\['layer_1'\]\['w'\] unchanged to \['before'\]"
    ):
        jo.jit(step_of(tx))(params, tx.init(params), X)


def test_moments_that_an_update_makes_in_another_dtype(tmp_path):
    """Of bfloat16 parameters and float32 gradients; each fix that the error names trains."""
    params = model(jnp.bfloat16)
    for how in (None, "a cast", "masters"):
        inner = jo.with_master_params(optax.adamw(1e-2)) if how == "masters" else optax.adamw(1e-2)
        tx = offload(inner, jo.disk(tmp_path / str(how)))
        grads = jax.tree.map(lambda p, how=how: p.astype(p.dtype if how == "a cast" else jnp.float32), params)
        state, step = tx.init(params), jo.jit(lambda p, s, g, tx=tx: jo.update_params(tx, g, s, p))
        if how is None:
            with pytest.raises(
                ValueError, match=r"keeps its type\. Fix: .*g\.astype\(p\.dtype\).*with_master_params.*sel"
            ):
                step(params, state, grads)
        else:
            step(*step(params, state, grads), grads)


def test_options(tmp_path, disk):
    with pytest.raises(TypeError, match=r"disk: expected a jo.disk\(directory"):
        jo.offload(CLIPPED, disk=str(tmp_path))
    with pytest.raises(TypeError, match=r"got True. Fix: disk=jo.disk\('/nvme/run'\)"):
        jo.offload(CLIPPED, disk=True)
    for options in ({"update_on": "host"}, {"fraction": 0}):
        with pytest.raises(ValueError, match=r"disk: .* Fix: leave one"):
            jo.offload(CLIPPED, disk=disk, **options)


def test_a_state_that_is_not_that_of_all_processes(disk, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"disk: .* is on devices of 1 of the 2 processes, .* Fix: parameters on a mesh"
    ):
        offload(CLIPPED, disk).init(model())


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_the_table(tmp_path):
    files = jo.disk(tmp_path, host_bytes=2 * MATRIX)
    tx, params = offload(optax.adamw(1e-2), files), model()
    table = jo.placement(tx, params)
    assert table.disk_bytes == 6 * MATRIX and table.host_bytes == 2 * MATRIX
    assert table.device_bytes == 8 * 256 + 4
    assert f"disk, {6 * MATRIX / 2**20:.2f} MiB: beyond host_bytes={2 * MATRIX}; whole, 2 leaves together" in str(table)
    assert "on disk, read and written in every step" in str(table)
    assert files.last_commit is None

    shown = jo.placement(jo.jit(step_of(tx)), params, tx.init(params), X)
    assert shown.disk_bytes == table.disk_bytes and shown.host_bytes == table.host_bytes
    assert {leaf.path for leaf in shown.leaves if leaf.disk} >= {"[1][0].mu['layer_4']['w']"}
    (why,) = shown.stays
    assert why.startswith("disk= cuts the step at this update") and __file__.rpartition("/")[2] in why


ON_TOKENS = {
    "a norm": optax.tree.norm,
    "a sum": optax.tree.sum,
    "a multiple": lambda state: jax.tree.map(lambda x: 2 * x, state),
    "a difference": lambda state: jax.tree.map(lambda x, y: x - y, state, state),
    "a comparison": lambda state: jax.tree.map(lambda x: x == 0, state),
    "jax's functions": lambda state: jax.tree.map(jnp.square, state),
    "finite": lambda state: jax.tree.map(jnp.isfinite, state),
    "a choice": lambda state: jax.tree.map(lambda x: jnp.where(True, x, 0), state),
    "a cast": lambda state: optax.tree.cast(state, jnp.bfloat16),
    "jax's arrays": lambda state: jax.tree.map(jnp.asarray, state),
    "numpy's arrays": jax.device_get,
    "numpy's functions": lambda state: jax.tree.map(np.square, state),
    "a program": lambda state: jax.jit(optax.tree.norm)(state),
    "a program of jo.jit": lambda state: jo.jit(optax.tree.norm)(state),
    "a copy on a device": lambda state: jax.device_put(state, jax.devices()[0]),
    "pickle": lambda state: pickle.dumps(jax.tree.leaves(state)),
    "a leaf's multiple": lambda state: 2 * state[0].mu["layer_1"]["w"],
    "a leaf's sum": lambda state: state[0].mu["layer_1"]["w"].sum(),
    "a leaf's rows": lambda state: state[0].mu["layer_1"]["w"][0],
    "a leaf's cast": lambda state: state[0].mu["layer_1"]["w"].astype(jnp.bfloat16),
    "a leaf's next value": lambda state: state[0].mu["layer_1"]["w"].at[0].set(0),
    "a leaf's device": lambda state: state[0].mu["layer_1"]["w"].devices(),
    "the leaves' placement": lambda state: [x.sharding for x in jax.tree.leaves(state)],
    "the leaves' shards": lambda state: [x.addressable_shards for x in jax.tree.leaves(state)],
}


@pytest.mark.parametrize("after", ["init", "a step"])
def test_nothing_computes_with_what_stands_for_a_leaf(after, disk):
    tx, params = offload(optax.adamw(1e-2), disk), model()
    state = tx.init(params)
    if after == "a step":
        params, state = jo.jit(lambda p, s: jo.update_params(tx, p, s, p))(params, state)
    for compute in ON_TOKENS.values():
        with pytest.raises((TypeError, ValueError), match=r"jo\.to_device.*jo\.save_args"):
            compute(state)


def test_plain_orbax_says_what_saves_a_state_on_disk(disk, tmp_path):
    state = offload(optax.adamw(1e-2), disk).init(model())
    # else a thread of orbax waits ten minutes for a directory, after any save that orbax refuses at once
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(async_options=at_once)
    with ocp.CheckpointManager(tmp_path / "manager", options=options) as manager:
        args = ocp.args.StandardSave({"opt_state": state})
        with pytest.raises((TypeError, ValueError), match=r"jo\.save_args"):
            manager.save(0, args=args)
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises((TypeError, ValueError), match=r"jo\.save_args"):
        checkpointer.save(tmp_path / "tree", state)


def test_what_looks_at_the_types_of_a_state_sees_those_of_its_leaves(disk):
    params = model()
    state, plain = offload(optax.adamw(1e-2), disk).init(params), optax.adamw(1e-2).init(params)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        assert (x.shape, x.dtype, x.size, x.nbytes) == (y.shape, y.dtype, y.size, y.nbytes)
    (leaf,) = jax.tree.leaves(state[0].mu["layer_1"]["w"])
    assert not hasattr(leaf, "sharding") and not hasattr(leaf, "__cuda_array_interface__")
    assert float(optax.tree.norm(optax.tree.zeros_like(state))) == 0
    assert jax.jit(lambda state, x: x + 1)(state, 1) == 2


def test_a_step_that_cannot_be_says_why(disk):
    tx, params = offload(optax.adamw(1e-2), disk), model()
    state = tx.init(params)

    def twice(params, state):
        for _ in range(2):
            params, state = jo.update_params(tx, params, state, params)
        return params, state

    def with_a_norm(params, state):
        params, state = jo.update_params(tx, params, state, params)
        return params, state, optax.tree.norm(optax.tree.get(state, "mu"))

    def with_a_norm_on_the_device(params, state):
        params, state = jo.update_params(tx, params, state, params)
        return params, state, optax.tree.norm(jo.to_device(optax.tree.get(state, "mu")))

    def in_a_scan(params, state):
        def body(carry, _):
            return jo.update_params(tx, carry[0], carry[1], carry[0]), None

        return jax.lax.scan(body, (params, state), length=2)[0]

    def in_a_checkpoint(params, state):
        return jax.checkpoint(lambda p, s: jo.update_params(tx, p, s, p))(params, state)

    def with_a_part(params, state):
        return jo.update_params(tx, params, state, params)[1][0].mu

    def by(other):
        return lambda params, state: jo.update_params(offload(optax.adamw(1e-2), other), params, state, params)

    in_memory = r"is on disk, and this offload keeps it in memory"
    for step, message in (
        (by(None), in_memory),
        (by(jo.disk("unused", host_bytes=2 * MATRIX)), in_memory),
        (with_a_part, r"the step updates a state and returns only a part"),
        (in_a_scan, r"disk: the update stands in a scan of the step, which cannot be cut there\. Fix: update once"),
        (in_a_checkpoint, r"disk: the update stands in a jax\.checkpoint of the step"),
        (twice, r"updates the state again.*call such a step several times"),
        (with_a_norm, r"reads a leaf, for a norm.*between two steps jo\.to_device.*jo\.save_args"),
        (with_a_norm_on_the_device, r"outside its update.*jo\.to_device\(optax\.tree\.get"),
    ):
        with pytest.raises(ValueError, match=message):
            jo.jit(step)(params, state)


# ---- branches --------------------------------------------------------------------------------------------------------


def test_apply_if_finite_around(disk):
    """An update that is not applied writes nothing, and changes no bit; the state goes on, and is committed."""
    inner = optax.apply_if_finite(CLIPPED, 2)
    tx = optax.apply_if_finite(jo.offload(CLIPPED, min_bytes=1024, disk=disk), 2)

    def step_with(tx):
        def step(params, state, x):
            updates, state = tx.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        return step

    step, plain = jo.jit(step_with(tx), donate_argnums=(0, 1)), jax.jit(step_with(inner))
    params = model()
    state, files = tx.init(params), Faulty(disk.directory)
    for x, written in (X, 8), (X * np.nan, 0), (2 * X, 8):
        files.calls.clear()
        want = plain(params, jo.to_device(state), x)
        before = read((params, state.inner_state))
        params, state = step(params, state, x)
        disk.wait()
        assert [name for name, _ in files.calls].count("pwritev") == written
        assert_close(read((params, state)), want, 1e-5)
        if not written:
            assert_equal(read((params, state.inner_state)), before)
    disk.commit(3, {"params": params, "state": state})
    assert int(state.total_notfinite) == 1 and len(handles(state)) == 8


# ---- pipelined -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_pipelined(gradients, disk, tmp_path):
    """As the plain loop on disk."""
    other = jo.disk(tmp_path / "other")
    plain, tx = (jo.offload(CLIPPED, min_bytes=1024, disk=files) for files in (other, disk))

    def step_by(tx):
        return lambda params, state, x: jo.update_params(tx, jax.grad(loss)(params, x), state, params)

    params, x = model(width=128), np.concatenate([X, X], 1)  # gradients of 64 KiB can wait on the host
    step, want = jo.jit(step_by(plain), donate_argnums=(0, 1)), (jax.tree.map(jnp.copy, params), plain.init(params))
    train, carry = jo.pipelined(step_by(tx), donate_argnums=(0, 1), gradients=gradients), (params, tx.init(params))
    for k in range(4):
        want = step(*want, x * (k + 1))
        carry, _ = train(carry, x * (k + 1))
    look = read(train.params(carry))
    params, state = train.finish(carry)
    assert len(handles(state)) == 8
    assert_close(look, read(params), 1e-6)
    assert_close(read((params, state)), read(want), 1e-5)
    disk.commit(4, (params, state))
    shown = jo.placement(train, params, state, x)
    assert shown.disk_bytes == 4 * 8 * 128 * 128
    other.close()
