"""Parts of a program in an order in which each comes after what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from jax_offload._base.jaxprs import Var


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
    made = makers(nodes)
    found: set[int] = set()
    todo = [made[v] for v in wanted if v in made] + [k for k, node in enumerate(nodes) if kept and node.kept]
    while todo:
        k = todo.pop()
        if k not in found:
            found.add(k)
            todo += [made[v] for v in nodes[k].reads if v in made]
    return found


def arranged(nodes: Sequence[Node], which: Set[int]) -> list[Node]:
    """Those of ``nodes``, in their order, but that each comes after what it needs.

    Raises:
      ValueError: some need each other.
    """
    made, order = makers(nodes), list[Node]()
    done: set[int] = set()
    begun: set[int] = set()
    for first in sorted(which):
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
                raise ValueError("parts of the step need each other")
            begun.add(k)
            stack.append((k, True))
            stack += [(made[v], False) for v in reversed(nodes[k].reads) if v in made and made[v] not in done]
    return order
