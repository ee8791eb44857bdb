"""From a recipe that loads everything, updates and stores everything, to the same thing streamed."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import optax

from jax_offload._boxes import key_of
from jax_offload._branches import numbers_ahead
from jax_offload._placement import Order, owners, ranks
from jax_offload._sharding import Axes, Sharded
from jax_offload._stream import stream
from jax_offload._trace import births, trace


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``offload`` was told, and has seen, about streaming."""

    window: int | None = None
    order: Order = None
    sharded: Sharded = dataclasses.field(default_factory=dict)


# While a recipe is traced, every offload inside it is a recipe too, and leaves its options here: the whole is then cut
# and streamed at once.
_INSIDE: contextvars.ContextVar[list[Options] | None] = contextvars.ContextVar("inside", default=None)


def streamed(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    *,
    next_of: tuple[int, ...],
    options: Options,
) -> Any:
    """``recipe(*args)``, with host leaves loaded, used and stored slice by slice.

    Args:
      recipe: a function of (updates, state, params, extra arguments).
      args: its arguments; what is not an array in them becomes part of the program.
      next_of: for each tree that the recipe returns, the number of the argument that it is the next value of.
      options: of the ``offload`` whose recipe it is.
    """
    if (outer := _INSIDE.get()) is not None:
        outer.append(options)
        return recipe(*args)
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]

    def on_arrays(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        return recipe(*jax.tree.unflatten(treedef, filled))

    inside: list[Options] = [options]
    token = _INSIDE.set(inside)
    try:
        program, out_tree = trace(on_arrays, *(leaves[i] for i in arrays))
    finally:
        _INSIDE.reset(token)
    window = max(each.window or 0 for each in inside) or None
    order = next((each.order for each in inside if each.order), None)
    sharded = {path: axes for each in inside for path, axes in each.sharded.items()}

    updates, state, params, *_ = args
    trees = treedef.children()
    starts = [0, *accumulate(tree.num_leaves for tree in trees)]
    position = {i: k for k, i in enumerate(arrays)}
    reuse, result = {}, 0
    for tree, argument in zip(out_tree.children(), next_of, strict=True):
        for k in range(tree.num_leaves):
            if tree == trees[argument] and starts[argument] + k in position:
                reuse[result + k] = position[starts[argument] + k]
        result += tree.num_leaves
    made = births(jax.tree.leaves(updates))
    like = updates if params is None else params
    in_order = ranks(state, like, order, made)
    rank = {starts[1] + k: place for k, place in enumerate(in_order)}
    results = stream(
        numbers_ahead(program),
        [leaves[i] for i in arrays],
        gradients={position[i] for i in range(starts[1]) if i in position},
        reuse=reuse,
        rank=lambda k: rank.get(arrays[k], -1),
        window=window,
        sharded={
            position[starts[1] + k]: axes for k, axes in _of_leaves(sharded, state, like) if starts[1] + k in position
        },
    )
    return jax.tree.unflatten(out_tree, results)


def _of_leaves(sharded: Sharded, state: Any, params: Any) -> list[tuple[int, Axes]]:
    """The sharded axes of the state leaves: of those that have their parameter's shape."""
    if not sharded:
        return []
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    owner, found = owners([path for path, _ in flat]), []
    for k, (path, x) in enumerate(jax.tree_util.tree_flatten_with_path(state)[0]):
        i = owner(path)
        if i is not None and np.shape(x) == np.shape(flat[i][1]):
            found.append((k, sharded.get(key_of(flat[i][0]), frozenset())))
    return found


def update_params(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """``tx.update`` and ``optax.apply_updates`` in one, so that no tree of updates ever exists.

    New parameters are written where the old ones are, in the same loop that streams the state. That matters where the
    updates cannot take the gradients' memory: with bfloat16 parameters and float32 arithmetic, say.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      grads: the gradients, a tree like ``params``.
      state: ``tx``'s state.
      params: the parameters.
      **extra_args: passed on to ``tx.update``.

    Returns:
      The new parameters, with the dtypes of the old ones, and the new state.
    """
    tx = optax.with_extra_args_support(tx)

    def recipe(grads: Any, state: Any, params: Any, extra_args: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return streamed(recipe, (grads, state, params, extra_args), next_of=(2, 1), options=Options())


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
