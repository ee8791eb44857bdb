"""Save a state that is partly on the host with orbax while training goes on, and restore each leaf in its place.

orbax is imported only here, and only when it is called. docs/state.md describes its behavior.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jax_offload._disk.leaves import check_target, is_on_disk, read_into
from jax_offload._program import memory
from jax_offload._program.arrays import leaves_with_paths, some

_NAME = "jax_offload"  # the name of our entry in orbax's custom metadata
_MARK = "jax_offload.save_args"  # stands in our entry: a file that holds it, and no such entry, is damaged
_PIECE = 2**18  # words that are summed at a time, each as a product of 64 bits
_THREADS = 8


def save_args(tree: Any, *, copy: bool = True) -> Any:
    """Return orbax's arguments for saving ``tree`` while the next steps donate its arrays.

    Call ``manager.save(step, args=jo.save_args(tree))``, or pass it as an item of an ``ocp.args.Composite``. The
    arguments are orbax's ``StandardSave`` and write the same files, with a checksum for each leaf by which ``restore``
    notices damage.

    In the background, orbax writes host leaves from their own memory. A GPU refuses to donate memory that is
    being written out ("Donation requested for buffer with external reference"), and a CPU copies it in every such
    step. The copies made here, from host to host, leave the originals free.

    Leaves on disk are read into host memory, all at once, and stay there until the save has finished. With
    ``copy=False`` they are read one after the other while orbax writes them.

    Args:
      tree: arrays and numbers, such as ``{"params": params, "opt_state": state}``.
      copy: whether to copy the host leaves, which takes as much pinned host memory again until the save has finished.
        If ``False``, call ``manager.wait_until_finished()`` before the next step that donates.

    Returns:
      An ``orbax.checkpoint.args.StandardSave``.

    Raises:
      ImportError: orbax is not installed.
      ValueError: two leaves have the same name, or the copies do not fit XLA's pool of pinned host memory on a GPU.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> state = jo.offload(optax.adamw(1e-3)).init(params)
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     manager.save(0, args=jo.save_args({"params": params, "opt_state": state}))
      True
    """
    ocp, leaves = _orbax(), jax.tree.leaves(tree, is_leaf=is_on_disk)
    # orbax asks only one process for a NumPy array, so leaves that are divided between processes are read now
    is_late = lambda x: is_on_disk(x) and not copy and x.sharding.is_fully_addressable  # noqa: E731
    new = [x for x in leaves if (is_on_disk(x) and not is_late(x)) or (copy and memory.on_host(x))]
    for platform in {next(iter(x.sharding.device_set)).platform for x in new}:
        wait = "pass copy=False and call manager.wait_until_finished() before the next step"
        hosted = [x for x in leaves if memory.on_host(x)]
        memory.check_host_pool(hosted + new, platform, "save_args(): the state with its copy", wait)

    def held(x: Any) -> Any:
        """Return an array that no step donates."""
        if is_late(x):
            return Late.of(x)
        if is_on_disk(x):
            return jax.device_put(x.read(), x.sharding)
        return memory.copy_on_host(x) if copy and memory.on_host(x) else x

    tree = jax.block_until_ready(jax.tree.map(held, tree, is_leaf=is_on_disk))
    leaves = named(tree)
    values = [x.leaf if isinstance(x, Late) else x for x in leaves.values()]
    sums = dict(zip(leaves, checksums(values), strict=True))
    return ocp.args.StandardSave(tree, custom_metadata={_NAME: {"by": _MARK, "checksums": sums}})


def restore(
    manager: Any, target: Any = None, *, step: int | None = None, item: str | None = None, fallback: bool = False
) -> Any:
    """Read a checkpoint, each leaf straight into the memory where it belongs, and check it.

    Args:
      manager: an ``orbax.checkpoint.CheckpointManager``.
      target: a tree of ``jax.ShapeDtypeStruct``s with shardings, such as ``jo.abstract_state(tx, params)``. Every leaf
        lands with that sharding in that memory. With ``None`` arrays land in pinned host memory, sharded as they were
        saved if those devices exist and otherwise as jax places unplaced arrays; scalars and PRNG keys land on the
        device, and named tuples come back as dicts and lists, as in plain orbax.
      step: the step to read; ``None`` for the latest.
      item: the item to read, if the checkpoint was saved as an ``ocp.args.Composite``.
      fallback: whether to read the checkpoint before a damaged one instead, with a warning. ``manager.latest_step()``
        still names the damaged one, until ``manager.delete(step)``.

    Returns:
      A tree of the target's structure. A checkpoint that was not saved with ``jo.save_args`` carries no checksums, so
      only damage that orbax notices is noticed.

    Raises:
      ImportError: orbax is not installed.
      TypeError: ``manager`` is not a ``CheckpointManager``.
      ValueError: there is no such checkpoint; its tree, shapes or dtypes differ from the target's; the target lacks a
        sharding; or the checkpoint is damaged and ``fallback`` is not set or finds no earlier one.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     saved = manager.save(0, args=jo.save_args(tx.init(params)))
      ...     state = jo.restore(manager, jo.abstract_state(tx, params))
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'
    """
    ocp = _orbax()
    if not isinstance(manager, ocp.CheckpointManager):
        raise TypeError(
            f"manager: expected an orbax.checkpoint.CheckpointManager, got a {type(manager).__name__}. Fix: "
            "jo.restore(ocp.CheckpointManager(folder), target); of a jo.disk, disk.resume(target)."
        )
    manager.wait_until_finished()  # a checkpoint that is being written is not damaged
    saved = sorted(manager.all_steps(), reverse=True)
    steps = [s for s in saved if step is None or s <= step]
    if not steps or (step is not None and steps[0] != step):
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise ValueError(f"manager: no complete {wanted} in {manager.directory}; complete steps there: {saved[::-1]}.")
    for s, earlier in zip(steps, [*steps[1:], None], strict=True):
        try:
            return _restore_step(ocp, manager, s, item, target)
        except Damaged as error:
            what = f"the checkpoint of step {s} in {_path(manager, s)} is damaged: {error}"
            if not fallback:
                raise ValueError(
                    f"{what}\nRestore an earlier one (complete steps: {saved[::-1]}) with step=..., or pass "
                    "fallback=True to use the latest that is whole."
                ) from error.__cause__
            if earlier is None:
                none = f"No earlier checkpoint is left in {manager.directory}."
                raise ValueError(f"{what}\n{none}") from error.__cause__
            warnings.warn(
                f"{what}\nUsing step {earlier} instead. manager.delete({s}) removes the damaged one, so that step can "
                "be saved again.",
                stacklevel=2,
            )


def _restore_step(ocp: Any, manager: Any, step: int, item: str | None, target: Any) -> Any:
    """Read one step; raise ``Damaged`` if another step may be whole, and ``ValueError`` if none can be right."""
    folder = _path(manager, step) / (item or "default")
    items = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
    if not folder.exists() and (items or item is not None):
        given = "none was given" if item is None else f"there is no {item!r}"
        raise ValueError(f"item: the checkpoint in {folder.parent} has the items {items}, and {given}; say which.")
    metadata = reading(ocp.StandardCheckpointHandler().metadata, folder)
    stored = reading(named, metadata.tree)
    sums = _stored_sums(metadata.custom_metadata, folder)
    if sums is not None and sums.keys() != stored.keys():
        raise Damaged(f"its metadata names other leaves than were saved: {some(sorted(sums.keys() ^ stored.keys()))}")
    by_default = target is None
    if by_default:
        target = reading(jax.tree.map, default_target, metadata.tree)
        for x in jax.tree.leaves(target):
            if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None:
                memory.check_platform(x.sharding.addressable_devices)
    wanted, treedef = named(target), jax.tree.structure(target)
    types = {name: None if is_key(wanted.get(name)) else reading(_type_of, x) for name, x in stored.items()}
    check_target(
        wanted, types, "checkpoint", folder,
        "Give a target for everything that was saved. If the checkpoint lacks an optimizer state, make one with "
        f"tx.init(params) after the restore; to read a part of a checkpoint see docs/state.md."
        f"{_other_storage(wanted, stored)}",
    )  # fmt: skip
    if placeless := [k for k, x in wanted.items() if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None]:
        raise ValueError(
            f"target: leaf {placeless[0]!r} has no sharding; orbax would put it on the device. jo.abstract_state(tx, "
            "params) has them for a state; for others: jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
    names, likes = [*wanted], [*wanted.values()]

    def read(indices: Sequence[int]) -> list[Any]:
        """Read these leaves and no others."""
        chosen = {*indices}
        part = jax.tree.unflatten(treedef, [x if k in chosen else ocp.PLACEHOLDER for k, x in enumerate(likes)])
        args = ocp.args.PyTreeRestore(part, restore_args=ocp.checkpoint_utils.construct_restore_args(part))
        found = jax.tree.leaves(reading(ocp.PyTreeCheckpointHandler().restore, folder, args=args))
        leaves = [memory.well_typed(found[k]) for k in indices]
        if by_default:  # orbax's metadata do not tell PRNG keys, which belong on the device, from other arrays
            leaves = [jax.device_put(x, x.sharding.with_memory_kind(memory.DEVICE_KIND)) if is_key(x) else x
                      for x in leaves]  # fmt: skip
        if sums is not None:
            got = dict(zip((names[k] for k in indices), checksums(leaves), strict=True))
            if wrong := [name for name in got if got[name] != sums[name]]:
                raise Damaged(f"other values than were saved in {len(wrong)} of {len(names)} leaves: {some(wrong, 5)}")
        return leaves

    return jax.tree.unflatten(treedef, read_into(likes, read))


def _stored_sums(metadata: Any, folder: Any) -> dict[str, int] | None:
    """Return the checksum of each leaf; ``None`` if ``save_args`` did not save them."""
    entry = metadata.get(_NAME) if isinstance(metadata, dict) else None
    if isinstance(entry, dict) and isinstance(entry.get("checksums"), dict):
        return entry["checksums"]
    file = folder / "_METADATA"
    if entry is not None or (file.exists() and _MARK.encode() in file.read_bytes()):
        raise Damaged("its metadata held checksums, and they are not found")
    return None


def _path(manager: Any, step: int) -> Any:
    """Return the folder of a step, whatever prefix or padding the manager's options give its name."""
    numbers = ((path, re.fullmatch(r"(?:.*_)?(\d+)", path.name)) for path in manager.directory.iterdir())
    found = (path for path, number in numbers if number and int(number[1]) == step)
    return next(found, manager.directory / str(step))  # the folder may be gone


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError("Checkpoints need orbax: pip install orbax-checkpoint.") from error
    return ocp


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


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name; a named tuple and the dict that orbax makes of it have the same names.

    Raise ``ValueError`` if two leaves have the same name, here or in orbax, which joins keys by dots.
    """
    leaves, seen = leaves_with_paths(tree), dict[tuple[str, str], Any]()
    for path, _ in leaves:
        for separator in "./":
            name = keystr(path, simple=True, separator=separator)
            if (other := seen.setdefault((separator, name), path)) is not path:
                both = f"leaves {keystr(other)} and {keystr(path)}"
                raise ValueError(f"tree: {both} have the same name in a checkpoint, {name!r}. Fix: rename a key.")
    return {keystr(path, simple=True, separator="/"): x for path, x in leaves}


def _type_of(stored: Any) -> jax.ShapeDtypeStruct | None:
    """Return the type of a leaf from orbax's metadata: orbax would convert another dtype without a word."""
    return jax.ShapeDtypeStruct(stored.shape, np.dtype(stored.dtype)) if hasattr(stored, "dtype") else None


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
    if stored.sharding is None:  # a NumPy array or a number
        zero = np.zeros((), stored.dtype)
        if stored.shape:
            return np.broadcast_to(zero, stored.shape)
        return zero.item() if np.asarray(zero.item()).dtype == zero.dtype else zero  # a Python number has 64 bits
    sharding = memory.ambient_sharding()
    with contextlib.suppress(Exception):  # the recorded devices may belong to another machine
        sharding = stored.sharding.to_jax_sharding() or sharding
    kind = memory.HOST_KIND if stored.shape else memory.DEVICE_KIND
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding.with_memory_kind(kind))


class Late(np.ndarray):
    """A leaf on disk that orbax takes for a NumPy array: it writes a deep copy, here the leaf, which then is read.

    The array itself is empty, so that an orbax that does not copy it fails instead of writing other values.
    """

    leaf: Any
    shape = property(lambda self: self.leaf.shape)  # pyright: ignore[reportIncompatibleMethodOverride]
    ndim = property(lambda self: self.leaf.ndim)  # pyright: ignore[reportIncompatibleMethodOverride]
    size = property(lambda self: self.leaf.size)  # pyright: ignore[reportIncompatibleMethodOverride]
    nbytes = property(lambda self: self.leaf.nbytes)  # pyright: ignore[reportIncompatibleMethodOverride]

    @classmethod
    def of(cls, leaf: Any) -> Late:
        found = np.zeros(0, leaf.dtype).view(cls)
        found.leaf = leaf
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        return self.leaf


# ---- checksums ------------------------------------------------------------------------------------------------------
#
# An array's checksum is the sum modulo 2^64 of its 32-bit words (or shorter ones), each multiplied by an odd key that
# its position in the array decides. So each process sums its own parts, in any order, however the array is sharded. One
# changed word always changes the sum, because its key is odd; other damage, such as swapped words, goes unnoticed about
# once in 2^32.


def checksums(leaves: Sequence[Any]) -> list[int]:
    """Compute the checksum of each leaf, an array or a number, in 64 bits.

    Shards on a device are copied to the host, at most eight at a time, each from a different leaf. With several
    processes it is a collective: all must call it with the same leaves.
    """
    leaves = [jax.random.key_data(x) if is_key(x) else x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = np.array([x % 2**64 for x in pool.map(_sum_here, leaves)], np.uint64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = multihost_utils.process_allgather(found.view(np.uint32))  # jax has no 64 bits unless told to
        found = np.asarray(words).view(np.uint64).sum(axis=0)
    return [int(x) for x in found]


def is_key(x: Any) -> bool:
    """Return whether ``x`` is an array of PRNG keys, or the description of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _sum_here(x: Any) -> int:
    """Sum the shards of a leaf that have their first replica in this process."""
    if not isinstance(x, jax.Array):
        return _sum_of_shard(x, (0,) * x.ndim) if jax.process_index() == 0 else 0
    total = 0
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            start = tuple(cut.indices(n)[0] for cut, n in zip(shard.index, x.shape, strict=True))
            # jax keeps the copy on the host for as long as the array lives, so the copy is made of an alias.
            one = jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
            total += _sum_of_shard(one, start)
    return total


def _sum_of_shard(shard: Any, start: tuple[int, ...]) -> int:
    values, start = np.ascontiguousarray(shard), start or (0,)  # a scalar becomes an array with one axis
    words = values.view(f"uint{8 * min(4, values.dtype.itemsize)}")
    if (count := values.dtype.itemsize // 4) > 1:
        words, start = words.reshape(*values.shape, count), (*start, 0)
    return _keyed_sum(words, start)


def _keyed_sum(words: np.ndarray, start: Sequence[int]) -> int:
    """Sum ``words``, which begin at ``start`` in the array, each times the product of its keys, one for each axis."""
    if words.size > _PIECE:
        axis = int(np.argmax(words.shape))
        half = words.shape[axis] // 2
        first, rest = np.split(words, [half], axis)
        return _keyed_sum(first, start) + _keyed_sum(rest, [n + half * (k == axis) for k, n in enumerate(start)])
    sums = words.astype(np.uint64)
    for axis in reversed(range(words.ndim)):
        sums = sums @ _keys(words.ndim - axis, start[axis], words.shape[axis])
    return int(sums)


def _keys(axis: int, begin: int, count: int) -> np.ndarray:
    """Return odd keys for ``count`` positions from ``begin`` on, by SplitMix64; axes are numbered from the last."""
    x = np.arange(begin, begin + count, dtype=np.uint64) + np.uint64(axis << 56)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31)) | np.uint64(1)
