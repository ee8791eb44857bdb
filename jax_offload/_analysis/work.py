"""How long a traced program's own arithmetic takes on a chip: a roofline, without transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.exposure import speed
from jax_offload._base.flops import MATMULS, at_default_precision, own_flops
from jax_offload._base.jaxprs import Equation, Jaxpr
from jax_offload._ir.primitives import REDUCE
from jax_offload._peak.flattened import Flattened, bodies, flattened, loop_of
from jax_offload._peak.liveness import Event, Lives

Read = dict[int, frozenset[int]]


def seconds(jaxpr: Jaxpr, chip: Chip) -> float:
    """Of all that it runs: matmuls at their speed, or at that of device memory if that is slower; what is fused at that
    of what it reads and writes."""
    return sum(each for _, each in _events(flattened(jaxpr), chip))


def production_times(jaxpr: Jaxpr, chip: Chip) -> tuple[list[float], float]:
    """After how many seconds each of its results is there, and how many all of it takes, in the order of the trace."""
    program = flattened(jaxpr)
    now, produced = 0.0, dict[int, float]()
    for event, each in _events(program, chip):
        now += each
        produced.update(dict.fromkeys(event.makes, now))
    return [produced.get(k, 0.0) for k in program.outputs], now


def _events(program: Flattened, chip: Chip) -> Iterator[tuple[Event, float]]:
    """What runs, one after the other, and its seconds."""
    lives = Lives(program, False)
    lives.run((), {k for k in program.outputs if k >= 0}, set())
    read: Read = {}
    for event in lives.events:
        yield event, _of(_in_one_kernel(event, read) if chip.platform == "cuda" else event, lives, chip)


def _in_one_kernel(event: Event, read: Read) -> Event:
    """Without reads that a kernel of XLA for GPUs makes once: what a number of a row is made of is there still for what
    that number is used on, as in a softmax or a norm of each row.

    ``read``: of the results of reductions of rows, what they have read; the event's own is added.
    """
    node = event.node
    reduces = node is not None and node.name in REDUCE
    if not (reduces or node is None or event.fused):
        return event
    there = frozenset[int]().union(*(read.get(k, frozenset()) for k in event.reads))
    if reduces and node is not None:
        eqn = node.eqn
        if tuple(eqn.params.get("axes", ())) == (len(eqn.invars[0].aval.shape) - 1,):
            read.update(dict.fromkeys(event.makes, there | {*event.reads}))
    return dataclasses.replace(event, reads=[k for k in event.reads if k not in there])


def _of(event: Event, lives: Lives, chip: Chip) -> float:
    sizes = lives.sizes
    produced = sum(sizes[k] for k in event.makes)
    node = event.node
    if node is None:
        moved = produced + sum(min(sizes[k], produced) for k in {*event.reads})
        return moved / chip.reached.hbm
    if (loop := loop_of(node.eqn)) is not None:
        length = loop.length
        return (1 if length is None else length) * seconds(loop.body, chip)
    if inner := bodies(node.eqn):
        return max(seconds(body, chip) for body in inner)
    if node.name == "device_put":
        return 0.0
    if event.in_place:
        rest = [k for k in node.operands[1:] if k >= 0]
        return 2 * max((sizes[k] for k in rest), default=0) / chip.reached.hbm
    reads = sum(min(sizes[k], produced) if event.fused else sizes[k] for k in {*event.reads})
    moved = (produced + reads) / chip.reached.hbm
    return max(moved, own_flops(node.eqn) / speed(chip, _dtype(node.eqn, chip)))


def all_flops(jaxpr: Jaxpr) -> float:
    """Of all that a program runs."""
    total = 0.0
    for node in flattened(jaxpr).nodes:
        loop = loop_of(node.eqn)
        times = 1 if loop is None or loop.length is None else loop.length
        inner = [all_flops(body) for body in bodies(node.eqn)]
        total += times * max(inner) if inner else own_flops(node.eqn)
    return total


def _dtype(eqn: Equation, chip: Chip) -> str:
    """In which it is computed: a TPU rounds what a matmul multiplies to bfloat16, unless the step asks for more."""
    if chip.platform == "tpu" and eqn.primitive.name in MATMULS and at_default_precision(eqn):
        return "bfloat16"
    return str(eqn.invars[0].aval.dtype) if eqn.invars else "float32"
