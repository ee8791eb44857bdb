"""Which results of an equation need which of its operands, and the order in which parts of a program run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_offload._base.jaxprs import Atom, Equation, Jaxpr, Literal, Var, branches_of, called_by

# Sets of small numbers are the bits of an int.

Mask = int
Join = Callable[[Iterable[int]], int]


_WITH_JAXPRS = frozenset(("cond", "jit", "pjit", "closed_call", "custom_jvp_call"))


def _nested(eqn: Equation) -> list[Jaxpr]:
    """The jaxprs of ``cond`` and calls, into which ``partial_eval.dce_jaxpr`` cuts. A loop counts as one equation."""
    if eqn.primitive.name not in _WITH_JAXPRS:
        return []
    return [branch.jaxpr for branch in branches_of(eqn)] if eqn.primitive.name == "cond" else [called_by(eqn).jaxpr]


def forward(eqn: Equation, env: Mapping[Var, int], join: Join | None = None) -> list[int]:
    """For each result, the union (or another ``join``) of what ``env`` says of the operands that it depends on."""
    if join is None and eqn.primitive.name not in _WITH_JAXPRS:  # nearly all of them
        total = 0
        for v in eqn.invars:
            if not isinstance(v, Literal) and (mask := env.get(v, 0)) is not total:
                total |= mask
        return [total] * len(eqn.outvars)
    join = join or union
    ins = [0 if isinstance(v, Literal) else env.get(v, 0) for v in eqn.invars]
    if not (nested := _nested(eqn)):
        return [join(ins)] * len(eqn.outvars)
    # Through the equations inside, not from a set of operands for each result: in a cond around all of an update those
    # sets together grow with the square of the leaves.
    common = len(ins) - len(nested[0].invars)  # a cond's index
    found = [_forward_through(jaxpr, ins[common:], join) for jaxpr in nested]
    return [join([*ins[:common], *each]) for each in zip(*found, strict=True)]


def _forward_through(jaxpr: Jaxpr, ins: Sequence[int], join: Join) -> list[int]:
    env = dict(zip(jaxpr.invars, ins, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, forward(eqn, env, join), strict=True))
    return [0 if isinstance(v, Literal) else env.get(v, 0) for v in jaxpr.outvars]


def backward(eqn: Equation, needs: Sequence[Mask], effect: Mask) -> list[Mask]:
    """For each operand, who needs it: those who need a result that depends on it."""
    total = needs[0] if len(needs) == 1 else union(needs)
    if not (nested := _nested(eqn)):
        return [total | effect] * len(eqn.invars)
    found = [needs_of(j.invars, j.eqns, j.outvars, needs)[1] for j in nested]
    common = len(eqn.invars) - len(nested[0].invars)
    return [total | effect] * common + [union(each) | effect for each in zip(*found, strict=True)]


def needs_of(
    inputs: Sequence[Var], eqns: Sequence[Equation], outputs: Sequence[Atom], needs: Sequence[Mask]
) -> tuple[list[list[Mask]], list[Mask]]:
    """Who needs each result of each equation, and each of the inputs, given who needs the outputs."""
    env: dict[Var, Mask] = {}

    def add(atoms: Sequence[Atom], masks: Sequence[Mask]) -> None:
        for v, mask in zip(atoms, masks, strict=True):
            if mask and not isinstance(v, Literal):
                env[v] = env.get(v, 0) | mask

    add(outputs, needs)
    inside: list[list[Mask]] = []
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

    known = 0
    for mask in masks:
        # Each new bit is visited, but of the known ones only one of each group: many masks may share most bits.
        new, old = mask & ~known, mask & known
        known |= mask
        roots: list[int] = []
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
    total = 0
    for mask in masks:
        total |= mask
    return total


def bits(mask: Mask) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# ---- parts of a program in order


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A part of a program.

    Attributes:
      payload: whoever arranges it knows what.
      reads, makes: variables.
      kept: whether it stays though nobody reads what it makes.
    """

    payload: Any
    reads: Sequence[Var]
    makes: Sequence[Var]
    kept: bool = False


def makers(nodes: Sequence[Node]) -> dict[Var, int]:
    """Variable -> the number of the node that makes it."""
    return {v: k for k, node in enumerate(nodes) for v in node.makes}


def needed(nodes: Sequence[Node], wanted: Sequence[Var], kept: bool = True) -> set[int]:
    """The numbers of the nodes that are needed to make ``wanted``, and with ``kept`` of those that stay."""
    defined = makers(nodes)
    found: set[int] = set()
    todo = [defined[v] for v in wanted if v in defined] + [k for k, node in enumerate(nodes) if kept and node.kept]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            todo += [defined[v] for v in nodes[k].reads if v in defined]
    return found


def topological(nodes: Sequence[Node], which: Iterable[int]) -> list[Node]:
    """Those of ``nodes``, in the order that ``which`` names, but that each comes after what it needs.

    Raises:
      RuntimeError: two of them need each other.
    """
    defined, order = makers(nodes), list[Node]()
    begun: set[int] = set()
    done: set[int] = set()
    for first in which:
        stack = [(first, False)]
        while stack:
            k, ready = stack.pop()
            if k in done:
                continue
            if ready:
                done.add(k)
                order.append(nodes[k])
                continue
            if k in begun:
                raise RuntimeError(f"parts of the step need each other, one of them {nodes[k].payload}; report this.")
            begun.add(k)
            stack.append((k, True))
            stack += [(defined[v], False) for v in reversed(nodes[k].reads) if v in defined and defined[v] not in done]
    return order
