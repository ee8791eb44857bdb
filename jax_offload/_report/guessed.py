"""What a table can only guess, as the trace does not tell it: a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from jax.sharding import NamedSharding

from jax_offload._emit.region import Update
from jax_offload._plan.options import claimed, merged

_ORDER = "order: guessed from the parameters' paths; "
_READ, _SAY = "placement(step, *args) reads it from the step", "the step does not tell it, offload(order=) does"
_ASK = "tx.init(params) or abstract_state(tx, params) before the step tells them, for parameters of one sharding"


def guessed(updates: Sequence[Update], *, of_step: bool) -> tuple[str, ...]:
    """What these updates go by that is neither in their arguments nor in the trace around them."""
    orders = [_ORDER + (_SAY if of_step else _READ)] if any(map(_in_guessed_order, updates)) else []
    return tuple(dict.fromkeys([*orders, *(each for update in updates for each in _shardings(update, of_step))]))


def _in_guessed_order(update: Update) -> bool:
    """Whether several slices of an ``offload`` without ``order`` are loaded in an order that nothing tells."""
    free = {v for v, claim in claimed(update.claims).items() if claim.options.order is None}
    return not update.ordered and sum(not free.isdisjoint(p.slice.loads) for p in update.planned) > 1


def _shardings(update: Update, of_step: bool) -> Iterator[str]:
    known = merged(update.claims)
    by_sharding: dict[str, list[str]] = {}
    for path in sorted(known.remembered):
        sharding = known.shardings[path]
        if sharding.num_devices > 1:  # on one there is nothing to decide
            text = f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else str(sharding)
            by_sharding.setdefault(text, []).append(path)
    if by_sharding:
        each = "; ".join(f"{text} of {_some(paths)}" for text, paths in by_sharding.items())
        yield f"shardings: remembered from init, or from where they were asked for: {each}"
    if (unknown := known.unknown - known.shardings.keys()) and update.planned:
        none = f"not known of {_some(unknown)}" if of_step else f"{len(unknown)} of the parameters have none"
        yield f"shardings: {none}, counted as on one device" + (f"; {_ASK}" if of_step else "")


def _some(paths: Sequence[str] | Set[str]) -> str:
    first, *rest = sorted(paths)
    return f"{first} and {len(rest)} more" if rest else first
