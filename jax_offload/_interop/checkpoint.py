"""Save a state that is partly on the host with orbax while training goes on, and restore each leaf in its place.

docs/state.md says what orbax does and what was measured. orbax is imported only here, and only when it is called.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from jax_offload._base import memory
from jax_offload._base.on_disk import read_into
from jax_offload._disk.disk import Disk
from jax_offload._interop.stored import (
    Damaged,
    check_target,
    checksums,
    default_target,
    is_key,
    named,
    read_late,
    reading,
    some,
    sums_of,
)

_NAME = "jax_offload"  # the name of our entry in orbax's custom metadata
_MARK = "jax_offload.save_args"  # stands in our entry: a file that holds it, and no such entry, is damaged


def save_args(tree: Any, *, copy: bool = True) -> Any:
    """Return orbax's arguments for saving ``tree`` while the next steps donate its arrays.

    Call ``manager.save(step, args=jo.save_args(tree))``, or pass it as an item of an ``ocp.args.Composite``. The
    arguments are orbax's ``StandardSave`` and write the same files, with a checksum for each leaf by which ``restore``
    notices damage.

    orbax writes host leaves from the memory in which they are, in the background. A GPU refuses to donate memory that
    is being written out ("Donation requested for buffer with external reference"), and a CPU copies it in every such
    step. The copies made here, from host to host, leave the originals free.

    Leaves on disk are read one after the other while orbax writes them, and once before for their checksums. Commit
    first and training may go on until the next commit; otherwise call ``manager.wait_until_finished()`` before the next
    step, or the save fails. Leaves that are divided between processes are read at once into host memory, until the save
    has finished.

    Args:
      tree: arrays and numbers, such as ``{"params": params, "opt_state": state}``.
      copy: whether to copy the host leaves, which takes as much pinned host memory again until the save has finished.
        If ``False``, call ``manager.wait_until_finished()`` before the next step that donates.

    Returns:
      An ``orbax.checkpoint.args.StandardSave``.

    Raises:
      ImportError: orbax is not installed.
      ValueError: the copies do not fit XLA's pool of pinned host memory on a GPU.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> state = jo.offload(optax.adamw(1e-3)).init(params)
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     manager.save(0, args=jo.save_args({"params": params, "opt_state": state}))
      True
    """
    ocp = _orbax()
    if copy:
        tree = _with_host_copies(tree)
    tree = read_late(ocp, tree)
    names, leaves = named(tree)
    sums = dict(zip(names, sums_of(leaves), strict=True))
    return ocp.args.StandardSave(tree, custom_metadata={_NAME: {"by": _MARK, "checksums": sums}})


def restore(
    manager: Any, target: Any = None, *, step: int | None = None, item: str | None = None, fallback: bool = False
) -> Any:
    """Read a checkpoint, each leaf straight into the memory where it belongs, and check it.

    Args:
      manager: an ``orbax.checkpoint.CheckpointManager``, or a ``jax_offload.disk``, whose last commit is read.
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
      TypeError: ``manager`` is neither a ``CheckpointManager`` nor a disk.
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
    if isinstance(manager, Disk):
        if target is None or item is not None or fallback:
            given = "item, fallback: not for a disk" if target is not None else "target: expected the committed tree"
            raise ValueError(
                f"{given}; a disk has one commit of one tree. Fix: jo.restore(disk, {{'params': shapes, 'opt_state': "
                "jo.abstract_state(tx, shapes)})."
            )
        return manager.restored(target, step)
    ocp = _orbax()
    if not isinstance(manager, ocp.CheckpointManager):
        raise TypeError(
            f"manager: expected an orbax.checkpoint.CheckpointManager, or a jo.disk, got a {type(manager).__name__}. "
            "Fix: jo.restore(ocp.CheckpointManager(folder), target)."
        )
    manager.wait_until_finished()  # for its own pending writes
    saved = sorted(manager.all_steps(), reverse=True)
    steps = [s for s in saved if step is None or s <= step]
    if not steps or (step is not None and steps[0] != step):
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise ValueError(f"manager: no complete {wanted} in {manager.directory}; complete steps there: {saved[::-1]}.")
    for k, s in enumerate(steps):
        try:
            return _restore_step(ocp, manager, s, item, target)
        except Damaged as error:
            what = f"the checkpoint of step {s} in {_path(manager, s)} is damaged: {error}"
            if not fallback:
                raise ValueError(
                    f"{what}\nRestore an earlier one (complete steps: {saved[::-1]}) with step=..., or pass "
                    "fallback=True to use the latest that is whole."
                ) from error.__cause__
            if k + 1 == len(steps):
                raise ValueError(f"{what}\nNo earlier checkpoint is left in {manager.directory}.") from error.__cause__
            warnings.warn(
                f"{what}\nUsing step {steps[k + 1]} instead. manager.delete({s}) removes the damaged one, so that "
                "step can be saved again.",
                stacklevel=2,
            )
    raise AssertionError("unreachable")


def _restore_step(ocp: Any, manager: Any, step: int, item: str | None, target: Any) -> Any:
    """Read one step; raise ``Damaged`` if another step may be whole, and ``ValueError`` if none can be right."""
    folder = _path(manager, step) / (item or "default")
    if item is not None and not folder.exists():
        there = sorted(path.name for path in folder.parent.iterdir())
        raise ValueError(f"item: no {item!r} in {folder.parent}; there are {there}.")
    if item is None and not folder.exists() and (items := _items(folder.parent)):
        raise ValueError(
            f"item: the checkpoint in {folder.parent} has the items {items}; say which: item={items[0]!r}."
        )
    metadata = reading(ocp.StandardCheckpointHandler().metadata, folder)
    stored = dict(zip(*named(metadata.tree), strict=True))
    sums = _stored_sums(metadata.custom_metadata, folder)
    if sums is not None and sums.keys() != stored.keys():
        raise Damaged(f"its metadata names other leaves than were saved: {some(sums.keys() ^ stored.keys())}")
    by_default = target is None
    if by_default:
        target = reading(jax.tree.map, default_target, metadata.tree)
        for x in jax.tree.leaves(target):
            if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None:
                memory.check_platform(x.sharding.addressable_devices)
    check_target(target, stored, folder)
    (names, likes), treedef = named(target), jax.tree.structure(target)

    def read(indices: Sequence[int]) -> list[Any]:
        """Read these leaves and no others."""
        chosen = {*indices}
        part = jax.tree.unflatten(treedef, [x if k in chosen else ocp.PLACEHOLDER for k, x in enumerate(likes)])
        args = ocp.args.PyTreeRestore(part, restore_args=ocp.checkpoint_utils.construct_restore_args(part))
        found = jax.tree.leaves(reading(ocp.PyTreeCheckpointHandler().restore, folder, args=args))
        leaves = [memory.well_typed(found[k]) for k in indices]
        if by_default:
            leaves = [_on_device(x) if is_key(x) else x for x in leaves]
        if sums is not None:
            found = zip((names[k] for k in indices), checksums(leaves), strict=True)
            if wrong := [name for name, got in found if got != sums[name]]:
                raise Damaged(f"other values than were saved in {len(wrong)} of {len(names)} leaves: {some(wrong)}")
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


def _items(folder: Any) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []


def _on_device(key: jax.Array) -> jax.Array:
    """Move a PRNG key to the device: orbax's metadata do not tell keys from other arrays before they are read."""
    return jax.device_put(key, memory.with_kind(key.sharding, memory.DEVICE_KIND))


def _with_host_copies(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    on_host = [isinstance(x, jax.Array) and memory.on_host(x) for x in leaves]
    host = [x for x, is_host in zip(leaves, on_host, strict=True) if is_host]
    for platform in {next(iter(x.sharding.device_set)).platform for x in host}:
        wait = "pass copy=False and call manager.wait_until_finished() before the next step"
        memory.check_host_pool(host + host, platform, "save_args(): the state with its copy", wait)
    copies = iter(jax.block_until_ready([memory.copy_on_host(x) for x in host]))
    leaves = [next(copies) if is_host else x for x, is_host in zip(leaves, on_host, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def _path(manager: Any, step: int) -> Any:
    """Return the folder of a step, whatever prefix or padding the manager's options give its name."""
    for path in manager.directory.iterdir():
        number = re.fullmatch(r"(?:.*_)?(\d+)", path.name)
        if number and int(number[1]) == step:
            return path
    return manager.directory / str(step)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError("Checkpoints need orbax: pip install orbax-checkpoint.") from error
    return ocp
