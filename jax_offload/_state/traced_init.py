"""The state that ``tx.init(params)`` would give, read off a trace: of each leaf its row, its type and its sharding.

The init of the whole transformation is traced, so that an ``offload`` anywhere inside it counts, and nothing is
allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jax_offload._base import memory
from jax_offload._base.around import described
from jax_offload._base.arrays import is_like
from jax_offload._base.jaxprs import Literal, jaxpr_of
from jax_offload._base.on_disk import typed
from jax_offload._base.own_primitives import marks_in
from jax_offload._base.paths import owners
from jax_offload._base.shardings import is_explicit, sharding_of, shards_of, typed_sharding, without_axes
from jax_offload._placement.factored import axes_in_parameter
from jax_offload._placement.placement import Leaf, unmanaged
from jax_offload._placement.zero import state_sharding
from jax_offload._update.arguments import check_transformation


def placed_state(tx: optax.GradientTransformation, params: Any) -> Any:
    """``abstract_state``, with shardings as the arrays that ``init`` gives have them."""
    leaves, treedef = placed_leaves(tx, params, remember=True)
    return jax.tree.unflatten(treedef, abstract_leaves(leaves))


def abstract_leaves(leaves: Iterable[tuple[Leaf, Any, Sharding]]) -> list[Any]:
    """The leaves of ``abstract_state``, of what ``placed_leaves`` returns."""
    return [
        typed(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s, weak_type=getattr(x, "weak_type", False)), leaf.place)
        for leaf, x, s in leaves
    ]


def placed_leaves(
    tx: optax.GradientTransformation, params: Any, *, remember: bool = False
) -> tuple[list[tuple[Leaf, Any, Sharding]], Any]:
    """For every state leaf its row of the table, its type and its sharding; and the state's tree."""
    leaves, treedef = traced_init(tx, params, remember=remember)
    flat = jax.tree.leaves(params)
    shardings = [_sharding(x) for x in flat]
    everywhere = _replicated(shardings)
    axes = axes_in_parameter(tx.init, params, [(leaf.owner, aval.shape) for leaf, aval in leaves])
    placed = []
    for (leaf, aval), of_param in zip(leaves, axes, strict=True):
        own = None if leaf.owner is None else shardings[leaf.owner]
        shape = () if leaf.owner is None else np.shape(flat[leaf.owner])
        sharding, note = everywhere, ""
        if own is not None and aval.shape != () and is_like(leaf.path, aval.shape, shape):
            sharding, why = state_sharding(leaf, aval.shape, own, shape, f"parameter {leaf.param}")
            note = f" ({why})" if why else ""
        elif of_param is not None and isinstance(own, NamedSharding):
            sharding = without_axes(own, of_param)
        typed = typed_sharding(aval)
        if typed is not None and isinstance(everywhere, NamedSharding) and is_explicit(typed.mesh):
            sharding = NamedSharding(everywhere.mesh, typed.spec)  # with Explicit axes the types tell
        spec = f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else ""
        shard_bytes = leaf.nbytes // math.prod(shards_of(sharding, aval.shape))
        leaf = dataclasses.replace(leaf, sharding=f"{spec}{note}", shard_bytes=shard_bytes)
        kind = memory.HOST_KIND if leaf.host or leaf.disk else memory.DEVICE_KIND
        sharding = memory.with_kind(sharding, kind)
        leaf = leaf if leaf.place is None else dataclasses.replace(leaf, place=leaf.place.at(sharding))
        placed.append((leaf, aval, sharding))
    return placed, treedef


def traced_init(
    tx: optax.GradientTransformation, params: Any, *, remember: bool = False
) -> tuple[list[tuple[Leaf, Any]], Any]:
    """For every state leaf its row of the table and its type; and the state's tree."""
    check_transformation(tx, "(tx, params)")
    found: list[Any] = []

    def init(params: Any) -> Any:
        state = tx.init(params)
        found.extend(jax.tree_util.tree_flatten_with_path(state)[0])
        return state

    with described(params, remember=remember):
        closed, treedef = jaxpr_of(init, params)
    rows = marks_in(closed)
    owner = owners([path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]])
    leaves = []
    for (path, x), v, aval in zip(found, closed.jaxpr.outvars, closed.out_avals, strict=True):
        row = unmanaged(aval if hasattr(x, "dtype") else x) if isinstance(v, Literal) or v not in rows else rows[v]
        leaf = dataclasses.replace(
            row, path=jax.tree_util.keystr(path), owner=owner(path), host=memory.is_host_aval(aval) and not row.disk
        )
        leaves.append((leaf, aval))
    return leaves, treedef


def _sharding(param: Any) -> Sharding:
    placed = sharding_of(param)
    traced = isinstance(param, Tracer)
    loose = isinstance(param, jax.Array) and not traced and not param.committed and memory.mesh_is_set()
    return memory.ambient_sharding() if placed is None or loose else placed


def _replicated(shardings: list[Sharding]) -> Sharding:
    first = shardings[0] if shardings else memory.ambient_sharding()
    return NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
