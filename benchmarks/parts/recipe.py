"""The usual recipe, as other libraries follow it."""

from __future__ import annotations

from typing import Any

import jax
import optax


def usual_recipe(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Load the whole state, update, store the whole state: the recipe of the jax guide, AXLearn and MaxText."""
    space = jax.memory.Space

    def put(tree: Any, to: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, to) if x.ndim else x, tree)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = inner.update(updates, put(state, space.Device), params, **extra)
        return updates, put(state, space.Host)

    return optax.GradientTransformationExtraArgs(lambda p: put(inner.init(p), space.Host), update)  # pyright: ignore
