"""In which order the operations of a traced program run, as far as an estimate knows: as XLA might schedule them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jax_offload._base.flops import MATMULS
from jax_offload._ir.primitives import ELEMENTWISE, REDUCE
from jax_offload._peak.flattened import Node, loop_of

GATE = "optimization_barrier"
_MOVES = frozenset(("device_put",))
FUSED = (ELEMENTWISE - _MOVES - {GATE}) | frozenset(
    "broadcast_in_dim iota slice dynamic_slice pad rev gather concatenate random_bits random_wrap random_unwrap "
    "threefry2x32 random_seed split".split()
)
IN_PLACE = frozenset(
    ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max")
)


def as_soon_as_they_can(nodes: Sequence[Node], sizes: Mapping[int, int]) -> list[Node]:
    """The operations, each as soon as it can run: what is fused first, then stores, loads and loops, and a matmul only
    where nothing else can run.

    Args:
      nodes: they, in the order of the trace.
      sizes: of the arrays, in bytes.
    """

    def turn(node: Node) -> int:
        if node.name in FUSED | REDUCE | IN_PLACE | {GATE}:
            return 0
        if node.name in _MOVES:
            return 1 if not any(sizes[k] for k in node.makes) else 2
        return 2 if node.name in ("scan", "while", "cond") else 3

    maker = {k: at for at, node in enumerate(nodes) for k in node.makes}
    needs = [{maker[k] for k in (*node.reads, *node.waits) if k in maker} for node in nodes]
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for at, of in enumerate(needs):
        for k in of:
            readers[k].append(at)
    left = [len(of) for of in needs]
    ready = [(turn(node), at) for at, node in enumerate(nodes) if not left[at]]
    heapq.heapify(ready)
    found: list[Node] = []
    while ready:
        _, at = heapq.heappop(ready)
        found.append(nodes[at])
        for k in readers[at]:
            left[k] -= 1
            if not left[k]:
                heapq.heappush(ready, (turn(nodes[k]), k))
    return _put_off(found)


def _put_off(nodes: Sequence[Node]) -> list[Node]:
    """In this order, but that a matmul whose result nobody reads before a loop is over comes after that loop.

    XLA schedules from the end. Of an embedding that is also the head the gradient of the head waits so for that of the
    embedding, and what it is made of, the logits' gradient, lives through the backward pass.
    """
    needed: dict[int, int] = {}  # number -> where it is first read, by what is not fused with what reads that
    for at, node in reversed([*enumerate(nodes)]):
        reader = min((needed[k] for k in node.makes if k in needed), default=at) if node.name in FUSED else at
        needed.update((k, min(reader, needed.get(k, reader))) for k in node.reads)
    loops = [at for at, node in enumerate(nodes) if loop_of(node.eqn) is not None]
    late: set[int] = set()
    places: list[int] = []
    for at, node in enumerate(nodes):
        reader = min((needed[k] for k in node.makes if k in needed), default=at)
        waits = node.name in MATMULS and any(at < loop < reader for loop in loops)
        if waits or (node.name in FUSED and not late.isdisjoint(node.reads)):
            late.update(node.makes)
        places.append(reader if not late.isdisjoint(node.makes) else at)
    return [nodes[at] for at in sorted(range(len(nodes)), key=places.__getitem__)]
