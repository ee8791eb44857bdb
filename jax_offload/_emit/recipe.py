"""The usual recipe, which loads everything, updates and stores everything, and how it becomes a streamed update.

The functions at the end make up the recipes of ``offload`` and ``update_params``: where values are, how they are
divided, and how a step skips. A recipe is traced. The offloads inside it are equations of the trace, which carry their
own recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr

from jax_offload._disk.leaves import not_from_disk
from jax_offload._emit.region import Update, bound, holds_update, updates_in, without_updates
from jax_offload._program.arrays import is_array, is_like, key_of, leaves_with_paths, owners
from jax_offload._program.jaxprs import Literal, jaxpr_of
from jax_offload._program.memory import (
    Layouts,
    Shards,
    devices_of,
    is_explicit,
    is_host_aval,
    is_manual,
    on_host,
    shards_of,
    stored,
    to_device,
    to_host,
    typed_sharding,
    types_tell,
)
from jax_offload._program.primitives import opaque
from jax_offload._program.program import Program, Var, flat, without_branches, without_round_trips
from jax_offload._schedule.after import LARGE, production_of
from jax_offload._schedule.schedule import Options, backward_ranks, merged
from jax_offload._state.arguments import check_on_device
from jax_offload._state.placement import Leaf
from jax_offload._state.state import resharded


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
    given = merged(trace.options)
    if given.partitions and options is None and not types_tell(updates):
        args = (resharded(updates, given.partitions, params), state, params, *rest)
    update = _update(trace, given, updates, state, params, next_of)
    return jax.tree.unflatten(trace.out_tree, bound(update, trace.operands(args)))


def _update(traced: Traced, given: Options, updates: Any, state: Any, params: Any, next_of: tuple[int, ...]) -> Update:
    """Make an update, not emitted yet, from the recipe's trace. ``updates`` are not divided yet."""
    program = dataclasses.replace(traced.program, shards=traced.of_inputs(_shards(given, updates, state, params)))
    next_values = _next_values(traced, program.outputs, next_of, updates, given.partitions)
    produced = production_of(jax.tree.leaves(updates))
    owner_of = owners(state, updates)
    backward = backward_ranks(updates, produced.order)
    whose = [*range(traced.starts[1]), *owner_of, *owners(params, updates)]
    rank = [(len(backward) if i is None else backward[i]) * len(whose) + k for k, i in enumerate(whose)]
    names = [keystr(path, simple=True, separator="/") for path, _ in leaves_with_paths(state)]
    own, named = traced.of_inputs(rank), traced.of_inputs([None] * traced.starts[1] + names)
    return Update(
        program=program,
        gradients=tuple(
            v for i in sorted(range(len(backward)), key=backward.__getitem__) if (v := traced.inputs[i]) is not None
        ),
        take_turns=_take_turns(given, updates, produced.constrained),
        names=named | {new: named[old] for new, old in next_values.items() if old in named},
        next_values=next_values,
        options=traced.options,
        offload_of=traced.offload_of,
        on_cores=traced.on_cores,
        on_disk=traced.on_disk,
        rank=own,
        manual=is_manual(),
        backward=produced.backward,
        ordered=produced.order is not None,
    )


def _next_values(
    traced: Traced, outputs: Sequence[Any], next_of: tuple[int, ...], updates: Any, partitions: Layouts
) -> dict[Var, Var]:
    """Map each result to the input whose next value it is, and whose buffer it may take."""
    paths = [key_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    found, result = dict[Var, Var](), 0
    for tree, argument in zip(traced.out_tree.children(), next_of, strict=True):
        given = traced.leaves(argument)
        for k, place in _same_places(tree, traced.trees[argument]):
            out, old = outputs[result + k], given[place]
            replicated = argument == 0 and paths[place] in partitions  # larger than the gradient
            if old is not None and not replicated and not isinstance(out, Literal):
                found[out] = old
        result += tree.num_leaves
    return found


def _same_places(new: Any, old: Any) -> list[tuple[int, int]]:
    """Pair the numbers of the leaves that have the same path in two trees: an update may add leaves to a state."""
    if new == old:
        return [(k, k) for k in range(new.num_leaves)]
    paths = [jax.tree_util.tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0] for tree in (old, new)]
    places = {path: k for path, k in paths[0]}
    return [(k, places[path]) for path, k in paths[1] if path in places]


def _take_turns(options: Options, updates: Any, constrained: Sequence[bool]) -> bool:
    """Whether gradients may wait for each other.

    They may not if one is divided between devices, by a known or an unknown sharding, or by ZeRO-1: each part of a norm
    would then be a collective. ``constrained`` says for which gradients the trace constrains the sharding.
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
    flat = [(key_of(path), np.shape(x)) for path, x in leaves_with_paths(like)]
    divided = options.shardings | options.partitions
    found: list[Shards | None] = []
    for tree, known in (updates, divided), (state, divided), (params, options.shardings):
        for (path, x), i in zip(leaves_with_paths(tree), owners(tree, like), strict=True):
            typed, shape = typed_sharding(jax.typeof(x)) if is_array(x) else None, np.shape(x)
            if typed is not None and is_explicit(typed.mesh):
                found.append(shards_of(typed, shape))
            elif i is None or not is_like(keystr(path), shape, flat[i][1]):
                found.append(None)
            else:
                shards = shards_of(known.get(flat[i][0]), flat[i][1])
                # arrays that do not divide evenly, such as scales of blocks, stay whole: see `fitted`
                found.append(tuple(k if n % k == 0 else 1 for n, k in zip(shape, shards, strict=True)))
    return found


@dataclasses.dataclass(frozen=True)
class Traced:
    """The trace of a recipe.

    Attributes:
      program: the traced program; its inputs, except the constants, are the arrays among the arguments' leaves.
      out_tree: the tree of the results.
      trees: the trees of the arguments.
      inputs: for each leaf of the arguments its variable in the program; ``None`` if it is no array.
      options: the options of the ``offload`` whose recipe it is, and of the offloads in it.
      offload_of, on_cores, on_disk: see ``Recipe``.
    """

    program: Program
    out_tree: Any
    trees: tuple[Any, ...]
    inputs: Sequence[Var | None]
    options: Sequence[Options] = ()
    offload_of: Mapping[Var, int] = dataclasses.field(default_factory=dict[Var, int])
    on_cores: frozenset[Var] = frozenset()
    on_disk: frozenset[Var] = frozenset()

    @functools.cached_property
    def starts(self) -> list[int]:
        """The number of each argument's first leaf."""
        return [0, *accumulate(tree.num_leaves for tree in self.trees)]

    def leaves(self, argument: int) -> Sequence[Var | None]:
        """The variables of an argument's leaves."""
        return self.inputs[self.starts[argument] : self.starts[argument + 1]]

    def operands(self, args: tuple[Any, ...]) -> list[Any]:
        return [x for x, v in zip(jax.tree.leaves(args), self.inputs, strict=True) if v is not None]

    def of_inputs(self, values: Sequence[Any]) -> dict[Var, Any]:
        """Map variables to the values given for the first leaves of the arguments; ``None`` is left out."""
        return {v: x for v, x in zip(self.inputs, values, strict=False) if v is not None and x is not None}


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
    variable_of = dict(zip(arrays, program.inputs[len(program.consts) :], strict=True))
    trace = Traced(program, out_tree[0], tuple(treedef.children()), [variable_of.get(i) for i in range(len(leaves))])
    known, offload_of, on_cores, on_disk = list[Options](), dict[Var, int](), set[Var](), set[Var]()
    if options is not None:
        own = {k: v for k, v in enumerate(trace.leaves(1)) if v is not None}
        known, offload_of = [options], dict.fromkeys(own.values(), 0)
        on_cores, on_disk = ({own[k] for k in some if k in own} for some in (options.on_cores, options.on_disk))
    for each, update in inside:
        offload_of |= {each.origins[v]: len(known) + k for v, k in update.offload_of.items() if v in each.origins}
        on_cores.update(each.inputs_of(update.on_cores))
        on_disk.update(each.inputs_of(update.on_disk))
        known += update.options
    # Gradients and parameters in host memory go through the window of the first offload's state.
    others = {v for v in variable_of.values() if is_host_aval(v.aval)} - {*trace.leaves(1), *offload_of}
    if others and known:
        if on_cores or on_disk:
            updates, _, params, *_ = args
            check_on_device(updates, params, "update_on= and disk= are for parameters on the device")
        offload_of |= dict.fromkeys(others, 0)
    facts = dict(options=known, offload_of=offload_of, on_cores=frozenset(on_cores), on_disk=frozenset(on_disk))
    return dataclasses.replace(trace, **facts)


# ---- what recipes are made of


def returned(state: Any, plan: Sequence[Leaf]) -> Any:
    """Move the leaves of a traced state that belong on the host there before anything is updated.

    If they were updated from device memory, old and new leaves would be on the device side by side, because neither
    can be written into the other's buffer. Leaves that ZeRO-1 divides are divided on the device first.
    """

    def to_its_place(x: Any, leaf: Leaf) -> Any:
        if not isinstance(x, Tracer) or not leaf.host:
            return x
        x = not_from_disk(x) if leaf.disk and not on_host(x) else x
        return x if leaf.shard_over else to_host(x)

    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, [to_its_place(x, leaf) for x, leaf in zip(leaves, plan, strict=True)])


def where_it_was(new: Any, old: Any) -> Any:
    """Move each leaf of ``new``, a tree like ``old``, to the memory of that leaf of ``old``."""
    on_hosts = [on_host(x) for x in jax.tree.leaves(old)]
    return stored(new, on_hosts) if any(on_hosts) else new


def sharded_params(params: Any, options: Options) -> Any:
    """Divide the parameters as their gradients are. Their own sharding comes first, or XLA divides them too early."""
    return resharded(resharded(params, options.replicated), options.partitions)


def replicated_into(params: Any, new: Any, options: Options) -> Any:
    """Gather the new parameters into the memory of the old ones.

    XLA does not gather into a donated buffer, but it selects in place between two arrays if it cannot know the outcome.
    """
    if not options.partitions:
        return new
    true = opaque(True)
    new, old = resharded(new, options.replicated), resharded(params, options.replicated)
    return resharded(jax.tree.map(lambda new, old: jnp.where(true, new, old), new, old), options.replicated)


def checked_skip(skip: Any) -> jax.Array | None:
    """Return ``skip`` as a bool of rank 0; ``None`` without one.

    Raises:
      ValueError: it is anything else.
    """
    if skip is None:
        return None
    skip = jnp.asarray(skip)
    if skip.shape != () or skip.dtype != jnp.bool_:
        raise ValueError(
            f"skip: expected a bool, a scalar; got {skip.dtype}{list(skip.shape)}. Reduce it with jnp.any."
        )
    return to_device(skip)


def zero_where(skip: jax.Array | None, updates: Any) -> Any:
    """Return ``updates``, or -0 where ``skip`` holds: -0 + 0 would be +0 in a parameter that is -0."""
    if skip is None:
        return updates
    return jax.tree.map(lambda x: jnp.where(skip, opaque(-jnp.zeros((), x.dtype)), x), updates)


def old_where(skip: jax.Array | None, old: Any, new: Any) -> Any:
    """Return ``new``, or ``old`` where ``skip`` holds: two trees with the same leaves, chosen on the device.

    Each value is chosen inside the update, so a slice of it streams, chunks and hides as any other does. A step that is
    skipped moves the bytes of its state and changes none of them. A choice outside the update would load and store all
    of the state once more.
    """
    if skip is None:
        return new

    def chosen(old: Any, new: Any) -> Any:
        kept = to_device(old)
        if old.dtype != new.dtype and jnp.promote_types(old.dtype, new.dtype) != new.dtype:  # a cast drops a weak type
            kept = kept.astype(new.dtype)
        x = jnp.where(skip, kept, to_device(new))
        return to_host(x) if on_host(new) else x

    return jax.tree.map(chosen, old, new)
