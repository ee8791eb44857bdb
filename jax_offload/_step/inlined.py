"""A whole step with its updates inlined, and the values whose next values its results are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Atom, DropVar, Equation, Literal, Var, renamed, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.find import is_update
from jax_offload._emit.region import Update
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import Program, decomposed, flat
from jax_offload._plan.decide import FLOPS_PER_BYTE
from jax_offload._plan.gates import is_heavy_equation
from jax_offload._plan.transfers import same_type

# ---- checkpointed blocks, opened where gates are to stand between the gradients that one makes


def opened(program: Program) -> Program:
    """Inline the equations of each ``jax.checkpoint`` that makes several large gradients.

    Such a block is one equation, and all of its gradients come at once: no gate can hold one of them back, and beside
    copies XLA puts their matmuls off behind the same block's attention. Recomputed values stay behind their
    barrier. A block inside such a block is opened too.

    A block stays closed where the link needs more than half of the passes' time, as more transfers run beside the
    attention of a larger piece; where it has a single matrix, as there is nothing to put between; and where XLA may
    merge it with the forward pass (``prevent_cse=False``), which it does not do across gates.
    """
    updates = [eqn.params["update"] for eqn in program.eqns if is_update(eqn)]
    if not updates or not all(map(_has_time, updates)):
        return program
    while several := _making_several(program):
        program = flat(program.closed, opens=lambda eqn, several=several: id(eqn) in several)
    return program


def _has_time(update: Update) -> bool:
    moved = sum(nbytes(v.aval) for v in update.program.inputs if is_host_aval(v.aval))
    return update.backward is not None and update.backward.flops > FLOPS_PER_BYTE * moved


def _making_several(program: Program) -> set[int]:
    """The blocks, by identity, that make gradients whose largest is at most half of all. Gradients are results that no
    pass through the network needs, only an update, a norm, or the caller."""
    needed, found = set[Var](), set[int]()
    for eqn in reversed(program.eqns):
        if is_update(eqn):  # of its results a pass may be made, by which its gradients are none of it
            continue
        gradients = [nbytes(v.aval) for v in eqn.outvars if v not in needed and not isinstance(v, DropVar)]
        if _is_apart(eqn) and gradients and 2 * max(gradients) <= sum(gradients):
            found.add(id(eqn))
        if is_heavy_equation(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _is_apart(eqn: Equation) -> bool:
    """Whether an equation is a block that keeps all recomputed values apart from the forward pass."""
    if eqn.primitive.name not in CHECKPOINT:
        return False
    said: bool | tuple[bool, ...] = eqn.params["prevent_cse"]
    return all(said) if isinstance(said, tuple) else said


@dataclasses.dataclass(frozen=True)
class Own:
    """An equation of an update.

    Attributes:
      update: the number of the update among the step's updates.
      equation: the equation in the update's own program.
    """

    update: int
    equation: Equation


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A step with its updates inlined.

    Attributes:
      program: the step.
      updates: the updates, in the order of the step.
      own: the equations of the updates, by identity.
      operands: an update's input -> the step's operand.
      next_of: result -> the variable of the step that it is the next value of.
      waiting: the same of gradients that wait in host memory for the next step.
      stays: why leaves do not move.
    """

    program: Program
    updates: tuple[Update, ...]
    own: Mapping[int, Own]
    operands: Mapping[Var, Atom]
    next_of: Mapping[Var, Var]
    waiting: Mapping[Var, Var]
    stays: tuple[str, ...] = ()

    @property
    def gradients(self) -> list[Var]:
        """The gradients of all updates, as variables of the step."""
        found = [(update, i) for update in self.updates for i in update.gradients]
        return variables([renamed(self.operands, update.operands[i]) for update, i in found])

    @property
    def names(self) -> dict[Var, str]:
        """The names of the states' leaves and of their next values, as variables of the step."""
        pairs = [(renamed(self.operands, v), name) for update in self.updates for v, name in update.names.items()]
        return {v: name for v, name in pairs if isinstance(v, Var)}


def inlined(program: Program) -> Inlined | None:
    """The program with its updates inlined; ``None`` where it has none, or runs one jitted update twice."""
    found = [eqn.params["update"] for eqn in program.eqns if is_update(eqn)]
    if not found or runs_one_twice(found):
        return None
    eqns: list[Equation] = []
    own: dict[int, Own] = {}
    operands: dict[Var, Atom] = {}
    results: dict[Var, Atom] = {}
    next_of: dict[Var, Var] = {}
    shards = dict(program.shards)
    for eqn in program.eqns:
        ins = [renamed(results, v) for v in eqn.invars]
        if not is_update(eqn):
            eqns.append(eqn.replace(invars=ins))
            continue
        update: Update = eqn.params["update"]
        recipe = update.program
        given = dict(zip(recipe.inputs, ins, strict=True))
        for each in decomposed(recipe.eqns):
            line = each.source_info.replace(traceback=eqn.source_info.traceback)  # of the user's call
            new = each.replace(invars=[renamed(given, v) for v in each.invars], source_info=line)
            own[id(new)] = Own(found.index(update), each)
            eqns.append(new)
        operands |= given
        results |= {v: renamed(given, made) for v, made in zip(eqn.outvars, recipe.outputs, strict=True)}
        # An update that is the rest of one has not all of its arguments left, nor makes all of its results.
        made = {v for each in recipe.eqns for v in each.outvars}
        left = {v: given[old] for v, old in update.next_values.items() if old in given and v in made}
        pairs = {v: x for v, x in left.items() if not isinstance(x, Literal)}
        divided = {x: n for v, n in recipe.shards.items() if v in given and not isinstance(x := given[v], Literal)}
        shards |= divided
        shards |= {v: shards[x] for v, x in pairs.items() if x in shards and v.aval.shape == x.aval.shape}
        next_of |= pairs
    outputs = [renamed(results, v) for v in program.outputs]
    step = dataclasses.replace(program, eqns=eqns, outputs=outputs, shards=shards)
    return Inlined(step, tuple(found), own, operands, next_of, _waiting(step, next_of))


def runs_one_twice(updates: Sequence[Update]) -> bool:
    """Whether two updates are one trace, of a jitted function that is called twice: their variables are the same."""
    inputs = [v for update in updates for v in update.program.inputs]
    return len({*inputs}) < len(inputs)


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
