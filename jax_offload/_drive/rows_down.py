"""Stacked gradients that go to host memory row by row, while a scan makes them.

This applies beside one accelerator, to gradients that only the cores' update reads. The stack never exists on the
device, and its rows are copied during the matmuls of the pass; then the cores begin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Equation, Jaxpr, Var, jax_fun, jaxpr_of, scan_of, variables
from jax_offload._base.memory import to_device, to_host
from jax_offload._drive.cores import is_sent
from jax_offload._drive.stages import Staged
from jax_offload._ir.program import Builder
from jax_offload._ir.slices import Slice, slice_of

LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the pass
LATE = frozenset(("convert_element_type", "mul", "div", "neg"))  # arithmetic that the cores do as well


def rows_sent_down(step: Staged) -> Staged:
    """Let the scans that make stacked gradients send them to host memory.

    The arithmetic on a stack's elements after the scan, such as a cast, is left to the cores.
    """
    (first, *later), alone = step.stages, _read_by_cores_alone(step)
    jaxpr = first.slices[0].jaxpr
    hosts: dict[Var, Var] = {}  # what a scan makes -> its variable in host memory
    late: dict[Var, tuple[Var, list[Equation]]] = {}  # gradient -> what the scan makes, and the arithmetic on it
    for scan in filter(None, map(scan_of, jaxpr.eqns)):
        for y in () if scan.body.consts else scan.ys:
            eqns, gradient = _behind(jaxpr, y)
            if gradient in alone and nbytes(y.aval) >= scan.length * LEAST_ROW:
                hosts[y] = Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host))
                late[gradient] = y, eqns
    if not hosts:
        return step
    left = {id(eqn) for _, eqns in late.values() for eqn in eqns}
    eqns = [_sending(eqn, hosts) for eqn in jaxpr.eqns if id(eqn) not in left]
    made = [hosts[late[v][0]] if v in late else v for v in first.slices[0].outputs]
    sending = slice_of(eqns, made, jaxpr.debug_info, {})
    stages = [dataclasses.replace(s, slices=tuple(_reading(each, hosts, late) for each in s.slices)) for s in later]
    found = dataclasses.replace(step, stages=[first, *stages], in_turn=[v for v in step.in_turn if v not in late])
    return found.with_first(sending, *first.slices[1:])


def _read_by_cores_alone(step: Staged) -> set[Var]:
    """Return the results of the pass that only the cores read."""
    first, *later = step.stages
    others = {*step.results, *(v for s in first.slices[1:] for v in s.inputs)}
    others = others.union(*(s.reads for s in later if not s.on_cores))
    return {v for s in later if s.on_cores for v in s.reads if is_sent(v.aval)} & {*first.slices[0].outputs} - others


def _behind(jaxpr: Jaxpr, y: Var) -> tuple[list[Equation], Var]:
    """Return the arithmetic on the elements of ``y`` alone and its result; nothing and ``y`` if others read ``y``."""
    late: list[Equation] = []
    v = y
    while readers := [eqn for eqn in jaxpr.eqns if v in variables(eqn.invars)]:
        eqn = readers[0]
        if len(readers) > 1 or v in jaxpr.outvars or variables(eqn.invars) != [v] or eqn.primitive.name not in LATE:
            return [], y
        late.append(eqn)
        (v,) = eqn.outvars
    return late, v


def _sending(eqn: Equation, hosts: Mapping[Var, Var]) -> Equation:
    """Return a scan that sends its stacks down row by row; return any other equation unchanged."""
    scan = scan_of(eqn)
    if scan is None or hosts.keys().isdisjoint(scan.ys):
        return eqn
    body, n = jax_fun(scan.body), len(scan.carry)

    def sending(*operands: Any) -> list[Any]:
        results = body(*operands)
        return [*results[:n], *(to_host(x) if y in hosts else x for x, y in zip(results[n:], scan.ys, strict=True))]

    with eqn.ctx.manager:
        traced, _ = jaxpr_of(sending, *(v.aval for v in scan.body.jaxpr.invars))
    made = [*scan.carry, *(hosts.get(y, y) for y in scan.ys)]
    # not unrolled: rows of several iterations would be put together in host memory
    return eqn.replace(params=eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=made)


def _reading(s: Slice, hosts: Mapping[Var, Var], late: Mapping[Var, tuple[Var, list[Equation]]]) -> Slice:
    """Let a slice read its gradients in host memory."""
    new = Builder()
    for v in s.inputs:
        if v in late:
            y, eqns = late[v]
            (new.names[y],) = new.run(to_device, hosts[y])
            new.copy(*eqns)
    for eqn in s.jaxpr.eqns:
        new.put(eqn)
    return slice_of(new.eqns, s.outputs, s.jaxpr.debug_info, {}) if new.names else s
