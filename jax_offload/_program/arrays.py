"""Properties that arrays and abstract values share, and the paths of leaves in their trees."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

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


# ---- paths of parameters, as users write them, and the parameter that a state leaf belongs to
#
# Paths leave out the boxes that flax puts around parameters (``nn.Partitioned``, ``nnx.Param``). A box is a node with
# one leaf, ``.value``. ``nnx.Optimizer`` gives ``init`` parameters in boxes and ``update`` bare ones. A path or a
# rule must mean the same in both.

KeyPath = tuple[Any, ...]


def first_matches(argument: str, rules: Sequence[str], names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Search regular expressions in paths.

    Returns:
      For each path the number of the first rule that it matches, ``len(rules)`` if there is none; and the numbers of
      the rules that match no path.

    Raises:
      ValueError: a rule is not a regular expression.
    """
    hits: list[list[bool]] = []
    for rule in rules:
        try:
            pattern = re.compile(rule)
        except (re.error, TypeError) as error:
            raise ValueError(f"{argument}: {rule!r} is not a regular expression: {error}.") from error
        hits.append([pattern.search(name) is not None for name in names])
    first = [next((k for k, hit in enumerate(hits) if hit[i]), len(rules)) for i in range(len(names))]
    return first, [k for k, hit in enumerate(hits) if not any(hit)]


def matches(argument: str, rules: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return for each parameter the number of the first rule that its path matches, ``len(rules)`` if there is none."""
    first, unused = first_matches(argument, rules, names)
    if unused:
        raise ValueError(
            f"{argument}: no parameter's path matches {[rules[k] for k in unused]!r}. Rules are searched in these "
            f"paths: {', '.join(names)}."
        )
    return first


def owners(state: Any, params: Any) -> list[int | None]:
    """Return for every leaf of ``state`` the number of the parameter that it belongs to; ``None`` for a leaf of none.

    A state holds copies of the parameters' tree, with one or several leaves in the place of each parameter: a moment,
    factors of it, an accumulator for each axis. Keys alone do not tell where a copy begins, because a list of
    parameters, a list of factors and a chain all count from 0. Of several subtrees inside one another, the copy is the
    one

    - in which every leaf lies in the place of a parameter,
    - whose leaves are the parameters, shape for shape,
    - whose leaves have at least no axes of other sizes than their parameters,
    - that has no fields of a state between a parameter's place and a leaf; and of these the outermost.

    A leaf of another shape behind such fields is in no parameter's place: ``optax.flatten`` keeps one vector for all.
    """
    leaves, wanted = leaves_with_paths(state), leaves_with_paths(params)
    if [(path, np.shape(x)) for path, x in leaves] == [(path, np.shape(x)) for path, x in wanted]:
        return [*range(len(wanted))]  # one copy, gradients for example
    index = {path: i for i, (path, _) in enumerate(wanted)}
    lengths = sorted({len(path) for path in index})
    found: dict[KeyPath, list[tuple[int, int]]] = {}  # from where a copy may begin to its leaves and their parameters
    under = Counter[KeyPath]()
    for k, (path, _) in enumerate(leaves):
        for start in range(len(path) + 1):
            under[path[:start]] += 1
            places = (index.get(path[start : start + n]) for n in lengths if start + n <= len(path))
            if (i := next((i for i in places if i is not None), None)) is not None:
                found.setdefault(path[:start], []).append((k, i))

    def rank(begin: KeyPath) -> tuple[Any, ...]:
        whole, foreign, fields = True, False, 0
        for k, i in found[begin]:
            (path, x), (of_param, param) = leaves[k], wanted[i]
            rest, shape, whose = path[len(begin) + len(of_param) :], np.shape(x), np.shape(param)
            alike = shape == whose or is_like(keystr(path), shape, whose)
            whole = whole and alike and not rest
            foreign = foreign or not (alike or {*shape} <= {1, *whose})
            fields = max(fields, sum(isinstance(key, GetAttrKey) for key in rest))
        whole = whole and len(found[begin]) == len(wanted)
        return len(found[begin]) < under[begin], not whole, foreign, fields, len(begin)

    owner: list[int | None] = [None] * len(leaves)
    nested: set[KeyPath] = set()  # the subtrees that hold a copy
    copies: set[KeyPath] = set()
    ranks = {begin: rank(begin) for begin in found}
    for begin in sorted(found, key=ranks.__getitem__):
        above = {begin[:n] for n in range(len(begin) + 1)}
        _, _, foreign, fields, _ = ranks[begin]
        if begin not in nested and not above & copies and not (foreign and fields):
            copies.add(begin)
            nested |= above
            for k, i in found[begin]:
                owner[k] = i
    return owner


def leaves_with_paths(tree: Any) -> list[tuple[KeyPath, Any]]:
    return tree_leaves_with_path(tree)


def key_of(path: KeyPath) -> str:
    """A path as a key, with or without a box around the leaf. No two leaves of a tree share a key."""
    return keystr(path[:-1] if _ends_in_value(path) else path)


def by_key(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths' keys."""
    return {key_of(path): x for path, x in leaves_with_paths(tree)}


def names_of(paths: Sequence[KeyPath]) -> list[str]:
    """All parameters' paths as users write them, ``a/b/c``; a ``.value`` with siblings is no box, and stays."""
    under = Counter(path[:n] for path in paths for n in range(len(path)))
    bare = [path[:-1] if _ends_in_value(path) and under[path[:-1]] == 1 else path for path in paths]
    return [keystr(path, simple=True, separator="/") for path in bare]


def some(names: Sequence[str], first: int = 1) -> str:
    """Name the first ones and count the others."""
    return ", ".join(names[:first]) + (f" and {len(names) - first} more" if len(names) > first else "")


def _ends_in_value(path: KeyPath) -> bool:
    return path[-1:] == (GetAttrKey("value"),)
