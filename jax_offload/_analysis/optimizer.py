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
from jax_offload._analysis.host import POOL_HEADROOM
from jax_offload._analysis.measured import MANY_LEAVES, Measured, devices_of, measured, of_table
from jax_offload._analysis.on_disk import HELD, NO_FILES, files_by_leaves, of_a_host
from jax_offload._analysis.option import Option
from jax_offload._analysis.setting import Setting, of_the_cores, of_the_disk, priced
from jax_offload._analysis.split import best_share
from jax_offload._analysis.streams import Streams
from jax_offload._analysis.units import in_bytes, in_seconds
from jax_offload._analysis.ways import (
    ON_THE_CORES,
    Way,
    commits_of,
    drives_of,
    inner_of,
    known,
    on_disk,
    resident,
    way,
    ways,
    without_cores,
)
from jax_offload._base.arrays import Offloaded, nbytes
from jax_offload._base.shardings import sharding_of, shards_of
from jax_offload._placement.placement import Leaf, unmanaged
from jax_offload._plan.decide import LEAST_WINDOW
from jax_offload._report.report import table_and_trace
from jax_offload._state.traced_init import placed_leaves
from jax_offload._update.arguments import check_params

LABELS = (
    ("parameters, gradients, state, host, each way, window", "exact"),
    ("hidden, added, peak", "estimated"),
)
BY_DATA_SHEET = "of a disk: what is under way in host memory, time, writes a day"
KEPT = "resident as given"
NO_ACTIVATIONS = "not in these peaks: activations"


def of_optimizer(
    tx: Any, params: Any, setting: Setting, mesh: Any, activations: int | None = None, called: str = "inner"
) -> Forecast:
    """``activations``: bytes of them on a device, where something is known of the model. ``called``: the optimizer, in
    the lines of code."""
    check_params(params)
    _check_arrays(params)
    check_mesh(params, mesh)
    leaves = jax.tree.leaves(params)
    matrices = sum(math.prod(np.shape(x)) for x in leaves if np.ndim(x) >= 2)
    flops, dtype = setting.flops_per_token or 6.0 * matrices, dtype_of(leaves)
    setting = dataclasses.replace(setting, flops_per_token=flops, devices=devices_of(leaves), dtype=dtype)
    parts_of = [(nbytes(x) // (n := math.prod(shards_of(sharding_of(x), np.shape(x)))), n) for x in leaves]
    own = sum(size for size, _ in parts_of)

    inner, given = inner_of(tx)
    inside = not isinstance(tx, Offloaded) and _offloads_inside(inner, params)
    name = "as given" if inside or given else "offload"
    first = Way(name, "tx as it is; step = jo.jit(step, donate_argnums=(0, 1))", tx) if inside else way(
        name, inner, called, given)  # fmt: skip
    table, trace = table_and_trace(first.tx, params)
    setting = dataclasses.replace(setting, drives=drives_of(given), commit_every=commits_of(given))
    found = of_table(table.leaves, trace, first.tx, params)
    notes = [f"how it streams is not known: {table.unknown}"] if table.unknown else []
    notes += [NO_ACTIVATIONS] if activations is None else []
    if activations is None and setting.tokens is None and setting.chip is not None:
        notes.append("tokens_per_step would tell what is hidden; until then `added` is the time of the link alone")
    parts = Parts(own, of_a_host(parts_of, setting.devices[1]), activations, setting)
    options = [parts.option(first, found)]
    if inside:
        notes.append("an offload inside of a chain: for the other ways give what is in it, or jo.offload(chain)")
        notes += of_the_disk(options, setting)
        return setting.forecast(options, notes=tuple(notes), labels=labels(options))

    plain = placed_leaves(inner, params)[0]
    options.insert(0, parts.option(resident(inner, called), Measured([leaf for leaf, _, _ in plain], Streams())))
    files = "disk" in given
    norm = found.streams is not None and found.streams.norm and not files  # jo.pipelined drives no disk
    alone = setting.devices[0] == setting.devices[1] and len(found.leaves) <= MANY_LEAVES
    for each in ways(inner, given, called, known(inner, params, norm, alone)):
        moved = measured(each, params, found)
        options.append(parts.option(each, moved))
        if each.name == ON_THE_CORES and (share := parts.best_share(first, found, moved)):
            both = way("on both", inner, called, {**given, "update_on": share})
            options.append(parts.option(both, measured(both, params, found)))
            notes.append(_balance(share, options[-1]))
    room = None if {*given} & {"disk", "update_on", "shard_over"} else _room_beside(options[1], setting, found)
    if room is not None:
        each = on_disk(inner, called, given, room)
        option = parts.option(each, measured(each, params, found))
        notes.append(_advised(option, helps := not setting.host.why_not(option.host)))
        options += [option] if helps else []
    notes += [*of_the_cores(options, setting), *of_the_disk(options, setting)]
    way_of = partial(way, inner=inner, called=called, ahead=norm)
    for option in solved(
        parts, lambda name, more: way_of(name, options=more), params, without_cores(given), options, found
    ):
        options.insert(2, option)
        if option.host and "window=" not in option.code and setting.memory is not None:
            left = setting.memory - option.peak
            notes.append(f"largest window that fits with {option.name}: {in_bytes(option.window + left)}")
        if option.name == KEPT:
            notes.append(f"{KEPT}: with these options the state fits the device, and nothing has to be offloaded")
        elif activations is None:
            notes.append(f"{option.name} leaves activations no room: device_memory is to be what they leave")
    if len(found.leaves) > MANY_LEAVES:
        notes.append(f"{len(found.leaves)} leaves: only {first.name!r} is traced, the other windows follow by bytes")
    return setting.forecast(options, notes=tuple(notes), labels=labels(options))


def labels(options: Sequence[Option]) -> tuple[tuple[str, str], ...]:
    """Which of the numbers are exact, and which estimated."""
    found = *LABELS, (BY_DATA_SHEET, "estimated, by the drive's data sheet")
    return found if any(option.disk for option in options) else LABELS


def _room_beside(option: Option, setting: Setting, found: Measured) -> int | None:
    """Bytes of state that this host has memory for, beside what is under way to and from a disk; ``None`` where it has
    enough for all."""
    usable = setting.host.usable
    if usable is None or setting.devices[0] > 1 or not setting.host.why_not(option.host):
        return None
    buffers = HELD * max((group.read for group in found.by_groups.groups), default=0)
    return max(0, int(usable / POOL_HEADROOM - buffers) >> 30 << 30)


def _balance(share: float, option: Option) -> str:
    """Why the cores take that share, and not more or less."""
    return (f"{option.name}: the cores take {share:.0%}, so that these and the link are busy for about as long; by "
            "other rates another share of update_on= takes least")  # fmt: skip


def _advised(option: Option, helps: bool) -> str:
    """What a disk would do on this host, which has no memory for all of the state."""
    if not helps:
        return (f"a disk would not help on this host: {in_bytes(option.buffers)} of its memory are for what is under "
                "way, as a parameter's state is read whole where its rows depend on each other, a layer of it where "
                "they do not; smaller ones need less")  # fmt: skip
    takes = "" if option.io is None else f", {in_seconds(option.io)} of reading and writing in a step"
    return f"where this is the host, {in_bytes(option.disk)} of the state on disk{takes}: {option.code}"


@dataclasses.dataclass(frozen=True)
class Parts:
    """What every way has in common: ``own`` bytes of parameters on each device, ``on_a_host`` on all of a host."""

    own: int
    on_a_host: int
    activations: int | None
    setting: Setting

    def option(self, way: Way, found: Measured) -> Option:
        held = found.host + found.disk
        moved = found.streams or Streams(held, held, 0, files=files_by_leaves(found.leaves, self.setting.devices[1]))
        cores, files = moved.cores, moved.files if found.disk else NO_FILES
        away = self.own if way.pending else 0  # gradients that wait on the host; in the window beside their state
        window = moved.window * (held + away) // max(1, held)
        peak = 2 * self.own - away + found.device + window + (self.activations or 0)
        option = Option(
            way.name, way.code, self.own, self.own - away, found.device, window, self.activations, peak, (peak, peak),
            found.host + away + cores.gradients + files.buffers, moved.loaded + away + cores.up,
            moved.stored + away + cores.gradients + cores.down, disk=found.disk, read=files.read,
            written=files.written, buffers=files.buffers, commit=self._commit(found), same_numbers=way.same_numbers,
        )  # fmt: skip
        # gradients go down to the cores beside the backward pass, whatever the update waits for
        share = FORWARD if way.ahead else 0.0 if moved.norm and not cores.dram else BACKWARD
        return priced(option, self.setting, share, cores, files)

    def _commit(self, found: Measured) -> int:
        """Bytes that one writes beside the groups; 0 where nothing is on disk."""
        away = [(x.shard_bytes, x.nbytes // max(1, x.shard_bytes)) for x in found.leaves if not x.disk]
        return self.on_a_host + of_a_host(away, self.setting.devices[1]) if found.disk else 0

    def best_share(self, way: Way, device: Measured, cores: Measured) -> float | None:
        """How much of the update the cores are to take, if a part of it."""
        if device.streams is None or cores.streams is None:
            return None

        def seconds(streams: Streams) -> float | None:
            return self.option(way, dataclasses.replace(device, streams=streams)).exposed

        return best_share(device.streams, cores.streams, seconds)


def solved(
    parts: Parts,
    way_of: Callable[..., Way],
    params: Any,
    given: Mapping[str, Any],
    options: Sequence[Option],
    all_: Measured,
) -> list[Option]:
    """Where the resident one does not fit: the smallest fraction that does, and the largest window that fits with it;
    or that alone, where the default one does not.

    ``way_of``: the way of some further options.
    """
    at_home, moved, memory = options[0], options[1], parts.setting.memory
    if memory is None or at_home.fits is not False:
        return []

    def tried(name: str, **more: Any) -> Option:
        each = way_of(name, {**given, **more})
        return parts.option(each, measured(each, params, all_))

    def through(window: int, name: str, **more: Any) -> Option | None:
        if "window" in given or window < LEAST_WINDOW:
            return None
        option = tried(name, **more, window=window >> 20 << 20)
        return option if option.fits else None

    if not moved.fits:
        alone = through(memory - (moved.peak - moved.window), "window")
        return [] if alone is None else [alone]
    best, smallest = moved, 1.0
    for _ in range(0 if "fraction" in given else 3):  # what is smaller has a smaller window, and may be smaller yet
        share = math.ceil(100 * smallest_share(all_.leaves, memory - (best.peak - best.state))) / 100
        if share >= smallest or (not share and "disk" in given):  # where nothing leaves the device, nothing is on disk
            break
        option = tried("fraction", fraction=share) if share else tried(KEPT, fraction=0)
        if not option.fits:
            break
        best, smallest = option, share
    if not 0 < smallest < 1 or not parts.setting.budget:
        return [best] if smallest < 1 else []
    wider = through(min(best.host, best.window + memory - best.peak), "fraction", fraction=smallest)
    return [best if wider is None or wider.window <= best.window else wider]


def smallest_share(leaves: Sequence[Leaf], room: int) -> float:
    """The least share of the state's bytes that has to move where ``room`` bytes of it may stay on the device.

    Leaves move in their order, as ``fraction`` takes them.
    """
    eligible = sorted((leaf for leaf in leaves if leaf.host or leaf.disk), key=lambda leaf: leaf.rank)
    stays, taken = sum(leaf.shard_bytes for leaf in leaves), 0
    for leaf in eligible:
        if stays <= room:
            break
        stays, taken = stays - leaf.shard_bytes, taken + leaf.nbytes
    return taken / sum(leaf.nbytes for leaf in eligible) if eligible else 0.0


def _offloads_inside(tx: Any, params: Any) -> bool:
    rows = placed_leaves(tx, params)[0]
    return any(leaf.why != (outside := unmanaged(aval).why) and bool(outside) for leaf, aval, _ in rows)


def _check_arrays(params: Any) -> None:
    """Raises ``TypeError`` for a Python number: optax takes it, but what it will be has no bytes yet."""
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not hasattr(x, "dtype"):
            raise TypeError(
                f"params: plan takes arrays, or what has shape and dtype; {jax.tree_util.keystr(path)} is {x!r}, a "
                f"{type(x).__name__}. Give jnp.asarray({x!r}), or jax.ShapeDtypeStruct((), 'float32')."
            )


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


def dtype_of(leaves: Sequence[Any]) -> str:
    """Of most of the bytes."""
    sizes: Counter[str] = Counter()
    for x in leaves:
        sizes[str(x.dtype)] += nbytes(x)
    return sizes.most_common(1)[0][0] if sizes else "float32"
