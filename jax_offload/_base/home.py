"""Where the state of one ``offload`` has been seen between updates. What undoes the offload is told once.

A state is seen twice: as it comes to an update, whose types tell its memory, and where a program that returns it is
lowered, whose results tell theirs. A ``jit`` with ``out_shardings`` that name no memory returns it on the device,
whatever an update says.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from jax_offload._base.private import results_of_main

_latest: list[Home] = []


class Home:
    """What one ``offload`` has seen of its state.

    Attributes:
      reached: whether the state has been in host memory. A resident state that is to become an offloaded one has not.
    """

    def __init__(self) -> None:
        self.reached = False
        self._told = set[str]()

    def tell(self, what: str, where: str = "step") -> None:
        """Warns, the first time for a step, and the first time for an init."""
        if where not in self._told:
            self._told.add(where)
            warnings.warn(what, stacklevel=3)

    def updates(self) -> None:
        """An update of this ``offload`` is traced: what a step returns next is its state."""
        _latest[:] = [self]

    @staticmethod
    def latest() -> Home:
        """That of the ``offload`` whose update was traced last."""
        return _latest[0] if _latest else Home()


def check_returned(context: Any, names: Sequence[str], home: Home, where: str) -> None:
    """Warns where the program that is lowered returns a leaf in device memory that belongs in host memory.

    Args:
      context: that of a lowering rule.
      names: paths of the leaves in their state, or of more: those of results end with them.
      home: where the state is seen.
      where: whether a ``"step"`` or an ``"init"`` returns it.
    """
    results = [(_parts(path), path, on_host) for path, on_host in results_of_main(context)]
    kept = [[on_host for parts, _, on_host in results if parts[-len(name) :] == name] for name in map(_parts, names)]
    forced = [k for k, found in enumerate(kept) if found and not any(found)]
    if not forced or sum(on_host for *_, on_host in results) >= len(names):
        return
    first = next(path for parts, path, _ in results if parts[-len(name := _parts(names[forced[0]])) :] == name)
    home.tell(
        f"offload(): {len(forced)} leaves of the optimizer state were in host memory and are returned in device memory "
        f"(the first is {first}) by a jit of the {where}, whose out_shardings name no memory kind. The "
        "whole state is on the device then, and nothing is gained. Fix: out_shardings with the shardings of "
        "jax_offload.abstract_state(tx, params) in the state's place, or None there; instead of jax.pmap, which always "
        "returns arrays so, jax.jit over a mesh. See docs/frameworks.md.",
        where,
    )


def _parts(path: str) -> list[str]:
    return [part for part in re.findall(r"\w+", path) if part != "value"]  # nnx boxes each leaf
