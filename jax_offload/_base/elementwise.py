"""Functions of single numbers, applied to whole arrays as one operation.

XLA's passes visit every operation of a program, and its fusion weighs each against its neighbours, so a program takes
as long to compile as it has operations. An encoder has sixty, at each leaf. XLA keeps the function of a ``map`` to
itself: on one device a step with 48 leaves stored in int8 compiles in 3.2 s and not in 7.1 (float32: 1.6 s; H200).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_offload._base.composite import plain
from jax_offload._base.jaxprs import ClosedJaxpr, jaxpr_of
from jax_offload._base.private import as_arrays, in_front, is_for_one_device, lowered, lowered_as_map, set_rules

NAME = "jax_offload_elementwise"


def elementwise(fun: Callable[..., jax.Array], *xs: jax.Array, **static: Hashable) -> jax.Array:
    """``fun(*xs, **static)``, for a ``fun`` that may as well be called with single elements of ``xs``.

    Args:
      fun: a function of arrays of any one shape, made of operations of ``jax.lax`` that work on each element by itself.
      xs: arrays of equal shapes; all that are floating of one dtype, as XLA wants it.
      static: what else ``fun`` takes.
    """
    return _elementwise.bind(*xs, fun=fun, static=tuple(sorted(static.items())))


@functools.cache
def _traced_once(fun: Any, static: Any) -> Callable[..., jax.Array]:
    """The function, traced once for arrays of equal types, however many equations of a program need it."""
    return jax.jit(plain(fun, static), inline=True)  # a map may call no function of the program


def _typed(*avals: Any, fun: Any, static: Any) -> Any:
    return _type_of(fun, static, avals)


@functools.lru_cache(1024)
def _type_of(fun: Any, static: Any, avals: tuple[Any, ...]) -> Any:
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=None) for a in avals]
    return avals[0].update(dtype=jax.eval_shape(plain(fun, static), *like).dtype, weak_type=False)


def _batched(xs: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    xs = [in_front(x, d, size) for x, d in zip(xs, dims, strict=True)]
    return _elementwise.bind(*xs, **params), 0


def _derived(xs: Sequence[Any], tangents: Sequence[Any], *, fun: Any, static: Any) -> Any:
    return jax.jvp(plain(fun, static), tuple(xs), as_arrays(tangents))


def _lower(context: Any, *xs: Any, fun: Any, static: Any) -> Any:
    # Shardy has no rule for a map and gathers its operands; given one (sdy.sharding_rule) it crashes in real programs.
    if is_for_one_device(context):
        return lowered_as_map(_of_elements(fun, static, context.avals_in), context, *xs)
    return lowered(_traced_once(fun, static), context, *xs, several=False)


def _of_elements(fun: Any, static: Any, avals: Sequence[Any]) -> ClosedJaxpr:
    """The function of single elements: the same for leaves of all shapes."""
    return _scalar_jaxpr(fun, static, tuple(a.dtype for a in avals), jax.config.jax_enable_x64)  # pyright: ignore


@functools.lru_cache(1024)
def _scalar_jaxpr(fun: Any, static: Any, dtypes: tuple[Any, ...], x64: bool) -> ClosedJaxpr:
    return jaxpr_of(plain(fun, static), *(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))[0]


_elementwise = Primitive(NAME)
_elementwise.def_impl(lambda *xs, fun, static: _traced_once(fun, static)(*xs))
_elementwise.def_abstract_eval(_typed)
set_rules(_elementwise, lower=_lower, jvp=_derived, batch=_batched)
