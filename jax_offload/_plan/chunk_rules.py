"""Whether a slice may run in chunks along an axis, and how: decided by its equations, never by an optimizer's name.

Each variable either has the chunked axis, at some dimension, or does not. Every equation must keep rows apart:
elementwise arithmetic and reductions over other dimensions do, a sort along the axis does not. A reduction over the
axis is put together from those of the chunks, if the slice does not use it itself. An equation that is not known here
means no: then the leaf is loaded whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_offload._base import composite
from jax_offload._base.jaxprs import (
    Atom,
    Aval,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    called_by,
    nameless,
    run_equation,
)
from jax_offload._base.shardings import types_of_axes
from jax_offload._ir.primitives import ELEMENTWISE, REDUCE


@dataclasses.dataclass(frozen=True)
class Rows:
    """The dimension of a variable along which its rows lie, and how many of its indices make a row: more than one where
    the dimension is merged with others, as by ``ravel``."""

    dim: int
    per_row: int = 1


@dataclasses.dataclass(frozen=True)
class Partial:
    """What a chunk adds to a reduction over all rows: ``combine`` puts the chunks' results together."""

    combine: Callable[[Any, Any], Any]


Dim = Rows | Partial | None  # None: a variable without the chunked axis
Dims = dict[Var, Dim]
Run = Callable[..., list[Any]]  # an equation on a chunk: of the numbers of its rows and the operands

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions of the left and of the right operand
DotDimensions = tuple[Pair, Pair]  # contracted ones, and those of a batch

_COMBINE = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor, "reduce_prod": lax.mul,
}  # fmt: skip
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", composite.NAME))


OTHER_AXES = "some of it is made on a mesh with Auto axes, as random numbers are, and the rest on one with Explicit"


class Dependent(Exception):
    """The rows of the axis depend on each other, or may."""


def chunked_dims(jaxpr: Jaxpr, dims: Sequence[Dim], size: int, shape: tuple[int, ...], axis: int) -> list[Dim]:
    """The chunked dimension of every result of ``jaxpr``, given those of its operands.

    Args:
      jaxpr: of a slice.
      dims: chunked dimension of each operand.
      size: length of the chunked axis.
      shape, axis: a leaf's shape and its chunked axis: what is broadcast to that shape is computed chunk by chunk.

    Raises:
      Dependent: some equation mixes rows.
    """
    if len({kinds for v in jaxpr.invars if (kinds := types_of_axes(v.aval))}) > 1:
        raise Dependent(OTHER_AXES)
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule_of(eqn, _read(env, eqn.invars), size, shape, axis)[0], strict=True))
    return _read(env, jaxpr.outvars)


def run_chunk(
    jaxpr: Jaxpr, dims: Sequence[Dim], where: tuple[int, tuple[int, ...], int], chunk: jax.Array, *args: Any
) -> list[Any]:
    """Evaluates ``jaxpr`` on operands of which the chunked dimension has only the rows with the numbers ``chunk``."""
    size, shape, axis = where
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    values: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        out_dims, run = rule_of(eqn, _read(env, eqn.invars), size, shape, axis)
        env.update(zip(eqn.outvars, out_dims, strict=True))
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        with eqn.ctx.manager:
            results = run(chunk, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _read(env: Dims, atoms: Sequence[Atom]) -> list[Dim]:
    return [None if isinstance(v, Literal) else env[v] for v in atoms]


def rule_of(
    eqn: Equation, all_dims: Sequence[Dim], size: int, shape: tuple[int, ...], axis: int
) -> tuple[Sequence[Dim], Run]:
    """For an equation: the chunked dimensions of its results, and how to run it on a chunk."""
    name, params = eqn.primitive.name, eqn.params
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]

    def bind(**changed: Callable[[jax.Array], Any]) -> Run:
        def run(chunk: jax.Array, *operands: Any) -> list[Any]:
            return run_equation(eqn, operands, {**params, **{k: f(chunk) for k, f in changed.items()}})

        return run

    def resized(sizes: Sequence[int], to: Rows) -> Callable[[jax.Array], tuple[int, ...]]:
        return lambda chunk: (*sizes[: to.dim], chunk.size * to.per_row, *sizes[to.dim + 1 :])

    dims = [d for d in all_dims if not isinstance(d, Partial)]
    if len(dims) < len(all_dims):
        raise Dependent(f"{name} of a reduction over all rows")
    if name == "iota" and params["shape"][: axis + 1] == shape[: axis + 1]:
        to = Rows(axis)
        if params["dimension"] != axis:
            return [to], bind(shape=resized(params["shape"], to))

        def numbered(chunk: jax.Array) -> list[Any]:
            new, rows = resized(params["shape"], to)(chunk), chunk.astype(params["dtype"])
            # jax annotates out_sharding by a type that it does not export
            of_rows = lax.broadcast_in_dim(rows, new, (axis,), out_sharding=params["sharding"])  # pyright: ignore[reportUnknownMemberType]
            return [of_rows]

        return [to], numbered
    if name == "broadcast_in_dim":
        full, mapped = params["shape"], params["broadcast_dimensions"]
        if dims[0] is not None:
            to = Rows(mapped[dims[0].dim], dims[0].per_row)
        elif full[: axis + 1] == shape[: axis + 1] and (axis not in mapped or ins[0].shape[mapped.index(axis)] == 1):
            to = Rows(axis)  # the same for every row
        else:
            return [None], bind()
        return [to], bind(shape=resized(full, to))
    if all(d is None for d in dims):
        return [None] * len(outs), bind()
    if eqn.effects:
        raise Dependent(f"{name} has an effect")
    if name in ELEMENTWISE:
        if name == "optimization_barrier":
            return dims, bind()
        rows, *others = {d for d in dims if d is not None}
        without_rows = [aval for d, aval in zip(dims, ins, strict=True) if d is None and aval.shape]
        # one row for all, a scale of each column, goes with every chunk
        if others or any(aval.shape[rows.dim] != 1 for aval in without_rows):
            raise Dependent(f"{name} of rows and a whole")
        if any(out.shape[rows.dim : rows.dim + 1] != (size * rows.per_row,) for out in outs):
            raise Dependent(f"{name} merges rows")  # a cast to wider numbers
        return [rows] * len(outs), bind()
    if name in _CALLS or name == "cond":
        return _call(eqn, dims, size, shape, axis)
    if name == "dot_general":
        return _dot_general(params["dimension_numbers"], dims, ins, outs[0]), bind()
    if dims[0] is None or any(d is not None for d in dims[1:]):
        raise Dependent(name)
    rows, dim = dims[0], dims[0].dim
    if name == "pad" and params["padding_config"][dim] == (0, 0, 0):
        return [rows], bind()
    if len(ins) != 1:
        raise Dependent(name)

    def without(removed: Sequence[int]) -> Rows:
        return Rows(dim - sum(d < dim for d in removed), rows.per_row)

    if name in REDUCE and dim not in params["axes"]:
        return [without(params["axes"])], bind()
    if name in _COMBINE and _exact(ins[0]):
        return [Partial(_COMBINE[name])], bind()
    if name == "squeeze" and dim not in params["dimensions"]:
        return [without(params["dimensions"])], bind()
    if name == "slice" and outs[0].shape[dim] == ins[0].shape[dim] and set(params["strides"] or [1]) == {1}:
        return [rows], bind(limit_indices=resized(params["limit_indices"], rows))
    if name == "transpose":
        return [Rows(params["permutation"].index(dim), rows.per_row)], bind()
    if name == "reshape" and params.get("dimensions") is None:
        new = params["new_sizes"]
        before = math.prod(ins[0].shape[:dim])
        for d in range(len(new)):
            if new[d] % size == 0 and math.prod(new[:d]) == before:
                to = Rows(d, new[d] // size)
                return [to], bind(new_sizes=resized(new, to))
    if name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp") and params["axis"] != dim:
        return [rows], bind()
    raise Dependent(name)


def _exact(aval: Aval) -> bool:
    """Whether partial results may be put together: a sum in 16 bits would be rounded at every chunk."""
    return not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize >= 4


def _call(
    eqn: Equation, dims: Sequence[Dim], size: int, shape: tuple[int, ...], axis: int
) -> tuple[Sequence[Dim], Run]:
    where = (size, shape, axis)

    def inner(branch: ClosedJaxpr, dims: Sequence[Dim]) -> tuple[Jaxpr, list[Dim]]:
        j = branch.jaxpr
        jaxpr = Jaxpr([], [*j.constvars, *j.invars], j.outvars, j.eqns, j.effects, nameless(j.debug_info))
        return jaxpr, [*(None for _ in branch.consts), *dims]

    if eqn.primitive.name != "cond":
        called = composite.decomposition(eqn) if eqn.primitive.name == composite.NAME else called_by(eqn)
        jaxpr, all_dims = inner(called, dims)

        def run_call(chunk: jax.Array, *args: Any) -> list[Any]:
            return run_chunk(jaxpr, all_dims, where, chunk, *called.consts, *args)

        return chunked_dims(jaxpr, all_dims, *where), run_call
    if dims[0] is not None:
        raise Dependent("cond on a row")
    branches = [inner(b, dims[1:]) for b in branches_of(eqn)]
    outs = [chunked_dims(jaxpr, d, *where) for jaxpr, d in branches]
    merged: list[Dim] = []
    for k, results in enumerate(zip(*outs, strict=True)):
        # nothing is what a chunk adds in a branch that returns 0
        nothing = [_is_zero(jaxpr.outvars[k]) for jaxpr, _ in branches]
        found: set[Dim] = {dim for dim, zero in zip(results, nothing, strict=True) if not zero} or {None}
        if len(found) > 1 or (any(nothing) and found - {Partial(lax.add), None}):
            raise Dependent("cond whose branches differ in what they chunk")
        merged.append(found.pop())

    def run(chunk: jax.Array, index: Any, *args: Any) -> list[Any]:
        def on_chunk(jaxpr: Jaxpr, dims: list[Dim], consts: list[Any]) -> Run:
            return lambda *operands: run_chunk(jaxpr, dims, where, chunk, *consts, *operands)

        pairs = zip(branches, branches_of(eqn), strict=True)
        functions = [on_chunk(jaxpr, d, b.consts) for (jaxpr, d), b in pairs]
        # jax does not annotate the index
        return lax.switch(index, functions, *args)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    return merged, run


def _is_zero(v: Atom) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0


def _dot_general(dimensions: DotDimensions, dims: list[Rows | None], ins: list[Aval], out: Aval) -> list[Dim]:
    """Rows stay apart along a batch dimension and along a free dimension of one side; contracted ones are summed."""
    contracting, batch = dimensions
    lhs, rhs = dims
    if lhs is not None and rhs is not None:
        pair = lhs.dim, rhs.dim
        if lhs.per_row == rhs.per_row and pair in zip(*batch, strict=True):
            return [Rows(list(zip(*batch, strict=True)).index(pair), lhs.per_row)]
        if lhs.per_row == rhs.per_row and pair in zip(*contracting, strict=True) and _exact(out):
            return [Partial(lax.add)]
        raise Dependent("dot_general of rows with rows")
    side, rows = (0, lhs) if lhs is not None else (1, rhs)
    assert rows is not None  # with rows on neither side nothing is chunked
    if rows.dim in contracting[side] or rows.dim in batch[side]:
        raise Dependent("dot_general over rows")
    bound = {*contracting[side], *batch[side]}
    free = [d for d in range(ins[side].ndim) if d not in bound]
    before = len(batch[0]) + (0 if side == 0 else ins[0].ndim - len(contracting[0]) - len(batch[0]))
    return [Rows(before + free.index(rows.dim), rows.per_row)]
