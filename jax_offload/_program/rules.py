"""Whether a slice may run in chunks along an axis, and how: decided by its equations, never by an optimizer's name.

Each variable either has the chunked axis, at some dimension, or does not. Every equation must keep rows apart:
elementwise arithmetic and reductions over other dimensions do, a sort along the axis does not. A reduction over the
axis is put together from the chunks' results, if the slice does not use it itself.

Each primitive that keeps rows apart has one rule. To add one, write a function under ``@rule("name")``; ``running``,
for cumulative sums, is a short example. ``rule_of`` calls it for an equation with rows in some operand, and passes the
equation, the rows of each operand (``None`` for an operand that all chunks share) and the chunked axis. The rule
returns the rows of each result, and a function that runs the equation on a chunk: ``unchanged``, or ``resized`` if a
parameter of the equation holds the length. It returns ``None``, or raises ``Dependent`` with a reason, if rows depend
on each other; then the leaf is loaded whole, as under a primitive without a rule. No rule is asked about an equation
that reads a reduction over all rows, or that has an effect. If an equation takes about as long as its operands are
read, its name also belongs in ``CHEAP`` (``_program/primitives.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_offload._program.jaxprs import (
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
    values_of,
)
from jax_offload._program.memory import shards_of, typed_sharding, types_of_axes
from jax_offload._program.primitives import ELEMENTWISE, REDUCE


@dataclasses.dataclass(frozen=True)
class Rows:
    """The dimension of a variable along which its rows lie, and how many indices make a row: several if the dimension
    has been merged with others, as by ``ravel``."""

    dim: int
    per_row: int = 1


@dataclasses.dataclass(frozen=True)
class Partial:
    """A chunk's share of a reduction over all rows: ``combine`` puts the chunks' results together."""

    combine: Callable[[Any, Any], Any]


class Dependent(Exception):
    """Rows along the axis depend on each other, or might."""


class Where(NamedTuple):
    """The chunked axis: its length, the shape of a leaf with it, and the number of shards that a chunk takes rows from.
    Values broadcast to that shape have rows too."""

    size: int
    shape: tuple[int, ...]
    axis: int
    shards: int = 1

    def begins(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape begins as the leaf does, up to the axis."""
        return shape[: self.axis + 1] == self.shape[: self.axis + 1]


def rows_like(aval: Aval, shape: tuple[int, ...], dim: int) -> Rows | None:
    """Guess that an array whose shape begins like another's has its rows there too; its equations confirm that."""
    return Rows(dim) if aval.shape[: dim + 1] == shape[: dim + 1] else None


Dim = Rows | Partial | None  # None: a variable without the chunked axis
Run = Callable[..., list[Any]]  # runs an equation on a chunk; takes the numbers of the chunk's rows, and the operands
Answer = tuple[Sequence[Dim], Run]  # the rows of the results, and how to run the equation on a chunk
Rule = Callable[[Equation, Sequence[Rows | None], Where], Answer | None]  # takes the rows of the operands


RULES: dict[str, Rule] = {}
MAKES_ROWS = frozenset(("iota", "broadcast_in_dim"))  # they are asked though no operand has rows, as a result may


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the primitives of these names."""

    def register(answer: Rule) -> Rule:
        assert RULES.keys().isdisjoint(names), f"two rules for one of {names}"
        RULES.update(dict.fromkeys(names, answer))
        return answer

    return register


# ---- the building blocks of rules


def unchanged(eqn: Equation) -> Run:
    """Return what runs the equation on a chunk: the same equation, with smaller operands."""

    def run(chunk: jax.Array, *operands: Any) -> list[Any]:
        return run_equation(eqn, operands, eqn.params)

    return run


def resized(eqn: Equation, param: str, to: Rows) -> Run:
    """Return what runs the equation on a chunk, if ``param`` holds a shape, in which the chunk's rows are counted."""

    def run(chunk: jax.Array, *operands: Any) -> list[Any]:
        return run_equation(eqn, operands, {**eqn.params, param: _as_long(eqn.params[param], to, chunk)})

    return run


def without_rows(eqn: Equation) -> Answer:
    """Say that no result has rows, because each is the same for every chunk."""
    return [None] * len(eqn.outvars), unchanged(eqn)


def adds_up(aval: Aval) -> bool:
    """Whether partial results may be put together: a sum in 16 bits would be rounded at every chunk."""
    return not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize >= 4


def _as_long(sizes: Sequence[int], to: Rows, chunk: jax.Array) -> tuple[int, ...]:
    return (*sizes[: to.dim], chunk.size * to.per_row, *sizes[to.dim + 1 :])


def _of_first(eqn: Equation, dims: Sequence[Rows | None]) -> Rows:
    """The rows of the first operand, if no other has any."""
    rows, *others = dims
    if rows is None or any(d is not None for d in others):
        raise Dependent(eqn.primitive.name)
    return rows


def _without(rows: Rows, removed: Sequence[int]) -> Rows:
    """Where rows are once these dimensions, which are others, are gone."""
    return Rows(rows.dim - sum(d < rows.dim for d in removed), rows.per_row)


# ---- rules of equations that may make rows


@rule("iota")
def counted(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    params, axis = eqn.params, where.axis
    if not where.begins(params["shape"]):
        return without_rows(eqn)
    if params["dimension"] != axis:
        return [Rows(axis)], resized(eqn, "shape", Rows(axis))

    def numbered(chunk: jax.Array) -> list[Any]:
        shape = _as_long(params["shape"], Rows(axis), chunk)
        rows = chunk.astype(params["dtype"])
        # jax annotates out_sharding by a type that it does not export
        return [lax.broadcast_in_dim(rows, shape, (axis,), out_sharding=params["sharding"])]  # pyright: ignore[reportUnknownMemberType]

    return [Rows(axis)], numbered


@rule("broadcast_in_dim")
def broadcast(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    axis, rows, mapped = where.axis, dims[0], eqn.params["broadcast_dimensions"]
    if rows is not None:
        to = Rows(mapped[rows.dim], rows.per_row)
    elif where.begins(eqn.params["shape"]) and (
        axis not in mapped or eqn.invars[0].aval.shape[mapped.index(axis)] == 1
    ):
        to = Rows(axis)  # the same for every row
    else:
        return without_rows(eqn)
    return [to], resized(eqn, "shape", to)


# ---- rules of arithmetic


@rule("optimization_barrier", "psum", "psum_invariant", "pvary", "pmax", "pmin")
def waiting(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    return dims, unchanged(eqn)


@rule(*(ELEMENTWISE - {"optimization_barrier"}))
def elementwise(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    name = eqn.primitive.name
    rows, *others = {d for d in dims if d is not None}
    wholes = [v.aval.shape for d, v in zip(dims, eqn.invars, strict=True) if d is None and v.aval.shape]
    # one row for all, a scale of each column, goes with every chunk
    if others or any(shape[rows.dim] != 1 for shape in wholes):
        raise Dependent(f"{name} of rows and a whole")
    if any(v.aval.shape[rows.dim : rows.dim + 1] != (where.size * rows.per_row,) for v in eqn.outvars):
        raise Dependent(f"{name} merges rows")  # a cast to wider numbers
    return [rows] * len(eqn.outvars), unchanged(eqn)


_COMBINE = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor, "reduce_prod": lax.mul,
}  # fmt: skip


@rule(*REDUCE)
def reduced(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows, axes, combine = _of_first(eqn, dims), eqn.params["axes"], _COMBINE.get(eqn.primitive.name)
    if rows.dim not in axes:
        return [_without(rows, axes)], unchanged(eqn)
    return ([Partial(combine)], unchanged(eqn)) if combine and adds_up(eqn.invars[0].aval) else None


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def running(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows = _of_first(eqn, dims)
    return ([rows], unchanged(eqn)) if rows.dim != eqn.params["axis"] else None


@rule("dot_general")
def multiplied(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    """Rows stay apart along a batch dimension and along a free dimension of one side; contracted ones are summed."""
    contracting, batch = eqn.params["dimension_numbers"]  # dimensions of the left operand, and of the right one
    lhs, rhs = dims
    if lhs is not None and rhs is not None:
        of_batch, pair = list(zip(*batch, strict=True)), (lhs.dim, rhs.dim)
        if lhs.per_row == rhs.per_row and pair in of_batch:
            return [Rows(of_batch.index(pair), lhs.per_row)], unchanged(eqn)
        contracted = lhs.per_row == rhs.per_row and pair in zip(*contracting, strict=True)
        if contracted and adds_up(eqn.outvars[0].aval):
            return [Partial(lax.add)], unchanged(eqn)
        raise Dependent("dot_general of rows with rows")
    side, rows = (0, lhs) if lhs is not None else (1, rhs)
    assert rows is not None  # with rows on neither side it is not asked
    bound = {*contracting[side], *batch[side]}
    if rows.dim in bound:
        raise Dependent("dot_general over rows")
    sizes = [v.aval.ndim for v in eqn.invars]
    free = [d for d in range(sizes[side]) if d not in bound]
    before = len(batch[0]) if side == 0 else sizes[0] - len(contracting[0])
    return [Rows(before + free.index(rows.dim), rows.per_row)], unchanged(eqn)


@rule("cholesky", "qr", "triangular_solve")
def factorized(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    """The last two dimensions of every operand hold a matrix, and each matrix is factorized by itself.

    SOAP, Shampoo and PSGD keep such matrices for stacked layers. ``eigh`` and ``svd`` have no rule: the signs of their
    vectors are free, and a GPU's solver may choose its algorithm, and with it the signs, by the number of matrices.
    """
    rows = dims[0]
    if rows is None or rows.dim >= eqn.invars[0].aval.ndim - 2 or any(d != rows for d in dims):
        return None
    return [rows] * len(eqn.outvars), unchanged(eqn)


# ---- rules of equations that only change shapes


@rule("pad")
def padded(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows = _of_first(eqn, dims)
    return ([rows], unchanged(eqn)) if eqn.params["padding_config"][rows.dim] == (0, 0, 0) else None


@rule("squeeze")
def squeezed(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows, removed = _of_first(eqn, dims), eqn.params["dimensions"]
    return ([_without(rows, removed)], unchanged(eqn)) if rows.dim not in removed else None


@rule("slice")
def sliced(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows = _of_first(eqn, dims)
    all_rows = eqn.outvars[0].aval.shape[rows.dim] == eqn.invars[0].aval.shape[rows.dim]
    if not all_rows or set(eqn.params["strides"] or [1]) != {1}:
        return None
    return [rows], resized(eqn, "limit_indices", rows)


@rule("transpose")
def transposed(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    rows = _of_first(eqn, dims)
    return [Rows(eqn.params["permutation"].index(rows.dim), rows.per_row)], unchanged(eqn)


@rule("reshape")
def reshaped(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer | None:
    rows, new = _of_first(eqn, dims), eqn.params["new_sizes"]
    if eqn.params.get("dimensions") is not None:
        return None
    before = math.prod(eqn.invars[0].aval.shape[: rows.dim])
    for d, length in enumerate(new):
        if length % where.size == 0 and math.prod(new[:d]) == before:
            to = Rows(d, length // where.size)
            return [to], resized(eqn, "new_sizes", to)
    return None


# ---- how rules are applied

Dims = dict[Var, Dim]

OTHER_AXES = "some of it is made on a mesh with Auto axes, as random numbers are, and the rest on one with Explicit"


def chunked_dims(jaxpr: Jaxpr, dims: Sequence[Dim], where: Where) -> list[Dim]:
    """The chunked dimension of every result of ``jaxpr``, given the operands' dimensions.

    Args:
      jaxpr: a slice's jaxpr.
      dims: the chunked dimension of each operand.
      where: the chunked axis. Values broadcast to the shape of the leaf are computed chunk by chunk.

    Raises:
      Dependent: some equation mixes rows.
    """
    if len({kinds for v in jaxpr.invars if (kinds := types_of_axes(v.aval))}) > 1:
        raise Dependent(OTHER_AXES)
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule_of(eqn, _read(env, eqn.invars), where)[0], strict=True))
    return _read(env, jaxpr.outvars)


def run_chunk(jaxpr: Jaxpr, dims: Sequence[Dim], where: Where, chunk: jax.Array, *args: Any) -> list[Any]:
    """Evaluate ``jaxpr`` on operands whose chunked dimension has only the rows numbered ``chunk``."""
    env: Dims = dict(zip(jaxpr.invars, dims, strict=True))
    values: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        out_dims, run = rule_of(eqn, _read(env, eqn.invars), where)
        env.update(zip(eqn.outvars, out_dims, strict=True))
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        with eqn.ctx.manager:
            results = run(chunk, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return values_of(values, jaxpr.outvars)


def _read(env: Dims, atoms: Sequence[Atom]) -> list[Dim]:
    return [None if isinstance(v, Literal) else env[v] for v in atoms]


def rule_of(eqn: Equation, all_dims: Sequence[Dim], where: Where) -> Answer:
    """For an equation: the chunked dimensions of its results, and how to run it on a chunk.

    Raises:
      Dependent: its rule says no, or there is none.
    """
    name, known = eqn.primitive.name, RULES.get(eqn.primitive.name)
    dims = [d for d in all_dims if not isinstance(d, Partial)]
    if len(dims) < len(all_dims):
        raise Dependent(f"{name} of a reduction over all rows")
    if all(d is None for d in dims) and name not in MAKES_ROWS:
        return without_rows(eqn)
    if eqn.effects:
        raise Dependent(f"{name} has an effect")
    answer = known(eqn, dims, where) if known else None
    if answer is None:
        raise Dependent(name if known else f"{name}, which has no rule")
    if any(_divides(v.aval, d, where.shards) for v, d in zip(eqn.outvars, answer[0], strict=True)):
        raise Dependent(f"{name} divides its rows between devices")
    return answer


def _divides(aval: Aval, dim: Dim, shards: int) -> bool:
    """Whether a type divides rows into parts that the rows of a chunk do not fill."""
    if not isinstance(dim, Rows) or (sharding := typed_sharding(aval)) is None:
        return False
    return shards % shards_of(sharding, aval.shape)[dim.dim] > 0


# ---- the rules of equations that hold others


@rule("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
def called(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    inner = called_by(eqn)
    jaxpr, all_dims = _inside(inner, dims)

    def run(chunk: jax.Array, *args: Any) -> list[Any]:
        return run_chunk(jaxpr, all_dims, where, chunk, *inner.consts, *args)

    return chunked_dims(jaxpr, all_dims, where), run


@rule("cond")
def chosen(eqn: Equation, dims: Sequence[Rows | None], where: Where) -> Answer:
    if dims[0] is not None:
        raise Dependent("cond on a row")
    branches = [_inside(b, dims[1:]) for b in branches_of(eqn)]
    outs = [chunked_dims(jaxpr, d, where) for jaxpr, d in branches]
    results = zip(*outs, strict=True)
    merged = [_merged(found, [jaxpr.outvars[k] for jaxpr, _ in branches]) for k, found in enumerate(results)]

    def run(chunk: jax.Array, index: Any, *args: Any) -> list[Any]:
        def on_chunk(jaxpr: Jaxpr, dims: list[Dim], consts: list[Any]) -> Run:
            return lambda *operands: run_chunk(jaxpr, dims, where, chunk, *consts, *operands)

        pairs = zip(branches, branches_of(eqn), strict=True)
        functions = [on_chunk(jaxpr, d, b.consts) for (jaxpr, d), b in pairs]
        # jax does not annotate the index
        return lax.switch(index, functions, *args)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    return merged, run


def _inside(called: ClosedJaxpr, dims: Sequence[Dim]) -> tuple[Jaxpr, list[Dim]]:
    """The called jaxpr, with its constants as operands, and the chunked dimension of each."""
    j = called.jaxpr
    jaxpr = Jaxpr([], [*j.constvars, *j.invars], j.outvars, j.eqns, j.effects, nameless(j.debug_info))
    return jaxpr, [*(None for _ in called.consts), *dims]


def _merged(dims: Sequence[Dim], results: Sequence[Atom]) -> Dim:
    """The chunked dimension of a ``cond``'s result, given the dimensions of its branches' results."""
    nothing = [_is_zero(v) for v in results]  # what a chunk adds in a branch that returns 0
    found: set[Dim] = {dim for dim, zero in zip(dims, nothing, strict=True) if not zero} or {None}
    if len(found) > 1 or (any(nothing) and found - {Partial(lax.add), None}):
        raise Dependent("cond whose branches chunk different results")
    return found.pop()


def _is_zero(v: Atom) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0
