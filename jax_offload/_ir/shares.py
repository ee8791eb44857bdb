"""A ``cond`` of which several slices need results, as a ``cond`` for each.

``apply_if_finite`` puts the update of all leaves into one branch. That branch is gone through once, and each equation
in it goes to the slices that need it; cutting it for each slice, as ``partial_eval.dce_jaxpr`` does, would visit it
as often as there are leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    branches_of,
    closed_like,
    holds_equations,
)
from jax_offload._ir.masks import Mask, bits, needs_of, union
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program, flat

Branches = tuple[ClosedJaxpr, ...]


class Shares:
    """The shares that slices have in equations.

    Shares that do the same get the same branches, by which ``_emit/run`` finds slices that do the same.
    """

    def __init__(self) -> None:
        self._key_of = numbered()
        self._known: dict[Hashable, Branches] = {}
        self._least: set[int] = set()  # of known branches: those from which nothing more can be cut

    def of(self, eqn: Equation, needs: Sequence[Mask], effect: Mask = 0) -> dict[int, Equation]:
        """For each slice that needs some of an equation's results, or its effect, what it needs of the equation.

        Args:
          eqn: an equation; what is not a ``cond``, or has an effect, is not divided.
          needs: for each result the numbers of the slices that need it.
          effect: the numbers of those that need its effect.
        """
        slices = union(needs) | effect
        if slices.bit_count() == 1:
            return {slices.bit_length() - 1: eqn}
        undivided = dict.fromkeys(bits(slices), eqn)
        return undivided if len(undivided) < 2 else self._of_cond(eqn, needs) or undivided

    def can_be_cut(self, eqn: Equation) -> bool:
        """Whether an equation may hold what its results do not need: a share does not, unless what is in it does."""
        if eqn.primitive.name in ELEMENTWISE or not holds_equations(eqn):
            return False
        return id(eqn.params.get("branches")) not in self._least

    def _of_cond(self, eqn: Equation, needs: Sequence[Mask]) -> dict[int, Equation]:
        if eqn.primitive.name != "cond" or eqn.effects:
            return {}
        programs = [flat(branch) for branch in branches_of(eqn)]
        if any(program.consts for program in programs):
            return {}
        shared = [self._inside(program, needs) for program in programs]
        wanted = [union(each) for each in zip(*(operands for _, operands in shared), strict=True)]
        results, operands = _listed(needs), _listed(wanted)
        shares: dict[int, Equation] = {}
        for k in bits(union(needs)):
            own = operands.get(k, [])
            branches = tuple(
                closed_like(branch, [program.inputs[i] for i in own], eqns[k], [program.outputs[i] for i in results[k]])
                for branch, program, (eqns, _) in zip(branches_of(eqn), programs, shared, strict=True)
            )
            shares[k] = eqn.replace(
                invars=[eqn.invars[0], *(eqn.invars[1 + i] for i in own)],
                outvars=[eqn.outvars[i] for i in results[k]],
                params={**eqn.params, "branches": self._one(branches)},
            )
        return shares

    def _inside(self, program: Program, needs: Sequence[Mask]) -> tuple[dict[int, list[Equation]], list[Mask]]:
        """The equations of a branch that each slice needs, and the slices that need each operand."""
        inside, wanted = needs_of(program.inputs, program.eqns, program.outputs, needs)
        eqns: dict[int, list[Equation]] = {k: [] for k in bits(union(needs))}
        for eqn, masks in zip(program.eqns, inside, strict=True):
            shares = self._of_cond(eqn, masks) or dict.fromkeys(bits(union(masks)), eqn)
            for k, share in shares.items():
                eqns[k].append(share)
        return eqns, wanted

    def _one(self, branches: Branches) -> Branches:
        """Branches that do the same as these: those that came first."""
        one = self._known.setdefault(tuple(structure(branch.jaxpr, self._key_of) for branch in branches), branches)
        if one is branches and not any(self.can_be_cut(eqn) for branch in branches for eqn in branch.jaxpr.eqns):
            self._least.add(id(one))
        return one


def _listed(masks: Sequence[Mask]) -> dict[int, list[int]]:
    """For each bit the places of the masks that have it."""
    places: dict[int, list[int]] = {}
    for i, mask in enumerate(masks):
        for k in bits(mask):
            places.setdefault(k, []).append(i)
    return places


def structure(jaxpr: Jaxpr, key_of: Callable[[Any], Hashable] | None = None) -> Hashable:
    """Equal for jaxprs that differ in the names of variables only.

    ``key_of``: of types, settings and parameters; for many jaxprs one of ``numbered``.
    """
    key_of, named = key_of or _hashable, {v: k for k, v in enumerate(jaxpr.invars)}

    def read(v: Atom) -> Hashable:
        return (key_of(v.aval), np.asarray(v.val).tobytes()) if isinstance(v, Literal) else named[v]

    found: list[Hashable] = [key_of(v.aval) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        found += [eqn.primitive, key_of(eqn.ctx), len(eqn.invars), *[read(v) for v in eqn.invars]]
        for name, value in eqn.params.items():
            found += [name, key_of(value)]
        for v in eqn.outvars:
            found.append(key_of(v.aval))
            named[v] = len(named)
    return (*found, *[read(v) for v in jaxpr.outvars])


def numbered() -> Callable[[Any], Hashable]:
    """A function that gives equal objects one number, and hashes each once: a program's equations share theirs, and
    jax takes as long for the hash of a type as for the rest of an equation here."""
    indices: dict[Hashable, int] = {}
    known: dict[int, tuple[Any, int]] = {}  # with the object itself, so that nothing else gets its id

    def number(x: Any) -> int:
        if (found := known.get(id(x))) is None:
            found = known[id(x)] = x, indices.setdefault((x.__class__, _hashable(x)), len(indices))
        return found[1]

    return number


def _hashable(value: Any) -> Hashable:
    """What is no key, a jaxpr with its arrays say, is only like itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
