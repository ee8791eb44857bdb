"""What an option of ``offload`` says of each parameter: one value for all, a prefix of their tree, or rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._base.paths import matches

Select = Any  # None | bool prefix tree | Callable[[str, ShapeDtypeStruct], bool] | str | Sequence[str]


def is_scalar(said: Any) -> bool:
    """Whether an option is one number for all parameters."""
    return isinstance(said, (int, float, np.floating))


def per_parameter(name: str, prefix: Any, params: Any) -> list[Any]:
    """The option ``name``, a number or a prefix of the tree of ``params``, for each of them."""
    n = len(jax.tree.leaves(params))
    return [prefix] * n if is_scalar(prefix) or not n else _broadcast(name, prefix, params)


def subtrees(fraction: Any, params: Any, owner: Callable, paths_state: list) -> list[int]:
    """For every state leaf, the number of the subtree of ``fraction`` that governs it; -1: none does."""
    if is_scalar(fraction) or not jax.tree.leaves(params):
        return [0] * len(paths_state)
    numbered = jax.tree.unflatten(jax.tree.structure(fraction), range(len(jax.tree.leaves(fraction))))
    groups = _broadcast("fraction", numbered, params)
    return [-1 if (i := owner(path)) is None else groups[i] for path, _ in paths_state]


def selector(select: Select, params: Any, named: list[tuple[str, Any]]) -> Callable[[int, Any], bool]:
    """``select`` as a function of (index of the parameter, state leaf)."""
    if select is None or not named:
        return lambda i, leaf: True
    if callable(select):
        _check_takes_two(select)
        return lambda i, leaf: bool(select(named[i][0], leaf))
    if isinstance(select, str) or (isinstance(select, Sequence) and all(isinstance(r, str) for r in select)):
        rules = [select] if isinstance(select, str) else list(select)
        chosen = set().union(*matches("select", rules, [name for name, _ in named]))
        return lambda i, leaf: i in chosen
    mask = _broadcast("select", select, params)
    if not all(isinstance(m, (bool, np.bool_)) for m in mask):
        raise ValueError(
            "select: expected regular expressions, a callable on (path, leaf), or a pytree prefix of the "
            f"parameters with a bool per subtree; got {select!r}."
        )
    return lambda i, leaf: bool(mask[i])


def _check_takes_two(select: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(select)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind("path", None)
    except TypeError as error:
        raise TypeError(
            f"select: a callable is called with a parameter's path and a state leaf: {error}. For example "
            'select=lambda path, leaf: "embed" in path.'
        ) from error


def _broadcast(name: str, prefix: Any, params: Any) -> list[Any]:
    """The leaves of a prefix tree, one for every parameter."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, params))
    except ValueError as error:
        raise ValueError(
            f"{name}: expected a single value or a pytree prefix of the parameters.\n"
            f"  got        {prefix!r}\n  parameters {jax.tree.structure(params)}\n{error}"
        ) from error
