"""Bounds of values in a program, by interval arithmetic: enough to show that a second moment is never negative.

A state leaf is bounded by induction: what ``init`` makes is within the bounds, and an update of a state within them
makes one within them. Bounds that an update widens are widened to one of a few round numbers, so that the search ends.
What an equation is not known to do is unbounded, so that the answer is never too narrow. NaN is in no bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._base.arrays import is_array
from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    branches_of,
    inner_of,
    jaxpr_of,
    scan_of,
)

Bounds = tuple[float, float]
ANY: Bounds = (-math.inf, math.inf)
_FLAG: Bounds = (0.0, 1.0)
_POSITIVE: Bounds = (0.0, math.inf)
_SMALL_CONSTANT = 4096  # elements of a constant whose values are looked at


class CannotTrace(Exception):
    """An update cannot be traced with the arguments that are known."""


def state_bounds(
    init: Callable[..., Any], update: Callable[..., Any], updates: Any, state: Any, params: Any, extra_args: Any
) -> list[Bounds]:
    """The bounds of each leaf of ``state``, before and after any number of updates, whatever the gradients are.

    Args:
      init, update: the functions of a transformation.
      updates, state, params, extra_args: what ``update`` takes; only types count.

    Raises:
      CannotTrace: ``update`` raises for these arguments.
    """
    updates, params = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, Number) else x, (updates, params))
    like = updates if params is None else params
    born, _ = jaxpr_of(lambda given: _arrays(init(given)), like)
    args = (state, updates, params, extra_args)
    leaves, treedef = jax.tree.flatten(args)
    traced = [k for k, x in enumerate(leaves) if is_array(x)]

    def after(values: Sequence[Any]) -> list[Any]:
        filled = list(leaves)
        for k, x in zip(traced, values, strict=True):
            filled[k] = x
        old, *given = jax.tree.unflatten(treedef, filled)
        return _arrays(update(given[0], old, given[1], **given[2])[1])

    try:
        step, _ = jaxpr_of(after, [leaves[k] for k in traced])
    except Exception as error:
        raise CannotTrace from error
    own = _arrays(state)
    found = _of_closed(born, [ANY] * len(born.jaxpr.invars))
    if not len(own) == len(found) == len(step.jaxpr.outvars):
        found = [ANY] * len(own)  # the update makes another tree
    else:
        rest = [ANY] * (len(traced) - len(own))
        found = _stable(lambda before: _of_closed(step, [*before, *rest]), found)
    known = iter(found)
    return [next(known) if is_array(x) else ANY for x in jax.tree.leaves(state)]


def _arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if is_array(x)]


def _stable(step: Callable[[list[Bounds]], list[Bounds]], first: Sequence[Bounds]) -> list[Bounds]:
    """Bounds that hold ``first`` and that ``step`` does not leave."""
    found = list(first)
    while True:
        new = [_joined(a, b) for a, b in zip(found, step(found), strict=True)]
        if new == found:
            return found
        found = [_widened(a, b) for a, b in zip(found, new, strict=True)]


def _joined(*each: Bounds) -> Bounds:
    return min(low for low, _ in each), max(high for _, high in each)


def _widened(old: Bounds, new: Bounds) -> Bounds:
    low = old[0] if new[0] >= old[0] else next(x for x in (1.0, 0.0, -1.0, -math.inf) if x <= new[0])
    high = old[1] if new[1] <= old[1] else next(x for x in (0.0, 1.0, math.inf) if x >= new[1])
    return low, high


def _of_closed(jaxpr: ClosedJaxpr, given: Sequence[Bounds]) -> list[Bounds]:
    return _of_jaxpr(jaxpr.jaxpr, [_of_value(x) for x in jaxpr.consts], given)


def _of_jaxpr(jaxpr: Any, consts: Sequence[Bounds], given: Sequence[Bounds]) -> list[Bounds]:
    known: dict[Var, Bounds] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))

    def of(v: Atom) -> Bounds:
        return _of_value(v.val) if isinstance(v, Literal) else known.get(v, ANY)

    factors: dict[int, list[Atom]] = {}  # of products, by the identity of the variable: c * x * x is a square
    for eqn in jaxpr.eqns:
        for v, bounds in zip(eqn.outvars, _of_equation(eqn, [of(v) for v in eqn.invars]), strict=True):
            known[v] = _within_type(bounds, v.aval)
        if eqn.primitive.name == "mul" and _is_real((v := eqn.outvars[0]).aval.dtype):
            factors[id(v)] = [x for operand in eqn.invars for x in factors.get(id(operand), [operand])]
            if all(of(x)[0] >= 0 or _appears_evenly(x, factors[id(v)]) for x in factors[id(v)]):
                known[v] = max(0.0, known[v][0]), known[v][1]
    return [of(v) for v in jaxpr.outvars]


def _appears_evenly(x: Atom, factors: Sequence[Atom]) -> bool:
    return sum(other is x for other in factors) % 2 == 0


def _of_value(x: Any) -> Bounds:
    if isinstance(x, Tracer) or not 0 < np.size(x) <= _SMALL_CONSTANT:
        return ANY
    values = np.asarray(x)
    if not _is_real(values.dtype):
        return ANY
    values = values.astype(np.float64)
    return ANY if np.isnan(values).any() else (float(values.min()), float(values.max()))


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def _within_type(bounds: Bounds, aval: Any) -> Bounds:
    dtype = getattr(aval, "dtype", None)
    if math.isnan(bounds[0]) or math.isnan(bounds[1]) or dtype is None or not _is_real(dtype):
        return ANY
    if jnp.issubdtype(dtype, jnp.bool_):
        return _FLAG
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = _outwards(bounds)
    return (max(bounds[0], 0.0), bounds[1]) if jnp.issubdtype(dtype, jnp.unsignedinteger) else bounds


def _of_equation(eqn: Equation, given: list[Bounds]) -> Sequence[Bounds]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _RULES:
        return [_RULES[name](eqn, *given)]
    if name in _JOINS:
        return [_joined(*given)]
    if name in _SAME:
        return given[:1] * count if count == 1 or len(given) != count else given
    if name == "cond":
        branches = [_of_closed(branch, given[1:]) for branch in branches_of(eqn)]
        return [_joined(*each) for each in zip(*branches, strict=True)]
    if (scan := scan_of(eqn)) is not None:
        return _of_scan(scan, given)
    if name == "while":
        consts, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        fixed = given[consts : consts + body]
        return _stable(lambda c: _of_closed(eqn.params["body_jaxpr"], [*fixed, *c]), given[consts + body :])
    inner = [each.jaxpr for each in inner_of(eqn)]
    if len(inner) == 1 and len(inner[0].outvars) == count:
        closed = next((x for x in eqn.params.values() if getattr(x, "jaxpr", None) is inner[0]), None)
        consts = [_of_value(x) for x in closed.consts] if closed is not None else []
        if len(consts) == len(inner[0].constvars):
            return _of_jaxpr(inner[0], consts, given)
    return [ANY] * count


def _of_scan(scan: Any, given: list[Bounds]) -> list[Bounds]:
    fixed, n = given[: len(scan.consts)], len(scan.init)
    start, rows = given[len(fixed) : len(fixed) + n], given[len(fixed) + n :]

    def body(carry: list[Bounds]) -> list[Bounds]:
        return _of_closed(scan.body, [*fixed, *carry, *rows])

    carry = _stable(lambda c: body(c)[:n], start)
    return [*carry, *body(carry)[n:]]


def _product(x: float, y: float) -> float:
    return 0.0 if 0 in (x, y) else x * y


def _multiplied(eqn: Equation, x: Bounds, y: Bounds) -> Bounds:
    ends = [_product(a, b) for a in x for b in y]
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer) and max(map(abs, ends)) >= 2**31:
        return ANY  # a product may wrap around; a sum of counts does not
    return min(ends), max(ends)


def _divided(eqn: Equation, x: Bounds, y: Bounds) -> Bounds:
    if y[0] < 0 < y[1] or y == (0, 0):
        return ANY
    inverse = (1 / y[1] if y[1] else -math.inf, 1 / y[0] if y[0] else math.inf)
    ends = [_product(a, b) for a in x for b in inverse]
    return min(ends), max(ends)


def _even(x: Bounds, power: Callable[[float], float]) -> Bounds:
    ends = [power(abs(end)) for end in x]
    return (0.0 if x[0] <= 0 <= x[1] else min(ends)), max(ends)


def _integer_power(eqn: Equation, x: Bounds) -> Bounds:
    y = eqn.params["y"]
    if y <= 0:
        return _POSITIVE if x[0] >= 0 or y % 2 == 0 else ANY
    return _even(x, lambda end: _raised(end, y)) if y % 2 == 0 else (_raised(x[0], y), _raised(x[1], y))


def _raised(x: float, y: float) -> float:
    try:
        return x**y
    except OverflowError:
        return math.inf if x > 0 or y % 2 == 0 else -math.inf


def _power(eqn: Equation, x: Bounds, y: Bounds) -> Bounds:
    if x[0] < 0:
        return ANY
    below_one = (x[1] <= 1 and y[0] >= 0) or (x[0] >= 1 and y[1] <= 0)
    return _FLAG if below_one else _POSITIVE


def _absolute(eqn: Equation, x: Bounds) -> Bounds:
    return _even(x, lambda end: end)


def _squared(eqn: Equation, x: Bounds) -> Bounds:
    return _even(x, lambda end: _raised(end, 2))


def _root(eqn: Equation, x: Bounds) -> Bounds:
    return math.sqrt(max(0.0, x[0])), math.sqrt(max(0.0, x[1])) if x[1] < math.inf else math.inf


def _summed(eqn: Equation, x: Bounds, *_: Bounds) -> Bounds:
    """The sum of any number of values keeps its sign."""
    return (0.0 if x[0] >= 0 else -math.inf), (0.0 if x[1] <= 0 else math.inf)


def _dot(eqn: Equation, x: Bounds, y: Bounds, *_: Bounds) -> Bounds:
    return _POSITIVE if x[0] >= 0 and y[0] >= 0 else ANY


def _chosen(eqn: Equation, _: Bounds, *cases: Bounds) -> Bounds:
    return _joined(*cases)


def _clamped(eqn: Equation, low: Bounds, x: Bounds, high: Bounds) -> Bounds:
    return min(max(low[0], x[0]), high[0]), min(max(low[1], x[1]), high[1])


def _outwards(x: Bounds) -> Bounds:
    """Bounds of what is rounded in any direction."""
    low, high = (
        float(f(end)) if math.isfinite(end) else end for f, end in zip((math.floor, math.ceil), x, strict=True)
    )
    return low, high


_RULES: dict[str, Callable[..., Bounds]] = {
    "add": lambda eqn, x, y: (x[0] + y[0], x[1] + y[1]),
    "add_any": lambda eqn, x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda eqn, x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda eqn, x: (-x[1], -x[0]),
    "max": lambda eqn, x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda eqn, x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "mul": _multiplied,
    "div": _divided,
    "abs": _absolute,
    "square": _squared,
    "integer_pow": _integer_power,
    "pow": _power,
    "sqrt": _root,
    "rsqrt": lambda eqn, x: _POSITIVE,
    "exp": lambda eqn, x: _FLAG if x[1] <= 0 else _POSITIVE,
    "exp2": lambda eqn, x: _FLAG if x[1] <= 0 else _POSITIVE,
    "logistic": lambda eqn, x: _FLAG,
    "sign": lambda eqn, x: (float(np.sign(x[0])), float(np.sign(x[1]))),
    "tanh": lambda eqn, x: (0.0 if x[0] >= 0 else -1.0, 0.0 if x[1] <= 0 else 1.0),
    "reduce_sum": _summed,
    "cumsum": _summed,
    "dot_general": _dot,
    "select_n": _chosen,
    "clamp": _clamped,
    "convert_element_type": lambda eqn, x: x,
    "floor": lambda eqn, x: _outwards(x),
    "ceil": lambda eqn, x: _outwards(x),
    "round": lambda eqn, x: _outwards(x),
    "gather": lambda eqn, x, *_: _joined(x, (0.0, 0.0)),
    "iota": lambda eqn: _POSITIVE,
    "is_finite": lambda eqn, x: _FLAG,
    "dynamic_slice": lambda eqn, x, *_: x,
    "dynamic_update_slice": lambda eqn, x, new, *_: _joined(x, new),
}
_JOINS = frozenset("concatenate pad".split())
_SAME = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice rev copy copy_p device_put optimization_barrier "
    "sharding_constraint reshard reduce_precision stop_gradient reduce_max reduce_min cummax cummin sort pvary".split()
)
