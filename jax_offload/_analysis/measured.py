"""Of a way to keep the state: where its leaves are, and what an update moves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jax_offload._analysis.on_disk import Files, depth_of, files_by_leaves
from jax_offload._analysis.streams import Streams, streams
from jax_offload._analysis.ways import Way
from jax_offload._base.around import described
from jax_offload._base.shardings import sharding_of
from jax_offload._placement.placement import Leaf
from jax_offload._report.report import table_and_trace, traced
from jax_offload._state.traced_init import placed_leaves
from jax_offload._update.update_params import update_params

# Tracing an update takes seconds for a thousand leaves. Beyond so many only one way is traced; what the others move,
# and their windows, follow from that by their bytes.
MANY_LEAVES = 400
ON_A_HOST = 8  # devices, at most, where a mesh does not tell


@dataclasses.dataclass(frozen=True)
class Measured:
    """A placement, and what its update moves; ``None`` where that is not known."""

    leaves: Sequence[Leaf]
    streams: Streams | None

    @property
    def host(self) -> int:
        """Bytes on one device's host."""
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.host)

    @property
    def device(self) -> int:
        return sum(leaf.shard_bytes for leaf in self.leaves if not leaf.host and not leaf.disk)

    @property
    def disk(self) -> int:
        return sum(leaf.shard_bytes for leaf in self.leaves if leaf.disk)

    @property
    def by_groups(self) -> Files:
        """All that is away from the device, as if it were on disk."""
        if self.streams is not None and self.streams.as_files.groups:
            return self.streams.as_files
        return files_by_leaves(dataclasses.replace(leaf, disk=True) for leaf in self.leaves if leaf.host or leaf.disk)


def measured(way: Way, params: Any, like: Measured) -> Measured:
    """Traced; or, of many leaves, by the bytes of another way."""
    if len(like.leaves) <= MANY_LEAVES:
        table, trace = table_and_trace(way.tx, params)
        return of_table(table.leaves, trace, way.tx, params)
    placed = Measured([leaf for leaf, _, _ in placed_leaves(way.tx, params)[0]], None)
    away = like.host + like.disk
    if like.streams is None or not away:
        return placed
    of, share = like.streams, (placed.host + placed.disk) / away
    scaled = {key: int(getattr(of, key) * share) for key in ("loaded", "stored", "window")}
    files = files_by_leaves(placed.leaves, devices_of(jax.tree.leaves(params))[1])
    scaled |= {"window": files.window} if files.groups else {}
    return dataclasses.replace(placed, streams=dataclasses.replace(of, files=files, **scaled))


def of_table(leaves: Sequence[Leaf], trace: Any | None, tx: Any, params: Any) -> Measured:
    """Of a placement, and the trace of an update; ``None`` where that is not known."""
    if trace is None:
        return Measured(leaves, None)
    found = streams_of(trace, tx, params)
    files = dataclasses.replace(found.files, depth=depth_of(leaves))
    return Measured(leaves, dataclasses.replace(found, files=files))


def streams_of(trace: Any, tx: Any, params: Any) -> Streams:
    """What comes up from the cores are parameters, as ``jo.update_params`` makes them there, not updates."""
    on_a_host = devices_of(jax.tree.leaves(params))[1]
    found = streams(trace, on_a_host)
    if not found.cores.dram:
        return found

    def step(params: Any) -> Any:
        return update_params(tx, params, tx.init(params), params)

    with described(params):
        return dataclasses.replace(found, cores=streams(traced(step, params), on_a_host).cores)


def devices_of(leaves: Sequence[Any]) -> tuple[int, int]:
    """How many devices, and how many of them on a host."""
    shardings = [s for x in leaves if (s := sharding_of(x)) is not None]
    total = max((s.num_devices for s in shardings), default=1)
    for s in shardings:
        if s.num_devices == total and not isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh):
            on = Counter(device.process_index for device in s.device_set)
            return total, min(max(on.values()), total) if len(on) > 1 else min(total, ON_A_HOST)
    return total, min(total, ON_A_HOST)
