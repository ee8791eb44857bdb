"""What a step is given to carry on and what it returns, matched by their trees, types and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import is_array


def matched(carried: Mapping[str, Any], result: Any) -> tuple[list[int], tuple[Any, ...]]:
    """The numbers of the result's leaves that are the next values of what is carried, and the trees of the others.

    A result is one of several if they are returned as a tuple or list. It is the next value of the argument that is
    like it; of several that are alike, in their order.
    """
    types = {name: types_of(x) for name, x in carried.items()}
    several = type(result) in (tuple, list) and types_of(result) not in types.values()
    numbered = jax.tree.unflatten(jax.tree.structure(result), range(len(jax.tree.leaves(result))))
    results = list(zip(result, numbered, strict=True)) if several else [(result, numbered)]
    found = [types_of(x) for x, _ in results]
    places: list[int] = []
    taken: set[int] = set()
    for name, want in types.items():
        like = [k for k, each in enumerate(found) if each == want]
        free = [k for k in like if k not in taken]
        if not free or len(like) > sum(each == want for each in types.values()):
            what = f"{len(like)} results have" if free else "no result has"
            raise ValueError(
                f"step: {what} the tree, shapes and dtypes of the carried argument {name!r}; return its next value, "
                "among the results and once. Another result of that type: in a dict of its own."
            )
        taken.add(free[0])
        places += jax.tree.leaves(numbered[free[0]] if several else numbered)
    return places, tuple(number for k, (_, number) in enumerate(results) if k not in taken)


def types_of(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(tuple(x.shape), x.dtype) for x in map(array_of, leaves)]


def array_of(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def is_traced(x: Any) -> bool:
    """Whether ``jit`` would trace ``x``: arrays and numbers."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | bool | int | float | complex)


def names_of(tree: Mapping[str, Any]) -> list[str]:
    """Of the leaves, each another."""
    names = [
        "/".join([name, *([inner] if (inner := jax.tree_util.keystr(path, simple=True, separator="/")) else [])])
        for name, x in tree.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]
    ]
    return [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]
