"""Paths of parameters, as users write them, and the parameter that a state leaf belongs to.

Without the boxes that flax puts around parameters: ``nn.Partitioned``, ``nnx.Param``. A box is a node with one leaf,
``.value``. ``nnx.Optimizer`` gives ``init`` parameters in boxes and ``update`` bare ones, so what one knows by path the
other must find, and a rule must mean the same in both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

KeyPath = tuple[Any, ...]


def matches(argument: str, rules: Sequence[str], names: Sequence[str]) -> list[set[int]]:
    """For each rule the numbers of the parameters whose path it is found in."""
    try:
        hits = [{i for i, name in enumerate(names) if re.search(rule, name)} for rule in rules]
    except re.error as error:
        raise ValueError(f"{argument}: {error.pattern!r} is not a regular expression: {error}.") from error
    if not all(hits):
        unused = [rule for rule, hit in zip(rules, hits, strict=True) if not hit]
        raise ValueError(
            f"{argument}: no parameter's path matches {unused!r}. Rules are searched in these paths: "
            f"{', '.join(names)}."
        )
    return hits


def owners(params: list[KeyPath]) -> Callable[[KeyPath], int | None]:
    """From a state leaf's path to its parameter: the longest parameter path inside it, the last one if several.

    ``[0].mu['layers']['w']`` belongs to ``['layers']['w']``. Paths are all that works for every optimizer: shapes
    differ (factored moments), and what init computes from a parameter (zeros) does not depend on it.
    """
    index = {path: i for i, path in enumerate(params)}
    lengths = sorted({len(path) for path in params}, reverse=True)

    def owner(path: KeyPath) -> int | None:
        for n in lengths:
            for start in range(len(path) - n, -1, -1):
                if (i := index.get(path[start : start + n])) is not None:
                    return i
        return None

    return owner


def leaves_with_paths(tree: Any) -> list[tuple[KeyPath, Any]]:
    return tree_leaves_with_path(tree)


def key_of(path: KeyPath) -> str:
    """A path as a key, the same in a box and out of it. No two leaves of a tree share one."""
    return keystr(path[:-1] if _ends_in_value(path) else path)


def names_of(paths: Sequence[KeyPath]) -> list[str]:
    """All parameters' paths as users write them, ``a/b/c``; a ``.value`` that has siblings is no box, and is kept."""
    under = Counter(path[:n] for path in paths for n in range(len(path)))
    bare = [path[:-1] if _ends_in_value(path) and under[path[:-1]] == 1 else path for path in paths]
    return [keystr(path, simple=True, separator="/") for path in bare]


def _ends_in_value(path: KeyPath) -> bool:
    return path[-1:] == (GetAttrKey("value"),)
