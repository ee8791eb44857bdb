"""Effects of jax, by name: which of them leave the order of equations free, and which an equation of ours may have.

By name because their classes are private.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_UNORDERED = frozenset(("DebugEffect", "IOEffect"))
_CALLBACKS = _UNORDERED | {"OrderedDebugEffect", "OrderedIOEffect"}


def ordered(effects: Iterable[Any]) -> list[str]:
    """The names of those whose order would be lost, were the equations arranged anew."""
    return sorted({type(effect).__name__ for effect in effects} - _UNORDERED)


def only_callbacks(effects: Iterable[Any]) -> bool:
    """Whether all are of callbacks and prints: others, of mutable arrays and checks, jax knows in its own equations
    only."""
    return {type(effect).__name__ for effect in effects} <= _CALLBACKS
