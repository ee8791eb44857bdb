"""Loops of a step one after the other, as they are traced.

XLA's scheduler is free to run first what was traced last. With the last of several microbatches taken out of their
scan, so that its backward pass can host the update, it ran that one's forward pass before the scan, and the activations
of two microbatches were alive at once (12x4096x4096, four microbatches of 16384 tokens, compiled for an H200: 17792
MiB, in turn 11520; resident 11904).
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Var
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.propagate import Mask, Node, union
from jax_offload._plan.in_scan import InScan
from jax_offload._plan.interleave import Gate

_LOOPS = frozenset(("scan", "while"))


def in_turn(order: Sequence[Node]) -> list[Node]:
    """``order`` with a gate before every loop that would not need the one before it."""
    found: list[Node] = []
    read = {v for node in order for v in node.reads}
    needs: dict[Var, Mask] = {}  # the loops that a value is made of, as bits of their places
    before = -1
    for k, node in enumerate(order):
        loops = union(needs.get(v, 0) for v in node.reads)
        if _is_loop(node):
            if before >= 0 and not loops >> before & 1:
                found += _gate([v for v in order[before].makes if v in read], node.reads)
            before = k
            loops |= 1 << k
        needs.update(dict.fromkeys(node.makes, loops))
        found.append(node)
    return found


def _gate(defined: Sequence[Var], reads: Sequence[Var]) -> list[Node]:
    """A loop begins when all that it reads is there: what is smallest waits, for what is smallest."""
    held, done = (min((v for v in of if not is_host_aval(v.aval)), key=lambda v: nbytes(v.aval), default=None)
                  for of in (reads, defined))  # fmt: skip
    return [] if held is None or done is None else [Node(Gate((held,), (done,)), [held, done], [])]


def _is_loop(node: Node) -> bool:
    if isinstance(node.payload, Equation):
        return node.payload.primitive.name in _LOOPS
    return isinstance(node.payload, InScan)
