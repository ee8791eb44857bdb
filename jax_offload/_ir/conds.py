"""A ``cond`` divided: its scalars hoisted out of it, and its results shared between slices.

``apply_if_finite`` puts all of an update into a branch, and with it the global norm of a clip; ``MultiSteps`` that may
skip does so with the norm of its accumulators. Cut leaf by leaf, every part of such a branch would compute the norm of
everything again, and none could run in chunks.

A branch is gone through once, and each equation in it goes to the slices that need it. Cutting it for each slice, as
``partial_eval.dce_jaxpr`` does, would visit it as often as there are leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_offload._base.jaxprs import (
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Equation,
    Jaxpr,
    Literal,
    Var,
    branches_of,
    closed,
    closed_like,
    holds_equations,
    without_dead_code,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program, flat
from jax_offload._ir.propagate import Mask, bits, forward, needs_of, union

# ---- scalars ahead


def scalars_hoisted(program: Program) -> Program:
    """``program`` with a ``cond`` of scalars alone ahead of each ``cond`` that needs host leaves and computes some."""
    eqns = _hoisted(program.eqns, {v for v in program.inputs if is_host_aval(v.aval)})
    return dataclasses.replace(program, eqns=eqns)


def _hoisted(eqns: Sequence[Equation], on_host: Set[Var]) -> list[Equation]:
    """``eqns``, in which such ``cond``s are split; ``on_host``: the inputs that must be loaded."""
    if not any(eqn.primitive.name == "cond" for eqn in eqns):
        return list(eqns)
    waiting = list(reversed(eqns))
    result: list[Equation] = []
    needs = dict.fromkeys(on_host, 1)
    while waiting:
        eqn = waiting.pop()
        dependent = [not isinstance(v, Literal) and bool(needs.get(v, 0)) for v in eqn.invars]
        if eqn.primitive.name == "cond" and any(dependent) and not eqn.effects and not dependent[0]:
            ahead, *rest = _split(eqn, dependent[1:])
            waiting += rest  # it may hold more scalars, which need those that are hoisted now
            eqn = ahead
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        result.append(eqn)
    return result


def _split(eqn: Equation, dependent: Sequence[bool]) -> list[Equation]:
    """A ``cond`` for the scalars of all branches, if there are any, and one that takes them as operands."""
    branches: list[Program] = []
    found: list[list[Var]] = []
    for branch in branches_of(eqn):
        program = flat(branch)
        if program.consts:
            return [eqn]
        given = {v for v, d in zip(program.inputs, dependent, strict=True) if d}
        program = dataclasses.replace(program, eqns=_hoisted(program.eqns, given))
        branches.append(program)
        found.append(_scalars_to_hoist(program, given))
    if not any(found):
        return [eqn]
    scalars = [Var(v.aval) for vs in found for v in vs]
    ahead: list[ClosedJaxpr] = []
    rest: list[ClosedJaxpr] = []
    for k, (branch, program) in enumerate(zip(branches_of(eqn), branches, strict=True)):
        own = [(v, i == k) for i, vs in enumerate(found) for v in vs]
        results = [v if mine else Literal(np.zeros((), v.aval.dtype), v.aval) for v, mine in own]
        names = [v if mine else Var(v.aval) for v, mine in own]
        hoisted = set(found[k])
        others = [e for e in program.eqns if hoisted.isdisjoint(e.outvars)]
        ahead.append(_closed(branch, program.inputs, program.eqns, results))
        rest.append(_closed(branch, [*program.inputs, *names], others, program.outputs))
    return [
        eqn.replace(outvars=scalars, params={**eqn.params, "branches": tuple(ahead)}),
        eqn.replace(invars=[*eqn.invars, *scalars], params={**eqn.params, "branches": tuple(rest)}),
    ]


def _scalars_to_hoist(program: Program, given: Set[Var]) -> list[Var]:
    """The scalars that can be hoisted together, of those that the rest uses.

    There are three kinds. A scalar may need nothing ``given``, which is to be loaded. It may be reduced from arrays
    that do, but not with the help of another such scalar: each leaf's part of a norm. And it may be computed from
    scalars that are hoisted themselves: the norm.
    """
    array, loaded, reduced, combined = 1, 2, 4, 8  # what a variable depends on: the latter two are hoisted now
    depends = {v: array * (v.aval.shape != ()) | loaded * (v in given) for v in program.inputs}
    hoisted: list[Var] = []
    used: set[Var] = {v for v in program.outputs if not isinstance(v, Literal)}
    for eqn in program.eqns:
        depends.update(zip(eqn.outvars, forward(eqn, depends), strict=True))
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        scalars = [v for v in eqn.outvars if not isinstance(v, DropVar)]  # of a nested cond several, or none
        on, of_arrays = union(depends[v] for v in scalars), any(v.aval.shape for v in operands)
        if not all(_is_scalar(v.aval) for v in scalars) or not on & (array | loaded):
            used.update(operands)
        elif not on & loaded:
            hoisted += scalars
        elif on & reduced or (on & combined and of_arrays):
            depends.update(dict.fromkeys(scalars, on | reduced))  # what is made of it waits too: a second norm, say
            used.update(operands)
        else:
            depends.update(dict.fromkeys(scalars, on | (reduced if of_arrays else combined)))
            hoisted += scalars
            used.update(scalars if of_arrays else ())
    return [v for v in hoisted if v in used]


def _is_scalar(aval: Aval) -> bool:
    return aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # keys are not


def _closed(like: ClosedJaxpr, inputs: list[Var], eqns: list[Equation], outputs: Sequence[Atom]) -> ClosedJaxpr:
    jaxpr, _ = without_dead_code(closed_like(like, inputs, eqns, outputs).jaxpr, keep_inputs=True)
    return closed(jaxpr)


# ---- shares

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
        """Whether an equation may hold equations that its results do not need, as a minimal share does not."""
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
