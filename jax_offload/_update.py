"""From a recipe that loads everything, updates and stores everything, to the same thing streamed."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import optax

from jax_offload._branches import numbers_ahead
from jax_offload._placement import Order, ranks
from jax_offload._stream import stream
from jax_offload._trace import births, trace

# While a recipe is traced, every offload inside it is a recipe too, and says here with which window and order: the
# whole is then cut and streamed at once.
_INSIDE: contextvars.ContextVar[list[tuple[int | None, Order]] | None] = contextvars.ContextVar("inside", default=None)


def streamed(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    *,
    next_of: tuple[int, ...],
    window: int | None = None,
    order: Order = None,
) -> Any:
    """``recipe(*args)``, with host leaves loaded, used and stored slice by slice.

    Args:
      recipe: a function of (updates, state, params, extra arguments).
      args: its arguments; what is not an array in them becomes part of the program.
      next_of: for each tree that the recipe returns, the number of the argument that it is the next value of.
      window, order: as in ``offload``.
    """
    if (outer := _INSIDE.get()) is not None:
        outer.append((window, order))
        return recipe(*args)
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]

    def on_arrays(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        return recipe(*jax.tree.unflatten(treedef, filled))

    inside: list[tuple[int | None, Order]] = []
    token = _INSIDE.set(inside)
    try:
        program, out_tree = trace(on_arrays, *(leaves[i] for i in arrays))
    finally:
        _INSIDE.reset(token)
    window = window or max((w or 0 for w, _ in inside), default=0) or None
    order = order or next((rules for _, rules in inside if rules), None)

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
    in_order = ranks(state, updates if params is None else params, order, made)
    rank = {starts[1] + k: place for k, place in enumerate(in_order)}
    results = stream(
        numbers_ahead(program),
        [leaves[i] for i in arrays],
        gradients={position[i] for i in range(starts[1]) if i in position},
        reuse=reuse,
        rank=lambda k: rank.get(arrays[k], -1),
        window=window,
    )
    return jax.tree.unflatten(out_tree, results)


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

    return streamed(recipe, (grads, state, params, extra_args), next_of=(2, 1))


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
