"""A transformation whose state is stored in other formats: what ``offload(..., storage=)`` is short for."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from jax_offload._placement.placement import stays
from jax_offload._precision.bounds import CannotTrace, state_bounds
from jax_offload._precision.formats import Storage
from jax_offload._precision.storage import (
    Rules,
    StoredState,
    as_stored,
    check_unsigned,
    formats,
    is_encoded,
    next_stored,
    plain,
    stored,
)
from jax_offload._update.features import checked_update


class WithStorage(optax.GradientTransformationExtraArgs):
    """A transformation whose state is a ``StoredState``."""

    adopted: Callable[[Any, Any], Any]
    look: Callable[[Any], None]


def with_storage(inner: optax.GradientTransformationExtraArgs, rules: Rules, min_bytes: int) -> WithStorage:
    """``inner`` with its state in the formats that the rules say, decoded for each update and encoded after it."""

    shown = set[Any]()  # trees of states whose unsigned leaves were shown to hold no negative number

    def check_signs(state: Any, found: Sequence[Storage | None], updates: Any, params: Any, extra_args: Any) -> None:
        key = jax.tree.structure(state), tuple(found)
        if any(storage is not None and storage.unsigned for storage in found) and key not in shown:
            bounds = state_bounds(inner.init, inner.update, updates, state, params, extra_args)
            check_unsigned(state, found, bounds)
            shown.add(key)

    def init_fn(params: Any) -> StoredState:
        state = inner.init(params)
        found = formats(rules, state, params, min_bytes)
        with contextlib.suppress(CannotTrace):  # it takes extra arguments, which its first update has
            check_signs(state, found, params, params, {})
        return stored(state, found)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, StoredState]:
        before = plain(state)
        new, after = checked_update(inner, updates, before, params, extra_args)
        check_signs(before, _formats_of(state), updates, params, extra_args)
        return new, next_stored(state, before, after)

    def adopted(state: Any, params: Any) -> Any:
        if not any(map(is_encoded, jax.tree.leaves(state, is_leaf=is_encoded))):
            state = as_stored(state, jax.eval_shape(init_fn, params))
        check_stored(state, rules, params, min_bytes, init_fn)
        return state

    tx = WithStorage(init_fn, update_fn)
    tx.adopted, tx.look = adopted, functools.partial(warn_of_unstored, rules)
    return tx


def warn_of_unstored(rules: Rules, state: StoredState) -> None:
    """Says which leaves one dtype for all leaves out although they are numbers of the optimizer: complex ones."""
    flat = jax.tree_util.tree_flatten_with_path(state.inner_state)[0]
    left = [keystr(path) for path, x in flat if not stays(x, 0) and jnp.issubdtype(x.dtype, jnp.complexfloating)]
    if left and rules[0][0] is None:
        warnings.warn(
            f"storage: {rules[0][1].dtype!r} leaves {len(left)} complex leaves of the state as they are, the first is "
            f"{left[0]}: no format stores complex numbers. To say so without this warning, name the others: "
            "storage={'mu/layers': 'bfloat16'}, say; or train real and imaginary parts apart "
            "(optax.contrib.split_real_and_imaginary).",
            stacklevel=5,
        )


def check_stored(state: Any, rules: Rules, params: Any, min_bytes: int, init: Callable[[Any], Any]) -> None:
    """Raises ``ValueError`` for a state that is stored otherwise than the rules say, and than ``init`` stores it.

    Some optimizers return leaves in other dtypes than they made: momentum of a bfloat16 or integer leaf becomes
    float32 in the first update. Such a leaf stays in the format that its first dtype asked for: a carry keeps its tree.
    """
    fix = "Convert it: jo.from_plain(tx, jo.to_plain(old_tx, state)), params given where their tree is not in it."
    if not isinstance(state, StoredState):
        raise ValueError(f"state: is a {type(state).__name__}, not one that offload(..., storage=) keeps. {fix}")
    leaves, treedef = jax.tree.flatten(state.inner_state, is_leaf=is_encoded)
    decoded = [jax.ShapeDtypeStruct(x.values.shape, x.dtype) if is_encoded(x) else x for x in leaves]
    wanted, got = formats(rules, jax.tree.unflatten(treedef, decoded), params, min_bytes), _formats_of(state)
    if got == wanted or got == _formats_at_first(init, params):
        return
    k = next(k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
    path = jax.tree_util.tree_flatten_with_path(state.inner_state, is_leaf=is_encoded)[0][k][0]
    raise ValueError(
        f"state: {jax.tree_util.keystr(path)} is stored as {got[k] or leaves[k].dtype}, and storage says {wanted[k]}. "
        f"{fix}"
    )


def _formats_of(state: StoredState) -> list[Storage | None]:
    return list(map(_format_of, jax.tree.leaves(state.inner_state, is_leaf=is_encoded)))


def _format_of(x: Any) -> Storage | None:
    return x.storage if is_encoded(x) else None


def _formats_at_first(init: Callable[[Any], Any], params: Any) -> list[Storage | None] | None:
    try:
        state = jax.eval_shape(init, params)
    except Exception:  # init cannot run on what we have
        return None
    return _formats_of(state)
