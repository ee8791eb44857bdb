"""Paths of parameters without the boxes that flax puts around them: ``nn.Partitioned``, ``nnx.Param``.

A box is a node with one leaf, ``.value``. ``nnx.Optimizer`` gives ``init`` parameters in boxes and ``update`` bare
ones, so what one knows by path the other must find, and a rule must mean the same in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.tree_util import GetAttrKey, keystr

KeyPath = tuple[Any, ...]


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
