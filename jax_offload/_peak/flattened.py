"""A traced program as a list of operations on numbered arrays, without calls and without what only renames."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_offload._base import composite
from jax_offload._base.jaxprs import Equation, Jaxpr, Literal, branches_of, scan_of, sub_jaxprs
from jax_offload._base.memory import is_host_aval
from jax_offload._peak.sharded import ALONE, Division

# Their result is their operand: a gate, a name, another view that a matmul reads as it is.
_GATE = "optimization_barrier"
_VIEWS = frozenset(
    "sharding_constraint reshard copy reshape squeeze expand_dims transpose stop_gradient name "
    "jax_offload_donation pvary".split()
)
_LOOPS_AND_BRANCHES = ("scan", "while", "cond")


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation: its equation, and the numbers of its operands, -1 for a constant, and of what it makes.

    A gate makes nothing but its own number, for which others wait that read what is behind it.
    """

    eqn: Equation
    operands: tuple[int, ...]
    makes: tuple[int, ...]
    waits: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(k for k in self.operands if k >= 0)

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclasses.dataclass(frozen=True)
class Flattened:
    """A program.

    Attributes:
      inputs, outputs: numbers; an output that is a constant has -1.
      sizes: bytes of each array in the memory of one device; what is in host memory takes none.
      types: shape and dtype, and whether it is on the host.
      results: the types of the outputs as they are returned, which may be other views of what they are.
    """

    nodes: list[Node]
    inputs: list[int]
    outputs: list[int]
    sizes: Mapping[int, int]
    types: Mapping[int, tuple[Any, ...]]
    results: list[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A ``scan`` or a ``while``, by the positions of its operands.

    Attributes:
      consts: of them those that each iteration reads as they are; then come as many as ``carry``, then the rows.
      body: its jaxpr takes these and gives carry and rows.
      length: of iterations; ``None`` where it is not known.
    """

    body: Jaxpr
    consts: int
    carry: int
    length: int | None


def loop_of(eqn: Equation) -> Loop | None:
    """What loops; the operands that only a ``while``'s condition reads come before these."""
    if (scan := scan_of(eqn)) is not None:
        return Loop(scan.body.jaxpr, len(scan.consts), len(scan.init), scan.length)
    if eqn.primitive.name != "while":
        return None
    body, skipped = eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
    consts = eqn.params["body_nconsts"]
    return Loop(body, consts, len(eqn.invars) - skipped - consts, None)


def bodies(eqn: Equation) -> list[Jaxpr]:
    """What a loop or a branch runs."""
    if eqn.primitive.name == "cond":
        return [branch.jaxpr for branch in branches_of(eqn)]
    loop = loop_of(eqn)
    return [] if loop is None else [loop.body]


def _called(eqn: Equation) -> Jaxpr | None:
    """What a call runs; of what depends on the platform, what runs on an accelerator."""
    if None in (platforms := eqn.params.get("branches_platforms") or ()):
        return branches_of(eqn)[platforms.index(None)].jaxpr
    if eqn.primitive.name in _LOOPS_AND_BRANCHES:
        return None
    if eqn.primitive.name == "custom_vmap_call":
        return eqn.params["call"].jaxpr
    if eqn.primitive.name == composite.NAME:
        return composite.decomposition(eqn).jaxpr
    return next((jaxpr for jaxpr, _ in sub_jaxprs(eqn)), None)


def flattened(jaxpr: Jaxpr, division: Division = ALONE) -> Flattened:
    """Of an open jaxpr; its constants are inputs too. ``division``: how its arrays are divided between devices."""
    sizes: dict[int, int] = {}
    types: dict[int, tuple[Any, ...]] = {}
    nodes: list[Node] = []

    def new(v: Any) -> int:
        k = len(types)
        sizes[k] = 0 if is_host_aval(v.aval) else division.own(v.aval)
        types[k] = _type(v.aval)
        return k

    def go(jaxpr: Jaxpr, env: dict[Any, tuple[int, int]]) -> None:
        """``env``: of a variable the number of the array, and that of the gate that it is behind."""

        def read(v: Any) -> tuple[int, int]:
            return (-1, -1) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            reads = [read(v) for v in eqn.invars]
            read_values, waits = tuple(k for k, _ in reads), tuple({gate for _, gate in reads if gate >= 0})
            called = _called(eqn)
            if called is not None:
                given = reads[len(reads) - len(called.invars) :]  # without a cond's index
                own = {v: (new(v), -1) for v in called.constvars} | dict(zip(called.invars, given, strict=True))
                go(called, own)
                found = ((-1, -1) if isinstance(x, Literal) else own[x] for x in called.outvars)
                env.update(zip(eqn.outvars, found, strict=True))
            elif eqn.primitive.name == _GATE:
                gate = len(types)
                sizes[gate], types[gate] = 0, ()
                nodes.append(Node(eqn, read_values, (gate,), waits))
                env.update((v, (k, gate)) for v, k in zip(eqn.outvars, read_values, strict=True))
            elif eqn.primitive.name in _VIEWS and len(reads) >= len(eqn.outvars):
                env.update(zip(eqn.outvars, reads, strict=False))
            else:
                makes = tuple(new(v) for v in eqn.outvars)
                env.update((v, (k, -1)) for v, k in zip(eqn.outvars, makes, strict=True))
                nodes.append(Node(eqn, read_values, makes, waits))

    env = {v: (new(v), -1) for v in (*jaxpr.constvars, *jaxpr.invars)}
    inputs = [k for k, _ in env.values()]
    go(jaxpr, env)
    outputs = [-1 if isinstance(v, Literal) else env[v][0] for v in jaxpr.outvars]
    results = [_type(v.aval) for v in jaxpr.outvars]
    return Flattened(_needed(nodes, outputs), inputs, outputs, sizes, types, results)


def _needed(nodes: list[Node], outputs: Sequence[int]) -> list[Node]:
    """Without loads that nothing reads: only another platform needs them."""
    read = {*outputs}.union(*(node.operands for node in nodes))
    return [node for node in nodes if node.name != "device_put" or not read.isdisjoint(node.makes)]


def _type(aval: Any) -> tuple[Any, ...]:
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", "")), is_host_aval(aval)
