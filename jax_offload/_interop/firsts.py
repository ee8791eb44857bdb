"""The first rows of a state that turned steps update row by row: on the device from one call to the next.

Nothing is beside the loads of what the first iteration of a forward pass needs. So the last one loads it, of the new
state, and the call hands it on: a row of each leaf more on the device in the backward pass, and nothing more to load.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._base.memory import DEVICE_KIND, to_device, with_kind
from jax_offload._emit.rows import read_rows
from jax_offload._step import rewritten


@dataclasses.dataclass(frozen=True)
class First:
    """Of a leaf.

    Attributes:
      key: its name among what is made for the update.
      dim, row: which it is, along which axis.
      place: how it is divided between devices; ``None``: it is not.
    """

    key: str
    dim: int
    row: int
    place: Sharding | None

    def of(self, leaf: Any) -> Any:
        return to_device(read_rows(leaf, self.dim, self.row, 1, 1, None))

    def lies(self, leaf: Any) -> Sharding | None:
        """Where it is, of a leaf that may be abstract."""
        sharding = getattr(leaf, "sharding", None)
        return None if sharding is None else with_kind(sharding, DEVICE_KIND)


Firsts = Mapping[str, First]


def firsts_of(train: Callable[..., Any], types: tuple[Any, ...], own: Mapping[str, Any]) -> dict[str, First]:
    """Of the carried arguments ``own``, which a call takes and hands on by these names, those with such rows."""
    closed, result = jaxpr_of(train, *types)
    (kept, _, _), _, _ = jax.tree.unflatten(result, range(result.num_leaves))
    number_of = _numbers(own)
    found = rewritten.lasting(closed, {k: kept[name] for name, k in number_of.items()})
    return {name: First(f"first/{name}", *found[k], _divided(own[name])) for name, k in number_of.items() if k in found}


def handing_on(firsts: Firsts, of_next: Firsts) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """How ``train`` is rewritten: it takes the rows ``firsts`` among what was made, and makes those of the next one."""
    if not firsts and not of_next:
        return rewritten.rewritten
    keys = {first.key for first in firsts.values()}

    def rewrite(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def run(own: Any, produced: Any, given: Any, arrays: Any) -> Any:
            rows = {name: produced[first.key] for name, first in firsts.items() if of_next.get(name) == first}
            args = own, {key: x for key, x in produced.items() if key not in keys}, given, arrays
            closed, result = jaxpr_of(train, *args)
            number_of = _numbers(own)
            given_rows = {number_of[name]: x for name, x in rows.items()}
            results, after = rewritten.handing_on(closed, jax.tree.leaves(args), given_rows)
            (own, produced, given), late, now = jax.tree.unflatten(result, results)
            loaded = {name: after[k] for name, k in number_of.items() if k in after}
            next_rows = {x.key: loaded[name] if name in loaded else x.of(own[name]) for name, x in of_next.items()}
            return (own, produced | next_rows, given), late, now

        return run

    return rewrite


def _numbers(own: Mapping[str, Any]) -> dict[str, int]:
    """Of the leaves of the first argument, as jax has them in order."""
    return {name: k for k, name in enumerate(sorted(own))}


def _divided(leaf: Any) -> Sharding | None:
    place = getattr(leaf, "sharding", None)
    if not isinstance(place, NamedSharding) or place.num_devices == 1:
        return None
    return with_kind(place, DEVICE_KIND)
