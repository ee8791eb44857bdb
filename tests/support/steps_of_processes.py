"""Trains in one of several processes: with a state on disk, pipelined, or updated by the cores of each.

python -m tests.support.steps_of_processes WHAT FOLDER PROCESSES PROCESS PORT
"""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.disk.faulty import Faulty, error, no_fault
from tests.support import steps
from tests.support.sizes import set_sizes
from tests.support.steps import assert_placed
from tests.support.trees import is_on_disk, shardings_in

WIDTH = 16
SHAPES = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "c": (4, WIDTH, WIDTH)}  # the last one's rows are parts
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
HOW = {  # specs of the parameters on a mesh of data and fsdp, shard_over=, which devices are along data
    "fsdp": ({"a": P("fsdp"), "b": P(None, "fsdp"), "c": P()}, None),
    "zero": ({"a": P(), "b": P(), "c": P()}, "data"),
    "replicated": ({"a": P(), "b": P(), "c": P()}, None),
    "both": ({"a": P(("data", "fsdp")), "b": P("data", "fsdp"), "c": P("fsdp")}, None),
    "two axes": ({"a": P("fsdp"), "b": P(None, "fsdp"), "c": P(None, "data", "fsdp")}, None),
}
APART = ("cores", "whole_leaves")  # the last device of each process stands for the CPU beside accelerators


def mesh_of():
    """Processes have a row of ``fsdp`` each, where there are two."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    of_each = [list(group) for _, group in itertools.groupby(devices, lambda d: d.process_index)]
    used = [d for group in of_each for d in (group[:-1] if sys.argv[1] in APART else group)]
    return Mesh(np.array(used).reshape(2, -1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def placed(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def model(how, width=WIDTH):
    mesh, rng = mesh_of(), np.random.default_rng(0)
    shapes = {name: (*shape[:-2], width, width) for name, shape in SHAPES.items()}
    return {
        name: placed(rng.standard_normal(shapes[name], np.float32) / width**0.5, NamedSharding(mesh, spec))
        for name, spec in HOW[how][0].items()
    }


def batch(k, width=WIDTH):
    x = np.random.default_rng(100 + k).normal(size=(8, width)).astype(np.float32)
    return placed(x, NamedSharding(mesh_of(), P(("data", "fsdp"))))


def loss(params, x):
    for w in [params["a"], params["b"], *params["c"]]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def loss_of_scan(params, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["c"])
    return ((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


def step_of(tx, params):
    """With the shardings of the results given, as docs/sharding.md does."""
    places = shardings_in(params), shardings_in(jo.abstract_state(tx, params)), NamedSharding(mesh_of(), P())
    return jo.jit(steps.step_of(tx, loss=loss), donate_argnums=(0, 1), out_shardings=places)


def trained(step, params, state, first, last, width=WIDTH):
    values = []
    for k in range(first, last):
        params, state, value = step(params, state, batch(k, width))
        values.append(np.asarray(value))
    return params, state, values


def copied(tree):
    return jax.device_put(tree, shardings_in(tree), may_alias=False)


def shards(tree):
    """What this process has of a tree, wherever it is."""
    tree = jo.to_device(tree)
    return [np.asarray(s.data) for x in jax.tree.leaves(tree) for s in x.addressable_shards]


def same(got, want, rtol=0.0):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-3 * rtol)


def values(folder, how):
    """As in host memory, in one way or all."""
    for each in ("fsdp", "zero", "replicated", "both") if how == "all" else [how]:
        resumed(folder, each, 3000 if each == "zero" else 0)


def resumed(folder, how, host_bytes):
    """Committed, resumed, and on as it would have gone."""
    over = HOW[how][1]
    disk = jo.disk(folder / how, host_bytes=host_bytes)
    txs = [jo.offload(INNER, min_bytes=0, shard_over=over, disk=d) for d in (None, disk)]
    both = [step_of(tx, model(how)) for tx in txs]
    (want, host, losses), (got, state, found) = (
        trained(step, copied(model(how)), tx.init(model(how)), 0, 3) for step, tx in zip(both, txs, strict=True)
    )
    leaves = [x for x in jax.tree.leaves(state, is_leaf=is_on_disk) if is_on_disk(x)]
    assert len(leaves) == (6 if not host_bytes else 4), leaves
    assert len(disk.ends("[1][0].mu['c']")) == (2 if how == "both" else 4)
    foretold = jo.abstract_state(txs[1], model(how))
    for x, like in zip(jax.tree.leaves(state, is_leaf=is_on_disk), jax.tree.leaves(foretold), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim), (x, x.sharding, like.sharding)
    same(shards((got, state)), shards((want, host)), rtol=1e-3)
    same(found, losses, rtol=1e-6)
    replicated = [leaf for leaf in leaves if leaf.sharding.is_fully_replicated]
    assert [np.asarray(leaf).shape for leaf in replicated] == [leaf.shape for leaf in replicated]
    if how == "both":
        with pytest.raises(ValueError, match=r"divided between processes, and this one has a part.*Fix: jo.to_device"):
            np.asarray(state[1][0].mu["a"])
    key = jax.jit(lambda: jax.random.key(7), out_shardings=NamedSharding(mesh_of(), P()))()
    tree = {"params": got, "state": state, "key": key, "seen": 24, "local": np.arange(3)}
    disk.commit(3, tree)
    assert disk.last_commit == 3
    before = shards((got, state))
    on_params, on_state, on = trained(both[1], copied(got), state, 3, 5)
    after = shards((on_params, on_state))
    disk.close()

    again = jo.disk(folder / how, host_bytes=host_bytes)
    assert again.last_commit == 3
    tx = jo.offload(INNER, min_bytes=0, shard_over=over, disk=again)
    tree, k = again.resume({**tree, "params": model(how), "state": jo.abstract_state(tx, model(how))})
    assert k == 3 and tree["seen"] == 24 and tree["local"].tolist() == [0, 1, 2]
    assert jax.random.key_data(tree["key"]).sharding.is_fully_replicated
    assert jax.tree.map(lambda x: x.sharding, tree["params"]) == jax.tree.map(lambda x: x.sharding, model(how))
    same(shards((tree["params"], tree["state"])), before)
    same(shards(jo.to_host(txs[0], tree["state"], tree["params"])), shards(tree["state"]))
    params, state, found = trained(step_of(tx, model(how)), tree["params"], tree["state"], 3, 5)
    same([*found, *shards((params, state))], [*on, *after])
    again.close()
    parts = {name: len(list((folder / how / name).iterdir())) for name in ("process-0-of-2", "process-1-of-2")}
    assert len({*parts.values()}) == 1, parts


def near(got, want):
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    off = jax.jit(lambda pairs: [jnp.abs(jo.to_device(a) - b).max() for a, b in pairs])(pairs)
    assert max(map(float, off)) < 1e-5


def pipelined(folder, gradients):
    """As plain optax under ``jax.jit``; gradients wait where they are asked to."""
    params, tx, width = model("two axes", 128), jo.offload(INNER, min_bytes=0), 128
    plain, step = (steps.step_of(each, loss=loss_of_scan) for each in (INNER, tx))
    *want, losses = trained(jax.jit(plain), params, INNER.init(params), 0, 3, width)
    train = jo.pipelined(step, donate_argnums=(0, 1), gradients=gradients)
    carry, found = (copied(params), tx.init(params)), []
    table = jo.placement(train, *carry, batch(0, width))
    assert "in the scan that reads the parameters" in " ".join(str(table).split()), table
    for k in range(3):
        carry, aux = train(carry, batch(k, width))
        found.append(np.asarray(aux.now))
    waiting = Counter(x.sharding.memory_kind for x in jax.tree.leaves(carry) if np.shape(x) == params["c"].shape)
    of_gradients = gradients == "device"  # beside both moments and the parameter
    assert waiting == {"device": 1 + of_gradients, "pinned_host": 3 - of_gradients}
    same(found, losses, rtol=1e-6)
    got = train.finish(carry)
    near(got, want)
    assert_placed(got, (params, jo.abstract_state(tx, params)))


def cores(folder, how):
    """Each process updates its own part on its share of the cores, and each step equals the plain one."""
    params, over = model(how, 256), HOW[how][1]
    tx = jo.offload(INNER, min_bytes=0, shard_over=over, update_on="host")
    step, plain, state = step_of(tx, params), jax.jit(steps.step_of(INNER, loss=loss)), tx.init(params)
    assert any(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state))
    like = params, jo.abstract_state(tx, params)
    for k in range(3):
        want = plain(params, jo.to_device(state), batch(k, 256))
        *got, value = step(params, state, batch(k, 256))
        near((got, value), (want[:2], want[2]))
        assert_placed(got, like)
        params, state = got
    threads = [each for each in threading.enumerate() if each.name.startswith("jax_offload")]
    assert 0 < len(threads) <= max(1, len(os.sched_getaffinity(0)) // 2)


def whole_leaves(folder):
    """An update that needs whole leaves is an error in several processes."""
    params = model("fsdp", 128)
    tx = jo.offload(optax.lamb(1e-2), min_bytes=0, update_on="host")
    with pytest.raises(ValueError, match=r"takes every leaf whole, and the step runs in 2 processes\. Fix: "):
        step_of(tx, params)(params, tx.init(params), batch(0, 128))


def everything(tree):
    """A tree's values, whole, in every process."""
    on_device = jax.tree.map(lambda x: jo.to_device(x) if is_on_disk(x) else x, tree, is_leaf=is_on_disk)
    return [np.asarray(multihost_utils.process_allgather(x, tiled=True)) for x in jax.tree.leaves(on_device)]


def into_a_checkpoint(folder):
    """By orbax; and from there onto another disk, divided otherwise, and into host memory."""
    import orbax.checkpoint as ocp

    disk = jo.disk(folder / "disk")
    tx = jo.offload(INNER, min_bytes=0, disk=disk)
    params, state, _ = trained(step_of(tx, model("fsdp")), copied(model("fsdp")), tx.init(model("fsdp")), 0, 2)
    want = everything({"params": params, "state": state})
    np.savez(folder / "want.npz", *want) if jax.process_index() == 0 else None
    with ocp.CheckpointManager(folder / "orbax") as manager:
        manager.save(2, args=jo.save_args({"params": params, "state": state}))
        manager.wait_until_finished()
        from_a_checkpoint(folder, "both")
        other = jo.disk(folder / "other-both")
        tx = jo.offload(INNER, min_bytes=0, disk=other)
        with pytest.raises(ValueError, match=r"divided otherwise between processes .* Fix: the mesh .*jo\.save_args"):
            other.resume({"params": model("fsdp"), "state": jo.abstract_state(tx, model("fsdp"))})
        other.close()
        in_memory = jo.offload(INNER, min_bytes=0)
        found = jo.restore(manager, {"params": model("both"), "state": jo.abstract_state(in_memory, model("both"))})
    same(everything(found), want)
    same(everything({"params": params, "state": jo.to_host(in_memory, state, params)}), want)
    disk.close()


def from_a_checkpoint(folder, how="zero"):
    """Onto a disk, by as many processes as there are."""
    import orbax.checkpoint as ocp

    disk = jo.disk(folder / f"other-{how}")
    tx = jo.offload(INNER, min_bytes=0, shard_over=HOW[how][1], disk=disk)
    with ocp.CheckpointManager(folder / "orbax") as manager:
        found = jo.restore(manager, {"params": model(how), "state": jo.abstract_state(tx, model(how))})
    assert any(map(is_on_disk, jax.tree.leaves(found, is_leaf=is_on_disk)))
    with np.load(folder / "want.npz") as want:
        same(everything(found), want.values())
    params, state, _ = trained(step_of(tx, model(how)), found["params"], found["state"], 2, 3)
    disk.commit(3, {"params": params, "state": state})
    disk.close()


def damaged(folder):
    """Checksums are the same however arrays are divided between processes, and each process notices damage."""
    import orbax.checkpoint as ocp

    x, (a, b) = np.random.default_rng(0).integers(0, 2**32, (16, 64), dtype=np.uint32), mesh_of().axis_names
    specs = [P((a, b), None), P(None, (a, b)), P(b, a), P(a, None), P()]
    cuts = [NamedSharding(mesh_of(), spec, memory_kind=kind) for spec in specs for kind in ("device", "pinned_host")]
    arrays = [placed(x, cut) for cut in cuts]
    stored = jo.save_args([*arrays, x]).custom_metadata["jax_offload"]["checksums"]
    assert len({*stored.values()}) == 1 and len(stored) == len(arrays) + 1
    with ocp.CheckpointManager(folder / "orbax") as manager:
        manager.save(1, args=jo.save_args({"x": arrays[1]}))
        manager.wait_until_finished()
        target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cuts[3])}
        back = jo.restore(manager, target)["x"]
        assert back.sharding == cuts[3]
        for shard in back.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
        multihost_utils.sync_global_devices("restored")
        if jax.process_index() == 0:  # two words, which are stored as they are, in each other's place
            words, changed = x[3, 4:6].tobytes(), x[3, 5:3:-1].tobytes()
            [path] = [p for p in (folder / "orbax").rglob("*") if p.is_file() and words in p.read_bytes()]
            path.write_bytes(path.read_bytes().replace(words, changed))
        multihost_utils.sync_global_devices("damaged")
        with pytest.raises(ValueError, match="is damaged: other values than were saved in 1 of 1 leaves"):
            jo.restore(manager, target)


def of_another_number(folder):
    """Of processes, than made the files."""
    with pytest.raises(ValueError, match=r"has the commit of 2 processes, .* now there are 1\. Fix: .*save_args"):
        print(jo.disk(folder / "other-both").last_commit)


def mortal(name, n):
    """Ends this process, as ``kill -9`` does, before a file of this name takes its place for the ``n``-th time.

    With the name "any" it ends before call number ``n`` of the system's.
    """
    left = n

    def fault(call, path, *arguments):
        nonlocal left
        if name == "any" or (call == "replace" and path.name == name):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return fault


def of_a_group(of):
    """All calls of this name fail that move a group."""

    def fault(name, path, *arguments):
        if name == of and len(arguments[0]) >= 512:
            raise OSError(errno.EIO, "Input/output error")

    return fault


def failing(folder):
    """A disk that fails in process 1: both stop at the end of the same step, and go on from the last commit."""
    files, disk = Faulty(folder / "disk"), jo.disk(folder / "disk")
    tx, params = jo.offload(INNER, min_bytes=0, disk=disk), model("fsdp")
    state, step = tx.init(params), step_of(tx, params)
    params, state, _ = trained(step, params, state, 0, 2)
    disk.commit(2, {"params": params, "state": state})
    *_, want = trained(step, params, state, 2, 4)
    for of in ("preadv", "pwritev"):
        tree, at = disk.resume({"params": model("fsdp"), "state": jo.abstract_state(tx, model("fsdp"))})
        assert at == 2
        params, state = tree["params"], tree["state"]
        files.fault, said = of_a_group(of) if jax.process_index() == 1 else no_fault, None
        for k in range(2, 5):
            try:
                params, state, _ = step(params, state, batch(k))
            except ValueError as error:
                said = k, str(error)
                break
        assert said is not None, "no step is an error"
        doing = "reading" if of == "preadv" else "writing"
        assert f"in process 1 {doing} [1][0]." in said[1] and "Input/output error" in said[1], said
        print("stopped", said[0], flush=True)
        with pytest.raises(ValueError, match="did not end, in process 1"):
            step(params, state, batch(5))
        files.fault = no_fault
    tree, at = disk.resume({"params": model("fsdp"), "state": jo.abstract_state(tx, model("fsdp"))})
    *_, found = trained(step, tree["params"], tree["state"], 2, 4)
    np.testing.assert_array_equal(found, want)
    disk.close()


def committing(folder):
    """A commit that fails in one process is an error in both; it names directories of different runs."""
    me, files, tree = jax.process_index(), Faulty(folder / "disk"), None
    for name in ("disk", "other"):
        disk = jo.disk(folder / name)
        tx, params = jo.offload(INNER, min_bytes=0, disk=disk), model("fsdp")
        tree = {"params": params, "state": tx.init(params)}
        disk.commit(1, tree)
        with pytest.raises((TypeError, ValueError), match=r"tree: \['more'\] is a object"):
            disk.commit(2, tree | {"more": object() if me == 0 else 1})
        disk.commit(2, tree)  # nothing has stopped
        if name == "disk":
            files.fault = error(errno.ENOSPC, "sync", file="manifest.next.json") if me == 1 else no_fault
            with pytest.raises((OSError, ValueError)) as raised:
                disk.commit(3, tree)
            files.fault = no_fault
            assert isinstance(raised.value, OSError) == (me == 1)
            assert me == 1 or "failed in 1 of 2 processes. Process 1: OSError" in str(raised.value)
            with pytest.raises(ValueError, match="stopped when a commit failed"):
                disk.commit(4, tree)
            assert disk.last_commit == 2
        disk.close()
    place, there = folder / "disk" / "process-1-of-2", folder / "other" / "process-1-of-2"
    for change, said in (
        (lambda: shutil.move(place, folder / "away"), r"process 0 has step \d, process 1 has none. Is a disk mounted"),
        (lambda: shutil.copytree(there, place), "no commit of the same run"),
    ):
        multihost_utils.sync_global_devices("before")
        change() if me == 0 else None
        multihost_utils.sync_global_devices("changed")
        with pytest.raises(ValueError, match=said):
            print(jo.disk(folder / "disk").last_commit)


def train(folder, name="", n="0", process="0"):
    """Six steps from where the disk is, a commit after each; says them, and at the end what this process has."""
    disk = jo.disk(folder / "disk")
    if jax.process_index() == int(process):
        Faulty(folder / "disk", mortal(name, int(n)))
    tx, params, start = jo.offload(INNER, min_bytes=0, disk=disk), model("fsdp"), 0
    if disk.last_commit is not None:
        tree, start = disk.resume({"params": params, "state": jo.abstract_state(tx, params)})
        params, state = tree["params"], tree["state"]
    else:
        state = tx.init(params)
    print("from", start, flush=True)
    step = step_of(tx, params)
    for k in range(start, 6):
        params, state, _ = trained(step, params, state, k, k + 1)
        disk.commit(k + 1, {"params": params, "state": state})
        print("committed", k + 1, flush=True)
    print("digest", zlib.crc32(b"".join(x.tobytes() for x in shards((params, state)))), flush=True)
    disk.close()


if __name__ == "__main__":
    what, folder, processes, process, port = sys.argv[1:6]
    if what in APART:
        flag = r"(?<=_device_count=)\d+"
        os.environ["XLA_FLAGS"] = re.sub(flag, lambda n: str(int(n[0]) + 1), os.environ["XLA_FLAGS"])
    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    set_sizes(group=1, part=1)
    globals()[what](Path(folder), *sys.argv[6:])
    print("done", flush=True)
