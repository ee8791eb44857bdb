"""How an ``offload`` meets what does more than an optimizer of optax: it knows none of that by class.

A transformation may have

* ``adopted(state, params) -> state``: a state that comes to ``update``, as its own; raises where it is none;
* ``look(state)``: called with each state that ``init`` has made; may warn.

``offload(..., storage=)`` is short for an ``offload`` of such a transformation. A node of a state may have, as static
methods,

* ``apply_updates(params, updates, state) -> params``: takes the place of ``optax.apply_updates`` in ``update_params``;
* ``check_updates(updates, state)``: raises where something has changed updates that must not be.

And a leaf whose path ends in ``arrays.BLOCK_SCALES`` has a scale for each block of its parameter's last axis.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from jax_offload._update.arguments import changes_shapes, check_state, check_tree


def adopted(tx: Any, state: Any, params: Any) -> Any:
    """A state that comes to an update of ``tx``, as its own."""
    return tx.adopted(state, params) if hasattr(tx, "adopted") else state


def look(tx: Any, state: Any) -> None:
    """Shows ``tx`` a state that its init has made."""
    if hasattr(tx, "look"):
        tx.look(state)


def applied(params: Any, updates: Any, state: Any) -> Any:
    """``optax.apply_updates``, or what a node of the state does instead: master parameters say where theirs land."""
    own = _nodes_with("apply_updates", state)
    return own[0].apply_updates(params, updates, state) if own else optax.apply_updates(params, updates)


def checked_update(tx: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
    """``tx.update``; ``ValueError`` where the state was made by another optimizer, or a node of it is not content."""
    if hasattr(tx, "adopted"):  # it checks what is inside of it
        return tx.update(updates, state, params, **extra_args)
    like = updates if params is None else params
    try:
        new, after = tx.update(updates, state, params, **extra_args)
        for node in _nodes_with("check_updates", state):
            node.check_updates(new, state)
    except Exception as error:
        check_state(tx.init, state, like, error)
        check_tree(updates, params, error)
        raise
    other_tree = jax.tree.structure(after) != jax.tree.structure(state)
    if other_tree or changes_shapes(state, after) or changes_shapes(like, new):
        check_state(tx.init, state, like, None)
    return new, after


def _nodes_with(name: str, state: Any) -> list[Any]:
    """One node of a state for each type that has such a method."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: hasattr(type(x), name))
    return list({type(x): x for x in nodes if hasattr(type(x), name)}.values())
