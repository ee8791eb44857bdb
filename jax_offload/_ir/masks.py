"""Which results of an equation need which of its operands. Sets of small numbers are the bits of an int."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

Mask = int


def _nested(eqn: Any) -> list[Any]:
    """The jaxprs of ``cond`` and calls, into which ``partial_eval.dce_jaxpr`` cuts. Loops count as a whole."""
    if eqn.primitive.name == "cond":
        return [branch.jaxpr for branch in eqn.params["branches"]]
    if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        return [eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")).jaxpr]
    return []


def forward(eqn: Any, env: Mapping[Any, Any], join: Callable[[Iterable[Any]], Any] | None = None) -> list[Any]:
    """For each result, the union (or another ``join``) of what ``env`` says of the operands that it depends on."""
    join = join or union
    ins = [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in eqn.invars]
    if not (nested := _nested(eqn)):
        return [join(ins)] * len(eqn.outvars)
    # Through the equations inside, not from a set of operands for each result: in a cond around a whole update those
    # sets together grow with the square of the leaves.
    common = len(ins) - len(nested[0].invars)  # a cond's index
    found = [_forward_through(jaxpr, ins[common:], join) for jaxpr in nested]
    return [join([*ins[:common], *each]) for each in zip(*found, strict=True)]


def _forward_through(jaxpr: Any, ins: Sequence[Any], join: Callable[[Iterable[Any]], Any]) -> list[Any]:
    env = dict(zip(jaxpr.invars, ins, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, forward(eqn, env, join), strict=True))
    return [0 if isinstance(v, jex.Literal) else env.get(v, 0) for v in jaxpr.outvars]


def backward(eqn: Any, needs: Sequence[Mask], effect: Mask) -> list[Mask]:
    """For each operand, who needs it: those who need a result that depends on it."""
    total = union(needs)
    if not (nested := _nested(eqn)):
        return [total | effect] * len(eqn.invars)
    found = [needs_of(j.invars, j.eqns, j.outvars, needs)[1] for j in nested]
    common = len(eqn.invars) - len(nested[0].invars)
    return [total | effect] * common + [union(each) | effect for each in zip(*found, strict=True)]


def needs_of(
    inputs: Sequence[Any], eqns: Sequence[Any], outputs: Sequence[Any], needs: Sequence[Mask]
) -> tuple[list[list[Mask]], list[Mask]]:
    """Who needs each result of each equation, and each of the inputs, given who needs the outputs."""
    env: dict[Any, Mask] = {}

    def add(atoms: Sequence[Any], masks: Sequence[Mask]) -> None:
        for v, mask in zip(atoms, masks, strict=True):
            if mask and not isinstance(v, jex.Literal):
                env[v] = env.get(v, 0) | mask

    add(outputs, needs)
    inside = []
    for eqn in reversed(eqns):
        inside.append([env.get(v, 0) for v in eqn.outvars])
        add(eqn.invars, backward(eqn, inside[-1], 0))
    return inside[::-1], [env.get(v, 0) for v in inputs]


def groups(masks: Sequence[Mask]) -> list[int]:
    """Numbers from 1 for masks that share a bit, directly or through others; 0 for the empty mask."""
    parent: dict[int, int] = {}
    joined: dict[int, Mask] = {}  # of a root: the bits of its group

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    seen = 0
    for mask in masks:
        # New bits once, and of those seen before one of each group: many masks may share most of their bits.
        new, old = mask & ~seen, mask & seen
        seen |= mask
        roots = []
        while old:
            roots.append(find(next(bits(old))))
            old &= ~joined[roots[-1]]
        root = roots[0] if roots else next(bits(new), -1)
        for bit in bits(new):
            parent[bit] = root
        for other in roots[1:]:
            parent[other] = root
        if mask:
            joined[root] = union((new, *(joined.pop(r) for r in roots)))
    number: dict[int, int] = {}
    return [0 if not m else number.setdefault(find(next(bits(m))), len(number) + 1) for m in masks]


def union(masks: Iterable[Mask]) -> Mask:
    return functools.reduce(operator.or_, masks, 0)


def bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
