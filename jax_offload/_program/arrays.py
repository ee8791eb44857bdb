"""Properties that arrays and abstract values share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK_SCALES = ".values_scale"  # the end of the path of a leaf that holds a scale for each block of values


class Offloaded(optax.GradientTransformationExtraArgs):
    """The result of ``offload``. Its pickle holds the recipe, and nothing that a run remembered.

    Attributes:
      inner: the optimizer inside; ``None`` where this is no optimizer of its own.
      options: the options of ``offload``.
      maker: ``offload``.
    """

    inner: optax.GradientTransformation | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    maker: Callable[..., Any] | None = None

    def wrapping(self, maker: Callable[..., Any], inner: optax.GradientTransformation, **options: Any) -> Offloaded:
        """Return this transformation, which now knows how it was made."""
        self.maker, self.inner, self.options = maker, inner, options
        return self

    def __reduce__(self) -> Any:
        if self.maker is None:
            return type(self), tuple(self)
        return _made, (self.maker, self.inner, dict(self.options))


def _made(maker: Callable[..., Any], inner: optax.GradientTransformation, options: Mapping[str, Any]) -> Any:
    return maker(inner, **options)


def is_like(path: str, shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    """Whether a state leaf is divided like its parameter: of its shape, or a scale for each block of the last axis."""
    of_blocks = path.endswith(BLOCK_SCALES) and len(shape) == len(param)
    return shape == param or (of_blocks and shape[:-1] == param[:-1])


def nbytes(x: Any) -> int:
    """Bytes of an array or abstract value over all devices; 0 for anything else."""
    dtype = getattr(x, "dtype", None)
    return 0 if dtype is None else math.prod(np.shape(x)) * dtype.itemsize


def types_of(tree: Any) -> list[Any]:
    """Return the shape and dtype of every leaf."""
    return [(np.shape(x), getattr(x, "dtype", type(x))) for x in jax.tree.leaves(tree)]


def check_integer(argument: str, given: Any, least: int, expected: str, fix: str) -> None:
    """Raise ``ValueError`` unless ``given`` is an integer, numpy's included, of at least ``least`` and no bool."""
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or given < least:
        raise ValueError(f"{argument}: expected {expected}; got {given!r}. {fix}")


def is_traced(x: Any) -> bool:
    """Whether jax traces ``x`` among the arguments of a step: an array, abstract or mutable too. ``jnp.float32``, which
    has a dtype as well, is static."""
    return hasattr(x, "dtype") and not isinstance(x, type)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def row_indices(size: int, start: Any, n: int, shards: int) -> jax.Array:
    """The places, in an axis of ``size``, of ``n`` rows from ``start`` on of each of its ``shards`` parts."""
    return (jnp.arange(shards)[:, None] * (size // shards) + start + jnp.arange(n)[None]).reshape(-1)
