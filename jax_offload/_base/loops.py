"""A loop that runs once, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import opaque


def at_most_once(run: Any, update: Callable[[Any], Any], carry: Any) -> Any:
    """``update(carry)`` where ``run`` holds, else ``carry``, in place.

    The carry says whether the loop is still to run: so XLA sees that it runs once at most, and hoists nothing.
    """
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), update(c[1])), (run, carry))[1]


def once(update: Callable[[Any, Any], tuple[Any, list[Any]]], init: Any, xs: Sequence[Any], ys: Sequence[Any]) -> Any:
    """``jax.lax.scan`` of one iteration, as a loop all the same; ``ys`` are the types of its stacks."""
    blank = [jnp.zeros(y.shape[1:], y.dtype) for y in ys]
    carry, rows = at_most_once(opaque(True), lambda c: update(c[0], [x[0] for x in xs]), (init, blank))
    return carry, [row[None] for row in rows]
