"""Exact bytes of an optimizer and its parameters, by the code that places the state and schedules the update."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_offload._base.around import described
from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import names_in, sharding_of, shards_of
from jax_offload._emit.find import updates_in
from jax_offload._emit.region import Moved, Update
from jax_offload._ir.propagate import NEEDS
from jax_offload._placement.placement import Leaf
from jax_offload._plan.plan import Planned
from jax_offload._report.report import trace_of
from jax_offload._state.state import abstract_state, placed_leaves
from jax_offload._update.update_params import update_params

AXIS = "data"  # of the mesh of a model that only a number describes
PER_WIDTH = 128  # such a model has this many columns of width per layer, and its width is a multiple of this


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an optimizer takes of one device and its host.

    Attributes:
      nbytes: bytes by the names that ``Row`` has for them, ``state`` to ``stored``; ``None`` where the update alone
        does not tell.
      waits: whether the update waits for a number made of all gradients, such as their norm.
      on_cores: bytes of state that the host's cores update.
    """

    nbytes: Mapping[str, Any]
    waits: bool
    on_cores: int


def sizes_of(tx: Any, params: Any, run: str) -> Sizes:
    """Return the bytes of ``tx`` on these parameters in a step of ``run``; under ``jax.jit`` nothing streams."""
    leaves = [leaf for leaf, _, _ in placed_leaves(tx, params)[0]]
    trace = None
    if run != "jax.jit":
        with described(params):
            trace, _ = trace_of(lambda p, s: update_params(tx, p, s, p), params, abstract_state(tx, params))
    updates = [] if trace is None else [each.update for each in updates_in(trace)]
    planned = [p for update in updates for p in update.planned if not p.on_cores]
    loaded: int | None = sum(p.slice.loaded_bytes for p in planned)
    # A leaf that a norm of the state reads first is loaded twice, unless a scan of the step holds both updates.
    if run == "jo.jit" and max(Counter(v for p in planned for v in p.slice.loads).values(), default=1) > 1:
        loaded = None
    disk, on_cores = (sum(leaf.shard_bytes for leaf in leaves if there(leaf)) for there in (
        lambda leaf: leaf.disk, lambda leaf: leaf.on_cores))  # fmt: skip
    down, up = _across_the_cores(updates, params, leaves) if on_cores else (0, 0)
    found = {
        "state": sum(leaf.shard_bytes for leaf in leaves if not leaf.host and not leaf.disk),
        "window": 0 if run == "jax.jit" else None if trace is None or disk else _window(planned),
        "host": sum(leaf.shard_bytes for leaf in leaves if leaf.host) + down,
        "disk": disk,
        "loaded": None if loaded is None else loaded + up,
        "stored": sum(map(_stored, updates)) + down,
    }
    return Sizes(found, any(isinstance(u, Update) and _waits_for_all(u) for u in updates), on_cores)


def own_bytes(x: Any) -> int:
    """Return the bytes of an array on one device."""
    return nbytes(x) // math.prod(shards_of(sharding_of(x), np.shape(x)))


def _window(planned: Sequence[Planned]) -> int:
    """Return the bytes of host leaves on the device at a time: each window, or all that streams through it if that is
    less."""
    through: dict[int, list[Planned]] = {}
    for p in planned:
        through.setdefault(id(p.window), []).append(p)
    return sum(
        min(sum(p.slice.loaded_bytes for p in ps), max(max(p.window.nbytes, p.bytes_at_once) for p in ps))
        for ps in through.values()
    )


def _stored(update: Update | Moved) -> int:
    """Return the bytes that an update stores on one device: each leaf is divided like the leaf it replaces."""
    old: Mapping[Var, Var] = update.next_values if isinstance(update, Update) else {}
    slices = [p.slice for p in update.planned if not p.on_cores]
    slices += [each.prelude for each in update.passes] if isinstance(update, Update) else []
    return sum(nbytes(v.aval) // math.prod(s.shards.get(old.get(v, v), ())) for s in slices for v in s.stores)


def _across_the_cores(updates: Sequence[Update | Moved], params: Any, leaves: Sequence[Leaf]) -> tuple[int, int]:
    """Return the bytes of one device that go down to the host's cores, gradients and what else these read, and that
    come up: new parameters, as ``jax_offload.update_params`` makes them there."""
    slices = [p.slice for update in updates for p in update.planned if p.on_cores]
    read = {v for s in slices for v in s.inputs if v.aval.shape and not is_host_aval(v.aval)}
    owners = {leaf.owner for leaf in leaves if leaf.on_cores}
    theirs = [x for k, x in enumerate(jax.tree.leaves(params)) if k in owners]
    up, every = sum(map(own_bytes, theirs)), sum(map(nbytes, theirs))
    return up * sum(nbytes(v.aval) for v in read) // every, up


def _waits_for_all(update: Update) -> bool:
    """Return whether a number made of gradients goes into a slice: their norm, or whether all of them are finite."""
    if len(update.passes) != 1:
        return len(update.passes) > 1
    (only,) = update.passes
    gradients = {update.operands[i] for i in update.gradients}
    made = NEEDS.spread(only.prelude.jaxpr.eqns, {v: int(v in gradients) for v in only.prelude.inputs})
    read = {v for p in only.slices for v in p.slice.inputs}
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


def model_of(
    n: int, dtype: str, devices: int, replicated: bool, layers: int | None, width: int | None
) -> tuple[dict[str, Any], int, int]:
    """Abstract parameters of equal layers, ``n`` in all to one row, with their layers and width; a layer has
    12 width² of them. What is left over is one matrix.

    Raises:
      ValueError: the dtype is none of floats, the parameters are too few for the layers, or the devices do not divide
        the width.
    """
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"param_dtype: expected a floating dtype such as bfloat16 or float32; got {dtype!r}.")
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
    place = None
    if devices > 1:
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        place = NamedSharding(mesh, PartitionSpec() if replicated else PartitionSpec(None, AXIS))
    shapes: dict[str, tuple[int, ...]] = {
        "attention": (layers, width, columns // 3), "mlp": (layers, width, columns - columns // 3),
    }  # fmt: skip
    if rest := (n - layers * width * columns) // width:
        shapes["embed"] = (rest, width)
    return {k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype), sharding=place) for k, s in shapes.items()}, layers, width
