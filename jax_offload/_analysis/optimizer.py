"""The forecast of an optimizer and its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jax_offload._analysis.exposure import BACKWARD, FORWARD
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.option import Option
from jax_offload._analysis.setting import Setting, of_the_cores, priced
from jax_offload._analysis.streams import Streams, streams
from jax_offload._analysis.units import in_bytes
from jax_offload._analysis.ways import Way, inner_of, resident, way, ways, without_cores
from jax_offload._arguments import check_params
from jax_offload._base.around import described
from jax_offload._base.arrays import Offloaded, nbytes
from jax_offload._base.shardings import sharding_of, shards_of
from jax_offload._placement import Leaf, unmanaged
from jax_offload._plan.decide import LEAST_WINDOW
from jax_offload._report import table_and_trace, traced
from jax_offload._state import placed_leaves
from jax_offload._update import update_params

# Tracing an update takes seconds for a thousand leaves. Beyond so many only one way is traced; what the others move,
# and their windows, follow from that by their bytes.
MANY_LEAVES = 400
ON_A_HOST = 8  # devices, at most, where a mesh does not tell
LABELS = (
    ("parameters, gradients, state, host, each way, window", "exact"),
    ("hidden, added, peak", "estimated"),
)
NO_ACTIVATIONS = "not in these peaks: activations"


def of_optimizer(
    tx: Any, params: Any, setting: Setting, mesh: Any, activations: int | None = None, called: str = "inner"
) -> Forecast:
    """``activations``: bytes of them on a device, where something is known of the model. ``called``: the optimizer, in
    the lines of code."""
    check_params(params)
    check_mesh(params, mesh)
    leaves = jax.tree.leaves(params)
    matrices = sum(math.prod(np.shape(x)) for x in leaves if np.ndim(x) >= 2)
    flops, dtype = setting.flops_per_token or 6.0 * matrices, dtype_of(leaves)
    setting = dataclasses.replace(setting, flops_per_token=flops, devices=devices_of(leaves), dtype=dtype)
    own = sum(nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x))) for x in leaves)

    inner, given = inner_of(tx)
    inside = not isinstance(tx, Offloaded) and _offloads_inside(inner, params)
    name = "as given" if inside or given else "offload"
    first = Way(name, "tx as it is; step = jo.jit(step, donate_argnums=(0, 1))", tx) if inside else way(
        name, inner, called, given)  # fmt: skip
    table, trace = table_and_trace(first.tx, params)
    if table.disk_bytes:
        raise ValueError(
            f"tx: keeps {in_bytes(table.disk_bytes)} on disk, of which plan knows nothing yet. Fix: the same offload "
            "without disk=; jo.placement(tx, params) has the bytes on disk, which each step reads and writes."
        )
    found = Measured(table.leaves, None if trace is None else _streams(trace, first.tx, params))
    notes = [f"how it streams is not known: {table.unknown}"] if table.unknown else []
    notes += [NO_ACTIVATIONS] if activations is None else []
    if activations is None and setting.tokens is None and setting.chip is not None:
        notes.append("tokens_per_step would tell what is hidden; until then `added` is the time of the link alone")
    parts = Parts(own, activations, setting)
    options = [parts.option(first, found)]
    if inside:
        notes.append("an offload inside of a chain: for the other ways give what is in it, or jo.offload(chain)")
        return setting.forecast(options, notes=tuple(notes), labels=LABELS)

    plain = placed_leaves(inner, params)[0]
    options.insert(0, parts.option(resident(inner, called), Measured([leaf for leaf, _, _ in plain], Streams())))
    norm = found.streams is not None and found.streams.norm
    alone = setting.devices[0] == 1 and len(found.leaves) <= MANY_LEAVES
    for each in ways(inner, given, params, called, norm, alone):
        options.append(parts.option(each, measured(each, params, found)))
    notes += of_the_cores(options, setting)
    made = partial(way, inner=inner, called=called, ahead=norm)
    for option in solved(
        parts, lambda name, more: made(name, options=more), params, without_cores(given), options, found
    ):
        options.insert(2, option)
        left = 0 if setting.memory is None else setting.memory - option.peak
        notes.append(f"largest window that fits with {option.name}: {in_bytes(option.window + left)}")
    if len(found.leaves) > MANY_LEAVES:
        notes.append(f"{len(found.leaves)} leaves: only {first.name!r} is traced, the other windows follow by bytes")
    return setting.forecast(options, notes=tuple(notes), labels=LABELS)


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
        return sum(leaf.shard_bytes for leaf in self.leaves if not leaf.host)


def measured(way: Way, params: Any, like: Measured) -> Measured:
    """Traced; or, of many leaves, by the bytes of another way."""
    if len(like.leaves) <= MANY_LEAVES:
        table, trace = table_and_trace(way.tx, params)
        return Measured(table.leaves, None if trace is None else _streams(trace, way.tx, params))
    placed = Measured([leaf for leaf, _, _ in placed_leaves(way.tx, params)[0]], None)
    if like.streams is None or not like.host:
        return placed
    of, share = like.streams, placed.host / like.host
    scaled = {key: int(getattr(of, key) * share) for key in ("loaded", "stored", "window")}
    return dataclasses.replace(placed, streams=dataclasses.replace(of, **scaled))


def _streams(trace: Any, tx: Any, params: Any) -> Streams:
    """What comes up from the cores are parameters, as ``jo.update_params`` makes them there, not updates."""
    found = streams(trace)
    if not found.cores.dram:
        return found

    def step(params: Any) -> Any:
        return update_params(tx, params, tx.init(params), params)

    with described(params):
        return dataclasses.replace(found, cores=streams(traced(step, params)).cores)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What every way has in common: ``own`` bytes of parameters on each device."""

    own: int
    activations: int | None
    setting: Setting

    def option(self, way: Way, found: Measured) -> Option:
        moved = found.streams or Streams(found.host, found.host, 0)
        cores = moved.cores
        away = self.own if way.pending else 0  # gradients that wait on the host; in the window beside their state
        window = moved.window * (found.host + away) // max(1, found.host)
        peak = 2 * self.own - away + found.device + window + (self.activations or 0)
        option = Option(
            way.name, way.code, self.own, self.own - away, found.device, window, self.activations, peak, (peak, peak),
            found.host + away + cores.gradients, moved.loaded + away + cores.up,
            moved.stored + away + cores.gradients + cores.down, same_numbers=way.same_numbers,
        )  # fmt: skip
        # gradients go down to the cores beside the backward pass, whatever the update waits for
        share = FORWARD if way.ahead else 0.0 if moved.norm and not cores.dram else BACKWARD
        return priced(option, self.setting, share, cores)


def solved(
    parts: Parts,
    made: Callable[..., Way],
    params: Any,
    given: Mapping[str, Any],
    options: Sequence[Option],
    all_: Measured,
) -> list[Option]:
    """Where the resident one does not fit: the smallest fraction that does; or the largest window, where none does.

    ``made``: the way of some further options.
    """
    at_home, moved, memory = options[0], options[1], parts.setting.memory
    if memory is None or at_home.fits is not False:
        return []

    def tried(name: str, **more: Any) -> Option:
        each = made(name, {**given, **more})
        return parts.option(each, measured(each, params, all_))

    if not moved.fits:
        left = memory - (moved.peak - moved.window)
        if left < LEAST_WINDOW or "window" in given:
            return []
        option = tried("window", window=left >> 20 << 20)
        return [option] if option.fits else []
    best, smallest = moved, 1.0
    for _ in range(0 if "fraction" in given else 3):  # what is smaller has a smaller window, and may be smaller yet
        share = math.ceil(100 * smallest_share(all_.leaves, memory - (best.peak - best.state))) / 100
        if share >= smallest:
            break
        option = tried("fraction", fraction=share)
        if not option.fits:
            break
        best, smallest = option, share
    return [best] if smallest < 1 else []


def smallest_share(leaves: Sequence[Leaf], room: int) -> float:
    """The least share of the state's bytes that has to move where ``room`` bytes of it may stay on the device.

    Leaves move in their order, as ``fraction`` takes them.
    """
    eligible = sorted((leaf for leaf in leaves if leaf.host), key=lambda leaf: leaf.rank)
    stays, taken = sum(leaf.shard_bytes for leaf in leaves), 0
    for leaf in eligible:
        if stays <= room:
            break
        stays, taken = stays - leaf.shard_bytes, taken + leaf.nbytes
    return taken / sum(leaf.nbytes for leaf in eligible) if eligible else 0.0


def _offloads_inside(tx: Any, params: Any) -> bool:
    rows = placed_leaves(tx, params)[0]
    return any(leaf.why != (outside := unmanaged(aval).why) and bool(outside) for leaf, aval, _ in rows)


def check_mesh(params: Any, mesh: Any) -> None:
    """Raises ``ValueError`` where parameters are not on the mesh that is given."""
    if mesh is None:
        return
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        s = sharding_of(x)
        if not isinstance(s, NamedSharding) or dict(s.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"params: {jax.tree_util.keystr(path)} is not on the mesh {dict(mesh.shape)}: its sharding is {s}. "
                "Give jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), or arrays that are there."
            )


def devices_of(leaves: Sequence[Any]) -> tuple[int, int]:
    """How many devices, and how many of them on a host."""
    shardings = [s for x in leaves if (s := sharding_of(x)) is not None]
    total = max((s.num_devices for s in shardings), default=1)
    for s in shardings:
        if s.num_devices == total and not isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh):
            on = Counter(device.process_index for device in s.device_set)
            return total, min(max(on.values()), total) if len(on) > 1 else min(total, ON_A_HOST)
    return total, min(total, ON_A_HOST)


def dtype_of(leaves: Sequence[Any]) -> str:
    """Of most of the bytes."""
    sizes: Counter[str] = Counter()
    for x in leaves:
        sizes[str(x.dtype)] += nbytes(x)
    return sizes.most_common(1)[0][0] if sizes else "float32"
