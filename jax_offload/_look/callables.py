"""Any callable training step as a pure function, and as something that ``jax`` can trace and lower.

A step of ``flax.nnx.jit`` changes its arguments in place, one of ``equinox.filter_jit`` takes and returns functions
among its arrays, and a method, a ``functools.partial`` or a lambda calls a jitted step. All of them come down to a
function of arrays, which returns the step's results and the arrays that it changes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_offload._program.arrays import is_traced

_JIT = type(jax.jit(lambda: None))
_HINT = (
    "jax_offload traces this step with its arguments, without running it. Pass everything that it reads or changes as "
    "an argument, or pass the jitted function that it calls, step(*args)."
)


def opened(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a step without the partials and bound methods around it, and its arguments with those that they add."""
    kwargs = dict(kwargs)
    while True:
        if isinstance(step, functools.partial):
            step, args, kwargs = step.func, (*step.args, *args), {**step.keywords, **kwargs}
        elif isinstance(step, types.MethodType):
            step, args = step.__func__, (step.__self__, *args)
        else:
            return step, args, kwargs


def unwrapped(step: Any) -> Callable[..., Any]:
    """Return the function under a ``jit``, to be traced without that ``jit``."""
    if hasattr(step, "whole_step"):  # which does not keep the step alive
        return functools.wraps(step, updated=())(lambda *args, **kwargs: step.whole_step(*args, **kwargs))
    # jax accepts no compiler_options in a jit inside another.
    return step.__wrapped__ if hasattr(step, "lower") and hasattr(step, "__wrapped__") else step


def jitted(
    step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return a step with the methods ``trace`` and ``lower``, and the arguments that these take.

    A function from ``jax.jit`` or ``jax_offload.jit`` stays unchanged. Any other callable is jitted: arguments that are
    not arrays are static, and an argument is donated if a ``jit`` inside donates all of it. The function returns the
    step's result if that is made of arrays and no argument has changed; else a pair of lists: the arrays in the result,
    and the arrays in the arguments that have changed in place.
    """
    if isinstance(step, _JIT) or hasattr(step, "whole_step"):
        return step, args, kwargs
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))

    @functools.wraps(step, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        arrays = iter(jax.tree.leaves((args, kwargs)))
        args, kwargs = jax.tree.unflatten(treedef, [next(arrays) if is_traced(x) else x for x in leaves])
        given = jax.tree.leaves((args, kwargs))
        results = jax.tree.leaves(result := step(*args, **kwargs))
        changed = [new for old, new in zip(given, jax.tree.leaves((args, kwargs)), strict=True) if new is not old]
        if not changed and all(map(is_traced, results)):
            return result
        return [x for x in results if is_traced(x)], changed

    args, kwargs = jax.tree.unflatten(treedef, [x if is_traced(x) else None for x in leaves])
    try:
        traced = jax.jit(of_arrays).trace(*args, **kwargs).jaxpr.jaxpr
    except Exception as error:
        error.add_note(_HINT)
        raise
    calls = [(eqn.invars, flags) for eqn in traced.eqns if (flags := eqn.params.get("donated_invars"))]
    donated = {v for operands, flags in calls for v, is_donated in zip(operands, flags, strict=True) if is_donated}
    flags = iter([v in donated for v in traced.invars])

    def donates(argument: Any) -> bool:
        own = [next(flags) for _ in jax.tree.leaves(argument)]
        return bool(own) and all(own)

    positions = [k for k, x in enumerate(args) if donates(x)]
    names = [name for name, x in sorted(kwargs.items()) if donates(x)]
    return jax.jit(of_arrays, donate_argnums=positions, donate_argnames=names), args, kwargs


def replaced(args: Sequence[Any], results: Any) -> dict[int, Any]:
    """Match a step's arguments, by their place, with the results that replace them in the next step.

    An argument takes the first unused result that has its structure, shapes and dtypes.
    """

    def types_of(x: Any) -> Any:
        leaves, treedef = jax.tree.flatten(x)
        return treedef, [(getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]

    left = [results, *(results if isinstance(results, tuple | list) else ())]
    found: dict[int, Any] = {}
    for k, argument in enumerate(args):
        same = next((i for i, x in enumerate(left) if jax.tree.leaves(x) and types_of(x) == types_of(argument)), None)
        if same is not None:
            found[k] = left.pop(same)
    return found
