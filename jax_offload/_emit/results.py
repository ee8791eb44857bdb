"""Loops of the passes, each with results that begin with it.

The rows that a scan makes are written into zeros, which depend on nothing. XLA makes those of equal shapes together, so
where every layer has a loop (attention, a sequence at a time) there is room for the results of all of them from the
first one on: a ViT of 8 checkpointed layers held 992 MiB of zeros with jax 0.10, of a peak of 2580; resident too. Here
they are made of a zero that waits for what the loop reads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.barriers import together
from jax_offload._base.jaxprs import Equation, Jaxpr, Scan, Var, jax_fun, jaxpr_of, scan_of
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import is_manual, typed_sharding
from jax_offload._ir.program import Program, as_program, expanded

LARGE = 2**20  # bytes of a loop's results
# not a kernel's jaxpr; not a ``shard_map``, which knows axes that are not known here; a loop's zeros live an iteration
_CALLS = frozenset(
    """jit pjit closed_call core_call eval_jaxpr checkpoint remat remat2 custom_jvp_call custom_vjp_call""".split()
)


Known = dict[Any, Program]  # what takes the place of scans, by what they are


def in_time(jaxpr: Jaxpr, known: Known) -> Jaxpr:
    """An open jaxpr with its scans so, in calls too; itself where there is nothing to change.

    ``known``: of the parts of the step before. Layers have the same loops, and each is traced and lowered once.
    """
    if is_manual():
        return jaxpr
    return expanded(jaxpr, lambda eqn: _in_time(eqn, known), lambda eqn: eqn.primitive.name in _CALLS)


def _in_time(eqn: Equation, known: Known) -> Program | None:
    scan = scan_of(eqn)
    if scan is None or scan.unroll != 1 or sum(nbytes(v.aval) for v in scan.ys) < LARGE:
        return None
    if any(map(_is_special, scan.ys)):
        return None
    read = [k for k, v in enumerate(eqn.invars) if isinstance(v, Var) and not is_host_aval(v.aval)]
    read = [k for k in read if k >= len(scan.consts)]
    if not read:
        return None
    largest = max(read, key=lambda k: nbytes(eqn.invars[k].aval))
    avals = tuple(v.aval for v in eqn.invars)
    consts = tuple(map(id, scan.body.consts))
    key = scan.body.jaxpr, consts, len(scan.consts), len(scan.init), scan.length, scan.reverse, largest, avals, eqn.ctx
    if key not in known:
        with eqn.ctx.manager:
            known[key] = as_program(jaxpr_of(lambda *args: _scanned(scan, largest, args), *avals)[0])
    return known[key]


def _is_special(v: Var) -> bool:
    """Whether it is not plain numbers of no known sharding on the device."""
    plain = jnp.issubdtype(v.aval.dtype, jnp.number) or v.aval.dtype == jnp.bool_
    return not plain or is_host_aval(v.aval) or typed_sharding(v.aval) is not None


def _scanned(scan: Scan, largest: int, args: tuple[Any, ...]) -> list[Any]:
    """The scan's results, its rows written into zeros that wait for the operand ``largest``."""
    operands = list(args)
    dtypes = list(dict.fromkeys(v.aval.dtype for v in scan.ys))
    held = [operands[largest], *(jnp.zeros((), dtype) for dtype in dtypes)]
    operands[largest], *zeros = together(held)
    zero = dict(zip(dtypes, zeros, strict=True))
    first, rows = len(scan.consts), len(scan.consts) + len(scan.init)

    def iteration(carry: Any, xs: list[Any]) -> Any:
        k, carried, ys = carry
        results = jax_fun(scan.body)(*operands[:first], *carried, *xs)
        at, n = scan.length - 1 - k if scan.reverse else k, len(carried)
        ys = [jax.lax.dynamic_update_index_in_dim(y, row, at, 0) for y, row in zip(ys, results[n:], strict=True)]
        return (k + 1, results[:n], ys), None

    ys = [jnp.broadcast_to(zero[v.aval.dtype], v.aval.shape) for v in scan.ys]
    init = jnp.int32(0), operands[first:rows], ys
    (_, carried, ys), _ = jax.lax.scan(iteration, init, operands[rows:], length=scan.length, reverse=scan.reverse)
    return [*carried, *ys]
