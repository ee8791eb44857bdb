"""Exact bytes of an optimizer and its parameters, by the code that places the state and schedules the update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_offload._base.around import described
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import names_in, sharding_of, shards_of
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved, Update
from jax_offload._ir.propagate import forward
from jax_offload._placement.placement import Leaf
from jax_offload._plan.plan import Planned
from jax_offload._report.report import table_and_trace, traced
from jax_offload._state.traced_init import placed_leaves, placed_state
from jax_offload._update.update_params import update_params

AXIS = "data"  # of the mesh of a model that only a number describes
PER_WIDTH = 128  # such a model has this many columns of width per layer, and its width is a multiple of this


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Exact bytes on one device and on its host.

    Attributes:
      parameters: of the parameters, and of their gradients as well.
      state: of the optimizer state that stays on the device.
      window: of the state on the device at a time while it streams; ``None`` where the update did not tell.
      host: of pinned host memory that the state takes, with gradients that the host's cores read.
      disk: of the state on disk.
      loaded: from the host in one step.
      stored: to the host in one step.
      waits: whether the update waits for a number made of all gradients, such as their norm.
      unknown: why the update could not be traced; empty where it could.
      leaves: the rows of the placement.
    """

    parameters: int
    state: int
    window: int | None
    host: int
    disk: int
    loaded: int
    stored: int
    waits: bool
    unknown: str
    leaves: Sequence[Leaf] = dataclasses.field(repr=False, compare=False)


def sizes_of(tx: Any, params: Any, *, streams: bool = True) -> Sizes:
    """The bytes of ``tx`` on these parameters.

    ``streams``: whether some of its state may stream; if not, the update is not traced.
    """
    own = sum(map(own_bytes, jax.tree.leaves(params)))
    if not streams:
        leaves = [leaf for leaf, _, _ in placed_leaves(tx, params)[0]]
        return Sizes(own, sum(leaf.shard_bytes for leaf in leaves), 0, 0, 0, 0, 0, False, "", leaves)
    table, trace = table_and_trace(tx, params)
    state, host, disk = (sum(leaf.shard_bytes for leaf in table.leaves if place(leaf)) for place in (
        lambda leaf: not leaf.host and not leaf.disk, lambda leaf: leaf.host, lambda leaf: leaf.disk))  # fmt: skip
    updates = [] if trace is None else [each.update for each in updates_in(trace)]
    planned = [p for update in updates for p in update.planned if not p.on_cores]
    loaded, stored = sum(p.slice.loaded_bytes for p in planned), sum(map(_stored, updates))
    window = None if trace is None or disk else _window(planned)
    down, up = _across_the_cores(tx, params, table.leaves)
    waits = any(isinstance(update, Update) and _waits_for_all(update) for update in updates)
    return Sizes(own, state, window, host + down, disk, loaded + up, stored + down, waits, table.unknown, table.leaves)


def own_bytes(x: Any) -> int:
    """Bytes of an array on one device."""
    return nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x)))


def _window(planned: Iterable[Planned]) -> int:
    """The bytes of host leaves on the device at a time: each window, or all that streams through it if that is less."""
    through: dict[int, list[Planned]] = {}
    for p in planned:
        through.setdefault(id(p.window), []).append(p)
    return sum(
        min(sum(p.slice.loaded_bytes for p in ps), max(max(p.window.nbytes, p.bytes_at_once) for p in ps))
        for ps in through.values()
    )


def _stored(update: Update | Moved) -> int:
    """The bytes that an update stores on one device: each leaf is divided like the leaf it replaces."""
    old: Mapping[Var, Var] = update.next_values if isinstance(update, Update) else {}
    slices = [p.slice for p in update.planned if not p.on_cores]
    slices += [each.prelude for each in update.plan.passes] if isinstance(update, Update) else []
    return sum(nbytes(v.aval) // math.prod(s.shards.get(old.get(v, v), ())) for s in slices for v in s.stores)


def _across_the_cores(tx: Any, params: Any, leaves: Sequence[Leaf]) -> tuple[int, int]:
    """The bytes of one device that go down to the host's cores, gradients and what else these read, and that come up:
    new parameters, as ``jax_offload.update_params`` makes them there."""
    owners = {leaf.owner for leaf in leaves if leaf.on_cores}
    if not owners:
        return 0, 0
    with described(params):
        trace = traced(lambda p, s: update_params(tx, p, s, p), params, placed_state(tx, params))
    slices = [p.slice for each in updates_in(trace) for p in each.update.planned if p.on_cores]
    read = {v for s in slices for v in s.inputs if v.aval.shape and not is_host_aval(v.aval)}
    theirs = [x for k, x in enumerate(jax.tree.leaves(params)) if k in owners]
    up, every = sum(map(own_bytes, theirs)), sum(map(nbytes, theirs))
    return up * sum(nbytes(v.aval) for v in read) // every, up


def _waits_for_all(update: Update) -> bool:
    """Whether a number made of gradients goes into a slice: their norm, or whether all of them are finite."""
    if len(update.plan.passes) != 1:
        return len(update.plan.passes) > 1
    (only,) = update.plan.passes
    gradients = {update.operands[i] for i in update.gradients}
    made: dict[Var, int] = {v: int(v in gradients) for v in only.prelude.inputs}
    for eqn in only.prelude.jaxpr.eqns:
        made.update(zip(eqn.outvars, forward(eqn, made), strict=True))
    read = {v for p in only.slices for v in p.slice.inputs if not is_host_aval(v.aval)}
    return any(made.get(v) and not v.aval.shape for v in only.prelude.outputs if v in read)


def smallest_share(leaves: Sequence[Leaf], room: int) -> float:
    """The least share of the state's bytes that has to move if ``room`` bytes of it may stay on the device.

    ``leaves``: where all that may move does. They move in their rank's order, as ``fraction`` takes them.
    """
    eligible = sorted((leaf for leaf in leaves if leaf.host or leaf.disk), key=lambda leaf: leaf.rank)
    stays, taken = sum(leaf.shard_bytes for leaf in leaves), 0
    for leaf in eligible:
        if stays <= room:
            break
        stays, taken = stays - leaf.shard_bytes, taken + leaf.nbytes
    return taken / sum(leaf.nbytes for leaf in eligible) if eligible else 0.0


def replicated_axes(params: Any) -> tuple[str, ...]:
    """The axes of the parameters' mesh along which none of them is divided."""
    shardings = [s for x in jax.tree.leaves(params) if isinstance(s := sharding_of(x), NamedSharding)]
    used = {name for s in shardings for entry in s.spec for name in names_in(entry)}
    sizes = shardings[0].mesh.shape.items() if shardings else ()
    return tuple(name for name, size in sizes if size > 1 and name not in used)


def devices_of(params: Any) -> int:
    return max((s.num_devices for x in jax.tree.leaves(params) if (s := sharding_of(x)) is not None), default=1)


def model_of(
    n: int, dtype: Any, devices: int, replicated: bool, layers: int | None, width: int | None
) -> tuple[dict[str, Any], int, int]:
    """Abstract parameters of equal layers, ``n`` in all to one row, with their layers and width; a layer has
    12 width² of them. What is left over is one matrix.

    Raises:
      ValueError: the parameters are too few for the layers, or the devices do not divide the width.
    """
    step = math.lcm(PER_WIDTH, 1 if replicated else devices)
    if width is None:
        ideal = (n / 12 / layers) ** 0.5 if layers else (PER_WIDTH * n / 12) ** (1 / 3)
        width = max(step, round(ideal / step) * step)
    if not replicated and width % devices:
        raise ValueError(f"width: {devices} devices do not divide {width} columns; give a multiple of {devices}.")
    layers = layers or max(1, round(n / (12 * width**2)))
    columns = min(12 * width, n // (layers * width))
    if columns < 3:
        raise ValueError(
            f"params: {n:g} are too few for {layers} layers of width {width}, {3 * layers * width:,} at least. Give "
            "fewer layers or a smaller width."
        )
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)) if devices > 1 else None

    def leaf(*shape: int, spec: PartitionSpec) -> Any:
        place = None if mesh is None else NamedSharding(mesh, PartitionSpec() if replicated else spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    over_width = PartitionSpec(None, AXIS)
    found = {
        "attention": leaf(layers, width, columns // 3, spec=over_width),
        "mlp": leaf(layers, width, columns - columns // 3, spec=over_width),
    }
    rest = (n - layers * width * columns) // width
    if rest:
        found["embed"] = leaf(rest, width, spec=over_width)
    return found, layers, width
