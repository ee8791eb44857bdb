"""Run one iteration of a scan by itself: the microbatch whose pass can host the update.

This is the last one, whose backward pass completes the sum of all gradients, or the first one, whose forward pass is
the first to read new parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._base.barriers import together
from jax_offload._base.jaxprs import jax_fun, scan_of
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.program import Program, replaced, traced_for


def why_not_peeled(program: Program, at: int) -> str:
    """Why no iteration of equation ``at`` of ``program``, a scan, can run by itself; empty if one can."""
    eqn = program.eqns[at]
    scan = scan_of(eqn)
    if scan is None or not scan.length:
        return "it has no iterations"
    if eqn.effects:
        return "it has effects, such as a callback, whose order would change"
    if any(is_host_aval(v.aval) for v in (*scan.xs, *scan.ys)):
        return "it reads or makes rows in host memory, which would be copied there"
    return ""


def peeled(program: Program, at: int, *, first: bool = False) -> Program:
    """Take the last iteration, or the first, out of equation ``at`` of ``program``, a scan, and inline it."""
    eqn = program.eqns[at]
    scan = scan_of(eqn)
    assert scan is not None  # else there is a reason
    body = jax_fun(scan.body)
    in_front = first != scan.reverse  # which row the iteration has
    others, apart = (slice(1, None), 0) if in_front else (slice(-1), -1)

    def run(*operands: Any) -> list[Any]:
        consts, init, xs = scan.parted(operands)

        def one(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            produced = body(*consts, *carry, *x)
            return produced[: len(init)], produced[len(init) :]

        # Rows are taken by number, because slices of the batches would be copies.
        def at(*args: Any) -> list[Any]:
            *given, k = args
            return body(*given, *(jax.lax.dynamic_index_in_dim(x, k, keepdims=False) for x in xs))

        mine = [x[apart] for x in xs]
        if scan.length == 1:
            carry, y = one(init, mine)
            return [*carry, *(row[None] for row in y)]
        y: list[Any] = []
        if first:
            init, y = one(init, mine)
        numbers = np.arange(scan.length, dtype=np.int32)[others]
        carry, ys = scan.run(at, consts, init, [numbers], scan.length - 1)
        if not first:
            # It waits for the others: its pass needs nothing from them, and would keep its activations beside theirs.
            carry, y = one(*together((carry, mine)))
        pairs = ([row[None], rows] if in_front else [rows, row[None]] for rows, row in zip(ys, y, strict=True))
        return [*carry, *map(jnp.concatenate, pairs)]

    return replaced(program, at, traced_for(eqn, run))
