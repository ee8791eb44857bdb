"""Rules that decide from a slice's equations, never from an optimizer's name, whether it may run in chunks.

Each variable either has the chunked axis, at some dimension, or does not. Every equation must keep rows apart:
elementwise arithmetic and reductions over other dimensions do, a sort along the axis does not. The chunks' results of a
reduction over the axis are combined, if the slice does not use it itself.

Each primitive that keeps rows apart has one rule, a function under ``@rule("name")``. It names the dimensions of an
equation's operands and results, as ``einsum`` does with letters: rows along a dimension of an operand lie along the
dimension of the same name in the results. If rows along a dimension depend on each other, its name is ``None``. A name
that is in no result is reduced; then ``combine`` joins the chunks' results, and without ``combine`` rows depend on each
other. ``running``, for cumulative sums, is a short example. If a parameter of the equation holds a shape of its
result, the parameter's name belongs in ``SHAPE_PARAMETER``. If an equation takes about as long as its operands are
read, as ``rev`` does and ``sort`` does not, its name also belongs in ``_OTHERS``, a part of ``CHEAP``
(``_program/primitives.py``).

``rows_after`` applies the rules. It decides about ``reshape``, barriers and calls by itself, and asks no rule about an
equation that reads a reduction over all rows, or that has an effect. Without a rule the leaf is loaded whole.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    run_equation,
    values_of,
)
from jax_offload._program.memory import shards_of, typed_sharding, types_of_axes
from jax_offload._program.primitives import ELEMENTWISE, REDUCE
from jax_offload._program.propagate import Facts


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


Dim = Rows | Partial | None  # None: a variable without the chunked axis


class Dependent(Exception):
    """Rows along the axis depend on each other, or might."""


class Where(NamedTuple):
    """The chunked axis: its length, the shape of a leaf with it, and the number of shards that a chunk takes rows from.
    Values broadcast to that shape have rows too."""

    size: int
    shape: tuple[int, ...]
    axis: int
    shards: int = 1


def rows_like(aval: Aval, shape: tuple[int, ...], dim: int) -> Rows | None:
    """Guess that an array whose shape begins like another's has its rows there too; its equations confirm that."""
    return Rows(dim) if aval.shape[: dim + 1] == shape[: dim + 1] else None


# ---- the rule of each primitive


class Names(NamedTuple):
    """A name for each dimension of each operand and result. ``combine`` joins the reductions of chunks."""

    operands: Sequence[Sequence[Hashable]]
    results: Sequence[Sequence[Hashable]]
    combine: Callable[[Any, Any], Any] | None = None


RULES: dict[str, Callable[[Equation], Names]] = {}
SHAPE_PARAMETER = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes", "slice": "limit_indices"}


def rule(*primitives: str) -> Callable[[Callable[[Equation], Names]], Callable[[Equation], Names]]:
    """Register a rule for the primitives of these names."""

    def register(names: Callable[[Equation], Names]) -> Callable[[Equation], Names]:
        assert RULES.keys().isdisjoint(primitives), f"two rules for one of {primitives}"
        RULES.update(dict.fromkeys(primitives, names))
        return names

    return register


def in_place(eqn: Equation, mixed: Iterable[int] = ()) -> Names:
    """Name dimensions by their numbers: each stays where it is; along those in ``mixed`` rows depend on each other."""
    of = [None if d in mixed else d for d in range(max(v.aval.ndim for v in (*eqn.invars, *eqn.outvars)))]
    return Names([of[: v.aval.ndim] for v in eqn.invars], [of[: v.aval.ndim] for v in eqn.outvars])


def without(eqn: Equation, removed: Sequence[int], combine: Callable[[Any, Any], Any] | None = None) -> Names:
    """Name dimensions where the result has all of the operand's except the removed ones."""
    dims = range(eqn.invars[0].aval.ndim)
    return Names([dims], [[d for d in dims if d not in removed]], combine)


@rule("slice", *(ELEMENTWISE - {"optimization_barrier"}))
def elementwise(eqn: Equation) -> Names:
    return in_place(eqn)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def running(eqn: Equation) -> Names:
    return in_place(eqn, [eqn.params["axis"]])


@rule("pad")
def padded(eqn: Equation) -> Names:
    return in_place(eqn, [d for d, how in enumerate(eqn.params["padding_config"]) if how != (0, 0, 0)])


@rule("cholesky", "qr", "triangular_solve")
def factorized(eqn: Equation) -> Names:
    """The last two dimensions of every operand hold a matrix, and each matrix is factorized by itself.

    SOAP, Shampoo and PSGD keep such matrices for stacked layers. ``eigh`` and ``svd`` have no rule: the signs of their
    vectors are free, and a GPU's solver may choose its algorithm, and with it the signs, by the number of matrices.
    """
    dims = eqn.invars[0].aval.ndim
    return in_place(eqn, [dims - 2, dims - 1])


_COMBINE = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor, "reduce_prod": lax.mul,
}  # fmt: skip


@rule(*REDUCE)
def reduced(eqn: Equation) -> Names:
    return without(eqn, eqn.params["axes"], _COMBINE.get(eqn.primitive.name))


@rule("squeeze")
def squeezed(eqn: Equation) -> Names:
    return without(eqn, eqn.params["dimensions"])


@rule("transpose")
def transposed(eqn: Equation) -> Names:
    return Names([range(eqn.invars[0].aval.ndim)], [eqn.params["permutation"]])


@rule("broadcast_in_dim")
def broadcast(eqn: Equation) -> Names:
    return Names([eqn.params["broadcast_dimensions"]], [range(len(eqn.params["shape"]))])


@rule("dot_general")
def multiplied(eqn: Equation) -> Names:
    contracted, batch = eqn.params["dimension_numbers"]  # dimensions of the left operand, and of the right one
    operands: list[list[Hashable]] = []
    for side, v in enumerate(eqn.invars):
        bound = {d: ("contracted", k) for k, d in enumerate(contracted[side])}
        bound |= {d: ("batch", k) for k, d in enumerate(batch[side])}
        operands.append([bound.get(d, (side, d)) for d in range(v.aval.ndim)])
    free = [name for side, names in enumerate(operands) for d, name in enumerate(names) if name == (side, d)]
    return Names(operands, [[*(("batch", k) for k in range(len(batch[0]))), *free]], lax.add)


# ---- how rules are applied

OTHER_AXES = "some of it is made on a mesh with Auto axes, as random numbers are, and the rest on one with Explicit"
_EACH_BY_ITSELF = frozenset(("optimization_barrier", "psum", "psum_invariant", "pvary", "pmax", "pmin"))
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "cond"))
_MADE = frozenset(("iota", "broadcast_in_dim"))  # their results may have rows though no operand does


def chunked_dims(jaxpr: Jaxpr, dims: Sequence[Dim], where: Where) -> list[Dim]:
    """The chunked dimension of every result of ``jaxpr``, given the operands' dimensions.

    Args:
      jaxpr: a slice's jaxpr.
      dims: the chunked dimension of each operand.
      where: the chunked axis. Values broadcast to the shape of the leaf are computed chunk by chunk.

    Raises:
      Dependent: some equation mixes rows.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    if len({kinds for v in inputs if (kinds := types_of_axes(v.aval))}) > 1:
        raise Dependent(OTHER_AXES)
    return _rows(where).through(jaxpr, dims)


def _rows(where: Where) -> Facts[Dim]:
    return Facts[Dim](None, lambda _: None, lambda eqn, dims: rows_after(eqn, dims, where))


def run_chunk(
    jaxpr: Jaxpr, dims: Sequence[Dim], where: Where, chunk: jax.Array, *args: Any, consts: Sequence[Any] = ()
) -> list[Any]:
    """Evaluate ``jaxpr`` on operands whose chunked dimension has only the rows numbered ``chunk``."""
    rows, env = _rows(where), dict(zip(jaxpr.invars, dims, strict=True))
    values: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        given = rows.read(env, eqn.invars)
        made = rows_after(eqn, given, where)
        env.update(zip(eqn.outvars, made, strict=True))
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        with eqn.ctx.manager:
            values.update(zip(eqn.outvars, _run(eqn, given, made, where, chunk, operands), strict=True))
    return values_of(values, jaxpr.outvars)


def rows_after(eqn: Equation, dims: Sequence[Dim], where: Where) -> list[Dim]:
    """The chunked dimensions of an equation's results, given its operands' dimensions.

    Raises:
      Dependent: its rule says no, or there is none.
    """
    name = eqn.primitive.name
    given = [d for d in dims if not isinstance(d, Partial)]
    if len(given) < len(dims):
        raise Dependent(f"{name} of a reduction over all rows")
    made: list[Dim]
    if all(d is None for d in given):
        made = [_made_for_all_rows(eqn, where)] if name in _MADE else [None] * len(eqn.outvars)
    elif eqn.effects:
        raise Dependent(f"{name} has an effect")
    elif name in _EACH_BY_ITSELF:
        made = [*given]
    elif name == "cond":
        made = _of_branches(eqn, given, where)
    elif name in _CALLS:
        made = chunked_dims(called_by(eqn).jaxpr, given, where)
    elif name == "reshape":
        made = [_reshaped(eqn, given[0], where)]
    elif name in RULES:
        made = _by_names(eqn, RULES[name](eqn), given, where)
    else:
        raise Dependent(f"{name}, which has no rule")
    if any(_divides(v.aval, d, where.shards) for v, d in zip(eqn.outvars, made, strict=True)):
        raise Dependent(f"{name} divides its rows between devices")
    return made


def _by_names(eqn: Equation, names: Names, dims: Sequence[Rows | None], where: Where) -> list[Dim]:
    """The rows of an equation's results where its dimensions have names."""
    primitive = eqn.primitive.name
    operands = list(zip(names.operands, dims, eqn.invars, strict=True))
    name, *others = {of[d.dim] for of, d, _ in operands if d is not None}
    per_row, *others_per_row = {d.per_row for d in dims if d is not None}
    dependent = Dependent(f"{primitive} of rows with rows" if sum(d is not None for d in dims) > 1 else primitive)
    if name is None or others or others_per_row:
        raise dependent
    # one row for all, a scale of each column, goes with every chunk
    if any(d is None and name in of and v.aval.shape[of.index(name)] != 1 for of, d, v in operands):
        raise Dependent(f"{primitive} of rows and a whole")
    made: list[Dim] = []
    for of, v in zip(names.results, eqn.outvars, strict=True):
        if name in of and v.aval.shape[of.index(name)] == where.size * per_row:
            made.append(Rows(of.index(name), per_row))
        elif name not in of and names.combine and _adds_up(v.aval):
            made.append(Partial(names.combine))
        else:
            raise dependent
    return made


def _adds_up(aval: Aval) -> bool:
    """Whether partial results may be put together: a sum in 16 bits would be rounded at every chunk."""
    return not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize >= 4


def _made_for_all_rows(eqn: Equation, where: Where) -> Rows | None:
    """Return the rows of a result in the leaf's shape, if its operand is the same for every row."""
    mapped: Sequence[int] = eqn.params.get("broadcast_dimensions", ())
    if where.axis in mapped and eqn.invars[0].aval.shape[mapped.index(where.axis)] != 1:
        return None
    return rows_like(eqn.outvars[0].aval, where.shape, where.axis)


def _reshaped(eqn: Equation, rows: Rows | None, where: Where) -> Rows:
    """Return the rows of a ``reshape``'s result. Their dimension starts at the same place and may include others."""
    assert rows is not None  # no other operand can have them
    new, before = eqn.params["new_sizes"], math.prod(eqn.invars[0].aval.shape[: rows.dim])
    begin = [d for d, size in enumerate(new) if size % where.size == 0 and math.prod(new[:d]) == before]
    if not begin or eqn.params.get("dimensions") is not None:
        raise Dependent("reshape")
    return Rows(begin[0], new[begin[0]] // where.size)


def _of_branches(cond: Equation, dims: Sequence[Rows | None], where: Where) -> list[Dim]:
    """Return the rows of a ``cond``'s results, which must agree in all of its branches."""
    if dims[0] is not None:
        raise Dependent("cond on a row")
    branches = [branch.jaxpr for branch in branches_of(cond)]
    dims_of = [chunked_dims(branch, dims[1:], where) for branch in branches]
    made: list[Dim] = []
    for k in range(len(cond.outvars)):
        adds_nothing = [_is_zero(branch.outvars[k]) for branch in branches]
        found: set[Dim] = {of[k] for of, nothing in zip(dims_of, adds_nothing, strict=True) if not nothing} or {None}
        if len(found) > 1 or (any(adds_nothing) and found - {Partial(lax.add), None}):
            raise Dependent("cond whose branches chunk different results")
        made.append(found.pop())
    return made


def _is_zero(v: Atom) -> bool:
    return isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val == 0


def _divides(aval: Aval, dim: Dim, shards: int) -> bool:
    """Whether a type divides rows into parts that the rows of a chunk do not fill."""
    if not isinstance(dim, Rows) or (sharding := typed_sharding(aval)) is None:
        return False
    return shards % shards_of(sharding, aval.shape)[dim.dim] > 0


def _run(
    eqn: Equation, given: Sequence[Dim], made: Sequence[Dim], where: Where, chunk: jax.Array, operands: Sequence[Any]
) -> list[Any]:
    """Run an equation on a chunk; ``given`` and ``made`` are the rows of its operands and results."""

    def on_chunk(called: ClosedJaxpr, dims: Sequence[Dim]) -> Callable[..., list[Any]]:
        return lambda *args: run_chunk(called.jaxpr, dims, where, chunk, *args, consts=called.consts)

    name, rows = eqn.primitive.name, made[0] if made else None
    if name in _CALLS and any(d is not None for d in given):
        if name != "cond":
            return on_chunk(called_by(eqn), given)(*operands)
        branches = [on_chunk(branch, given[1:]) for branch in branches_of(eqn)]
        # jax does not annotate the index
        return lax.switch(operands[0], branches, *operands[1:])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(rows, Rows) or name not in SHAPE_PARAMETER:
        return run_equation(eqn, operands, eqn.params)
    shape = list(eqn.params[SHAPE_PARAMETER[name]])
    shape[rows.dim] = chunk.size * rows.per_row
    if name == "iota" and eqn.params["dimension"] == rows.dim:
        numbers = chunk.astype(eqn.params["dtype"])
        # jax annotates out_sharding by a type that it does not export
        return [lax.broadcast_in_dim(numbers, shape, (rows.dim,), out_sharding=eqn.params["sharding"])]  # pyright: ignore[reportUnknownMemberType]
    return run_equation(eqn, operands, {**eqn.params, SHAPE_PARAMETER[name]: tuple(shape)})
