"""From a recipe that loads everything, updates and stores everything, to the same thing streamed."""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from jax_offload._branches import numbers_ahead
from jax_offload._master import landed
from jax_offload._order import Order, births, is_constrained, ranks
from jax_offload._paths import key_of, owners
from jax_offload._placement import is_like
from jax_offload._sharding import Layouts, Shardings, Shards, is_explicit, shards_of, typed_sharding
from jax_offload._skip import carried_unless
from jax_offload._stream import stream
from jax_offload._trace import trace
from jax_offload._turns import Turns, is_large
from jax_offload._zero import arranged


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``offload`` was told, and has seen, about streaming.

    Attributes:
      window, order: its arguments.
      shardings: of the parameters, by path, as far as they are known.
      partitions: of the gradients, by the parameters' paths, where the state is divided further (ZeRO-1).
      in_turn: whether gradients of what stays on the device wait for each other. Not where every one has an accumulator
        there: all would.
    """

    window: int | None = None
    order: Order = None
    shardings: Shardings = dataclasses.field(default_factory=dict)
    partitions: Layouts = dataclasses.field(default_factory=dict)
    in_turn: bool = True

    @property
    def whole(self) -> Shardings:
        """Of the parameters whose state is divided further."""
        return {path: self.shardings[path] for path in self.partitions}


# While a recipe is traced, every offload inside it is a recipe too, and leaves its options here: the whole is then cut
# and streamed at once.
_INSIDE: contextvars.ContextVar[list[Options] | None] = contextvars.ContextVar("inside", default=None)

# While ``update_params`` is traced, updates stay divided: it is the new parameters that are gathered.
_DIVIDED: contextvars.ContextVar[bool] = contextvars.ContextVar("divided", default=False)


def _merged(inside: list[Options]) -> Options:
    return Options(
        window=max(each.window or 0 for each in inside) or None,
        order=next((each.order for each in inside if each.order), None),
        shardings={path: s for each in inside for path, s in each.shardings.items()},
        partitions={path: s for each in inside for path, s in each.partitions.items()},
        in_turn=all(each.in_turn for each in inside),
    )


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
    updates, state, params, *rest = args
    # Divided before anything else: then they are scattered as they are reduced, and only parts are alive.
    args = (arranged(updates, options.partitions, params), state, params, *rest)
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
    given = _merged(inside)
    if given.partitions and not options.partitions and not _typed(updates):
        leaves[: len(jax.tree.leaves(updates))] = jax.tree.leaves(arranged(updates, given.partitions, params))

    trees = treedef.children()
    starts = [0, *accumulate(tree.num_leaves for tree in trees)]
    position = {i: k for k, i in enumerate(arrays)}
    paths = [key_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    reuse, result = {}, 0
    for tree, argument in zip(out_tree.children(), next_of, strict=True):
        for k in range(tree.num_leaves if tree == trees[argument] else 0):
            gathered = argument == 0 and paths[k] in given.partitions  # larger than the gradient
            if starts[argument] + k in position and not gathered:
                reuse[result + k] = position[starts[argument] + k]
        result += tree.num_leaves
    made = births(jax.tree.leaves(updates))
    like = updates if params is None else params
    in_order = ranks(state, like, given.order, made)
    rank = {starts[1] + k: place for k, place in enumerate(in_order)}
    first = len(program.consts)
    found = enumerate(_shards(given, updates, state, params))
    shards = {program.inputs[first + position[i]]: n for i, n in found if n is not None and i in position}
    results = stream(
        dataclasses.replace(numbers_ahead(program), shards=shards),
        [leaves[i] for i in arrays],
        gradients=[position[i] for i in _in_order(updates, given.order, made) if i in position],
        turns=_turns(given, updates, made),
        reuse=reuse,
        rank=lambda k: rank.get(arrays[k], -1),
        window=given.window,
    )
    return jax.tree.unflatten(out_tree, results)


def _in_order(updates: Any, order: Order, births: list[int] | None) -> list[int]:
    """The gradients' numbers, in the order of the backward pass."""
    rank = ranks(updates, updates, order, births)
    return sorted(range(len(rank)), key=rank.__getitem__)


def _turns(options: Options, updates: Any, births: list[int] | None) -> Turns:
    """Which gradients wait for each other: none where one is divided between devices, or might be."""
    leaves = jax.tree_util.tree_flatten_with_path(updates)[0]
    for path, x in leaves if jax.device_count() > 1 else []:
        if is_array(x) and is_large(x):
            typed, key = typed_sharding(jax.typeof(x)), key_of(path)
            explicit = typed is not None and is_explicit(typed.mesh)
            sharding = typed if explicit else options.partitions.get(key) or options.shardings.get(key)
            if sharding is None or is_constrained(x) or math.prod(shards_of(sharding, x.shape)) > 1:
                return Turns.NONE
    return Turns.SUMS if births is None or not options.in_turn else Turns.ALL


def gathered(updates: Any, options: Options) -> Any:
    """Updates as their parameters are, but for ``update_params``, which gathers the new parameters instead."""
    return updates if _DIVIDED.get() and not _typed(updates) else arranged(updates, options.whole)


def divided_params(params: Any, options: Options) -> Any:
    """Parameters divided as their gradients are. What they were is said first, lest XLA divide them before a loop."""
    return arranged(arranged(params, options.whole), options.partitions)


def _gathered_into(params: Any, new: Any, options: Options) -> Any:
    """The new parameters, whole again, in the memory of the old ones.

    XLA does not gather into a donated buffer: a TPU copied each parameter twice. A choice between both, whose outcome
    it cannot know, it makes in place.
    """
    if not options.partitions:
        return new
    true = jax.lax.optimization_barrier(True)
    new, old = arranged(new, options.whole), arranged(params, options.whole)
    return arranged(jax.tree.map(lambda new, old: jnp.where(true, new, old), new, old), options.whole)


def _typed(tree: Any) -> bool:
    """Whether types tell shardings, so that arrays of different ones cannot be added."""
    return any(typed_sharding(jax.typeof(x)) is not None for x in jax.tree.leaves(tree) if is_array(x))


def _shards(options: Options, updates: Any, state: Any, params: Any) -> list[Shards | None]:
    """For every leaf of (updates, state, params) how it is divided, as far as that is known."""
    like = updates if params is None else params
    flat = jax.tree_util.tree_flatten_with_path(like)[0]
    own = {path: shards_of(options.shardings.get(key_of(path)), np.shape(x)) for path, x in flat}
    shapes = {path: np.shape(x) for path, x in flat}
    divided = {path: shards_of(s, shapes[path]) for path in own if (s := options.partitions.get(key_of(path)))}
    owner, found = owners([path for path, _ in flat]), []
    for tree, known in (updates, own | divided), (state, own | divided), (params, own):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            i = owner(path)
            typed = typed_sharding(jax.typeof(x)) if is_array(x) else None
            if typed is not None and is_explicit(typed.mesh):
                found.append(shards_of(typed, x.shape))
            elif i is None or not is_like(keystr(path), np.shape(x), np.shape(flat[i][1])):
                found.append(None)
            else:
                shards = known[flat[i][0]]
                found.append(tuple(k if n % k == 0 else 1 for n, k in zip(np.shape(x), shards, strict=True)))
    return found


def update_params(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    skip: Any = None,
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
      skip: a bool, traced or not. Where it holds, parameters and state stay as they are, bit for bit, and nothing
        moves: ``~is_finite`` of flax's ``DynamicScale``. On several devices it must be the same on all.
      **extra_args: passed on to ``tx.update``.

    Returns:
      The new parameters, with the dtypes of the old ones, and the new state.
    """
    if skip is not None:
        return carried_unless(skip, lambda c: update_params(tx, grads, c[1], c[0], **extra_args), (params, state))
    tx = optax.with_extra_args_support(tx)

    def recipe(grads: Any, state: Any, params: Any, extra_args: Any) -> Any:
        token = _DIVIDED.set(True)
        try:
            updates, state = tx.update(grads, state, params, **extra_args)
        finally:
            _DIVIDED.reset(token)
        given = _merged(_INSIDE.get() or [Options()])
        new = landed(params if _typed(updates) else divided_params(params, given), updates, state)
        return _gathered_into(params, new, given), state

    return streamed(recipe, (grads, state, params, extra_args), next_of=(2, 1), options=Options())


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
