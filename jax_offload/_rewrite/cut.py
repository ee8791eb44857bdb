"""Cut a traced training step at its updates into the part before, the updates, and the part after.

A step in one piece runs inside one ``jit``. The updates of a cut step can run apart from its model: beside the next
forward pass, on the host, or in groups whose state comes from files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from jax_offload._disk.leaves import READ
from jax_offload._emit.find import holds_update
from jax_offload._program.arrays import nbytes
from jax_offload._program.donation import unguarded
from jax_offload._program.jaxprs import Equation, ordered, variables
from jax_offload._program.program import Program, Var
from jax_offload._program.propagate import made_of, needed_for
from jax_offload._program.slices import Slice, consecutive


@dataclasses.dataclass(frozen=True)
class Cut:
    """A step as three parts that run one after the other.

    Attributes:
      program: the step.
      before: the forward and the backward pass, and everything else that needs no result of an update (a loss).
      update: the updates, and the equations between two of them.
      after: the equations that need results of an update, and that no update needs.
    """

    program: Program
    before: Slice
    update: Slice
    after: Slice

    @property
    def parts(self) -> tuple[Slice, Slice, Slice]:
        return self.before, self.update, self.after


def cut_step(program: Program) -> Cut:
    """Cut a step's program, in which every ``jit`` is inlined, at its updates.

    A branch, a loop (gradient accumulation that updates inside), ``shard_map`` or ``jax.checkpoint`` that holds an
    update belongs to the updates as a whole.

    Raises:
      ValueError: no ``offload`` updates anything in the step, or it has effects whose order a cut would lose.
    """
    program = unguarded(program)
    marks = [holds_update(eqn) or eqn.primitive is READ for eqn in program.eqns]  # a leaf is read where it is updated
    marked = {id(eqn) for eqn, mark in zip(program.eqns, marks, strict=True) if mark}
    if not any(map(holds_update, program.eqns)):
        raise ValueError(
            "step: has no update of an offload(...) in it that can be seen; call tx.update or jo.update_params, with "
            "one array or more, and not under vmap or a derivative."
        )
    if effects := ordered(program.effects):
        raise ValueError(
            f"step: has effects whose order a cut would lose: {', '.join(effects)}. Fix: ordered=False for "
            "callbacks; an argument that the step returns anew in the place of a jax.new_ref made outside."
        )
    follows = made_of(program.eqns, lambda eqn: id(eqn) in marked)
    _, leads = needed_for(program.eqns, [v for eqn in program.eqns if id(eqn) in marked for v in variables(eqn.invars)])
    late = [not follows.isdisjoint(variables(eqn.invars)) for eqn in program.eqns]
    places = [
        1 if mark or (after and not leads.isdisjoint(eqn.outvars)) else 2 if after else 0
        for eqn, mark, after in zip(program.eqns, marks, late, strict=True)
    ]
    parts: list[list[Equation]] = [[], [], []]
    for eqn, place in zip(program.eqns, _constants_where_used(program, places), strict=True):
        parts[place].append(eqn)

    return Cut(program, *consecutive(parts, program.outputs, program.debug_info, {}))


def _constants_where_used(program: Program, places: Sequence[int]) -> list[int]:
    """The places, with constants moved to the part that first reads them, so that they do not cross."""
    made = made_of(program.eqns, lambda _: False, program.inputs)
    constant = [made.isdisjoint(variables(eqn.invars)) and not eqn.effects for eqn in program.eqns]
    first: dict[Var, int] = dict.fromkeys(variables(program.outputs), 0)
    found = list(places)
    for k in reversed(range(len(found))):
        eqn = program.eqns[k]
        if constant[k] and found[k] == 0:
            found[k] = min((first[v] for v in eqn.outvars if v in first), default=0)
        for v in variables(eqn.invars):
            first[v] = min(first.get(v, found[k]), found[k])
    return found


# Operands may be a little larger than the value that is computed from them again (a softmax from its exponentials and
# their sums), because their own operands may be smaller (scores in bfloat16).
SLACK = 1.05


def computed_again(wanted: Set[Var], free: Set[Var], eqns: Sequence[Equation]) -> tuple[list[Equation], set[Var]]:
    """Return the equations that are repeated where values are read, and the values that must get there for them.

    Going backwards, each value gives way to its operands if they are no larger. The last arithmetic on a gradient (a
    scale, a cast to more bytes) then follows the gradient.

    Args:
      wanted: the values that are read.
      free: the values that are there anyway.
      eqns: the cheap equations among the ones that make the values.
    """
    need, again = {*wanted} - free, list[Equation]()
    for eqn in reversed(eqns):
        if len(eqn.outvars) == 1 and (v := eqn.outvars[0]) in need and v.aval.shape and not eqn.effects:
            more = {*variables(eqn.invars)} - free - need
            if sum(nbytes(x.aval) for x in more if x.aval.shape) <= SLACK * nbytes(v.aval):
                need = (need - {v}) | more
                again.append(eqn)
    return again[::-1], need
