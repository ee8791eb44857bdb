"""What an option of ``offload`` says of each parameter: one value for all, a prefix of their tree, or rules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._base.paths import matches

Select = Any  # None | bool prefix tree | Callable[[str, ShapeDtypeStruct], bool] | str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Rules:
    """An option as regular expressions: of those that are found in a parameter's path the first one counts.

    Attributes:
      patterns: they.
      values: what each of them says.
      otherwise: what holds for a parameter in whose path none is found.
    """

    patterns: tuple[str, ...]
    values: tuple[Any, ...]
    otherwise: Any

    def indices(self, name: str, names: Sequence[str]) -> list[int]:
        """For each parameter the number of its rule; -1: it has none. Of no parameters there is nothing to say."""
        hits = matches(name, self.patterns, names) if names else []
        return [next((k for k, hit in enumerate(hits) if i in hit), -1) for i in range(len(names))]


def is_scalar(said: Any) -> bool:
    """Whether an option is one number for all parameters."""
    return isinstance(said, (int, float, np.floating))


def per_parameter(name: str, said: Any, params: Any, names: Sequence[str]) -> list[Any]:
    """The option ``name`` for each parameter: a number, a prefix of their tree, or ``Rules`` for their paths."""
    if isinstance(said, Rules):
        return [said.otherwise if k < 0 else said.values[k] for k in said.indices(name, names)]
    return [said] * len(names) if is_scalar(said) or not names else _broadcast(name, said, params)


def subtrees(name: str, said: Any, params: Any, names: Sequence[str], owner: Callable, paths_state: list) -> list[int]:
    """For every state leaf, the number of the subtree, or rule, of the option that governs it; -1: none does."""
    if is_scalar(said) or not names:
        return [0] * len(paths_state)
    if isinstance(said, Rules):
        groups = said.indices(name, names)
    else:
        numbered = jax.tree.unflatten(jax.tree.structure(said), range(len(jax.tree.leaves(said))))
        groups = _broadcast(name, numbered, params)
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
