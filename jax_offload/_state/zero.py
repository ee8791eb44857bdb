"""How a state is divided: as its parameters are, and over further mesh axes, ZeRO-1 (Rajbhandari et al. 2020).

With ZeRO-1 each device updates its part: the reduction scatters gradients, and new values are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_offload._program.memory import on_host
from jax_offload._program.paths import by_key, key_of
from jax_offload._program.shardings import (
    Layouts,
    Shardings,
    constrained,
    fitted,
    names_in,
    padded,
    shards_of,
    spec_of,
    typed_sharding,
)
from jax_offload._state.around import Remembered, described
from jax_offload._state.placement import Leaf


def partitioned(
    sharding: Sharding | None, shape: Sequence[int], over: Sequence[str], name: str | None
) -> NamedSharding | str:
    """Divide the sharding of the parameter ``name`` over further mesh axes; return why as text if that is impossible.

    The first axis of the array that divides evenly is divided, preferably one that is not sharded yet. In arrays of
    three or more axes the first axis is tried last: in a scanned model it counts the layers, and each layer's gradient
    can then be scattered to all devices as it appears.

    Raises:
      ValueError: the mesh has no such axis, or there is no mesh.
    """
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"shard_over: {tuple(over)} are axes of a mesh, but parameter {name} is on {sharding}. Fix: give the "
            "parameters a NamedSharding (jax.device_put, or the out_shardings of their init)."
        )
    if len(set(sharding.mesh.axis_types)) > 1:
        raise ValueError(
            f"shard_over: the parameters' mesh mixes types of axes, {sharding.mesh.axis_types}. Make all of them Auto, "
            "or all Explicit."
        )
    sizes = dict(sharding.mesh.shape)
    if unknown := [name for name in over if name not in sizes]:
        raise ValueError(f"shard_over: the parameters' mesh has no axes {unknown}, only {tuple(sizes)}.")
    spec, shards = padded(sharding.spec, len(shape)), shards_of(sharding, shape)
    used = {name for entry in spec for name in names_in(entry)}
    over = [name for name in over if name not in used]
    parts = math.prod(sizes[name] for name in over)
    if parts == 1:
        return "sharded over these axes already" if used else "the axes have size 1"
    axes = [*range(1, len(shape)), 0] if len(shape) > 2 else list(range(len(shape)))
    for axis in sorted(axes, key=lambda axis: shards[axis] > 1):
        if shape[axis] % (shards[axis] * parts) == 0:
            spec[axis] = (*names_in(spec[axis]), *over) if spec[axis] is not None or len(over) > 1 else over[0]
            return sharding.update(spec=spec_of(spec))
    return f"no axis divides by {parts}"


def partitions(plan: Sequence[Leaf], params: Any, shardings: Shardings, remembered: Remembered) -> Layouts:
    """Return the shardings, by path, of the parameters whose state ZeRO-1 divides; gradients and updates take them too.

    Args:
      plan: the table of the state.
      params: the parameters, or gradients.
      shardings: the parameters' shardings, where they are known.
      remembered: the shardings of earlier calls, for the message.

    Raises:
      ValueError: the sharding of a parameter is not known.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    found: Layouts = {}
    for i, over in {leaf.owner: leaf.shard_over for leaf in plan if leaf.owner is not None and leaf.shard_over}.items():
        path, x = flat[i]
        if (name := key_of(path)) in shardings:
            sharded = partitioned(shardings[name], x.shape, over, name)
            if isinstance(sharded, NamedSharding):
                found[name] = sharded
        else:
            several = list(remembered.of(name))
            raise ValueError(
                f"shard_over: parameter {name} was seen in several shardings, {several}, and with Auto mesh axes a "
                "trace does not tell which it is. Make an offload(...) for each model and mesh."
                if several
                else f"shard_over: the sharding of parameter {name} is not known: with Auto mesh axes a trace does not "
                "tell. Call tx.init on the parameters, or jax_offload.abstract_state(tx, params), before update is "
                "traced; an offload(...) that each step makes anew, as in inject_hyperparams, belongs around that."
            )
    return found


def check_not_manual() -> None:
    """Raise ``ValueError`` inside ``shard_map``, where gradients cannot be divided over axes of the mesh."""
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"shard_over: update is traced inside shard_map, manual over {manual}. Take it out of shard_map, or leave "
            "shard_over out and divide the state yourself."
        )


def check_typed(sharded: Layouts, error: Exception) -> None:
    """Say what to do if an optimizer mixes divided arrays with others, which Explicit axes forbid."""
    branches = "must have equal" in str(error) and "@" in str(error)  # with Explicit axes a type says how it is divided
    if sharded and (branches or type(error).__name__ == "ShardingTypeError"):
        raise ValueError(
            "shard_over: on a mesh with Explicit axes this optimizer cannot mix divided gradients with undivided "
            "state, such as factored moments. Use Auto axes, or leave shard_over out."
        ) from error


def resharded(tree: Any, shardings: Mapping[str, Sharding], like: Any = None) -> Any:
    """Constrain the leaves of a tree like the parameters to the shardings that are given for their paths.

    Gradients of single examples have one axis more than ``like``, the parameters; on Auto axes they stay unchanged.
    """
    if not shardings:
        return tree
    shapes = {path: np.shape(x) for path, x in by_key(like).items()}

    def one(path: Any, x: Any) -> Any:
        sharding, shape = shardings.get(key_of(path)), shapes.get(key_of(path), np.shape(x))
        if on_host(x):  # divided once it is loaded
            return x
        if sharding is None or shape == np.shape(x):
            return constrained(x, sharding)
        if shape == np.shape(x)[1:] and isinstance(sharding, NamedSharding) and typed_sharding(jax.typeof(x)):
            return constrained(x, sharding.update(spec=PartitionSpec(None, *sharding.spec)))
        return x

    return jax.tree_util.tree_map_with_path(one, tree)


def state_sharding(leaf: Leaf, shape: Sequence[int], own: Sharding, param: Sequence[int]) -> tuple[Sharding, str]:
    """Return the sharding of a state leaf of its parameter's shape, and why ZeRO-1 does not divide it further.

    Args:
      leaf: the leaf's row of the table.
      shape: the leaf's shape; there may be one scale for each block of the last axis.
      own: the parameter's sharding.
      param: the parameter's shape.
    """
    sharded = partitioned(own, param, leaf.shard_over, leaf.param) if leaf.shard_over else own
    sharding, why = (own, sharded) if isinstance(sharded, str) else (sharded, "")
    return sharding if tuple(shape) == tuple(param) else fitted(sharding, shape), why


def resharded_state(state: Any, plan: Sequence[Leaf], params: Any, shardings: Shardings, before: Any = None) -> Any:
    """Divide the leaves of a state further, as far as the shardings of their parameters are known.

    A leaf that is not divided further, such as a scale that stays on the device or a factored moment, is made of
    gradients that are. It keeps the sharding it had: otherwise the second step would be another program, and a loop's
    carry would change its type.

    Args:
      state: the state.
      plan: its table.
      params: the parameters.
      shardings: the parameters' shardings, as far as they are known.
      before: the state before the update; ``None`` if it is not the same tree, or is being made.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    owners = {leaf.owner for leaf in plan if leaf.shard_over}

    def sharded(x: Any, leaf: Leaf, old: Any) -> Any:
        if leaf.owner is None or leaf.owner not in owners:
            return x
        path, param = flat[leaf.owner]
        if (name := key_of(path)) not in shardings or not (leaf.shard_over or np.ndim(x) == np.ndim(param)):
            return x if old is None else constrained(x, typed_sharding(jax.typeof(old)))
        sharding, why = state_sharding(leaf, np.shape(x), shardings[name], np.shape(param))
        return x if why else constrained(x, sharding)

    leaves, treedef = jax.tree.flatten(state)
    olds = [None] * len(plan) if before is None else jax.tree.leaves(before)
    return jax.tree.unflatten(treedef, list(map(sharded, leaves, plan, olds)))


Axes = tuple[int | None, ...]  # for each axis of a leaf the axis of its parameter; None: none of them


def axes_in_parameter(
    init: Callable[[Any], Any], params: Any, leaves: Sequence[tuple[int | None, tuple[int, ...]]]
) -> list[Axes | None]:
    """Find the axes of its parameter that a smaller state leaf, such as a factored second moment, has.

    A row factor of a square matrix has the shape of a column factor. So ``init`` is traced once more with parameters
    whose axes all have different sizes, which tell the factors apart.

    Args:
      init: the ``init`` of a transformation.
      params: the parameters.
      leaves: for each state leaf, its parameter's number and its shape.

    Returns:
      The axes of each leaf; ``None`` if they are not known.
    """
    flat, treedef = jax.tree.flatten(params)
    unknown: list[Axes | None] = [None] * len(leaves)
    if all(i is None or len(shape) in (0, len(np.shape(flat[i]))) for i, shape in leaves):
        return unknown
    changed = [jax.ShapeDtypeStruct(_distinct(np.shape(x)), x.dtype) for x in flat]
    try:
        with described(()):
            probe = jax.tree.leaves(jax.eval_shape(init, jax.tree.unflatten(treedef, changed)))
    except Exception:  # an init that looks at more than shapes
        return unknown

    def axes(i: int | None, shape: tuple[int, ...], probed: tuple[int, ...]) -> Axes | None:
        if i is None or len(shape) != len(probed):
            return None
        at, param = changed[i].shape, np.shape(flat[i])
        return tuple(
            at.index(m) if m in at and param[at.index(m)] == n else None for n, m in zip(shape, probed, strict=True)
        )

    same = len(probe) == len(leaves)
    return [axes(*leaf, x.shape) for leaf, x in zip(leaves, probe, strict=True)] if same else unknown


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return about the same sizes, all different; of two equal sizes the later one becomes the larger."""
    sizes, last = list(shape), 0
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis)):
        sizes[axis] = last = max(shape[axis], last + 1)
    return tuple(sizes)
