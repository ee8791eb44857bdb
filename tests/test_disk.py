"""State on disk, read and written group by group around a step that is driven from Python: when it moves, where it is,
and what is said where it cannot be. Values: tests/test_equivalence.py."""

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
from tests.support.random_steps import OPTIMIZERS
from tests.support.steps import ADAMW, CLIPPED, apart, batch, loss_apart, step_of
from tests.support.trees import assert_close, assert_equal, handles, read

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
MATRIX = 64 * 64 * 4
X = batch(0)["x"]


def offload(inner, disk, **options):
    return jo.offload(inner, min_bytes=1024, disk=disk, **options)


def begun(disk, inner=ADAMW, n=4, **options):
    """An optimizer, parameters, and their state."""
    tx, params = offload(inner, disk, **options), apart(n)
    return tx, params, tx.init(params)


def by_loss(tx, form="update_params"):
    return step_of(tx, form, loss_apart)


def alone(tx):
    """An update whose gradients are the parameters."""
    return lambda params, state: jo.update_params(tx, params, state, params)


# ---- when it moves ---------------------------------------------------------------------------------------------------


def test_reads_run_ahead_and_writes_behind(disk):
    """Of eight groups, the fifth is being read before the first is written, and the sixth after that."""
    tx, params, state = begun(disk, n=8)
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
    jo.jit(alone(tx))(params, state)
    disk.wait()
    assert len(events) == 32 and {*places.values()} == {*range(8)}
    assert events.index(("pwritev", 0)) < events.index(("preadv", 5))


def test_a_step_returns_while_its_last_writes_are_under_way(disk):
    tx, params, state = begun(disk, select="layer_4|layer_3")
    let_go = threading.Event()

    def fault(name, path, *_):
        assert name != "pwritev" or "state" not in path.name or let_go.wait(300)

    Faulty(disk.directory, fault)
    params, state, _ = jo.jit(by_loss(tx))(params, state, X)  # which else would wait for the event
    let_go.set()
    assert np.abs(np.asarray(handles(state)[0])).max() > 0  # waits for what is written
    assert np.array(handles(state)[0]).flags.writeable


def test_an_update_that_is_not_applied_writes_nothing(disk):
    """It changes no bit; the state goes on, and is committed."""
    txs = [optax.apply_if_finite(tx, 2) for tx in (CLIPPED, offload(CLIPPED, disk))]
    plain, step = (jit(by_loss(tx, "update")) for jit, tx in zip((jax.jit, jo.jit), txs, strict=True))
    params, files = apart(), Faulty(disk.directory)
    state = txs[1].init(params)
    for x, written in (X, 8), (X * np.nan, 0), (2 * X, 8):
        files.calls.clear()
        want = plain(params, jo.to_device(state), x)[:2]
        before = read((params, state.inner_state))
        params, state, _ = step(params, state, x)
        disk.wait()
        assert [name for name, _ in files.calls].count("pwritev") == written
        assert_close(read((params, state)), want, 1e-5)
        if not written:
            assert_equal(read((params, state.inner_state)), before)
    disk.commit(3, {"params": params, "state": state})
    assert int(state.total_notfinite) == 1 and len(handles(state)) == 8


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_pipelined(gradients, disk, tmp_path):
    """As the plain loop on disk."""
    other = jo.disk(tmp_path / "other")
    plain, tx = (offload(CLIPPED, files) for files in (other, disk))
    params, x = apart(width=128), jnp.concatenate([X, X], 1)  # gradients of 64 KiB can wait on the host
    step, want = jo.jit(by_loss(plain), donate_argnums=(0, 1)), (jax.tree.map(jnp.copy, params), plain.init(params))
    train, carry = jo.pipelined(by_loss(tx), donate_argnums=(0, 1), gradients=gradients), (params, tx.init(params))
    for k in range(4):
        want = step(*want, x * (k + 1))[:2]
        carry, _ = train(carry, x * (k + 1))
    look = read(train.params(carry))
    params, state = train.finish(carry)
    assert len(handles(state)) == 8
    assert_close(look, read(params), 1e-6)
    assert_close(read((params, state)), read(want), 1e-5)
    disk.commit(4, (params, state))
    assert jo.placement(train, params, state, x).disk_bytes == 4 * 8 * 128 * 128
    other.close()


# ---- where it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "on_disk"), [(2 * MATRIX, 6), (5 * MATRIX, 4), (0, 8), (2 * MATRIX - 1, 8), (2**30, 0)]
)
def test_host_bytes(budget, on_disk, tmp_path):
    """Whole parameters stay in host memory, those whose gradients come last; the table says so, and a step's too."""
    tx, params, state = begun(jo.disk(tmp_path, host_bytes=budget))
    assert len(handles(state)) == on_disk
    in_memory = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.ndim == 2]
    assert len(in_memory) == 8 - on_disk and {x.sharding.memory_kind for x in in_memory} <= {"pinned_host"}
    if 0 < on_disk < 8:
        assert not handles(state[0].mu["layer_1"]) and handles(state[0].mu["layer_4"])
    table, shown = jo.placement(tx, params), jo.placement(jo.jit(by_loss(tx)), params, state, X)
    for each in table, shown:
        assert (each.disk_bytes, each.host_bytes) == (on_disk * MATRIX, (8 - on_disk) * MATRIX)
    if budget == 2 * MATRIX:
        assert f"disk, {6 * MATRIX / 2**20:.2f} MiB: beyond host_bytes={budget}; whole, 2 leaves" in str(table)
        assert "on disk, read and written in every step" in str(table)
        assert {leaf.path for leaf in shown.leaves if leaf.disk} >= {"[1][0].mu['layer_4']"}
        (why,) = shown.stays
        assert why.startswith("disk= cuts the step at this update") and "steps.py" in why


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_no_state_of_this_disk(disk, tmp_path):
    """A part of the state, another disk's, an earlier step's; a state that is not on disk, or has to be in memory."""
    tx, params, state = begun(disk, CLIPPED)
    _, _, theirs = begun(jo.disk(tmp_path / "other"), CLIPPED)
    in_memory, step = jo.offload(CLIPPED, min_bytes=1024).init(params), jo.jit(by_loss(tx))
    zeros = jax.tree.map(jnp.zeros_like, CLIPPED.init(params))

    def rejected(*wrong):
        for message, call in wrong:
            with pytest.raises(ValueError, match=message):
                call()

    is_in_memory = "state: .* is in memory, and this offload keeps it on disk. Fix"
    rejected(
        ("disk: there is no commit in", lambda: disk.resume((params, state))),
        ("tree: lacks a part of the state", lambda: disk.commit(0, {"params": params, "mu": state[1][0].mu})),
        (r"tree: OnDisk.* is in disk", lambda: disk.commit(0, theirs)),
        (is_in_memory, lambda: step(params, in_memory, X)),
        (is_in_memory, lambda: step(params, zeros, X)),
        (is_in_memory, lambda: jo.jit(by_loss(tx, "update"))(params, zeros, X)),
        (r"leaves of the state are on disk.*Fix: jo\.to_device\(part\)", lambda: jo.to_plain(tx, state)),
        (r"leaves on disk are read between steps.*jo\.to_device", lambda: jax.jit(jo.to_device)(state)),
        (r"tx.init makes files.*Fix: state = tx.init\(params\)", lambda: jax.jit(offload(CLIPPED, disk).init)(params)),
    )
    params, after, _ = step(params, state, X)
    rejected(
        ("an earlier step", lambda: disk.commit(0, (params, state))),
        ("disk: the state is not the one that is in", lambda: step(params, state, X)),
        ("disk: the state is not the one", lambda: np.asarray(handles(state)[0])),
    )
    params, after, _ = step(params, jax.block_until_ready(jax.tree.map(lambda x: x, after)), X)
    disk.commit(2, (params, after))


def test_a_leaf_that_an_update_moves_to_another_ones_place(disk):
    tx, params, state = begun(disk, OPTIMIZERS["rotating"]())
    with pytest.raises(ValueError, match=r"disk: the update moves \[1\]\['layer_1'\] unchanged to \[0\]\['layer_1'\]"):
        jo.jit(by_loss(tx))(params, state, X)


def test_moments_that_an_update_makes_in_another_dtype(tmp_path):
    """Of bfloat16 parameters and float32 gradients; each fix that the error names trains."""
    params = apart(dtype=jnp.bfloat16)
    for how in (None, "a cast", "masters"):
        inner = jo.with_master_params(ADAMW) if how == "masters" else ADAMW
        tx = offload(inner, jo.disk(tmp_path / str(how)))
        grads = jax.tree.map(lambda p, how=how: p.astype(p.dtype if how == "a cast" else jnp.float32), params)
        state, step = tx.init(params), jo.jit(lambda p, s, g, tx=tx: jo.update_params(tx, g, s, p))
        if how is None:
            with pytest.raises(ValueError, match=r"its type\. Fix: .*g\.astype\(p\.dtype\).*with_master_params.*sel"):
                step(params, state, grads)
        else:
            step(*step(params, state, grads), grads)


def test_options(tmp_path, disk, monkeypatch):
    with pytest.raises(TypeError, match=r"disk: expected a jo.disk\(directory"):
        jo.offload(CLIPPED, disk=str(tmp_path))
    with pytest.raises(TypeError, match=r"got True. Fix: disk=jo.disk\('/nvme/run'\)"):
        jo.offload(CLIPPED, disk=True)
    for options in ({"update_on": "host"}, {"fraction": 0}):
        with pytest.raises(ValueError, match=r"disk: .* Fix: leave one"):
            jo.offload(CLIPPED, disk=disk, **options)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"disk: .* on devices of 1 of the 2 processes, .* Fix: parameters on a mesh"):
        begun(disk)


# ---- what stands for a leaf ------------------------------------------------------------------------------------------


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
    "a leaf's multiple": lambda state: 2 * state[0].mu["layer_1"],
    "a leaf's sum": lambda state: state[0].mu["layer_1"].sum(),
    "a leaf's rows": lambda state: state[0].mu["layer_1"][0],
    "a leaf's cast": lambda state: state[0].mu["layer_1"].astype(jnp.bfloat16),
    "a leaf's next value": lambda state: state[0].mu["layer_1"].at[0].set(0),
    "a leaf's device": lambda state: state[0].mu["layer_1"].devices(),
    "a leaf's type": lambda state: jax.typeof(state[0].mu["layer_1"]),
    "a vmap of a leaf": lambda state: jax.vmap(jnp.sum)(state[0].mu["layer_1"]),
    "a sum in lax": lambda state: jax.lax.add(state[0].mu["layer_1"], 1.0),
    "sums in lax": lambda state: jax.tree.map(jax.lax.neg, state),
    "a loop": lambda state: jax.lax.fori_loop(0, 2, lambda i, x: x, state),
    "a branch": lambda state: jax.lax.cond(True, lambda x: x, lambda x: x, state),
    "a checkpoint": lambda state: jax.checkpoint(lambda x: x)(state),
    "the leaves' placement": lambda state: [x.sharding for x in jax.tree.leaves(state)],
    "the leaves' shards": lambda state: [x.addressable_shards for x in jax.tree.leaves(state)],
}


@pytest.mark.parametrize("after", ["init", "a step", "two branches"])
def test_nothing_computes_with_what_stands_for_a_leaf(after, disk):
    tx, params, state = begun(disk)

    def once(low, params, state):
        small = params["layer_1"][0, 0] < 9
        return jax.lax.cond(small == low, alone(tx), lambda *handed_on: handed_on, params, state)

    if after == "a step":
        params, state = jo.jit(alone(tx))(params, state)
    if after == "two branches":
        params, state = jo.jit(lambda *given: once(False, *once(True, *given)))(params, state)
    for compute in ON_TOKENS.values():
        with pytest.raises((TypeError, ValueError), match=r"jo\.to_device.*jo\.save_args"):
            compute(state)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"disk: .* cannot be pickled or copied.*jo\.to_device.*jo\.save_args"):
            copied(state)


def test_plain_orbax_says_what_saves_a_state_on_disk(disk, tmp_path):
    _, _, state = begun(disk)
    # else a thread of orbax waits ten minutes for a directory, after any save that orbax refuses at once
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CheckpointManagerOptions(async_options=at_once)
    with ocp.CheckpointManager(tmp_path / "manager", options=options) as manager:
        args = ocp.args.StandardSave({"opt_state": state})
        with pytest.raises((TypeError, ValueError), match=r"jo\.save_args"):
            manager.save(0, args=args)
    both = r"jo\.to_device.*jo\.save_args"
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises((TypeError, ValueError), match=both):
        checkpointer.save(tmp_path / "tree", state)
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer, pytest.raises(TypeError, match=both):
        checkpointer.save(tmp_path / "array", args=ocp.args.ArraySave(state[0].mu["layer_1"]))


def test_what_looks_at_the_types_of_a_state_sees_those_of_its_leaves(disk):
    _, params, state = begun(disk)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(ADAMW.init(params)), strict=True):
        assert (x.shape, x.dtype, x.size, x.nbytes) == (y.shape, y.dtype, y.size, y.nbytes)
    (leaf,) = jax.tree.leaves(state[0].mu["layer_1"])
    assert not hasattr(leaf, "sharding") and not hasattr(leaf, "__cuda_array_interface__")
    assert float(optax.tree.norm(optax.tree.zeros_like(state))) == 0
    plain = ADAMW.init(params)
    for look in (
        jnp.shape,
        lambda x: x.dtype,
        lambda x: x.nbytes,
        lambda x: None,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    ):
        assert jax.tree.map(look, state) == jax.tree.map(look, plain)
    assert jax.jit(lambda state, x: x + 1)(state, 1) == 2
    assert repr(handles(state)[0]) == "OnDisk([0].mu['layer_1']: float32[64, 64])"


@pytest.mark.parametrize("way", ["deepcopy", "cloudpickle"])
def test_a_copy_of_an_optimizer_is_the_recipe(way, disk):
    cloudpickle = pytest.importorskip("cloudpickle")
    tx, params, state = begun(disk)
    again = copy.deepcopy(tx) if way == "deepcopy" else cloudpickle.loads(cloudpickle.dumps(tx))
    with pytest.raises(ValueError, match=r"in use by .* this one"):  # two would write over each other
        again.init(params)
    disk.close()
    assert repr(again.init(params)) == repr(state)


def test_a_step_that_cannot_be_says_why(disk):
    tx, params, state = begun(disk)
    once = alone(tx)

    def with_a_norm(params, state, move=lambda x: x):
        params, state = once(params, state)
        return params, state, optax.tree.norm(move(optax.tree.get(state, "mu")))

    def in_a_scan(params, state):
        return jax.lax.scan(lambda carry, _: (once(*carry), None), (params, state), length=2)[0]

    def in_the_other_branch(params, state):
        looks = lambda: (params, state, optax.tree.norm(optax.tree.get(state, "mu")))  # noqa: E731
        return jax.lax.cond(params["layer_1"][0, 0] > 9, lambda: (*once(params, state), jnp.float32(0)), looks)

    in_memory = r"is on disk, and this offload keeps it in memory"
    for step, message in (
        (alone(offload(ADAMW, None)), in_memory),
        (alone(offload(ADAMW, jo.disk("unused", host_bytes=2 * MATRIX))), in_memory),
        (lambda p, s: once(p, s)[1][0].mu, r"the step updates a state and returns only a part"),
        (in_a_scan, r"disk: the update stands in a scan of the step, which cannot be cut there\. Fix: update once"),
        (jax.checkpoint(once), r"disk: the update stands in a jax\.checkpoint of the step"),
        (lambda p, s: once(*once(p, s)), r"updates the state again.*call such a step several times"),
        (with_a_norm, r"reads a leaf, for a norm.*between two steps jo\.to_device.*jo\.save_args"),
        (in_the_other_branch, r"reads a leaf, for a norm"),
        (lambda p, s: with_a_norm(p, s, jo.to_device), r"outside its update.*jo\.to_device\(optax\.tree\.get"),
    ):
        with pytest.raises(ValueError, match=message):
            jo.jit(step)(params, state)
