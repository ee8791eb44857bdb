"""Which arguments of a step its results carry on: those that they are elementwise arithmetic on."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, scan_of, sub_jaxprs
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.masks import Mask, union
from jax_offload._ir.primitives import ELEMENTWISE
from jax_offload._ir.program import Program
from jax_offload._step.cut import unguarded

UPDATED: Mask = 1
"""The bit of what an update makes; other bits are the caller's, who numbers the arguments with them."""

_ROWS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"}


def origins_of(program: Program, arguments: Mapping[Var, Mask]) -> list[Mask]:
    """For each result, the bits of the arguments that it is elementwise arithmetic on, and ``UPDATED`` if it is
    arithmetic on what an update makes.

    An update hands on the bits of the argument whose next value a result is, and of nothing else that it reads: a
    gradient says where parameters go, not which array they are.
    """
    program = unguarded(program)
    return _through(program.inputs, program.eqns, program.outputs, [arguments.get(v, 0) for v in program.inputs])


def _through(
    inputs: Sequence[Var], eqns: Sequence[Equation], outputs: Sequence[Atom], masks: Sequence[Mask]
) -> list[Mask]:
    env: dict[Var, Mask] = dict(zip(inputs, masks, strict=True))

    def read(atoms: Sequence[Atom]) -> list[Mask]:
        return [0 if isinstance(v, Literal) else env.get(v, 0) for v in atoms]

    for eqn in eqns:
        env.update(zip(eqn.outvars, _forward(eqn, read(eqn.invars)), strict=True))
    return read(outputs)


def _forward(eqn: Equation, masks: Sequence[Mask]) -> Sequence[Mask]:
    """What the results of an equation are made of, given what its operands are made of."""
    if is_update(eqn):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, masks, strict=True)) | {update.operands[k]: 0 for k in update.gradients}
        olds = [None if isinstance(v, Literal) else update.next_values.get(v) for v in update.program.outputs]
        return [UPDATED | (0 if old is None else given.get(old, 0)) for old in olds]
    if eqn.primitive.name in _ROWS:
        return masks if len(masks) == len(eqn.outvars) else [union(masks)] * len(eqn.outvars)
    carry, found = _carried(eqn), list[list[Mask]]()
    for jaxpr, operands in sub_jaxprs(eqn):
        given = list(masks[len(masks) - len(operands) :])
        while True:
            made = _through(jaxpr.invars, jaxpr.eqns, jaxpr.outvars, given)
            before = [given[at] for at in carry]
            made[: len(carry)] = map(operator.or_, before, made)
            if made[: len(carry)] == before:
                break  # one iteration hands nothing more to the next
            given[carry.start : carry.stop] = made[: len(carry)]
        if len(made) == len(eqn.outvars):
            found.append(made)
    return [union(each) for each in zip(*found, strict=True)] if found else [0] * len(eqn.outvars)


def _carried(eqn: Equation) -> range:
    """The places of what a loop carries, among the operands of its body."""
    if (scan := scan_of(eqn)) is not None:
        return range(len(scan.consts), len(scan.consts) + len(scan.init))
    if eqn.primitive.name == "while":
        return range(eqn.params["body_nconsts"], eqn.params["body_nconsts"] + len(eqn.outvars))
    return range(0)
