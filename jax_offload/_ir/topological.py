"""Parts of a program in an order in which each comes after what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
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
