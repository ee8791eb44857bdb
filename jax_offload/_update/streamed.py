"""From a recipe that loads everything, updates and stores everything, to the same thing streamed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jax_offload._base.arrays import is_array, is_like
from jax_offload._base.jaxprs import Literal
from jax_offload._base.memory import on_host, to_device
from jax_offload._base.paths import key_of, leaves_with_paths, owners
from jax_offload._base.shardings import (
    Layouts,
    Shards,
    devices_of,
    is_explicit,
    is_manual,
    shards_of,
    typed_sharding,
    types_tell,
)
from jax_offload._base.trace import backward_of, is_constrained, production_order
from jax_offload._emit.region import Update, bound
from jax_offload._ir.program import Program, Var
from jax_offload._placement.zero import resharded
from jax_offload._plan.options import Options, claimed, merged
from jax_offload._plan.order import ranks
from jax_offload._plan.serialise import Serialise, is_large
from jax_offload._update.recipe import Traced, traced


def streamed(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    *,
    next_of: tuple[int, ...],
    options: Options | None = None,
) -> Any:
    """``recipe(*args)``, with host leaves loaded, used and stored slice by slice.

    Args:
      recipe: a function of (updates, state, params, extra arguments).
      args: its arguments; what is not an array in them becomes part of the program.
      next_of: for each tree that the recipe returns, the number of the argument that it is the next value of.
      options: of the ``offload`` whose recipe it is; ``None``: each ``offload`` inside has its own.
    """
    updates, state, params, *rest = args
    # A number in host memory would put all that is made of it, a bias correction say, behind a pass of its own.
    state = jax.tree.map(lambda x: to_device(x) if is_array(x) and on_host(x) and not np.ndim(x) else x, state)
    args = updates, state, params, *rest
    # Sharded further before anything else: then they are scattered as they are reduced, and only parts are alive.
    if options is not None:
        args = (resharded(updates, options.partitions, params), state, params, *rest)
    trace = traced(recipe, args, options)
    if options is not None and options.partitions and not types_tell(updates):
        trace = dataclasses.replace(trace, sharded=_ungathered(trace, updates, options.partitions))
    given = merged(trace.claims)
    if given.partitions and options is None and not types_tell(updates):
        args = (resharded(updates, given.partitions, params), state, params, *rest)
    update = _update(trace, given, updates, state, params, next_of)
    return jax.tree.unflatten(trace.out_tree, bound(update, trace.operands(args)))


def part_of_recipe(fun: Callable[..., Any], *args: Any) -> tuple[Any, Options]:
    """``fun(*args)`` in a recipe that is being traced, and what the offloads in it know of the parameters.

    Updates that are divided further stay so, where types do not tell: it is for the recipe to gather what it makes.
    """
    trace = traced(fun, args)
    update = Update(trace.sharded or trace.program, (), Serialise.NONE, {}, {}, trace.claims, {}, is_manual())
    return jax.tree.unflatten(trace.out_tree, bound(update, trace.operands(args))), merged(trace.claims)


def _update(traced: Traced, given: Options, updates: Any, state: Any, params: Any, next_of: tuple[int, ...]) -> Update:
    """What the recipe's trace comes to: sharded and ordered. ``updates`` as they were produced."""
    shards = traced.of_inputs(_shards(given, updates, state, params))
    program = dataclasses.replace(traced.program, shards=shards)
    next_values = _next_values(traced, program.outputs, next_of, updates, given.partitions)
    produced = production_order(jax.tree.leaves(updates))
    rank = _rank(traced, state, updates if params is None else params, produced)
    names = traced.of_inputs([None] * traced.starts[1] + _names(state))
    return Update(
        program,
        _in_order(traced, updates, state, produced),
        _serialise(given, updates, produced),
        names | {new: names[old] for new, old in next_values.items() if old in names},
        next_values,
        traced.claims,
        rank,
        is_manual(),
        traced.sharded,
        backward=backward_of(jax.tree.leaves(updates)),
        ordered=produced is not None,
    )


def _ungathered(traced: Traced, updates: Any, partitions: Layouts) -> Program:
    """The program without the last thing that it does with updates: put them into the sharding of their parameters.

    Its first results are the updates, leaf for leaf as they came: an optimizer keeps their tree.
    """
    program = traced.program
    gathered = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if eqn.primitive.name == "sharding_constraint"}
    outputs = list(program.outputs)
    for k, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(updates)[0]):
        out = outputs[k]
        if key_of(path) in partitions and not isinstance(out, Literal):
            outputs[k] = gathered.get(out, out)
    return dataclasses.replace(program, outputs=outputs)


def _next_values(
    traced: Traced, outputs: Sequence[Any], next_of: tuple[int, ...], updates: Any, partitions: Layouts
) -> dict[Var, Var]:
    """Result -> the input whose next value it is, and whose buffer it may take."""
    paths = [key_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    inputs, starts, found, result = traced.inputs, traced.starts, {}, 0
    for tree, argument in zip(traced.out_tree.children(), next_of, strict=True):
        for k, place in _same_places(tree, traced.trees[argument]):
            out, at = outputs[result + k], traced.position.get(starts[argument] + place)
            replicated = argument == 0 and paths[place] in partitions  # larger than the gradient
            if at is not None and not replicated and not isinstance(out, Literal):
                found[out] = inputs[at]
        result += tree.num_leaves
    return found


def _same_places(new: Any, old: Any) -> list[tuple[int, int]]:
    """The numbers of leaves of two tree structures that are in the same place: an update may add to a state."""
    if new == old:
        return [(k, k) for k in range(new.num_leaves)]
    paths = [jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0] for tree in (old, new)]
    places = {path: k for path, k in paths[0]}
    return [(k, places[path]) for path, k in paths[1] if path in places]


def _rank(traced: Traced, state: Any, like: Any, produced: list[int] | None) -> dict[Var, int]:
    """Of every leaf of the state its place in the backward pass, as its ``offload`` orders it."""
    inputs, start, rank = traced.inputs, traced.starts[1], {}
    of = {v: each.options.order_key for v, each in claimed(traced.claims).items()}
    for order in {None, *of.values()}:
        for k, place in enumerate(ranks(state, like, order, produced)):
            at = traced.position.get(start + k)
            if at is not None and of.get(inputs[at]) == order:
                rank[inputs[at]] = place
    return rank


def _names(state: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return [keystr(path, simple=True, separator="/") for path, _ in paths]


def _in_order(traced: Traced, updates: Any, state: Any, produced: list[int] | None) -> tuple[int, ...]:
    """The gradients' numbers among the arrays, in the order of the backward pass.

    An ``offload`` with an ``order`` says it of the gradients of its own leaves, and the only one also of those whose
    state nobody has; the others keep their places.
    """
    of, start = claimed(traced.claims), traced.starts[1]
    owner, said = owners([path for path, _ in leaves_with_paths(updates)]), dict[int, tuple[str, ...] | None]()
    for k, (path, _) in enumerate(leaves_with_paths(state)):
        at, i = traced.position.get(start + k), owner(path)
        if at is not None and i is not None and (claim := of.get(traced.inputs[at])) is not None:
            said.setdefault(i, claim.options.order_key)
    rank = ranks(updates, updates, None, produced)
    in_order = sorted(range(len(rank)), key=rank.__getitem__)
    orders = dict.fromkeys(order for order in said.values() if order)
    for order in orders:
        rank, one = ranks(updates, updates, order), len(orders) == 1
        places = [at for at, i in enumerate(in_order) if said.get(i, order if one else None) == order]
        for at, i in zip(places, sorted((in_order[at] for at in places), key=rank.__getitem__), strict=True):
            in_order[at] = i
    return tuple(traced.position[i] for i in in_order if i in traced.position)


def _serialise(options: Options, updates: Any, produced: list[int] | None) -> Serialise:
    """Which gradients wait for each other: none where one might be divided between devices, and how is not known, or
    is only while it is updated (ZeRO-1: 4693 instead of 4677 MiB, 12x4096x4096, half of it, four devices)."""
    found = Serialise.SUMS if produced is None or not options.serialise else Serialise.ALL
    for path, x in jax.tree_util.tree_flatten_with_path(updates)[0]:
        if is_array(x) and is_large(x):
            typed, key = typed_sharding(jax.typeof(x)), key_of(path)
            explicit = typed is not None and is_explicit(typed.mesh)
            sharding = typed if explicit else options.partitions.get(key) or options.shardings.get(key)
            unknown = devices_of(x) > 1 and (sharding is None or is_constrained(x))
            if unknown or key in options.partitions:
                return Serialise.NONE
            if math.prod(shards_of(sharding, x.shape)) > 1:
                found = Serialise.DIVIDED if found is not Serialise.SUMS else Serialise.NONE
    return found


def _shards(options: Options, updates: Any, state: Any, params: Any) -> list[Shards | None]:
    """For every leaf of (updates, state, params) how it is divided, as far as that is known."""
    like = updates if params is None else params
    flat = jax.tree_util.tree_flatten_with_path(like)[0]
    own = {path: shards_of(options.shardings.get(key_of(path)), np.shape(x)) for path, x in flat}
    shapes = {path: np.shape(x) for path, x in flat}
    sharded = {path: shards_of(s, shapes[path]) for path in own if (s := options.partitions.get(key_of(path)))}
    owner, found = owners([path for path, _ in flat]), []
    for tree, known in (updates, own | sharded), (state, own | sharded), (params, own):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            i = owner(path)
            typed = typed_sharding(jax.typeof(x)) if is_array(x) else None
            if typed is not None and is_explicit(typed.mesh):
                found.append(shards_of(typed, x.shape))
            elif i is None or not is_like(keystr(path), np.shape(x), np.shape(flat[i][1])):
                found.append(None)
            else:
                shards = known[flat[i][0]]
                # what does not divide evenly, scales of blocks, is not divided: see `fitted`
                found.append(tuple(k if n % k == 0 else 1 for n, k in zip(np.shape(x), shards, strict=True)))
    return found
