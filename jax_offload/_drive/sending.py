"""What a program of the device does for the host's cores: its gradients leave the device as early as they can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.barriers import opaque, together
from jax_offload._base.jaxprs import (
    Equation,
    Jaxpr,
    Scan,
    Var,
    jax_fun,
    jaxpr_like,
    jaxpr_of,
    renamed,
    scan_of,
    variables,
)
from jax_offload._base.memory import on_host, to_host

LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the program


def sending_rows(jaxpr: Jaxpr, n: int) -> Jaxpr:
    """Let scans send the results after the first ``n`` to host memory row by row, if nothing else in it reads them.

    Such a stack never exists on the device, and its rows are copied during the matmuls of the pass.
    """
    times = Counter(v for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in variables(atoms))
    sent = {v for v in variables(jaxpr.outvars[n:]) if times[v] == 1}
    hosts: dict[Var, Var] = {}
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        scan = scan_of(eqn)
        ys = [y for y in scan.ys if y in sent and nbytes(y.aval) >= scan.length * LEAST_ROW] if scan else []
        if scan is not None and ys and not scan.body.consts:
            hosts |= {y: Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host)) for y in ys}
            eqn = _sending(scan, [hosts.get(y, y) for y in scan.ys])
        eqns.append(eqn)
    return jaxpr_like(jaxpr, eqns, [renamed(hosts, v) for v in jaxpr.outvars]) if hosts else jaxpr


def _sending(scan: Scan, ys: Sequence[Var]) -> Equation:
    """Return the equation of a scan whose stacks are ``ys``, some of them in host memory."""
    body, n = jax_fun(scan.body), len(scan.carry)

    def sending(*operands: Any) -> list[Any]:
        results = body(*operands)
        return [
            *results[:n],
            *(x if y is old else to_host(x) for x, y, old in zip(results[n:], ys, scan.ys, strict=True)),
        ]

    with scan.eqn.ctx.manager:
        traced, _ = jaxpr_of(sending, *(v.aval for v in scan.body.jaxpr.invars))
    # not unrolled: rows of several iterations would be put together in host memory
    return scan.eqn.replace(params=scan.eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=[*scan.carry, *ys])


def in_turn(results: Sequence[Any], turns: Sequence[int]) -> list[Any]:
    """Let each of some results wait for the one before, and the smallest of the others wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    found, turns = list(results), [k for k in turns if not on_host(results[k])]
    if len(turns) < 2:
        return found
    # a number of each gradient, masked to nothing by an opaque zero, is made of it and is used
    read, zero = opaque(jnp.int32(0)), opaque(jnp.int32(0))
    for k in turns:
        found[k], read = together((found[k], read))
        first = jax.lax.slice(found[k], [0] * found[k].ndim, [1] * found[k].ndim).reshape(())
        read |= jnp.real(first).astype(jnp.int32) & zero
    others = {*range(len(found))}.difference(turns)
    others = [k for k in others if not on_host(found[k]) and not jnp.issubdtype(found[k].dtype, jax.dtypes.extended)]
    last = min(others or turns, key=lambda k: nbytes(jax.typeof(found[k])))
    found[last] = jnp.where(read == 0, found[last], jnp.zeros((), found[last].dtype))
    return found
