"""Match a step's carried arguments with its results: which result is the next value of which argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import is_array
from jax_offload._base.on_disk import is_on_disk
from jax_offload._ir.propagate import Mask, union
from jax_offload._step.returned import UPDATED

Origins = Callable[[Mapping[str, Mask]], Sequence[Mask]]
"""Map bits for the carried arguments to the bits on which each leaf of the result depends (``origins_of``)."""

_FIX = "Return a dict with the carried arguments' names as keys."


def matched(carried: Mapping[str, Any], result: Any, origins: Origins) -> tuple[list[int], Any]:
    """Return the numbers of the result's leaves that are next values of carried ones, and the tree of the others.

    A result is one of several if they are returned as a tuple or list, or as a dict or named tuple whose keys include
    the names of all that is carried. These names decide. Else the next value of an argument is the only result of its
    tree, shapes and dtypes. Of several, it is the one that the step's update makes of this argument and of no other
    that is like it; where all but one are known by that, the last one belongs to the last argument.

    Raises:
      ValueError: an argument has no next value among the results, or it is not certain which one that is.
    """
    types = {name: types_of(x) for name, x in carried.items()}
    leaves, treedef = jax.tree.flatten(result)
    numbered = jax.tree.unflatten(treedef, map(Number, range(len(leaves))))
    if types_of(result) not in types.values() and (named := _by_name(result, numbered)).keys() >= carried.keys():
        for name, (x, _) in named.items():
            if name in types and types_of(x) != types[name]:
                raise ValueError(
                    f"step: its result {name!r} differs from the carried argument in tree, shapes or dtypes."
                )
        places = [leaf.number for name in carried for leaf in jax.tree.leaves(named[name][1])]
        return places, _plain({name: numbers for name, (_, numbers) in named.items() if name not in carried})
    several = type(result) in (tuple, list) and types_of(result) not in types.values()
    results = list(zip(result, numbered, strict=True)) if several else [(result, numbered)]
    kinds = [types_of(x) for x, _ in results]
    place_of: dict[str, int] = {}
    for name, want in types.items():
        if name not in place_of:
            alike = [other for other, each in types.items() if each == want]
            place_of |= _told_apart(alike, {k: results[k][1] for k, each in enumerate(kinds) if each == want}, origins)
    places = [leaf.number for name in carried for leaf in jax.tree.leaves(results[place_of[name]][1])]
    others = tuple(numbers for k, (_, numbers) in enumerate(results) if k not in place_of.values())
    return places, _plain(others[0] if len(others) == 1 else others)


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a leaf of a result: its number. A plain number would be the version of a leaf on disk."""

    number: int


def _plain(numbered: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.number, numbered)


def _by_name(result: Any, numbered: Any) -> dict[str, tuple[Any, Any]]:
    """The results of a step by the names that it gives them, each with the numbers of its leaves."""
    if isinstance(result, Mapping):
        return {str(name): (x, numbered[name]) for name, x in result.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    fields = getattr(result, "_fields", ())
    return {name: (getattr(result, name), getattr(numbered, name)) for name in fields}


def _told_apart(names: Sequence[str], results: Mapping[int, Any], origins: Origins) -> dict[str, int]:
    """The result that is the next value of each of some carried arguments that are alike.

    Args:
      names: the arguments.
      results: the results of their type, each with the numbers of its leaves.
    """
    what = " and ".join(map(repr, names))
    if len(results) < len(names):
        raise ValueError(
            f"step: {len(results) or 'no'} result{'s have' if len(results) > 1 else ' has'} the tree, shapes and "
            f"dtypes of the carried argument{'s' * (len(names) > 1)} {what}; return the next value of each."
        )
    left, found = dict(results), dict[str, int]()
    if len(results) > 1:
        bits = {name: UPDATED << (k + 1) for k, name in enumerate(names)}
        made, any_of_them = origins(bits), union(bits.values())
        for name, bit in bits.items():
            masks = {k: [made[leaf.number] for leaf in jax.tree.leaves(numbers)] for k, numbers in results.items()}
            own = [
                k
                for k, each in masks.items()
                if union(each) & any_of_them == bit and any(mask & UPDATED and mask & bit for mask in each)
            ]
            if len(own) == 1:
                found[name] = own[0]
                del left[own[0]]
    unknown = [name for name in names if name not in found]
    if len(unknown) == len(left) == 1:
        return found | {unknown[0]: next(iter(left))}
    if unknown:
        raise ValueError(
            f"step: {len(left)} results have the tree, shapes and dtypes of the carried argument"
            f"{'s' * (len(unknown) > 1)} {' and '.join(map(repr, unknown))}, and the update does not tell which "
            f"result is the next value of which argument. {_FIX}"
        )
    return found


def types_of(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_on_disk)  # which has the leaf's type, and not its token's
    return treedef, [(tuple(x.shape), x.dtype) for x in map(array_of, leaves)]


def array_of(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def is_traced(x: Any) -> bool:
    """Whether ``jit`` would trace ``x``: arrays and numbers."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | bool | int | float | complex)


def names_of(tree: Mapping[str, Any]) -> list[str]:
    """A name for each leaf, no two alike."""
    names = [
        "/".join([name, *([inner] if (inner := jax.tree_util.keystr(path, simple=True, separator="/")) else [])])
        for name, x in tree.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]
    ]
    return [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]
