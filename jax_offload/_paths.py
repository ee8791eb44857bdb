"""Paths of parameters, as users write them, and the parameter that a state leaf belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import keystr

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


def name_of(path: KeyPath) -> str:
    return keystr(path, simple=True, separator="/")


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
