"""A whole step with its update inlined, and which of its results are the next values of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_offload._base.composite import decomposed
from jax_offload._base.jaxprs import Atom, Equation, Literal, Var, renamed, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.branches import scalars_hoisted
from jax_offload._ir.program import Program
from jax_offload._plan.transfers import same_type


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A step with its update inlined.

    Attributes:
      program: it.
      own: the equations of the update, by identity, as they are in the update's own program.
      operands: the update's inputs -> what the step gives them.
      next_of: result -> the variable of the step that it is the next value of.
      waiting: the same of gradients that wait in host memory for the next step.
      stays: why leaves do not move.
    """

    program: Program
    update: Update
    own: Mapping[int, Equation]
    operands: Mapping[Var, Atom]
    next_of: Mapping[Var, Var]
    waiting: Mapping[Var, Var]
    stays: tuple[str, ...] = ()

    @property
    def gradients(self) -> list[Var]:
        """As variables of the step."""
        operands = self.update.operands
        return variables([renamed(self.operands, operands[i]) for i in self.update.gradients])


def inlined(program: Program) -> Inlined | None:
    """The program with its only update inlined; ``None`` where it has none, or several."""
    found = [eqn for eqn in program.eqns if is_update(eqn)]
    if len(found) != 1:
        return None
    update: Update = found[0].params["update"]
    recipe = scalars_hoisted(update.program)
    recipe = dataclasses.replace(recipe, eqns=decomposed(recipe.eqns))
    operands = dict(zip(recipe.inputs, found[0].invars, strict=True))
    given: dict[Var, Atom] = dict(operands)
    eqns: list[Equation] = []
    own: dict[int, Equation] = {}
    for eqn in program.eqns:
        if eqn is found[0]:
            for each in recipe.eqns:
                new = each.replace(invars=[renamed(operands, v) for v in each.invars])
                own[id(new)] = each
                eqns.append(new)
            given |= {v: renamed(operands, defined) for v, defined in zip(eqn.outvars, recipe.outputs, strict=True)}
        else:
            eqns.append(eqn.replace(invars=[renamed(given, v) for v in eqn.invars]))
    # An update that is the rest of one has not all of its arguments left, nor makes all of its results.
    made = {v for each in recipe.eqns for v in each.outvars}
    left = {v: operands[old] for v, old in update.next_values.items() if old in operands and v in made}
    next_of = {v: x for v, x in left.items() if not isinstance(x, Literal)}
    outputs = [renamed(given, v) for v in program.outputs]
    shards = {x: n for v, n in recipe.shards.items() if v in operands and not isinstance(x := operands[v], Literal)}
    shards |= {v: shards[x] for v, x in next_of.items() if x in shards and v.aval.shape == x.aval.shape}
    inlined_step = dataclasses.replace(program, eqns=eqns, outputs=outputs, shards=shards)
    return Inlined(inlined_step, update, own, operands, next_of, _waiting(inlined_step, next_of))


def _waiting(program: Program, next_of: Mapping[Var, Var]) -> dict[Var, Var]:
    """Result that a step sends to the host -> the argument there whose rows it may be written over: one of its type
    that is nobody's old value."""
    moved = {eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "device_put"}
    results = [v for v in dict.fromkeys(variables(program.outputs)) if v in moved and is_host_aval(v.aval)]
    taken = {*next_of.values(), *variables(program.outputs)}
    free = [v for v in program.inputs if is_host_aval(v.aval) and v not in taken]
    found: dict[Var, Var] = {}
    for v in results:
        old = next((x for x in free if same_type(x.aval, v.aval)), None) if v not in next_of else None
        if old is not None:
            found[v] = old
            free.remove(old)
    return found
