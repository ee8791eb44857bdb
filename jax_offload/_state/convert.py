"""Convert a stored state to that of plain optax, and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from jax_offload._base.on_disk import check_in_memory
from jax_offload._placement.arguments import check_transformation
from jax_offload._precision.storage import Encoded, StoredState, decoded_in_place, encoded_in_place, is_encoded
from jax_offload._state.state import params_like, to_host, traced_init


def to_plain(tx: optax.GradientTransformation, state: Any) -> Any:
    """Decode a state of ``storage=``: return what the optimizers inside ``tx`` would hold without it.

    Each leaf stays in its memory; ``jo.to_device`` moves it. The conversion goes leaf by leaf, so the whole state need
    not fit on the device, and it is exact. A state without ``storage=`` is returned as it is.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      state: the state of ``tx``, or a part of it such as ``optax.tree.get(state, "mu")``.

    Returns:
      A tree like the state of the optimizers inside, with its shapes and dtypes.

    Raises:
      TypeError: ``tx`` is not a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), storage={"mu": "int8", "nu": "uint8"})
      >>> plain = jo.to_plain(tx, tx.init(params))
      >>> plain[0].mu["w"].dtype.name, plain[0].mu["w"].sharding.memory_kind
      ('float32', 'pinned_host')
    """
    check_in_memory(state, "jo.to_plain")
    check_transformation(tx, "(tx, state)")  # the stored state tells everything else

    def plain(node: Any) -> Any:
        if _is_stored(node):
            return jax.tree.map(plain, node.inner_state, is_leaf=is_encoded)
        return decoded_in_place(node) if is_encoded(node) else node

    return jax.tree.map(plain, state, is_leaf=lambda x: _is_stored(x) or is_encoded(x))


def from_plain(tx: optax.GradientTransformation, state: Any, params: Any = None) -> Any:
    """Encode a plain state as ``tx`` stores it, each leaf where ``tx`` keeps it.

    ``jo.from_plain(new_tx, jo.to_plain(old_tx, state))`` changes how a run stores its state. It rounds to nearest, and
    is exact if the format has the number. The conversion goes leaf by leaf: at most one host leaf is on the device at a
    time. The count of rounds, which seeds stochastic rounding, starts anew.

    Args:
      tx: a transformation with an ``offload`` anywhere inside it.
      state: the state that plain optax would hold: from ``to_plain`` or from a resident run.
      params: the parameters, concrete or abstract. If they are left out, their tree is read off the state.

    Returns:
      The state as ``tx.init`` would return it, with these values.

    Raises:
      TypeError: ``tx`` is not a transformation.
      ValueError: the state is already stored, belongs to other optimizers, or the parameters' tree cannot be read off
        it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3), storage="bfloat16")
      >>> state = jo.from_plain(tx, optax.adamw(1e-3).init(params))
      >>> mu = state.inner_state[0].mu["w"].values
      >>> mu.dtype.name, mu.sharding.memory_kind
      ('bfloat16', 'pinned_host')
    """
    if any(_is_stored(x) for x in jax.tree.leaves(state, is_leaf=_is_stored)):
        raise ValueError("state: is stored, not plain; jo.to_plain(tx, state) gives the plain one.")
    params = params_like(tx, state, plain=True) if params is None else params
    rows, treedef = traced_init(tx, params)
    wanted, treedef = jax.tree.flatten(jax.tree.unflatten(treedef, [aval for _, aval in rows]), is_leaf=_is_stored)
    try:
        parts = treedef.flatten_up_to(state)
        stored = [_stored(part, like) for part, like in zip(parts, wanted, strict=True)]
    except (ValueError, TypeError) as error:
        why = str(error) if isinstance(error, _Mismatch) else f"its tree is {jax.tree.structure(state)}"
        raise ValueError(f"state: not a plain state of tx for these parameters: {why}") from error
    return to_host(tx, jax.tree.unflatten(treedef, stored), params)


class _Mismatch(ValueError):
    """A leaf has another type than ``tx`` expects."""


def _stored(state: Any, like: Any) -> Any:
    if not _is_stored(like):
        return state
    wanted, treedef = jax.tree.flatten(like.inner_state, is_leaf=is_encoded)
    leaves = [_encoded(x, w) if is_encoded(w) else x for x, w in zip(treedef.flatten_up_to(state), wanted, strict=True)]
    return StoredState(np.zeros((), np.int32), jax.tree.unflatten(treedef, leaves))


def _encoded(x: Any, like: Encoded) -> Encoded:
    got, expected = (np.shape(x), np.dtype(x.dtype).name), (like.values.shape, like.dtype)
    if got != expected:
        raise _Mismatch(f"a leaf is {got[1]}{list(got[0])}, and tx has {expected[1]}{list(expected[0])}")
    return encoded_in_place(x, like.storage)


def _is_stored(x: Any) -> bool:
    return isinstance(x, StoredState)
