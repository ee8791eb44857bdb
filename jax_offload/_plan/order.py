"""The order of the backward pass, in which leaves are taken and streamed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jax_offload._base.paths import leaves_with_paths, matches, names_of, owners

Order = Sequence[str] | None


def ranks(state: Any, params: Any, order: Order = None, produced: Sequence[int] | None = None) -> list[int]:
    """For every state leaf its place in the backward pass: its parameter's, then the state's own order.

    Args:
      state, params: arrays or abstract values.
      order: the rules of ``offload``.
      produced: for every parameter when its gradient was made, where the trace tells; ``order`` goes before it.
    """
    backward = _backward_ranks(names_of([path for path, _ in leaves_with_paths(params)]), order, produced)
    places = [len(backward) if i is None else backward[i] for i in owners(state, params)]
    return [place * len(places) + k for k, place in enumerate(places)]


def _backward_ranks(names: list[str], rules: Order, produced: Sequence[int] | None) -> list[int]:
    """For every parameter its place in the backward pass: as the rules say, else as the trace tells, else guessed.

    The guess is the natural order of the paths, reversed. ``layers_10`` comes before ``layers_2``: the last layer's
    gradient appears first.
    """
    hits = matches("order", rules, names) if rules and names else []
    by_rule = [next((k for k, hit in enumerate(hits) if i in hit), len(hits)) for i in range(len(names))]

    def natural(name: str) -> list[tuple[int, int, str]]:
        return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", name)]

    order = sorted(range(len(names)), key=lambda i: natural(names[i]), reverse=True)
    order.sort(
        key=lambda i: (
            by_rule[i],
            produced[i] if produced and len(produced) == len(names) and not rules else 0,
        )
    )
    ranks = [0] * len(names)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks
