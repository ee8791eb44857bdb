"""ZeRO-1: a state divided over mesh axes along which its parameters are replicated (Rajbhandari et al. 2020).

Each device updates its part: gradients are scattered as they are reduced, and what becomes of them is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_offload._base.around import Remembered
from jax_offload._base.paths import key_of
from jax_offload._base.shardings import (
    Layouts,
    Shardings,
    constrained,
    fitted,
    names_in,
    padded,
    shards_of,
    typed_sharding,
)
from jax_offload._placement.placement import Leaf


def axes_of(shard_over: Any) -> tuple[str, ...]:
    """``shard_over`` as a tuple of names."""
    axes = (shard_over,) if isinstance(shard_over, str) else shard_over
    if axes is None:
        return ()
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(name, str) for name in axes):
        raise ValueError(f"shard_over: expected the name of a mesh axis, or several; got {shard_over!r}.")
    if len(set(axes)) < len(axes):
        raise ValueError(f"shard_over: names an axis twice: {shard_over!r}.")
    return tuple(axes)


def partitioned(
    sharding: Sharding | None, shape: Sequence[int], over: Sequence[str], whose: str
) -> NamedSharding | str:
    """``sharding`` divided over further mesh axes too, or why it cannot be.

    It takes the first axis of the array that divides evenly, of those that are not sharded yet if there is one. Of
    three and more axes the first comes last: in a scanned model it counts the layers, and each layer's gradient, as it
    appears, can then be scattered to all devices.

    Raises:
      ValueError: the mesh has no such axis, or there is no mesh.
    """
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"shard_over: {tuple(over)} are axes of a mesh, but {whose} is on {sharding}. Fix: give the parameters "
            "a NamedSharding (jax.device_put, or out_shardings of what makes them)."
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
            while spec[-1] is None:
                spec.pop()  # as XLA spells it: P("x", None) for the same would compile a second time
            return sharding.update(spec=PartitionSpec(*spec))
    return f"no axis divides by {parts}"


def partitions(plan: Sequence[Leaf], params: Any, shardings: Shardings, remembered: Remembered) -> Layouts:
    """By their paths, the parameters whose state is divided further: how, and how their gradients and updates are.

    Args:
      plan: the table of the state.
      params: the parameters, or gradients.
      shardings: of the parameters, as far as they are known.
      remembered: what they were in, for the message.

    Raises:
      ValueError: some are not known.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    found: Layouts = {}
    for i, over in {leaf.owner: leaf.shard_over for leaf in plan if leaf.owner is not None and leaf.shard_over}.items():
        path, x = flat[i]
        if (name := key_of(path)) in shardings:
            sharded = partitioned(shardings[name], x.shape, over, _parameter(name))
            if isinstance(sharded, NamedSharding):
                found[name] = sharded
        else:
            several = list(remembered.of(name))
            raise ValueError(
                f"shard_over: parameter {name} was seen in several shardings, {several}, and with Auto mesh axes a "
                "trace does not tell which it is. Make an offload(...) for each model and mesh."
                if several
                else f"shard_over: the sharding of parameter {name} is not known: with Auto mesh axes a trace does not "
                "tell. Call tx.init on the parameters, or jax_offload.state_shardings(tx, params), before update is "
                "traced; an offload(...) that each step makes anew, as in inject_hyperparams, belongs around that."
            )
    return found


def check_not_manual() -> None:
    """Raises ``ValueError`` inside ``shard_map``, where gradients cannot be divided over axes of the mesh."""
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"shard_over: update is traced inside shard_map, manual over {manual}. Take it out of shard_map, or leave "
            "shard_over out and divide the state yourself."
        )


def check_typed(sharded: Layouts, error: Exception) -> None:
    """Says what to do where an optimizer mixes divided arrays with others, which types forbid."""
    if sharded and type(error).__name__ == "ShardingTypeError":
        raise ValueError(
            "shard_over: on a mesh with Explicit axes this optimizer cannot mix gradients that are divided with state "
            "that is not (factored moments, say). Use Auto axes, or leave shard_over out."
        ) from error


def resharded(tree: Any, shardings: Mapping[str, Sharding], like: Any = None) -> Any:
    """A tree like the parameters, those that have an entry in that sharding.

    ``like``: the parameters. Gradients of each example have one more axis, the first; where types do not tell
    shardings they stay as they are.
    """
    if not shardings:
        return tree
    shapes = {key_of(path): np.shape(x) for path, x in jax.tree_util.tree_flatten_with_path(like)[0]}

    def one(path: Any, x: Any) -> Any:
        sharding, shape = shardings.get(key_of(path)), shapes.get(key_of(path), np.shape(x))
        if sharding is None or shape == np.shape(x):
            return constrained(x, sharding)
        if shape == np.shape(x)[1:] and isinstance(sharding, NamedSharding) and typed_sharding(jax.typeof(x)):
            return constrained(x, sharding.update(spec=PartitionSpec(None, *sharding.spec)))
        return x

    return jax.tree_util.tree_map_with_path(one, tree)


def state_sharding(
    leaf: Leaf, shape: Sequence[int], own: Sharding, param: Sequence[int], whose: str
) -> tuple[Sharding, str]:
    """How a state leaf is divided that is like its parameter: as that, and over ``leaf.shard_over``; or why not that.

    Args:
      leaf: its row of the table.
      shape: of the leaf; blocks of the last axis may have one scale each.
      own: the parameter's sharding.
      param: the parameter's shape.
      whose: its name, for messages.
    """
    sharded = partitioned(own, param, leaf.shard_over, whose) if leaf.shard_over else own
    sharding, why = (own, sharded) if isinstance(sharded, str) else (sharded, "")
    return sharding if tuple(shape) == tuple(param) else fitted(sharding, shape), why


def resharded_state(
    leaves: Sequence[Any], plan: Sequence[Leaf], params: Any, shardings: Shardings, before: Sequence[Any] = ()
) -> list[Any]:
    """Divide the leaves of a state further, as far as the shardings of their parameters are known.

    A leaf that is not divided further, such as a scale that stays on the device or a factored moment, is made of
    gradients that are. It keeps the sharding it had: otherwise the second step would be another program, and a loop's
    carry would change its type.

    Args:
      leaves: of the state.
      plan: its table.
      params: the parameters.
      shardings: of the parameters, as far as they are known.
      before: the leaves of the state before the update; empty where it is not the same tree, or is being made.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    owners = {leaf.owner for leaf in plan if leaf.shard_over}

    def sharded(x: Any, leaf: Leaf, old: Any) -> Any:
        if leaf.owner is None or leaf.owner not in owners:
            return x
        path, param = flat[leaf.owner]
        if (name := key_of(path)) not in shardings or not (leaf.shard_over or np.ndim(x) == np.ndim(param)):
            return x if old is None else constrained(x, typed_sharding(jax.typeof(old)))
        sharding, why = state_sharding(leaf, np.shape(x), shardings[name], np.shape(param), _parameter(name))
        return x if why else constrained(x, sharding)

    return [sharded(x, leaf, old) for x, leaf, old in zip(leaves, plan, before or [None] * len(plan), strict=True)]


def _parameter(name: str) -> str:
    return f"parameter {name}"
