"""A skipped update: not a byte of the state changes, and none moves.

A choice between the old and the new state, outside, would load and store all of it twice over. ``lax.cond`` around the
update copies host buffers on a GPU, also in the branch that does nothing. A loop that runs once or not at all carries
them in place, and what stands in it is still streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Sharding

from jax_offload._base.barriers import opaque
from jax_offload._base.loops import at_most_once
from jax_offload._base.memory import on_host, to_device, to_host
from jax_offload._base.private import equation_of, variable_of
from jax_offload._base.shardings import constrained
from jax_offload._emit.region import REGION, Update

_CONSTRAINT = "sharding_constraint"
Types = list[tuple[Any, bool]]  # of each leaf: its dtype, and whether it is on the host


def updated_unless(skip: Any, update: Callable[[Any, Any], tuple[Any, Any]], updates: Any, state: Any) -> Any:
    """``update(updates, state)``; where ``skip`` holds, updates of zero and the same state."""
    skip = _checked(skip)

    def zeroed(x: jax.Array) -> jax.Array:
        zero = opaque(-jnp.zeros((), x.dtype))  # -0, as -0 + 0 is +0
        return jnp.where(skip, zero, x)

    if not isinstance(skip, Tracer):
        new, after = update(updates, state)  # for its types
        return (jax.tree.map(zeroed, new), _moved(state, _types(after))) if skip else (new, after)

    def fitted(like: Any, types: Types) -> Any:
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like[0])
        return blank, _moved(state, types[len(jax.tree.leaves(blank)) :])

    # the gradients' memory becomes the updates', if that is possible
    updated = [lambda c: update(*c), lambda c: update(updates, c[1])]
    new, after = _with_types_that_last(skip, updated, (updates, state), fitted)
    return jax.tree.map(zeroed, new), after


def carried_unless(skip: Any, update: Callable[[Any], Any], carry: Any) -> Any:
    """``update(carry)``; where ``skip`` holds, ``carry``."""
    skip = _checked(skip)
    if not isinstance(skip, Tracer):
        after = update(carry)  # for its types
        return _moved(carry, _types(after)) if skip else after
    return _with_types_that_last(skip, [update], carry, lambda like, types: _moved(carry, types))


def _with_types_that_last(
    skip: jax.Array, updates: list[Callable[[Any], Any]], carry: Any, fitted: Callable[[Any, Types], Any]
) -> Any:
    """``at_most_once``, for a carry of the types that the update gives it: dadapt_adamw's take two updates to stay.

    The first of ``updates`` is for ``carry``, the last for what is ``fitted`` to the shapes and types of a result.
    """
    tried: list[Types] = []
    while True:
        results: list[tuple[Any, Types, list[Sharding | None]]] = []
        update = updates[0] if not tried else updates[-1]

        def recorded(carry: Any, update: Any = update, results: Any = results) -> Any:
            after = update(carry)
            leaves = jax.tree.leaves(after)
            results.append((jax.eval_shape(lambda: after), _types(leaves), _constraints(leaves)))
            return after

        try:
            after, treedef = jax.tree.flatten(at_most_once(~skip, recorded, carry))
            return jax.tree.unflatten(treedef, map(constrained, after, results[-1][-1]))
        except TypeError:
            if not results or results[-1][1] in tried:
                raise
            like, types, _ = results[-1]
            tried.append(types)
            carry = fitted(like, types)


def _constraints(results: Sequence[Any]) -> list[Sharding | None]:
    """The shardings that results on the device were constrained to, in the update that made them.

    Where axes are Auto XLA chooses those of a loop's carry, whatever the body says; a constraint on what comes out of
    the loop binds it.
    """
    known: dict[int, dict[Any, Sharding]] = {}  # of each region: its results, as variables outside of it

    def sharding(x: Any) -> Sharding | None:
        eqn = None if not isinstance(x, Tracer) or on_host(x) else equation_of(x)
        if eqn is None or eqn.primitive is not REGION:
            return None if eqn is None or eqn.primitive.name != _CONSTRAINT else eqn.params["sharding"]
        if id(eqn) not in known:
            known[id(eqn)] = _constrained_results(eqn.params["update"], eqn.outvars)
        return known[id(eqn)].get(variable_of(x))

    return [sharding(x) for x in results]


def _constrained_results(update: Any, outside: Sequence[Any]) -> dict[Any, Sharding]:
    if not isinstance(update, Update):
        return {}
    found = {e.outvars[0]: e.params["sharding"] for e in update.program.eqns if e.primitive.name == _CONSTRAINT}
    return {new: found[v] for new, v in zip(outside, update.program.outputs, strict=True) if v in found}


def _checked(skip: Any) -> jax.Array:
    skip = jnp.asarray(skip)
    if skip.shape != () or skip.dtype != jnp.bool_:
        raise ValueError(
            f"skip: expected a bool, a scalar; got {skip.dtype}{list(skip.shape)}. Reduce it with jnp.any."
        )
    return skip


def _types(tree: Any) -> Types:
    return [(x.dtype, on_host(x)) for x in jax.tree.leaves(tree)]


def _moved(tree: Any, types: Types) -> Any:
    """``tree`` as it is after its first update: a resident state moves to the host, a dtype may be wider."""
    leaves, treedef = jax.tree.flatten(tree)
    moved = []
    for x, (dtype, host) in zip(leaves, types, strict=True):
        x = x if x.dtype == dtype else to_device(x).astype(dtype)
        moved.append(to_host(x) if host else to_device(x))
    return jax.tree.unflatten(treedef, moved)
