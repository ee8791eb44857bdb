"""Whether a step returns what its update makes: where it does not, it most likely was to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax_offload._base.jaxprs import Atom, Equation, Var, scan_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._ir.program import Program
from jax_offload._plan.transfers import same_type
from jax_offload._step.cut import unguarded


@dataclasses.dataclass(frozen=True)
class Unreturned:
    """What of an update a step does not return.

    Attributes:
      why: in words.
      meant: whether it may well be meant so: numbers made of the update are returned, and all else as it was.
    """

    why: str
    meant: bool = False


def unreturned(program: Program) -> Unreturned | None:
    """What of its updates a step does not return; ``None`` where it has none, or returns what they make.

    A state that is neither returned as it was nor anew is not missed: that is how one looks at an update.
    """
    program = unguarded(program)
    holding = [eqn for eqn in program.eqns if holds_update(eqn)]
    if not holding:
        return None
    used, results = _used(program), _made(program)
    if not results:
        return Unreturned("nothing that the step returns is made by its update")
    handed_on = {*variables(program.outputs)} & {*program.inputs}
    for eqn in holding:
        pairs = [(old, new, name) for old, new, name in _pairs(eqn) if is_host_aval(old.aval)]
        stale = [name for old, new, name in pairs if old in handed_on and new not in used]
        if stale and not any(v.aval.shape for v in results):
            return Unreturned("the step returns its state as it was, and of its update only numbers", meant=True)
        if stale:
            what = stale[0] + (f" and {len(stale) - 1} more" if stale[1:] else "")
            return Unreturned(
                f"the step returns {what} of the state as before the update, and not what that made of it"
            )
        others = [v for v in _others(eqn) if v.aval.shape]
        as_it_was = others and all(any(same_type(v.aval, x.aval) for x in handed_on) for v in others)
        if as_it_was and used.isdisjoint(others) and any(new in used for _, new, _ in pairs):
            return Unreturned("the step returns the new state, and the parameters as they were")
    return None


def _used(program: Program) -> set[Var]:
    """The variables of which results are made."""
    used = {*variables(program.outputs)}
    for eqn in reversed(program.eqns):
        if not used.isdisjoint(eqn.outvars):
            used.update(variables(eqn.invars))
    return used


def _made(program: Program) -> set[Var]:
    """The results that are made of what an update makes."""
    late = set[Var]()
    for eqn in program.eqns:
        if holds_update(eqn) or not late.isdisjoint(variables(eqn.invars)):
            late.update(eqn.outvars)
    return late & {*variables(program.outputs)}


def _pairs(eqn: Equation) -> Iterator[tuple[Var, Var, str]]:
    """What goes into an update, or a loop around one, as a leaf, its next value that comes out, and its name."""
    found: list[tuple[Atom, Var, str]] = []
    if is_update(eqn):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, eqn.invars, strict=True))
        pairs = zip(update.program.outputs, eqn.outvars, strict=True)
        old = [(update.next_values.get(x), v) for x, v in pairs if isinstance(x, Var)]
        found = [(given[x], v, update.names.get(x, "a leaf")) for x, v in old if x is not None and x in given]
    elif (scan := scan_of(eqn)) is not None:
        found = [(old, new, "a leaf") for old, new in zip(scan.init, eqn.outvars, strict=False)]
    elif eqn.primitive.name == "while":
        carry = eqn.invars[len(eqn.invars) - len(eqn.outvars) :]
        found = [(old, new, "a leaf") for old, new in zip(carry, eqn.outvars, strict=True)]
    return ((old, new, name) for old, new, name in found if isinstance(old, Var))


def _others(eqn: Equation) -> list[Var]:
    """An update's results that are no leaves of its state: updates, or new parameters."""
    if not is_update(eqn):
        return []
    update: Update = eqn.params["update"]
    pairs = zip(update.program.outputs, eqn.outvars, strict=True)
    return [v for x, v in pairs if isinstance(x, Var) and x not in update.names]
