"""The usual recipe, which loads everything, updates and stores everything, and how it becomes a streamed update.

The functions at the end make up the recipes of ``offload`` and ``update_params``: where values are, how they are
divided, and how a step skips. A recipe is traced. The offloads inside it are equations of the trace, which carry their
own recipes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from jax_offload._disk.leaves import not_from_disk
from jax_offload._emit.region import Found, Update, bound, holds_update, updates_in, without_updates
from jax_offload._program.arrays import is_array, is_like, key_of, leaves_with_paths, owners
from jax_offload._program.jaxprs import jaxpr_of
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
    trace = _traced(recipe, args)
    update = _update(trace, (updates, state, params), next_of, options)
    if options is None and not types_tell(updates):
        args = (resharded(updates, merged(update.options).partitions, params), state, params, *rest)
    return jax.tree.unflatten(trace.out_tree, bound(update, [x for x in jax.tree.leaves(args) if is_array(x)]))


class Traced(NamedTuple):
    """The trace of a recipe.

    Attributes:
      program: the traced program.
      inputs: the variables of each argument's leaves; ``None`` for a leaf that is not an array.
      out_tree: the tree of the results.
      inside: the updates in the recipe.
    """

    program: Program
    inputs: Sequence[Sequence[Var | None]]
    out_tree: Any
    inside: Sequence[Found]

    def of_inputs(self, values: Iterable[Any]) -> dict[Var, Any]:
        """Map the variables of the arguments' first leaves to these values; leave out ``None``."""
        pairs = zip(chain(*self.inputs), values, strict=False)
        return {v: x for v, x in pairs if v is not None and x is not None}


def _traced(recipe: Callable[..., Any], args: tuple[Any, ...]) -> Traced:
    """Trace a recipe.

    Each ``offload`` inside is an equation that carries its own recipe and options. That recipe replaces it, in branches
    and loops too, so that the outer recipe is cut and streamed as one.
    """
    leaves, treedef = jax.tree.flatten(args)

    def on_arrays(arrays: list[Any]) -> Any:  # jax traces one list faster than many arguments
        given = iter(arrays)
        return recipe(*jax.tree.unflatten(treedef, [next(given) if is_array(x) else x for x in leaves]))

    jaxpr, out_tree = jaxpr_of(on_arrays, [x for x in leaves if is_array(x)])
    found = updates_in(jaxpr) if any(map(holds_update, jaxpr.jaxpr.eqns)) else []
    inside = [each for each in found if isinstance(each.update, Update)]
    program = without_branches(without_updates(jaxpr) if inside else without_round_trips(flat(jaxpr)))
    own = iter(program.inputs[len(program.consts) :])
    inputs = [[next(own) if is_array(x) else None for x in jax.tree.leaves(each)] for each in args]
    return Traced(program, inputs, out_tree, inside)


def _offloads(trace: Traced, updates: Any, params: Any, options: Options | None) -> dict[str, Any]:
    """Collect the offloads in a recipe, as fields of ``Recipe``; ``options`` belong to the ``offload`` around it."""
    state, known = trace.inputs[1], [] if options is None else [options]
    offload_of = {v: 0 for v in state if v is not None and known}
    on_cores = {state[k] for each in known for k in each.on_cores}
    on_disk = {state[k] for each in known for k in each.on_disk}
    for each in trace.inside:  # each leaf streams as its own offload says
        update, origins = cast(Update, each.update), each.origins
        offload_of |= {origins[v]: len(known) + k for v, k in update.offload_of.items() if v in origins}
        on_cores.update(each.inputs_of(update.on_cores))
        on_disk.update(each.inputs_of(update.on_disk))
        known += update.options
    # Gradients and parameters in host memory go through the window of the first offload's state.
    others = {v for v in chain(*trace.inputs) if v is not None and is_host_aval(v.aval)} - {*state, *offload_of}
    if others and known:
        if on_cores or on_disk:
            check_on_device(updates, params, "update_on= and disk= are for parameters on the device")
        offload_of |= dict.fromkeys(others, 0)
    own = frozenset(trace.program.inputs)  # a leaf that a wrapper changed is no input
    return dict(options=known, offload_of=offload_of, on_cores=own & on_cores, on_disk=own & on_disk)


def _update(trace: Traced, trees: tuple[Any, Any, Any], next_of: tuple[int, ...], options: Options | None) -> Update:
    """Make an update from a recipe's trace, without emitting it.

    ``trees``: the updates before ZeRO-1 divides them, the state, and the parameters.
    """
    updates, state, params = trees
    offloads = _offloads(trace, updates, params, options)
    given = merged(offloads["options"])
    produced = production_of(jax.tree.leaves(updates))
    backward = backward_ranks(updates, produced.order)
    whose = [*range(len(backward)), *owners(state, updates), *owners(params, updates)]
    rank = [(len(backward) if i is None else backward[i]) * len(whose) + k for k, i in enumerate(whose)]
    paths = [keystr(path, simple=True, separator="/") for path, _ in leaves_with_paths(state)]
    names = {v: path for v, path in zip(trace.inputs[1], paths, strict=True) if v is not None}
    next_values = _next_values(trace, trees, next_of, given.partitions)
    return Update(
        program=dataclasses.replace(trace.program, shards=trace.of_inputs(_shards(given, *trees))),
        gradients=tuple(v for _, v in sorted(zip(backward, trace.inputs[0], strict=True)) if v is not None),
        take_turns=_take_turns(given, updates, produced.constrained),
        names=names | {new: names[old] for new, old in next_values.items() if old in names},
        next_values=next_values,
        rank=trace.of_inputs(rank),
        manual=is_manual(),
        backward=produced.backward,
        ordered=produced.order is not None,
        **offloads,
    )


def _next_values(trace: Traced, trees: Sequence[Any], next_of: Sequence[int], partitions: Layouts) -> dict[Var, Var]:
    """Map each result to the input with the same path, whose next value it is and whose buffer it may take."""
    found = dict[Var, Var]()
    for new, argument in zip(jax.tree.unflatten(trace.out_tree, trace.program.outputs), next_of, strict=True):
        paths = [path for path, _ in leaves_with_paths(trees[argument])]
        old_of = dict(zip(paths, trace.inputs[argument], strict=True))
        for path, out in leaves_with_paths(new):
            old = old_of.get(path)  # an update may add leaves to a state
            if old is not None and isinstance(out, Var):
                found[out] = old
    return found


def _take_turns(options: Options, updates: Any, constrained: Sequence[bool]) -> bool:
    """Whether gradients may wait for each other.

    They may not if one is divided between devices, by a known or an unknown sharding, or by ZeRO-1: each part of a norm
    would then be a collective. ``constrained`` says for which gradients the trace constrains the sharding.
    """
    for (path, x), placed in zip(leaves_with_paths(updates), constrained, strict=True):
        if not is_array(x) or x.size < LARGE:
            continue
        key = key_of(path)
        sharding = _explicit_sharding(x) or options.partitions.get(key) or options.shardings.get(key)
        unknown = devices_of(x) > 1 and (sharding is None or placed)
        if unknown or key in options.partitions or math.prod(shards_of(sharding, x.shape)) > 1:
            return False
    return True


def _explicit_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding in an array's type if all axes of its mesh are Explicit, else ``None``."""
    typed = typed_sharding(jax.typeof(x)) if is_array(x) else None
    return typed if typed is not None and is_explicit(typed.mesh) else None


def _shards(options: Options, updates: Any, state: Any, params: Any) -> list[Shards | None]:
    """Return how every leaf of (updates, state, params) is divided, where that is known."""
    like = updates if params is None else params
    own = [(key_of(path), np.shape(x)) for path, x in leaves_with_paths(like)]
    divided = options.shardings | options.partitions
    found: list[Shards | None] = []
    for tree, known in (updates, divided), (state, divided), (params, options.shardings):
        for (path, x), i in zip(leaves_with_paths(tree), owners(tree, like), strict=True):
            shape = np.shape(x)
            if (typed := _explicit_sharding(x)) is not None:
                found.append(shards_of(typed, shape))
            elif i is None or not is_like(keystr(path), shape, own[i][1]):
                found.append(None)
            else:
                shards = shards_of(known.get(own[i][0]), own[i][1])
                # arrays that do not divide evenly, such as scales of blocks, stay whole: see `fitted`
                found.append(tuple(k if n % k == 0 else 1 for n, k in zip(shape, shards, strict=True)))
    return found


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

    rows = iter(plan)
    return jax.tree.map(lambda x: to_its_place(x, next(rows)), state)


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
