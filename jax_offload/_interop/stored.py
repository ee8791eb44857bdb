"""Check targets against stored trees, let orbax read leaves on disk late, and compute checksums of arrays.

orbax copies NumPy arrays before it writes them in the background. A leaf on disk is handed to it as an array without
memory, whose copy reads the leaf when tensorstore asks for its values, so that few leaves are in memory at a time.
orbax does not promise to copy them so; one save and restore of a small array checks that it does.

An array's checksum is the sum modulo 2^64 of its 32-bit words (or shorter ones), each multiplied by an odd key that its
position in the array decides. So each process sums its own parts, in any order, however the array is sharded. One
changed word always changes the sum, because its key is odd; other damage, such as swapped words, goes unnoticed about
once in 2^32.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jax_offload._base import memory
from jax_offload._base.on_disk import is_on_disk, read_to

_PIECE = 2**20  # bytes that are summed at a time, as 64-bit products of each word
_THREADS = 8


class Damaged(Exception):
    """Stored data cannot be read, or differs from the saved data."""


def reading(read: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``read(...)``; any error except one of memory or of the platform means that the stored data is damaged.

    orbax and tensorstore raise whatever the first broken byte leads to: ``ValueError``, ``KeyError``, JSON and Unicode
    errors, a bare ``Exception``.
    """
    try:
        return read(*args, **kwargs)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise Damaged(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}") from error


def named(tree: Any) -> tuple[list[str], list[Any]]:
    """Return the names of a tree's leaves, and the leaves; a named tuple and the dict that orbax makes of it agree."""
    with_paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = ["/".join(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in with_paths]
    return names, [x for _, x in with_paths]


def some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "") or "nothing"


def check_target(target: Any, stored: dict[str, Any], folder: Any) -> None:
    """Raise ``ValueError`` if the target has another tree, shape or dtype, or a leaf has no sharding.

    orbax would convert dtypes without a word, and choose the device.
    """
    wanted = dict(zip(*named(target), strict=True))
    if wanted.keys() != stored.keys():
        raise ValueError(
            f"target: its leaves differ from those in the checkpoint in {folder}.\n"
            f"  only in the target     {some(wanted.keys() - stored.keys())}\n"
            f"  only in the checkpoint {some(stored.keys() - wanted.keys())}\n"
            "Give a target for everything that was saved. If the checkpoint lacks an optimizer state, make one with "
            f"tx.init(params) after the restore; to read a part of a checkpoint see docs/state.md."
            f"{_other_storage(wanted, stored)}"
        )
    for name, x in wanted.items():
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None:
            raise ValueError(
                f"target: leaf {name!r} has no sharding; orbax would put it on the device. jo.abstract_state(tx, "
                "params) has them for a state; for others: jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
        if is_key(x) or not hasattr(x, "dtype"):
            continue
        got = reading(lambda leaf: (tuple(leaf.shape), np.dtype(leaf.dtype)), stored[name])
        if got != (tuple(x.shape), np.dtype(x.dtype)):
            raise ValueError(
                f"target: leaf {name!r} is {np.dtype(x.dtype).name}{list(x.shape)}, and the checkpoint in {folder} has "
                f"{got[1].name}{list(got[0])}. Restore it as it was saved, and convert afterwards."
            )


def _other_storage(wanted: Collection[str], stored: Collection[str]) -> str:
    """Say what to do if one of two trees stores leaves in fewer bits than the other."""
    encoded = [{x.rpartition("/")[0] for x in names if x.endswith("/values")} for names in (wanted, stored)]
    if encoded[0] == encoded[1]:
        return ""
    return (
        " One of the two has moments in fewer bits (storage=): restore with the optimizer that was saved, and convert: "
        "jo.from_plain(tx, jo.to_plain(saved_tx, state), params)."
    )


def default_target(stored: Any) -> Any:
    """Return the target of a stored leaf for which the caller gives none."""
    if stored.sharding is None:  # no jax.Array: a NumPy array, or a number
        zero = np.zeros((), stored.dtype)
        if stored.shape:
            return np.broadcast_to(zero, stored.shape)
        return zero.item() if np.asarray(zero.item()).dtype == zero.dtype else zero  # Python's numbers are of 64 bits
    sharding = _recorded(stored.sharding) or memory.ambient_sharding()
    kind = memory.HOST_KIND if stored.shape else memory.DEVICE_KIND
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=memory.with_kind(sharding, kind))


def _recorded(sharding: Any) -> Sharding | None:
    """Return the sharding that orbax recorded; ``None`` if this machine does not have its devices."""
    try:
        return sharding.to_jax_sharding()
    except Exception:  # another machine's, in one way or another
        return None


# ---- leaves on disk -------------------------------------------------------------------------------------------------


class Late(np.ndarray):
    """An array of zeros in one element's memory. Its deep copy is ``leaf``, which reads its values when asked."""

    leaf: Any

    def __deepcopy__(self, memo: Any) -> Any:
        return self.leaf


def late(leaf: Any) -> Late:
    found = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape).view(Late)
    found.leaf = leaf
    return found


def read_late(ocp: Any, tree: Any) -> Any:
    """Return a tree whose leaves on disk are read when orbax writes them.

    Leaves that are divided between processes are read now, because orbax asks only one process for a NumPy array.

    Raises:
      ValueError: this version of orbax would write other values.
    """

    def sharded(x: Any) -> bool:
        return is_on_disk(x) and not x.sharding.is_fully_addressable

    tree = jax.tree.map(lambda x: read_to(x, x.sharding) if sharded(x) else x, tree, is_leaf=is_on_disk)
    if not any(map(is_on_disk, jax.tree.leaves(tree, is_leaf=is_on_disk))):
        return tree
    if not _works(ocp):
        raise ValueError(
            "jo.save_args: leaves of the state are on disk, and this orbax does not read them when it writes them. "
            "Fix: disk.commit(step, tree) saves the state where it is; jo.restore(disk, target) reads that."
        )
    return jax.tree.map(lambda x: late(x) if is_on_disk(x) else x, tree, is_leaf=is_on_disk)


def sums_of(leaves: list[Any]) -> list[int]:
    """Return the checksums of leaves, one after the other for leaves that are read late."""
    here = iter(checksums([x for x in leaves if not isinstance(x, Late)]))
    return [checksums([np.asarray(x.leaf)])[0] if isinstance(x, Late) else next(here) for x in leaves]


@functools.cache
def _works(ocp: Any) -> bool:
    want = np.arange(6, dtype=np.float32).reshape(2, 3)
    with tempfile.TemporaryDirectory() as folder, ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(Path(folder) / "x", args=ocp.args.StandardSave({"x": late(want)}))
        found = checkpointer.restore(Path(folder) / "x", args=ocp.args.StandardRestore({"x": np.zeros_like(want)}))
    return np.array_equal(found["x"], want)


# ---- checksums ------------------------------------------------------------------------------------------------------


def checksums(leaves: Sequence[Any]) -> list[int]:
    """Compute the checksum of each leaf, an array or a number, in 64 bits.

    Shards on a device are copied to the host, at most eight at a time. With several processes it is a
    collective: all must call it with the same leaves.
    """
    leaves = [jax.random.key_data(x) if is_key(x) else x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
    shards = [(i, *shard) for i, x in enumerate(leaves) for shard in _shards_here(x)]
    sums = [0] * len(leaves)
    with ThreadPoolExecutor(_THREADS) as pool:
        for i, part in pool.map(lambda shard: (shard[0], _sum_of_shard(*shard[1:])), shards):
            sums[i] += part
    found = np.array([x % 2**64 for x in sums], np.uint64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = multihost_utils.process_allgather(found.view(np.uint32))  # jax has no 64 bits unless told to
        found = np.asarray(words).view(np.uint64).sum(axis=0)
    return [int(x) for x in found]


def is_key(x: Any) -> bool:
    """Return whether ``x`` is an array of PRNG keys, or the description of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _shards_here(x: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the shards of ``x`` that this process sums, the first replica of each, with their starts in ``x``."""
    if isinstance(x, jax.Array):
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                yield shard.data, tuple(cut.indices(n)[0] for cut, n in zip(shard.index, x.shape, strict=True))
    elif jax.process_index() == 0:
        yield x, (0,) * x.ndim


def _sum_of_shard(shard: Any, start: tuple[int, ...]) -> int:
    if isinstance(shard, jax.Array):
        # jax keeps the copy on the host for as long as the array lives, so the copy is made of an alias.
        shard = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    values = np.ascontiguousarray(shard)  # which has an axis at least
    start = start or (0,)
    words = values.view(f"uint{8 * min(4, values.dtype.itemsize)}")
    if (count := values.dtype.itemsize // 4) > 1:
        return _keyed_sum(words.reshape(*values.shape, count), (*start, 0))
    return _keyed_sum(words, start)


def _keyed_sum(words: np.ndarray, start: Sequence[int]) -> int:
    """Sum ``words``, which begin at ``start`` in the array, each times the product of its keys, one for each axis."""
    row, total = words[:1].nbytes, 0
    rows = max(1, _PIECE // max(1, row))
    for begin in range(0, len(words), rows):
        piece = words[begin : begin + rows]
        if words.ndim > 1 and row > _PIECE:
            sums = np.array([_keyed_sum(piece[0], start[1:])], np.uint64)
        else:
            sums = piece.astype(np.uint64)
            for axis in range(words.ndim - 1, 0, -1):
                sums = (sums * _keys(words.ndim - axis, start[axis], words.shape[axis])).sum(axis=axis)
        total += int((sums * _keys(words.ndim, start[0] + begin, len(sums))).sum())
    return total % 2**64


def _keys(axis: int, begin: int, count: int) -> np.ndarray:
    """Return odd keys for ``count`` positions from ``begin`` on, by SplitMix64; axes are numbered from the last."""
    x = np.arange(begin, begin + count, dtype=np.uint64) + np.uint64(axis << 56)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31)) | np.uint64(1)
