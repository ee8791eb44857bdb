"""Parse and check the options of ``offload`` that place the state: where, how divided, and who updates it.

``fraction``, ``select`` and ``update_on`` may be said of each parameter: one value for all, a pytree prefix of the
parameters, or regular expressions that are searched in the parameters' paths.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._base.arrays import is_integer
from jax_offload._base.paths import matches
from jax_offload._plan.order import Order

Select = Any  # None | bool prefix tree | Callable[[str, ShapeDtypeStruct], bool] | str | Sequence[str]
Governing = tuple[int, float] | None  # the subtree or rule that governs a parameter, and what it says
_SHARES = {"device": 0.0, "host": 1.0}


@dataclasses.dataclass(frozen=True)
class Rules:
    """An option as regular expressions: the first that is found in a parameter's path counts.

    Attributes:
      patterns: the expressions.
      values: what each of them says.
      otherwise: what holds for a parameter in whose path none is found.
    """

    patterns: tuple[str, ...]
    values: tuple[Any, ...]
    otherwise: Any


@dataclasses.dataclass(frozen=True)
class Policy:
    """The placement options of ``offload``, checked.

    Attributes:
      shard_over: the names of mesh axes.
      update_on: the share of the host's cores, from 0 to 1: one, a tree of them, or ``Rules``.
      host_bytes: what may be in host memory, while the rest is on disk; ``None`` without a disk.
    """

    fraction: Any
    select: Select
    min_bytes: int
    order: Order
    shard_over: tuple[str, ...]
    update_on: Any
    host_bytes: int | None


def policy_of(
    fraction: Any, select: Select, min_bytes: Any, order: Any, shard_over: Any, update_on: Any, host_bytes: int | None
) -> Policy:
    """Check the options as ``offload`` takes them.

    Raises:
      ValueError: an option is out of range, or two do not go together.
    """
    for f in jax.tree.leaves(fraction):
        if isinstance(f, bool) or not isinstance(f, (int, float, np.floating)) or not 0 <= f <= 1:
            raise ValueError(
                "fraction: expected a float in [0, 1], or a pytree prefix of the parameters with one per "
                f"subtree; got {fraction!r}. fraction=0.5 offloads half of the eligible bytes."
            )
    if not is_integer(min_bytes) or min_bytes < 0:
        raise ValueError(f"min_bytes: expected a number of bytes >= 0, an int; got {min_bytes!r}. 2**16 are 64 KiB.")
    if order is not None and (
        not isinstance(order, Sequence) or isinstance(order, str) or not all(isinstance(rule, str) for rule in order)
    ):
        raise ValueError(
            "order: expected regular expressions, in the order in which the gradients of what they match appear "
            f"in the backward pass; got {order!r}. For example order=['head', 'layers', 'embed']."
        )
    shares = _shares_of_cores(update_on)
    if shares != 0 and _is_number(fraction) and fraction == 0:
        raise ValueError(
            f"update_on: with fraction=0 nothing is in host memory to be updated there; got {update_on!r}. Fix: leave "
            "one of both out."
        )
    return Policy(fraction, select, min_bytes, order, _axes(shard_over), shares, host_bytes)


def check_window(window: Any) -> None:
    """Raise ``ValueError`` if the window is not a number of bytes."""
    if window is not None and (not is_integer(window) or window <= 0):
        raise ValueError(f"window: expected a number of bytes > 0, an int, or None; got {window!r}. 2**28 are 256 MiB.")


def _axes(shard_over: Any) -> tuple[str, ...]:
    """Return ``shard_over`` as a tuple of names."""
    axes = (shard_over,) if isinstance(shard_over, str) else shard_over
    if axes is None:
        return ()
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(name, str) for name in axes):
        raise ValueError(f"shard_over: expected the name of a mesh axis, or several; got {shard_over!r}.")
    if len(set(axes)) < len(axes):
        raise ValueError(f"shard_over: names an axis twice: {shard_over!r}.")
    return tuple(axes)


def _shares_of_cores(update_on: Any) -> Any:
    def share(x: Any) -> float:
        if isinstance(x, str) and x in _SHARES:
            return _SHARES[x]
        if isinstance(x, bool) or not isinstance(x, (int, float, np.floating)) or not 0 <= x <= 1:
            raise ValueError(
                "update_on: expected 'device', 'host', the share in [0, 1] that the host's cores update, a pytree "
                "prefix of the parameters with one of these per subtree, or pairs of a regular expression and one of "
                f"these; got {update_on!r}. update_on=0.3 updates 30 % of what is in host memory there, "
                "[('embed', 'host')] the embedding."
            )
        return float(x)

    if _are_rules(update_on):
        return Rules(tuple(rule for rule, _ in update_on), tuple(share(x) for _, x in update_on), 0.0)
    leaves, treedef = jax.tree.flatten(update_on, is_leaf=lambda x: x is None)
    return jax.tree.unflatten(treedef, [share(x) for x in leaves])


def _are_rules(update_on: Any) -> bool:
    """Return whether these are pairs that begin with a regular expression; ``("host", "device")`` is a prefix tree."""
    return (
        isinstance(update_on, (list, tuple))
        and bool(update_on)
        and all(isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str) for x in update_on)
        and not all(rule in _SHARES for rule, _ in update_on)
    )


def _is_number(said: Any) -> bool:
    return isinstance(said, (int, float, np.floating))


def per_parameter(name: str, said: Any, params: Any, names: Sequence[str]) -> Callable[[int | None], Governing]:
    """Return the option ``name`` as a function of a parameter's number, or of ``None`` for a leaf without one.

    Args:
      said: a number, a prefix of the parameters' tree, or ``Rules`` for their paths.
      params, names: the parameters and their paths.
    """
    if _is_number(said) or not names:
        return lambda i: (0, said) if _is_number(said) else None
    if isinstance(said, Rules):
        hits = matches(name, said.patterns, names)
        rules = [next((k for k, hit in enumerate(hits) if i in hit), -1) for i in range(len(names))]
        found = [(k, said.otherwise if k < 0 else said.values[k]) for k in rules]
    else:
        leaves, treedef = jax.tree.flatten(said)
        found = [(k, leaves[k]) for k in _broadcast(name, jax.tree.unflatten(treedef, range(len(leaves))), params)]
    return lambda i: None if i is None else found[i]


def selector(select: Select, params: Any, named: list[tuple[str, Any]]) -> Callable[[int, Any], bool]:
    """Return ``select`` as a function of (index of the parameter, state leaf)."""
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
    """Return the leaf of a prefix tree for every parameter."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, params))
    except ValueError as error:
        raise ValueError(
            f"{name}: expected a single value or a pytree prefix of the parameters.\n"
            f"  got        {prefix!r}\n  parameters {jax.tree.structure(params)}\n{error}"
        ) from error
