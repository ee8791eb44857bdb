"""``offload(..., storage=)`` without host memory."""

from __future__ import annotations

from typing import Any

import optax

from jax_offload._precision.storage import Rules, formats, next_stored, plain, stored


def resident(inner: optax.GradientTransformation, rules: Rules, min_bytes: int) -> optax.GradientTransformation:
    """The same arithmetic on the device: decode all, update, encode all."""

    def init(params: Any) -> Any:
        state = inner.init(params)
        return stored(state, formats(rules, state, params, min_bytes))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        before = plain(state)
        updates, after = inner.update(updates, before, params)
        return updates, next_stored(state, before, after)

    return optax.GradientTransformation(init, update)
