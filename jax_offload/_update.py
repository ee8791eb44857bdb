"""From a recipe that loads everything, updates and stores everything, to the same thing streamed."""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from jax_offload._arguments import check_transformation
from jax_offload._base.arrays import is_array, is_like
from jax_offload._base.eager import compiled_where_eager
from jax_offload._base.memory import is_host_aval
from jax_offload._base.paths import key_of, owners
from jax_offload._base.shardings import (
    Layouts,
    Shardings,
    Shards,
    devices_of,
    is_explicit,
    is_manual,
    shards_of,
    typed_sharding,
)
from jax_offload._base.tracers import is_constrained, production_order
from jax_offload._emit.region import Update, bound
from jax_offload._emit.serialise import Serialise, is_large
from jax_offload._emit.skip import carried_unless
from jax_offload._ir.branches import scalars_hoisted
from jax_offload._ir.program import Var, trace
from jax_offload._plan.decide import Region, plan_of
from jax_offload._plan.order import Order, ranks
from jax_offload._zero import resharded


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``offload`` was told, and has seen, about streaming.

    Attributes:
      window, order: its arguments.
      shardings: of the parameters, by path, as far as they are known.
      partitions: of the gradients, by the parameters' paths, where the state is divided further (ZeRO-1).
      serialise: whether gradients of what stays on the device wait for each other. Not where every one has an
        accumulator there: all would.
    """

    window: int | None = None
    order: Order = None
    shardings: Shardings = dataclasses.field(default_factory=dict)
    partitions: Layouts = dataclasses.field(default_factory=dict)
    serialise: bool = True

    @property
    def whole(self) -> Shardings:
        """Of the parameters whose state is divided further."""
        return {path: self.shardings[path] for path in self.partitions}


@dataclasses.dataclass(frozen=True)
class _Inside:
    """An ``offload`` whose recipe is part of the one that is traced, and the state's leaves as it got them."""

    options: Options
    leaves: list[Any]


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What is said while a recipe is traced: of the offloads in it, and which leaves are others that were loaded."""

    offloads: list[_Inside]
    loaded: list[tuple[Any, Any]]


# While a recipe is traced, every offload inside it is a recipe too, and says here what it was told: the whole is then
# cut and streamed at once, each leaf as its own offload says.
_INSIDE: contextvars.ContextVar[_Recipe | None] = contextvars.ContextVar("inside", default=None)

# While ``update_params`` is traced, updates stay divided: it is the new parameters that are gathered.
_STAY_SHARDED: contextvars.ContextVar[bool] = contextvars.ContextVar("divided", default=False)


def loaded_from(state: Any, original: Any) -> None:
    """Says that the leaves of ``state`` are those of ``original``, loaded: a wrapper does it for what is inside it."""
    if (recipe := _INSIDE.get()) is not None:
        recipe.loaded.extend(zip(jax.tree.leaves(state), jax.tree.leaves(original), strict=True))


def _own(options: Options | None, by_leaf: Sequence[Options] | None, state: Any) -> list[_Inside]:
    if options is None:
        return []
    leaves = jax.tree.leaves(state)
    groups: dict[Any, _Inside] = {}
    for x, of_leaf in zip(leaves, by_leaf or [options] * len(leaves), strict=True):
        key = of_leaf.window, _as_key(of_leaf.order)
        told = dataclasses.replace(options, window=of_leaf.window, order=of_leaf.order)
        groups.setdefault(key, _Inside(told, [])).leaves.append(x)
    return list(groups.values()) or [_Inside(options, [])]


def _merged(inside: list[_Inside]) -> Options:
    """What is known of the parameters: all that any of them knows."""
    return Options(
        shardings={path: s for each in inside for path, s in each.options.shardings.items()},
        partitions={path: s for each in inside for path, s in each.options.partitions.items()},
        serialise=all(each.options.serialise for each in inside),
    )


def streamed(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    *,
    next_of: tuple[int, ...],
    options: Options | None = None,
    by_leaf: Sequence[Options] | None = None,
) -> Any:
    """``recipe(*args)``, with host leaves loaded, used and stored slice by slice.

    Args:
      recipe: a function of (updates, state, params, extra arguments).
      args: its arguments; what is not an array in them becomes part of the program.
      next_of: for each tree that the recipe returns, the number of the argument that it is the next value of.
      options: of the ``offload`` whose recipe it is; ``None``: each ``offload`` inside has its own.
      by_leaf: for every leaf of the state window and order of its ``offload``, where the recipe is a wrapper's.
    """
    updates, state, params, *rest = args
    own = _own(options, by_leaf, state)
    if (outer := _INSIDE.get()) is not None:
        outer.offloads.extend(own)
        return recipe(*args)
    # Divided before anything else: then they are scattered as they are reduced, and only parts are alive.
    args = (resharded(updates, _merged(own).partitions, params), state, params, *rest)
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]

    inside, loaded = [], []
    whose: dict[int, int] = {}  # position of a state leaf -> the offload that it belongs to

    def on_arrays(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args = jax.tree.unflatten(treedef, filled)
        inside[:] = _own(options, by_leaf, args[1])
        result = recipe(*args)
        position = {id(x): k for k, x in enumerate(values)}
        position |= {id(x): position[id(old)] for x, old in loaded if id(old) in position}
        for r, each in enumerate(inside):
            whose.update((position[id(x)], r) for x in each.leaves if id(x) in position)
            each.leaves.clear()  # jax.checking_leaks sees tracers that outlive their trace
        loaded.clear()
        return result

    token = _INSIDE.set(_Recipe(inside, loaded))
    try:
        program, out_tree = trace(on_arrays, *(leaves[i] for i in arrays))
    finally:
        _INSIDE.reset(token)
    given = _merged(inside)
    if given.partitions and options is None and not _typed(updates):
        leaves[: len(jax.tree.leaves(updates))] = jax.tree.leaves(resharded(updates, given.partitions, params))

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
    made = production_order(jax.tree.leaves(updates))
    like = updates if params is None else params
    first = len(program.consts)
    inputs = program.inputs[first:]
    found = enumerate(_shards(given, updates, state, params))
    shards = {inputs[position[i]]: n for i, n in found if n is not None and i in position}
    program = dataclasses.replace(scalars_hoisted(program), shards=shards)
    rank: dict[Var, int] = {}
    for order in {None, *(_as_key(each.options.order) for each in inside)}:
        of_order = {k for k, r in whose.items() if _as_key(inside[r].options.order) == order}
        for k, place in enumerate(ranks(state, like, order, made)):
            at = position.get(starts[1] + k)
            if at is not None and (at in of_order or (order is None and at not in whose)):
                rank[inputs[at]] = place
    next_value = {
        program.outputs[i]: inputs[j] for i, j in reuse.items() if not isinstance(program.outputs[i], jex.Literal)
    }
    plan = plan_of(program, next_value, _regions(inputs, inside, whose), lambda v: rank.get(v, -1), manual=is_manual())
    order = next((each.options.order for each in inside if each.options.order), None)
    gradients = tuple(position[i] for i in _in_order(updates, order, made) if i in position)
    leaves_of_state = jax.tree_util.tree_flatten_with_path(state)[0]
    names = {
        inputs[position[starts[1] + k]]: keystr(path, simple=True, separator="/")
        for k, (path, _) in enumerate(leaves_of_state)
        if starts[1] + k in position
    }
    names |= {new: names[old] for new, old in next_value.items() if old in names}
    update = Update(program, plan, gradients, _serialise(given, updates, made), {*next_value}, names)
    results = bound(update, [leaves[i] for i in arrays])
    return jax.tree.unflatten(out_tree, results)


def _regions(inputs: Sequence[Var], inside: Sequence[_Inside], whose: Mapping[int, int]) -> list[Region]:
    """The host leaves of each ``offload``; last those that a wrapper has changed on the way, and that nobody claims."""
    hosts = [k for k, v in enumerate(inputs) if is_host_aval(v.aval)]
    windows = [each.options.window for each in inside]
    claimed = [frozenset(inputs[k] for k in hosts if whose.get(k) == r) for r in range(len(inside))]
    rest = frozenset(inputs[k] for k in hosts if k not in whose)
    return [*map(Region, claimed, windows), Region(rest, max((w for w in windows if w), default=None))]


def _as_key(order: Order) -> tuple[str, ...] | None:
    return None if order is None else tuple(order)


def _in_order(updates: Any, order: Order, production_order: list[int] | None) -> list[int]:
    """The gradients' numbers, in the order of the backward pass."""
    rank = ranks(updates, updates, order, production_order)
    return sorted(range(len(rank)), key=rank.__getitem__)


def _serialise(options: Options, updates: Any, production_order: list[int] | None) -> Serialise:
    """Which gradients wait for each other: none where one is divided between devices, or might be."""
    for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if is_array(x) and is_large(x):
            typed, key = typed_sharding(jax.typeof(x)), key_of(path)
            explicit = typed is not None and is_explicit(typed.mesh)
            sharding = typed if explicit else options.partitions.get(key) or options.shardings.get(key)
            parts = devices_of(x) if sharding is None else math.prod(shards_of(sharding, x.shape))
            if parts > 1 or (is_constrained(x) and devices_of(x) > 1):
                return Serialise.NONE
    return Serialise.SUMS if production_order is None or not options.serialise else Serialise.ALL


def gathered(updates: Any, options: Options) -> Any:
    """Updates as their parameters are, but for ``update_params``, which gathers the new parameters instead."""
    return updates if _STAY_SHARDED.get() and not _typed(updates) else resharded(updates, options.whole)


def sharded_params(params: Any, options: Options) -> Any:
    """Parameters divided as their gradients are. What they were is said first, lest XLA divide them before a loop."""
    return resharded(resharded(params, options.whole), options.partitions)


def _applied(params: Any, updates: Any, state: Any) -> Any:
    """``optax.apply_updates``, or what a node of the state does instead: master parameters say where theirs land."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: hasattr(type(x), "apply_updates"))
    own = next((x.apply_updates for x in nodes if hasattr(type(x), "apply_updates")), None)
    return optax.apply_updates(params, updates) if own is None else own(params, updates, state)


def _replicated_into(params: Any, new: Any, options: Options) -> Any:
    """The new parameters, whole again, in the memory of the old ones.

    XLA does not gather into a donated buffer: a TPU copied each parameter twice. A choice between both, whose outcome
    it cannot know, it makes in place.
    """
    if not options.partitions:
        return new
    true = jax.lax.optimization_barrier(True)
    new, old = resharded(new, options.whole), resharded(params, options.whole)
    return resharded(jax.tree.map(lambda new, old: jnp.where(true, new, old), new, old), options.whole)


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


@compiled_where_eager(like=lambda tx, grads, state, params, **_: params)
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
      grads: the gradients, a tree like ``params``, of their shapes.
      state: ``tx``'s state.
      params: the parameters.
      skip: a bool, traced or not. Where it holds, parameters and state stay as they are, bit for bit, and nothing
        moves: ``~is_finite`` of flax's ``DynamicScale``. On several devices it must be the same on all.
      **extra_args: passed on to ``tx.update``.

    Returns:
      The new parameters, with the dtypes of the old ones, and the new state.

    Raises:
      ValueError: gradients, state and parameters do not fit each other or ``tx``, or are in each other's places.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> step = jax.jit(functools.partial(jo.update_params, tx), donate_argnums=(1, 2))
      >>> state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
      >>> params, state = step(grads, state, params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
    """
    if skip is not None:
        return carried_unless(skip, lambda c: update_params(tx, grads, c[1], c[0], **extra_args), (params, state))
    check_transformation(tx, "(tx, grads, state, params)")
    tx = optax.with_extra_args_support(tx)

    def recipe(grads: Any, state: Any, params: Any, extra_args: Any) -> Any:
        token = _STAY_SHARDED.set(True)
        try:
            updates, state = tx.update(grads, state, params, **extra_args)
        finally:
            _STAY_SHARDED.reset(token)
        told = _INSIDE.get()
        given = _merged(told.offloads if told else [])
        new = _applied(params if _typed(updates) else sharded_params(params, given), updates, state)
        return _replicated_into(params, new, given), state

    return streamed(recipe, (grads, state, params, extra_args), next_of=(2, 1))
