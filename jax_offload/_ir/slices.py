"""What each part of a traced update depends on: the update, cut into slices that need few host leaves each.

The update of an optimizer is traced once, as the *usual recipe*: every host leaf loaded, all of the update, every host
leaf stored. A slice is what remains of it for some results: for AdamW, one parameter's update and moments, with the
loads and stores of just these. No optimizer is known by name; whatever its equations say holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jax.sharding import NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import (
    DebugInfo,
    Effects,
    Equation,
    Jaxpr,
    Literal,
    Var,
    closed,
    holds_equations,
    jax_fun,
    nameless,
    without_dead_code,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import Shards
from jax_offload._ir.dependence import divide, parts_of, read, roots_of
from jax_offload._ir.program import Program
from jax_offload._ir.shares import Shares


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a program: ``outputs`` from ``inputs``, both given as variables of the program.

    Attributes:
      shards: of the program's inputs, how they are divided between devices.
    """

    inputs: list[Var]
    outputs: list[Var]
    jaxpr: Jaxpr
    shards: Mapping[Var, Shards] = dataclasses.field(default_factory=dict[Var, Shards])

    @property
    def run(self) -> Callable[..., list[Any]]:
        """``run(*inputs) -> outputs``, all at once."""
        return jax_fun(closed(self.jaxpr))

    @functools.cached_property
    def loads(self) -> list[Var]:
        """The host leaves that it needs."""
        return [v for v in self.inputs if is_host_aval(v.aval)]

    @functools.cached_property
    def stores(self) -> list[Var]:
        """The host leaves that it makes."""
        return [v for v in self.outputs if is_host_aval(v.aval)]

    @property
    def pins(self) -> dict[Var, NamedSharding]:
        """The shardings that the trace says operands have, and gives results; with Explicit axes the types tell."""
        eqns = [eqn for eqn in self.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        operands = {eqn.invars[0]: eqn.params["sharding"] for eqn in reversed(eqns) if eqn.invars[0] in self.inputs}
        return operands | {eqn.outvars[0]: eqn.params["sharding"] for eqn in eqns}

    @functools.cached_property
    def loaded_bytes(self) -> int:
        """Bytes of ``loads`` on one device."""
        return sum(nbytes(v.aval) // math.prod(self.shards.get(v, ())) for v in self.loads)

    @functools.cached_property
    def decoded_bytes(self) -> int:
        """Bytes of ``loads`` on one device once they are float32, as what is stored in fewer bits is for the update."""
        return sum(
            math.prod(v.aval.shape) * max(4, v.aval.dtype.itemsize) // math.prod(self.shards.get(v, ()))
            for v in self.loads
        )


def repeats_effects(program: Program, passes: Sequence[Pass]) -> bool:
    """Whether what happens once in the program, a callback say, would happen in more than one slice."""
    slices = [s for each in passes for s in (each.prelude, *each.slices)]
    return sum(bool(eqn.effects) for s in slices for eqn in s.jaxpr.eqns) > sum(bool(e.effects) for e in program.eqns)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Slices that can run one after the other, in any order, once the prelude, which loads nothing, has run."""

    prelude: Slice
    slices: list[Slice]


def joined(a: Slice, b: Slice) -> Slice:
    """Both slices as one. They have no effects: what has is not put into a loop."""
    inputs, outputs = (list(dict.fromkeys([*u, *v])) for u, v in ((a.inputs, b.inputs), (a.outputs, b.outputs)))
    defined = {v for eqn in a.jaxpr.eqns for v in eqn.outvars}
    # Both may compute a scale.
    eqns = [*a.jaxpr.eqns, *(eqn for eqn in b.jaxpr.eqns if not defined.issuperset(eqn.outvars))]
    jaxpr = Jaxpr([], inputs, outputs, eqns, a.jaxpr.effects, a.jaxpr.debug_info)
    return Slice(inputs, outputs, jaxpr, a.shards)


def cut(program: Program, scalars_ahead: bool) -> list[Pass]:
    """The program as passes over the host leaves, in slices.

    Two results belong to one slice where they need a host leaf in common: then loading it once serves both. What needs
    no host leaf belongs to the prelude if it serves several slices, is a scalar (a learning rate, the gradients' norm),
    or summarises all rows (``adaptive_grad_clip``'s norm of each column: it would keep the rows together). Elementwise
    arithmetic on arrays does not, though several slices need it: each does its own.

    Where a scalar is reduced from the leaves of many parameters (a norm over accumulated gradients, prodigy's sums), or
    from all rows of one (LAMB's trust ratio), everything that uses it needs all of them at once. ``scalars_ahead``
    makes such a scalar a result of its own, one pass ahead: each leaf, or chunk of it, is loaded for its part of the
    scalar, and once more for what uses that.
    """
    known = read(program, scalars_ahead)
    parts, number_of = parts_of(roots_of(program, known), known.last)
    shares = Shares()
    divide(program, known, parts, number_of, shares)
    slices = [
        slice_of(part.eqns, part.outputs, program.debug_info, program.shards, part.given, shares.can_be_cut)
        for part in parts
    ]
    passes = [Pass(prelude, []) for prelude in slices[: known.last + 1]]
    for part, s in [*zip(parts, slices, strict=True)][known.last + 1 :]:
        if s.jaxpr.eqns:
            passes[part.at].slices.append(s)
    return passes


def slice_of(
    eqns: list[Equation],
    outputs: list[Var],
    debug_info: DebugInfo,
    shards: Mapping[Var, Shards],
    given: Set[Var] = frozenset(),
    can_be_cut: Callable[[Equation], bool] = holds_equations,
) -> Slice:
    """The slice of some equations and results.

    Args:
      eqns, outputs: they.
      debug_info, shards: of the program.
      given: the variables that other parts provide.
      can_be_cut: whether an equation may hold what its results do not need.
    """
    defined = {v for eqn in eqns for v in eqn.outvars} - given
    read = [v for vs in [*(eqn.invars for eqn in eqns), outputs] for v in vs if not isinstance(v, Literal)]
    inputs = [v for v in dict.fromkeys(read) if v not in defined]
    # an equation of which only some results are wanted (a cond) may still name the others: let dce cut inside it
    eqns = [_without(eqn, given) for eqn in eqns] if given else eqns
    effects: Effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns if eqn.effects))
    jaxpr = Jaxpr([], inputs, outputs, eqns, effects, nameless(debug_info))  # the names are the program's
    if any(map(can_be_cut, eqns)):
        jaxpr, used = without_dead_code(jaxpr)
        inputs = [v for v, u in zip(inputs, used, strict=True) if u]
    return Slice(inputs, outputs, jaxpr, shards)


def _without(eqn: Equation, given: Set[Var]) -> Equation:
    """``eqn`` without the results that are given already, so that a slice does not define one of its inputs."""
    if given.isdisjoint(eqn.outvars):
        return eqn
    return eqn.replace(outvars=[Var(v.aval) if v in given else v for v in eqn.outvars])
