"""Damage to a checkpoint: what comes back is what was saved, bit for bit, or an error that says so."""

import gc
import itertools
import json
import sys
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jax_offload as jo
from tests.test_checkpoint import files

P = PartitionSpec
HOST = "pinned_host"


def opened(folder):
    """Without orbax's look at ``_CHECKPOINT_METADATA``, which damage there may end (docs/state.md)."""
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(lightweight_initialize=True))


def bits(tree):
    return [(np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


# The checksums


def random_bits(shape, dtype):
    x = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if dtype in (np.bool_, jnp.int4):
        return (x[..., 0] % 2 == 0) if dtype is np.bool_ else (x[..., 0] % 16 - 8).astype(np.int8).astype(dtype)
    return np.ascontiguousarray(x).view(dtype)[..., 0]


def specs(shape, sizes):
    """Every way to cut ``shape`` over the axes of a mesh."""
    for names in itertools.product((None, "a", "b", ("a", "b")), repeat=len(shape)):
        used = [name for group in names if group for name in (group if isinstance(group, tuple) else (group,))]
        parts = [int(np.prod([sizes[n] for n in (g if isinstance(g, tuple) else (g,)) if n])) for g in names]
        if len(set(used)) == len(used) and not any(n % k for n, k in zip(shape, parts, strict=True)):
            yield P(*names)


def sums(*leaves):
    """The checksums that ``save_args`` stores."""
    stored = jo.save_args(list(leaves), copy=False).custom_metadata["jax_offload"]["checksums"]
    return [stored[str(k)] for k in range(len(leaves))]


LARGE = (3, 600, 640)  # whose rows are summed in pieces
DTYPES = [np.float32, jnp.bfloat16, np.complex64, np.bool_, jnp.float8_e4m3fn, jnp.int4]
CASES = [(dtype, shape) for dtype in DTYPES for shape in [(8,), (8, 3, 8), (0, 8), (3,)]] + [(np.float32, LARGE)]


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_a_checksum_is_the_same_however_an_array_is_cut(dtype, shape):
    x, sizes = random_bits(shape, dtype), {"a": 2, "b": 4}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    cuts = [jax.device_put(x, NamedSharding(mesh, s, memory_kind=HOST)) for s in specs(shape, sizes)]
    cuts += [jax.device_put(x, NamedSharding(mesh, s)) for s in specs(shape, sizes)]
    assert len(cuts) >= 2
    assert len({*sums(x, *cuts)}) == 1
    if x.size:
        other = x.copy()
        other.reshape(-1).view(np.uint8)[-1] ^= 1
        assert sums(other) != sums(x)


def test_checksums_of_numbers_and_keys():
    key = jax.random.key(5)
    given = [7, 0.5, key, jnp.float32(3)]
    assert sums(*given) == sums(np.asarray(7), np.asarray(0.5), jax.random.key_data(key), np.float32(3))
    assert len({*sums(*given)}) == 4


def test_checksums_see_order_and_pairs_of_flips():
    for dtype in (np.uint32, np.float64):
        x = random_bits((64, 64), dtype)
        others = [x.copy() for _ in range(4)]
        others[0][3, 5], others[0][40, 7] = x[40, 7], x[3, 5]
        others[1][[3, 9]] = x[[9, 3]]
        others[2][:, [3, 9]] = x[:, [9, 3]]
        others[3].view(np.uint8)[[3, 9], [7, 15]] ^= 2**7  # the highest bits of two values
        intact, *found = sums(x, *others)
        assert intact not in found


def test_a_checksum_leaves_no_copy_of_a_device_array_on_the_host():
    x = jnp.ones((64, 64)) * 3
    sums(x)
    assert x._npy_value is None and x.addressable_shards[0].data._npy_value is None


# A checkpoint, and the damage


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of two steps: values that no compression touches, and some that it does; and their target."""
    folder, trees = tmp_path_factory.mktemp("damage") / "run", {}
    host = SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("a"), memory_kind=HOST)
    rng = np.random.default_rng(1)
    with opened(folder) as manager:
        for step in (1, 2):
            trees[step] = {
                "params": jax.device_put(rng.normal(size=(32, 16)).astype(np.float32), jax.devices()[0]),
                "state": [{"nu": jax.device_put(np.full((64, 8), step, np.float32), sharded)}, None],
                "table": jax.device_put(rng.integers(0, 2**32, (32, 64), dtype=np.uint32), host),
                "count": jax.device_put(jnp.int32(step), jax.devices()[0]),
            }
            manager.save(step, args=jo.save_args(trees[step]))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees[1])
    with mock.patch.object(sys, "unraisablehook"):
        yield folder, trees, target
        gc.collect()  # where one read fails orbax leaves the others behind, and Python says so


def outcome(run, target):
    """ "same", or "damaged" with an earlier one offered; anything else is an error of the test."""
    folder, trees, _ = run
    with opened(folder) as manager:
        try:
            back = jo.restore(manager, target, step=2)
        except ValueError as error:
            said = str(error)
            assert f"checkpoint of step 2 in {folder / '2'} is damaged" in said
            assert "fallback=True" in said and "[1, 2]" in said
            return "damaged"
    assert bits(back) == bits(trees[2])
    return "same"


def damaged(data, kind, rng):
    """``data`` with a few of its bytes changed, replaced by letters, cut out, exchanged; or half of it, or none."""
    n = min(int(rng.integers(2, 21)), len(data) // 2)
    i = int(rng.integers(len(data) - 2 * n + 1))
    j = i + n + int(rng.integers(len(data) - i - 2 * n + 1))
    letters = np.frombuffer(b'0123456789abcdefghijklmnopqrstuvwxyz"[]{}:, _().', np.uint8)  # of a text, and JSON's
    flipped = bytearray(data)
    for k in rng.choice(len(data), 2, replace=False):
        flipped[k] ^= 1 << int(rng.integers(8))
    return {
        "two flips": bytes(flipped),
        "in a row": data[:i] + rng.bytes(n) + data[i + n :],
        "in letters": data[:i] + rng.choice(letters, n).tobytes() + data[i + n :],
        "cut out": data[:i] + data[i + n :],
        "exchanged": data[:i] + data[j : j + n] + data[i + n : j] + data[i : i + n] + data[j + n :],
        "halved": data[: len(data) // 2],
        "emptied": b"",
    }[kind]


DAMAGES = ("two flips", "in a row", "in letters", "cut out", "exchanged", "halved", "emptied")


@pytest.mark.parametrize("given", [True, False])
def test_random_damage(run, given):
    """Half of the damage hits any file, and half hits files in proportion to their size."""
    rng, ends, times = np.random.default_rng(given), Counter(), 100
    paths = files(run[0] / "2")
    sizes = np.array([p.stat().st_size for p in paths])
    for i in range(times):
        path = paths[rng.choice(len(paths), p=sizes / sizes.sum() if i % 2 else None)]
        data = path.read_bytes()
        path.write_bytes(damaged(data, DAMAGES[i % len(DAMAGES)], rng))
        try:
            ends[outcome(run, run[2] if given else None)] += path.read_bytes() != data
        finally:
            path.write_bytes(data)
    assert ends["damaged"] >= 0.4 * times and ends["same"] >= 0.1 * times, ends


# Our entry in the metadata


def test_without_checksums_only_where_there_never_were_any(run):
    """A checkpoint of plain orbax restores; one whose checksums were lost is damaged."""
    path = run[0] / "2" / "default" / "_METADATA"
    data = path.read_bytes()
    try:
        path.write_text(json.dumps(json.loads(data) | {"custom_metadata": None}))
        assert outcome(run, run[2]) == "same"
        for lost in (
            data.replace(b'"jax_offload"', b'"jax_ofgload"'),
            data.replace(b'"checksums"', b'"chekcsums"'),
            data.replace(b'"custom_metadata"', b'"custom_metadatb"'),
        ):
            assert lost != data
            path.write_bytes(lost)
            assert outcome(run, run[2]) == "damaged"
            with opened(run[0]) as manager, pytest.warns(UserWarning, match=r"step 2 .*damaged(.|\n)*Using step 1"):
                assert bits(jo.restore(manager, run[2], fallback=True)) == bits(run[1][1])
    finally:
        path.write_bytes(data)
