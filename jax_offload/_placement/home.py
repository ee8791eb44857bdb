"""Notice a state that something has moved to the device between updates, and check what eager ``init`` can know."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import keystr

from jax_offload._base import memory
from jax_offload._base.around import around
from jax_offload._base.donation import Home
from jax_offload._base.memory import on_host, to_host
from jax_offload._base.on_disk import not_from_disk
from jax_offload._ir.trace import was_on_host
from jax_offload._placement.placement import Leaf


def arrived(home: Home, leaves: Sequence[Any], plan: Sequence[Leaf]) -> None:
    """Warn if a state that has been in host memory arrives at an ``update`` in device memory.

    A resident state, which has never been in host memory, is no fault: the update moves it there.
    """
    home.updates()
    at_home = [(x, leaf) for x, leaf in zip(leaves, plan, strict=True) if leaf.host and isinstance(x, jax.Array)]
    away = [(x, leaf) for x, leaf in at_home if not on_host(x)]
    if not around().runs:
        return
    if at_home and not away:
        home.reached = True
    elif away and (home.reached or any(was_on_host(x) for x, _ in away)):
        size = sum(leaf.nbytes for _, leaf in away)
        home.tell(
            f"offload(): {len(away)} leaves of the optimizer state ({size} bytes, the first is {away[0][1].path}) "
            "were in host memory and arrive at update in device memory: something between has moved them. Trainers "
            "do with jax.lax.with_sharding_constraint or jax.device_put and shardings that name no memory (Tunix's "
            "PeftTrainer before its first step under `with mesh:`; MaxText in the step itself), restores without a "
            "target do, pickle and NumPy do. This update puts them back, but until it has, all of them are on the "
            "device; if they are moved at every step, nothing is gained. Fix: leave out the move, or "
            "jax_offload.to_host(tx, state) after it, or move with the shardings of "
            "jax_offload.abstract_state(tx, params). See docs/frameworks.md."
        )


def returned(state: Any, plan: Sequence[Leaf]) -> Any:
    """Move the leaves of a traced state that belong on the host there before anything is updated.

    If they were updated from device memory, old and new leaves would be on the device side by side, because neither
    can be written into the other's buffer. Leaves that ZeRO-1 divides are divided on the device first.
    """

    def to_its_place(x: Any, leaf: Leaf) -> Any:
        if not isinstance(x, Tracer) or not leaf.host:
            return x
        x = not_from_disk(x) if leaf.disk and not on_host(x) else x
        return x if leaf.shard_over else to_host(x)

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [to_its_place(x, leaf) for x, leaf in zip(leaves, plan, strict=True)])


def check_eager(params: Any, placed: Sequence[tuple[Leaf, Any, Any]]) -> None:
    """Check what only concrete parameters tell: whether the platform can hold the state, and if they are committed."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    state = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for leaf, x, s in placed if leaf.host]
    if not any(leaf.host or leaf.disk for leaf, _, _ in placed):
        return
    devices = {d for x in arrays for d in x.sharding.addressable_devices}
    memory.check_platform(devices)
    memory.check_host_pool(state, next(iter(devices)).platform if devices else jax.default_backend())
    in_bytes = any(x.dtype.itemsize == 1 for x in state)
    if in_bytes and any(d.platform == "tpu" for d in devices):
        warnings.warn(
            "storage: on a TPU XLA copies an 8-bit leaf that streams in chunks as a whole, at every chunk. "
            "bfloat16 and float16 stream as they should (docs/precision.md).",
            stacklevel=3,
        )
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    loose = [(path, x) for path, x in flat if not getattr(x, "committed", False)]
    if loose and not memory.mesh_is_set():
        path, first = loose[0]
        what = "" if isinstance(first, jax.Array) else ", a NumPy array"
        warnings.warn(
            "offload(): the parameters are not committed to a device (the first is "
            f"{keystr(path) or 'params itself'}{what}). jax commits whatever a step with host memory returns, so the "
            "second step would compile again. Fix: params = jax.device_put(params, jax.devices()[0]) (or a "
            "NamedSharding) before init, or jax.set_mesh.",
            stacklevel=3,
        )
