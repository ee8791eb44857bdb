"""The table of what lives where and why, and how it is streamed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from jax_offload import _memory
from jax_offload._placement import Leaf
from jax_offload._sharding import known
from jax_offload._state import arranged_leaves
from jax_offload._stream import Load, Window, loads_of_updates


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table of what lives where and why, and how it is streamed; ``print`` it.

    Attributes:
      leaves: a row for every state leaf.
      unknown: why ``update`` could not be traced; empty where it could.
      windows: bytes of the state on each device at a time while it streams, and why so many: one for each ``offload``
        that streams something.
    """

    leaves: tuple[Leaf, ...]
    unknown: str = ""
    windows: tuple[Window, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of the state in pinned host memory; what is replicated counts once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state that stay in device memory; what is replicated counts once."""
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.host)

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of pinned host memory that the state takes for each device."""
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.host)

    def __str__(self) -> str:
        rows = [("state leaf", "shape", "dtype", "MiB", "sharding", "memory", "why", "streams")]
        for leaf in self.leaves:
            memory = _memory.HOST_KIND if leaf.host else _memory.DEVICE_KIND
            shape = "×".join(map(str, leaf.shape)) or "()"
            size = f"{leaf.nbytes / 2**20:.2f}"
            rows.append((leaf.path, shape, str(leaf.dtype), size, leaf.sharding, memory, leaf.why, leaf.streams))
        if not any(leaf.sharding for leaf in self.leaves):  # no mesh
            rows = [(*row[:4], *row[5:]) for row in rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(w) if k == 3 else cell.ljust(w) for k, (cell, w) in enumerate(
            zip(row, widths, strict=True))).rstrip() for row in rows]  # fmt: skip
        total = self.host_bytes + self.device_bytes
        share = self.host_bytes / total if total else 0.0
        summary = (
            f"optimizer state: {total / 2**20:.2f} MiB, of which {self.host_bytes / 2**20:.2f} MiB ({share:.1%}) in "
            f"{_memory.HOST_KIND} and {self.device_bytes / 2**20:.2f} MiB on the device"
        )
        if any(leaf.sharding for leaf in self.leaves):
            summary += f"; for each device {self.host_bytes_per_device / 2**20:.2f} MiB in {_memory.HOST_KIND}"
        windows = [
            f"window: {w.nbytes / 2**20:.2f} MiB on each device: {w.why}" + (f"; {_APART}" if w.apart else "")
            + (f" (from {w.leaf} on)" if len(self.windows) > 1 else "")
            for w in self.windows
        ]  # fmt: skip
        notes = [f"how it streams is not known: {self.unknown}"] if self.unknown else []
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], summary, *windows, *notes])


_APART = "once the backward pass is over, as pieces this small hide little"
_UNSEEN = "not loaded, or in a branch or a loop around offload"


def placement(tx: optax.GradientTransformation, params: Any, **extra_args: Any) -> Placement:
    """Where each leaf of ``tx``'s state lives and why, and how ``update`` brings it to the device.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      params: the parameters, concrete or abstract. Nothing is allocated.
      **extra_args: what ``tx.update`` needs besides gradients, state and parameters, to trace it.
    """
    leaves, _ = arranged_leaves(tx, params, only_looking=True)
    loads, unknown = _streams(tx, params, extra_args)
    rows, windows = [], {}
    for (leaf, _, _), of_leaf in zip(leaves, loads, strict=True):
        hidden = leaf.host and not of_leaf and not unknown
        rows.append(dataclasses.replace(leaf, streams=_UNSEEN if hidden else _in_words(of_leaf)))
        windows |= {id(load.window): dataclasses.replace(load.window, leaf=leaf.path) for load in of_leaf
                    if id(load.window) not in windows}  # fmt: skip
    return Placement(tuple(rows), unknown, tuple(windows.values()))


def _streams(tx: optax.GradientTransformation, params: Any, extra_args: Any) -> tuple[list[list[Load]], str]:
    """How a traced ``update`` loads each leaf of the state; and why it could not be traced."""
    found: list[list[Load]] = []

    def update(params: Any, extra_args: Any) -> None:
        leaves, treedef = jax.tree.flatten(tx.init(params))
        found.extend([] for _ in leaves)
        with loads_of_updates() as loads:
            optax.with_extra_args_support(tx).update(params, jax.tree.unflatten(treedef, leaves), params, **extra_args)
        index = {id(x): rows for x, rows in zip(leaves, found, strict=True)}
        for load in loads:
            for x in load.ids:
                if x in index:  # not in a cond or a loop of a wrapper around offload
                    index[x].append(load)

    leaves, treedef = jax.tree.flatten(extra_args)
    arrays = [k for k, x in enumerate(leaves) if hasattr(x, "dtype")]  # the others, functions say, stay as they are

    def with_arrays(params: Any, values: list[Any]) -> None:
        filled = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        update(params, jax.tree.unflatten(treedef, filled.values()))

    try:
        with known(params, only_looking=True):
            jax.make_jaxpr(with_arrays)(params, [leaves[k] for k in arrays])
    except Exception as error:
        state = jax.eval_shape(tx.init, params)
        return [
            [] for _ in jax.tree.leaves(state)
        ], f"update raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return found, ""


def _in_words(loads: list[Load]) -> str:
    parts = [load.how + (f", {len(load.ids)} leaves together" if len(load.ids) > 1 else "") for load in loads]
    repeated = len(parts) > 1 and len(set(parts)) == 1
    return f"{parts[0]} ({len(parts)} times)" if repeated else "; then ".join(parts)
