"""Find which arguments of a step its results continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._program.donation import unguarded
from jax_offload._program.jaxprs import Equation, Literal, Var, inner_of
from jax_offload._program.primitives import ELEMENTWISE
from jax_offload._program.program import Program
from jax_offload._program.propagate import Facts, Mask, union

UPDATED: Mask = 1
"""The bit for an update's results; callers number the arguments with the other bits."""

_ROWS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"}


def origins_of(program: Program, arguments: Mapping[Var, Mask]) -> list[Mask]:
    """For each result, the bits of the arguments from which elementwise arithmetic makes it, and ``UPDATED`` if an
    update's result is among its operands.

    A result of an update has the bits of the argument whose next value it is, and no bits of the update's other
    operands: a gradient changes parameters, but the new parameters do not continue it.
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
