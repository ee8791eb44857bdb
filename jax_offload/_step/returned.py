"""Find the results of updates that a step does not return, which is most likely a mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, inner_of, scan_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program
from jax_offload._ir.propagate import Facts, Mask, made_of, needed_for, union
from jax_offload._plan.transfers import same_type
from jax_offload._step.cut import unguarded


@dataclasses.dataclass(frozen=True)
class Unreturned:
    """The results of an update that a step does not return.

    Attributes:
      why: the reason in words.
      meant: whether that may be intended: the step returns numbers made of the update, and everything else unchanged.
    """

    why: str
    meant: bool = False


def unreturned(program: Program) -> Unreturned | None:
    """The results of its updates that a step does not return; ``None`` if it has no updates, or returns all results.

    A state that is returned neither old nor new is not missed, because a step that inspects an update does that.
    """
    program = unguarded(program)
    holding = [eqn for eqn in program.eqns if holds_update(eqn)]
    if not holding:
        return None
    outputs = {*variables(program.outputs)}
    _, used = needed_for(program.eqns, outputs)
    updating = {id(eqn) for eqn in holding}
    results = made_of(program.eqns, lambda eqn: id(eqn) in updating) & outputs
    if not results:
        return Unreturned("nothing that the step returns is made by its update")
    handed_on = outputs & {*program.inputs}
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


def _pairs(eqn: Equation) -> Iterator[tuple[Var, Var, str]]:
    """Yield each leaf that goes into an update, or into a loop around one, with its next value and its name."""
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


# ---- which arguments of a step its results continue

UPDATED: Mask = 1
"""The bit for an update's results; callers number the arguments with the other bits."""

_ROWS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"}


def origins_of(program: Program, arguments: Mapping[Var, Mask]) -> list[Mask]:
    """For each result, the bits of the arguments from which elementwise arithmetic makes it, and ``UPDATED`` if an
    update's result is among its operands.

    A result of an update has the bits of the argument that it is the next value of, and of nothing else that the
    update reads: a gradient says where parameters go, not which array they are.
    """
    program = unguarded(program)
    env = {v: arguments.get(v, 0) for v in program.inputs}
    return _CARRIED_ON.read(_CARRIED_ON.spread(program.eqns, env), program.outputs)


def _of_rows(eqn: Equation, masks: Sequence[Mask]) -> Sequence[Mask] | None:
    """The bits of an equation's results: of elementwise arithmetic, the union of its operands' bits."""
    if is_update(eqn):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, masks, strict=True)) | dict.fromkeys(update.gradients, 0)
        olds = [None if isinstance(v, Literal) else update.next_values.get(v) for v in update.program.outputs]
        return [UPDATED | (0 if old is None else given.get(old, 0)) for old in olds]
    if eqn.primitive.name in _ROWS:
        return masks if len(masks) == len(eqn.outvars) else [union(masks)] * len(eqn.outvars)
    return None if inner_of(eqn) else [0] * len(eqn.outvars)


_CARRIED_ON = Facts[Mask](0, union, rule=_of_rows, choice_counts=False)
