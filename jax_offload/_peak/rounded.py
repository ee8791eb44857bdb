"""What a TPU keeps in half of its bytes: arrays of float32 that nothing but matmuls read, which round them to bfloat16.

XLA rounds them where they are made. Only what a loop stacks for another loop counts: what a backward pass will read.
And of what was there before, the parameters, it makes a copy in half of the bytes, all layers at once, ahead of a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from jax_offload._base.flops import MATMULS, at_default_precision
from jax_offload._peak.flattened import Flattened, Loop, Node, flattened, loop_of
from jax_offload._peak.sequence import GATE

Uses = dict[int, list[tuple[Node, int]]]


def rounded(program: Flattened) -> set[int]:
    """The numbers of these arrays."""
    uses = _uses(program)
    stacked = (k for node in program.nodes if (loop := loop_of(node.eqn)) for k in node.makes[loop.carry :])
    return {k for k in stacked if program.types[k][1] == "float32" and _only_multiplied(k, program, uses)}


def rounded_ahead(node: Node, loop: Loop, types: Mapping[int, tuple[Any, ...]]) -> list[int]:
    """Of the rows that a loop reads the stacks in float32 of which it has such a copy: those that it only multiplies,
    rounded by its matmuls or by itself."""
    body, count = flattened(loop.body), len(loop.body.invars)
    uses, rows = _uses(body), loop.consts + loop.carry
    places = zip(node.operands[len(node.operands) - count :], body.inputs[len(body.inputs) - count :], strict=True)
    return [
        k for k, inner in [*places][rows:]
        if k >= 0 and types[k][1] == "float32" and uses.get(inner)
        and all(_multiplies(*use) or _rounds(use[0]) for use in uses[inner])
    ]  # fmt: skip


def _rounds(node: Node) -> bool:
    return node.name == "convert_element_type" and str(node.eqn.outvars[0].aval.dtype) == "bfloat16"


def _uses(program: Flattened) -> Uses:
    """Of each array who reads it, and as which operand."""
    found: Uses = defaultdict(list)
    for node in program.nodes:
        for place, k in enumerate(node.operands):
            if node.name != GATE and k >= 0:
                found[k].append((node, place))
    return found


def _only_multiplied(k: int, program: Flattened, uses: Uses) -> bool:
    return k not in program.outputs and bool(uses.get(k)) and all(_multiplies(*use) for use in uses[k])


def _multiplies(node: Node, place: int) -> bool:
    """Whether an operand is one of a matmul of the default precision, or rows that are in each iteration of a loop."""
    if node.name in MATMULS:
        return at_default_precision(node.eqn)
    if (loop := loop_of(node.eqn)) is None:
        return False
    body = flattened(loop.body)
    at = place - (len(node.operands) - len(loop.body.invars))
    inner = body.inputs[len(body.inputs) - len(loop.body.invars) + at]
    return at >= loop.consts + loop.carry and _only_multiplied(inner, body, _uses(body))
