"""Which results of an equation need which of its operands. Sets of small numbers are the bits of an int."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

Mask = int


def reach(eqn: Any) -> list[Mask] | None:
    """For each result of an equation, the operands it depends on; ``None``: every result on all of them.

    Looks inside ``cond`` and calls, as ``partial_eval.dce_jaxpr`` does when it cuts them. Loops count as a whole.
    """
    if eqn.primitive.name == "cond":
        branches = [_reach_jaxpr(b.jaxpr) for b in eqn.params["branches"]]
        return [union(masks) << 1 | 1 for masks in zip(*branches, strict=True)]
    if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return _reach_jaxpr(inner.jaxpr)
    return None


def _reach_jaxpr(jaxpr: Any) -> list[Mask]:
    env: dict[Any, Mask] = {v: 1 << i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, forward(eqn, env), strict=True))
    return [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in jaxpr.outvars]


def forward(eqn: Any, env: Mapping[Any, Any], join: Callable[[Iterable[Any]], Any] | None = None) -> list[Any]:
    """For each result, the union (or another ``join``) of what ``env`` says of the operands that it depends on."""
    join = join or union
    ins = [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in eqn.invars]
    found = reach(eqn)
    if found is None:
        return [join(ins)] * len(eqn.outvars)
    return [join(ins[i] for i in bits(mask)) for mask in found]


def backward(eqn: Any, needs: Sequence[Mask], effect: Mask) -> list[Mask]:
    """For each operand, who needs it: those who need a result that depends on it."""
    found = reach(eqn)
    if found is None:
        return [union(needs) | effect] * len(eqn.invars)
    masks = [effect] * len(eqn.invars)
    for need, mask in zip(needs, found, strict=True):
        if need:
            for i in bits(mask):
                masks[i] |= need
    return masks


def groups(masks: Sequence[Mask]) -> list[int]:
    """Numbers from 1 for masks that share a bit, directly or through others; 0 for the empty mask."""
    parent: dict[int, int] = {}

    def find(i: int) -> int:
        while parent.setdefault(i, i) != i:
            parent[i] = i = parent[parent[i]]
        return i

    for mask in masks:
        first, *rest = list(bits(mask)) or [-1]
        for bit in rest:
            parent[find(bit)] = find(first)
    number: dict[int, int] = {}
    return [0 if not m else number.setdefault(find(next(bits(m))), len(number) + 1) for m in masks]


def union(masks: Iterable[Mask]) -> Mask:
    total = 0
    for mask in masks:
        total |= mask
    return total


def bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
