"""A loop that runs once, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.barriers import opaque
from jax_offload._base.jaxprs import Atom, ClosedJaxpr, Equation, Literal


def at_most_once(run: Any, update: Callable[[Any], Any], carry: Any) -> Any:
    """``update(carry)`` where ``run`` holds, else ``carry``, in place.

    The carry says whether the loop is still to run: so XLA sees that it runs once at most, and hoists nothing.
    """
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), update(c[1])), (run, carry))[1]


def once(update: Callable[[Any, Any], tuple[Any, list[Any]]], init: Any, xs: Sequence[Any], ys: Sequence[Any]) -> Any:
    """``jax.lax.scan`` of one iteration, as a loop all the same; ``ys`` are the types of its stacks."""
    blank = [jnp.zeros(y.shape[1:], y.dtype) for y in ys]
    carry, rows = at_most_once(opaque(True), lambda c: update(c[0], [x[0] for x in xs]), (init, blank))
    return carry, [row[None] for row in rows]


@dataclasses.dataclass(frozen=True)
class AtMostOnce:
    """The loop of ``at_most_once``, in a traced step.

    Attributes:
      run: whether it runs.
      body: of its constants and its carry, to the carry behind it.
      carry: where the carry begins among its operands, with ``run``.
    """

    run: Atom
    body: ClosedJaxpr
    carry: int


def at_most_once_of(eqn: Equation) -> AtMostOnce | None:
    """What an equation says, if it is such a loop: it runs while the first of its carry holds, which its body ends."""
    if eqn.primitive.name != "while":
        return None
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"]
    if condition.eqns or condition.outvars[0] is not condition.invars[eqn.params["cond_nconsts"]]:
        return None
    ends = body.jaxpr.outvars[0]
    for each in body.jaxpr.eqns:  # with Explicit axes a number is put into a sharding
        if each.primitive.name == "reshard" and each.outvars[0] is ends:
            ends = each.invars[0]
            break
    if not isinstance(ends, Literal) or ends.val:
        return None
    carry = eqn.params["body_nconsts"]
    return AtMostOnce(eqn.invars[eqn.params["cond_nconsts"] + carry], body, carry)
