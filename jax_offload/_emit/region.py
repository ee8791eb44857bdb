"""An update as one equation of the trace around it.

The equation runs what was emitted for the update, and carries what that was made of: the recipe, not emitted yet, and
its plan. So whoever sees a traced step (``placement``, the cut of a step) finds its updates, and can emit them anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from jax.core import Tracer

from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    call_primitive,
    closed,
    is_traced,
    jaxpr_of,
    nameless,
    sub_jaxprs,
)
from jax_offload._emit.run import as_array, stream
from jax_offload._emit.serialise import Serialise
from jax_offload._emit.transfers import Names
from jax_offload._ir.program import Program, Var
from jax_offload._plan.decide import Planning
from jax_offload._plan.in_scan import InScan
from jax_offload._plan.plan import Plan, Planned

NAME = "jax_offload_update"
KEPT_EFFECTS = frozenset(("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"))
_region = call_primitive(NAME)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Update:
    """A traced update that is not emitted yet.

    Attributes:
      program: the usual recipe (load all, update, store all).
      plan: of it.
      gradients: positions among the program's arguments (its inputs without the constants), in the order of the
        backward pass, which the trace around it knows.
      serialise: which gradients wait for each other.
      names: of the state's leaves, of their next values too.
      next_of: result -> the argument that it is the next value of.
      planning: what the plan was made of, beside the program.
      made: the results that the equation has.
      stays: why leaves whose gradients a scan makes are not updated in that scan; only ``jax_offload.jit`` asks.
    """

    program: Program
    plan: Plan
    gradients: tuple[int, ...]
    serialise: Serialise
    next_of: Mapping[Var, Var]
    names: Names
    planning: Planning
    made: tuple[Var, ...] = ()
    stays: tuple[str, ...] = ()

    @property
    def results(self) -> Set[Var]:
        """Those that are the next value of an argument."""
        return {*self.next_of}

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"Update({sum(len(each.slices) for each in self.plan.passes)} slices)"

    @property
    def operands(self) -> list[Var]:
        """The last operands of its equation, as variables of its own."""
        return self.program.inputs[len(self.program.consts) :]

    @property
    def planned(self) -> list[Planned]:
        """Its slices, in the order of loading."""
        return [p for each in self.plan.passes for p in each.slices]

    def replanned(self, program: Program, gradients: tuple[int, ...]) -> Update:
        """What is left of it: ``program``, whose equations are some of its own."""
        plan = self.planning.plan(program, self.next_of)
        return dataclasses.replace(self, program=program, plan=plan, gradients=gradients, made=())

    def emitted(self, args: Sequence[Any]) -> list[Any]:
        """Its results, by the plan."""
        results = stream(
            self.program,
            self.plan,
            args,
            gradients=self.gradients,
            serialise=self.serialise,
            results=self.results,
            names=self.names,
        )
        return guarded(results, list(args))


def bound(update: Update, args: Sequence[Any]) -> list[Any]:
    """``update`` of these arguments, as one equation; where ``vmap`` or a derivative traces it, as its equations.

    Arguments that are handed on are no results of the equation: jax would copy them where nobody donates.
    """
    consts = update.program.consts
    if not all(is_traced(x) for x in (*consts, *args) if isinstance(x, Tracer)) or not any(map(is_traced, args)):
        return update.emitted(args)
    # what the recipe closes over becomes operands: a tracer among an equation's parameters would outlive its trace
    update = dataclasses.replace(
        update,
        program=dataclasses.replace(update.program, consts=[]),
        gradients=tuple(len(consts) + i for i in update.gradients),
    )
    return marked(update.emitted, update, [*consts, *args])


def marked(run: Callable[[Sequence[Any]], list[Any]], update: Any, args: Sequence[Any]) -> list[Any]:
    """``run(args)`` as one equation, marked by ``update``: an ``Update``, or the plan of a scan with one inside."""
    traced, _ = jaxpr_of(lambda *args: run(args), *args)
    if not all(type(effect).__name__ in KEPT_EFFECTS for effect in traced.effects):
        return run(args)  # mutable arrays and checks are known to jax in its own equations only
    jaxpr, operands = traced.jaxpr, [*traced.consts, *args]
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    handed_on = dict(zip(inputs, operands, strict=True))
    made = [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in handed_on]
    if isinstance(update, Update):
        results_of = dict(zip(jaxpr.outvars, update.program.outputs, strict=True)) if made else {}
        update = dataclasses.replace(update, made=tuple(results_of[v] for v in made))
    called = closed(Jaxpr([], inputs, made, jaxpr.eqns, jaxpr.effects, nameless(jaxpr.debug_info)))
    results = dict(zip(made, _region.bind(*operands, jaxpr=called, update=update), strict=True)) if made else {}
    results |= handed_on
    return [as_array(v) if isinstance(v, Literal) else results[v] for v in jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class Found:
    """An update in a traced step.

    Attributes:
      update: it.
      origins: argument of its program -> variable of the step, where it is one, through branches, loops and moves.
    """

    update: Update | InScan
    origins: Mapping[Var, Var]

    @property
    def loads(self) -> list[tuple[list[Var], Planned]]:
        """For every slice, in the order of loading, the variables of the step that it loads, and how."""
        slices = self.update.planned
        return [([self.origins[v] for v in p.slice.loads if v in self.origins], p) for p in slices]


def is_update(eqn: Equation) -> bool:
    """Whether an equation is an update that can be emitted anew."""
    return eqn.primitive is _region and isinstance(eqn.params["update"], Update)


def holds_update(eqn: Equation) -> bool:
    """Whether an equation is an update, or has one in a branch, a loop or a call."""
    return eqn.primitive is _region or any(holds_update(inner) for jaxpr, _ in sub_jaxprs(eqn) for inner in jaxpr.eqns)


def updates_in(step: ClosedJaxpr) -> list[Found]:
    """The updates in a step's closed jaxpr, in its branches and loops too, in the order of the trace."""
    jaxpr = step.jaxpr
    own = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    moved = {v for eqn in jaxpr.eqns if eqn.primitive.name in _MOVES for v in eqn.outvars}
    results = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    return list(_found(jaxpr, {v: v for v in own - moved | own & results}))


_MOVES = ("device_put", "sharding_constraint", "reshard", "copy", "optimization_barrier", "jax_offload_donation")


def _found(jaxpr: Jaxpr, origin: dict[Var, Var]) -> Iterator[Found]:
    """``origin``: variables of the jaxpr -> those of the step that they are. Moves are looked through where it does not
    tell."""

    def known(inner: Sequence[Var], operands: Sequence[Atom]) -> dict[Var, Var]:
        pairs = zip(inner, operands, strict=True)
        return {v: origin[x] for v, x in pairs if not isinstance(x, Literal) and x in origin}

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVES:
            for v, x in known(eqn.outvars, eqn.invars).items():
                origin.setdefault(v, x)
        elif eqn.primitive is _region and (update := eqn.params["update"]) is not None:
            inputs = update.operands
            yield Found(update, known(inputs, eqn.invars[len(eqn.invars) - len(inputs) :]))
        else:
            for inner, operands in sub_jaxprs(eqn):
                yield from _found(inner, known(inner.invars, operands))
