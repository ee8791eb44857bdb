"""The usual recipe: what everyone else does."""

from __future__ import annotations

from typing import Any

import jax
import optax


def usual_recipe(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """What the jax guide, AXLearn and MaxText do: the whole state in, update, the whole state out."""
    space = jax.memory.Space

    def put(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, to) if x.ndim else x, tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = inner.update(updates, put(state, space.Device), params, **extra)
        return updates, put(state, space.Host)

    return optax.GradientTransformationExtraArgs(lambda p: put(inner.init(p), space.Host), update)  # pyright: ignore
