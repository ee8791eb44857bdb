"""Turn a recipe that loads everything, updates and stores everything into a streamed update.

The recipe is traced. The offloads inside it are equations of the trace, which carry their own recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jax_offload._base.arrays import is_array, is_like
from jax_offload._base.jaxprs import Literal, jaxpr_of
from jax_offload._base.memory import is_host_aval, on_host, to_device
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
from jax_offload._emit.find import holds_update, updates_in, without_updates
from jax_offload._emit.region import Update, bound
from jax_offload._ir.branches import without_branches
from jax_offload._ir.program import Program, Var, flat, without_round_trips
from jax_offload._ir.trace import LARGE, production_of
from jax_offload._placement.arguments import check_on_device
from jax_offload._placement.zero import resharded
from jax_offload._plan.options import Claim, Options, claimed, merged, ranks


def streamed(
    recipe: Callable[..., tuple[Any, ...]],
    args: tuple[Any, ...],
    *,
    next_of: tuple[int, ...],
    options: Options | None = None,
) -> Any:
    """Run ``recipe(*args)`` with host leaves loaded, used and stored slice by slice.

    Args:
      recipe: a function of (updates, state, params, extra arguments).
      args: its arguments; values that are not arrays become part of the program.
      next_of: for each tree that the recipe returns, the number of the argument whose next value it is.
      options: the options of the recipe's ``offload``; ``None`` if each ``offload`` inside has its own.
    """
    updates, state, params, *rest = args
    # A number in host memory would put all values made of it, such as a bias correction, behind a pass of its own.
    state = jax.tree.map(lambda x: to_device(x) if is_array(x) and on_host(x) and not np.ndim(x) else x, state)
    args = updates, state, params, *rest
    # Sharded further before anything else: the reduction then scatters them, and only parts are alive.
    if options is not None:
        args = (resharded(updates, options.partitions, params), state, params, *rest)
    trace = traced(recipe, args, options)
    given = merged([each.options for each in trace.claims])
    if given.partitions and options is None and not types_tell(updates):
        args = (resharded(updates, given.partitions, params), state, params, *rest)
    update = _update(trace, given, updates, state, params, next_of)
    return jax.tree.unflatten(trace.out_tree, bound(update, trace.operands(args)))


def _update(traced: Traced, given: Options, updates: Any, state: Any, params: Any, next_of: tuple[int, ...]) -> Update:
    """Make an update, which is not emitted yet, of the recipe's trace. ``updates`` are not divided yet."""
    program = dataclasses.replace(traced.program, shards=traced.of_inputs(_shards(given, updates, state, params)))
    next_values = _next_values(traced, program.outputs, next_of, updates, given.partitions)
    produced = production_of(jax.tree.leaves(updates))
    owner_of = owners(state, updates)
    order = _in_order(traced, updates, owner_of, produced.order)
    place = {i: k for k, i in enumerate(order)}
    whose = [*range(traced.starts[1]), *owner_of, *owners(params, updates)]
    rank = [(len(place) if i is None else place[i]) * len(whose) + k for k, i in enumerate(whose)]
    names = [keystr(path, simple=True, separator="/") for path, _ in leaves_with_paths(state)]
    own, named = traced.of_inputs(rank), traced.of_inputs([None] * traced.starts[1] + names)
    return Update(
        program,
        tuple(traced.position[i] for i in order if i in traced.position),
        _take_turns(given, updates, produced.constrained),
        named | {new: named[old] for new, old in next_values.items() if old in named},
        next_values,
        traced.claims,
        own,
        is_manual(),
        backward=produced.backward,
        ordered=produced.order is not None,
    )


def _next_values(
    traced: Traced, outputs: Sequence[Any], next_of: tuple[int, ...], updates: Any, partitions: Layouts
) -> dict[Var, Var]:
    """Map each result to the input whose next value it is, and whose buffer it may take."""
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
    """Pair the numbers of the leaves that have the same path in two trees: an update may add leaves to a state."""
    if new == old:
        return [(k, k) for k in range(new.num_leaves)]
    paths = [jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0] for tree in (old, new)]
    places = {path: k for path, k in paths[0]}
    return [(k, places[path]) for path, k in paths[1] if path in places]


def _in_order(traced: Traced, updates: Any, owner_of: Sequence[int | None], produced: list[int] | None) -> list[int]:
    """Return the numbers of the gradients in the order of the backward pass.

    The ``order`` of an ``offload`` sorts the gradients of its own leaves; if there is only one, it also sorts gradients
    without a state. The others keep their places.
    """
    of, start = claimed(traced.claims), traced.starts[1]
    said: dict[int, tuple[str, ...] | None] = {}
    for k, i in enumerate(owner_of):
        at = traced.position.get(start + k)
        if at is not None and i is not None and (claim := of.get(traced.inputs[at])) is not None:
            said.setdefault(i, claim.options.order)
    rank = ranks(updates, updates, None, produced)
    in_order = sorted(range(len(rank)), key=rank.__getitem__)
    orders = dict.fromkeys(order for order in said.values() if order)
    for order in orders:
        rank, one = ranks(updates, updates, order), len(orders) == 1
        places = [at for at, i in enumerate(in_order) if said.get(i, order if one else None) == order]
        for at, i in zip(places, sorted((in_order[at] for at in places), key=rank.__getitem__), strict=True):
            in_order[at] = i
    return in_order


def _take_turns(options: Options, updates: Any, constrained: Sequence[bool]) -> bool:
    """Whether gradients may wait for each other.

    Not if one is divided between devices, by a known sharding or an unknown one, or while it is updated (ZeRO-1): each
    part of a norm would be a collective. ``constrained`` says which gradients the trace has put into a sharding.
    """
    leaves = jax.tree_util.tree_flatten_with_path(updates)[0]
    for (path, x), placed in zip(leaves, constrained, strict=True):
        if not is_array(x) or x.size < LARGE:
            continue
        key, typed = key_of(path), typed_sharding(jax.typeof(x))
        explicit = typed is not None and is_explicit(typed.mesh)
        sharding = typed if explicit else options.partitions.get(key) or options.shardings.get(key)
        unknown = devices_of(x) > 1 and (sharding is None or placed)
        if unknown or key in options.partitions or math.prod(shards_of(sharding, x.shape)) > 1:
            return False
    return True


def _shards(options: Options, updates: Any, state: Any, params: Any) -> list[Shards | None]:
    """Return how every leaf of (updates, state, params) is divided, where that is known."""
    like = updates if params is None else params
    flat = jax.tree_util.tree_flatten_with_path(like)[0]
    own = {path: shards_of(options.shardings.get(key_of(path)), np.shape(x)) for path, x in flat}
    shapes = {path: np.shape(x) for path, x in flat}
    sharded = {path: shards_of(s, shapes[path]) for path in own if (s := options.partitions.get(key_of(path)))}
    found: list[Shards | None] = []
    for tree, known in (updates, own | sharded), (state, own | sharded), (params, own):
        for (path, x), i in zip(leaves_with_paths(tree), owners(tree, like), strict=True):
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


@dataclasses.dataclass(frozen=True)
class Traced:
    """The trace of a recipe.

    Attributes:
      program: the traced program; its inputs, except the constants, are the arrays among the arguments' leaves.
      out_tree: the tree of the results.
      trees: the trees of the arguments.
      arrays: the numbers of the arguments' leaves that are arrays.
      claims: the claims of the ``offload`` whose recipe it is, and of the offloads in it.
      sharded: like ``program``, but it leaves divided the updates that ``program`` gathers (ZeRO-1).
    """

    program: Program
    out_tree: Any
    trees: tuple[Any, ...]
    arrays: list[int]
    claims: tuple[Claim, ...] = ()

    @property
    def inputs(self) -> list[Var]:
        """The inputs of the program, one for each array."""
        return self.program.inputs[len(self.program.consts) :]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The number of each argument's first leaf."""
        return [0, *accumulate(tree.num_leaves for tree in self.trees)]

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """Map the number of a leaf to its number among the arrays."""
        return {i: k for k, i in enumerate(self.arrays)}

    def operands(self, args: tuple[Any, ...]) -> list[Any]:
        leaves = jax.tree.leaves(args)
        return [leaves[i] for i in self.arrays]

    def of_inputs(self, values: Sequence[Any]) -> dict[Var, Any]:
        """Map the program's inputs to the values that are given for the arguments' leaves; ``None`` is left out."""
        inputs, position = self.inputs, self.position
        return {inputs[position[i]]: x for i, x in enumerate(values) if x is not None and i in position}


def traced(recipe: Callable[..., Any], args: tuple[Any, ...], options: Options | None = None) -> Traced:
    """Trace ``recipe`` for ``args``; the second one is the state.

    Every ``offload`` in it is an equation that carries its own recipe and options. The recipes replace the equations,
    also in branches and loops, so that the whole is cut and streamed at once. Each leaf streams as its own ``offload``
    says.
    """
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]

    out_tree: list[Any] = []

    def on_arrays(values: list[Any]) -> list[Any]:  # with one argument, jax takes half the time of one for each array
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        results, tree = jax.tree.flatten(recipe(*jax.tree.unflatten(treedef, filled)))
        out_tree[:] = [tree]
        return results

    jaxpr, _ = jaxpr_of(on_arrays, [leaves[i] for i in arrays])
    found = updates_in(jaxpr) if any(map(holds_update, jaxpr.jaxpr.eqns)) else []
    inside = [(each, each.update) for each in found if isinstance(each.update, Update)]
    program = without_branches(without_updates(jaxpr) if inside else without_round_trips(flat(jaxpr)))
    trace = Traced(program, out_tree[0], tuple(treedef.children()), arrays)
    claims = []
    if options is not None:
        start, end = trace.starts[1:3]
        own = {i - start: v for i, v in zip(arrays, trace.inputs, strict=True) if start <= i < end}
        of = [frozenset(v for k, v in own.items() if k in some) for some in (options.on_cores, options.on_disk)]
        claims.append(Claim(options, frozenset(own.values()), *of))
    for each, update in inside:
        claims += (
            Claim(c.options, *(frozenset(each.inputs_of(leaves)) for leaves in (c.leaves, c.on_cores, c.on_disk)))
            for c in update.claims
        )
    # Gradients and parameters in host memory go through the window of the first offload's state.
    start, end, numbered = *trace.starts[1:3], zip(arrays, trace.inputs, strict=True)
    others = {v for i, v in numbered if is_host_aval(v.aval) and not start <= i < end} - {*claimed(claims)}
    if others and claims:
        if any(each.on_cores or each.on_disk for each in claims):
            updates, _, params, *_ = args
            check_on_device(updates, params, "update_on= and disk= are for parameters on the device")
        claims[0] = dataclasses.replace(claims[0], leaves=claims[0].leaves | others)
    return dataclasses.replace(trace, claims=tuple(claims))
