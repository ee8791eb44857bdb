"""Which leaves in host memory are updated there, by the host's cores: the option ``update_on``, as shares of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jax_offload._placement.by_parameter import Rules

_NAMES = {"device": 0.0, "host": 1.0}


def share_of_cores(update_on: Any) -> Any:
    """``update_on`` as shares of the host's cores, from 0 to 1: one, a tree of them, or rules.

    Raises:
      ValueError: it has something else in it.
    """

    def share(x: Any) -> float:
        if isinstance(x, str) and x in _NAMES:
            return _NAMES[x]
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
    """Whether these are pairs that begin with a regular expression; ``("host", "device")`` is a prefix of two."""
    return (
        isinstance(update_on, (list, tuple))
        and bool(update_on)
        and all(isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str) for x in update_on)
        and not all(rule in _NAMES for rule, _ in update_on)
    )


def first_up_to(share: float, sizes: Sequence[int], ranks: Sequence[int], whose: Sequence[Hashable]) -> set[int]:
    """The places of the leaves that are a share of the bytes, first those whose gradients are there first.

    Their transfers have most of the step to hide in. What belongs together is not parted; the error in bytes is the
    smallest that this allows.
    """
    together: dict[Hashable, list[int]] = {}
    for k in sorted(range(len(sizes)), key=ranks.__getitem__):
        together.setdefault(whose[k], []).append(k)
    groups = list(together.values())
    sums = np.cumsum([0] + [sum(sizes[k] for k in group) for group in groups])
    count = int(np.argmin(np.abs(sums - share * sums[-1])))
    return {k for group in groups[:count] for k in group}
