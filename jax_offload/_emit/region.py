"""An update as one equation of the trace around it, which is not emitted yet.

The equation carries the recipe and all that decides its plan. It is planned where somebody asks for that, and emitted
where it is lowered, at the latest: so whoever sees a traced step (``placement``, the cut of a step) finds its updates
and can emit them otherwise. Under ``vmap`` and derivatives what is emitted takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import jax
from jax.core import Tracer

from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    call_primitive,
    closed,
    equations,
    jax_fun,
    jaxpr_of,
    nameless,
    params_of,
    sub_jaxprs,
    without_dead_code,
)
from jax_offload._base.passes import Passes
from jax_offload._emit.run import as_array, stream
from jax_offload._emit.serialise import Serialise
from jax_offload._emit.transfers import Names
from jax_offload._ir.branches import scalars_hoisted
from jax_offload._ir.program import Program, Var, as_program, expanded, flat, without_round_trips
from jax_offload._plan.decide import plan_of
from jax_offload._plan.options import Claim, regions
from jax_offload._plan.plan import Plan, Planned

NAME = "jax_offload_update"
KEPT_EFFECTS = frozenset(("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"))
_region = call_primitive(NAME)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Update:
    """A traced update that is not emitted yet.

    Attributes:
      program: the usual recipe (load all, update, store all).
      gradients: positions among the program's arguments (its inputs without the constants), in the order of the
        backward pass, which the trace around it knows.
      serialise: which gradients wait for each other.
      names: of the state's leaves, of their next values too.
      next_values: result -> the argument that it is the next value of.
      claims: of the offloads in it.
      rank: of a leaf of the state its place in the order of the backward pass.
      manual: whether it was traced inside ``shard_map``.
      divided: where ``program`` gathers updates that are divided (ZeRO-1), the same without that, for a recipe around
        it that gathers what it makes of them.
      wide: whether it was traced with types of 64 bits; jax may lower it where they are off.
      passes: those that made its gradients, where only gates in the update hold them back.
      stays: why leaves whose gradients a scan makes are not updated in that scan; only ``jax_offload.jit`` asks.
    """

    program: Program
    gradients: tuple[int, ...]
    serialise: Serialise
    names: Names
    next_values: Mapping[Var, Var]
    claims: Sequence[Claim]
    rank: Mapping[Var, int]
    manual: bool
    divided: Program | None = None
    wide: bool = dataclasses.field(default_factory=lambda: bool(jax.config.jax_enable_x64))  # pyright: ignore
    passes: Passes | None = None
    stays: tuple[str, ...] = ()

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"Update({sum(len(each.slices) for each in self.plan.passes)} slices)"

    @functools.cached_property
    def plan(self) -> Plan:
        program = scalars_hoisted(self.program)
        found = regions(self.claims, program.inputs)
        gradients = {self.operands[i] for i in self.gradients}
        return plan_of(
            program, self.next_values, found, lambda v: self.rank.get(v, -1), manual=self.manual,
            passes_before=self.passes, gradients=gradients,
        )  # fmt: skip

    @property
    def operands(self) -> list[Var]:
        """Those of its equation, as variables of its own."""
        return self.program.inputs[len(self.program.consts) :]

    @property
    def planned(self) -> list[Planned]:
        """Its slices, in the order of loading."""
        return [p for each in self.plan.passes for p in each.slices]

    @property
    def results(self) -> Set[Var]:
        """Those that are the next value of an argument."""
        return {*self.next_values}

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        program = self.program
        return [v.aval for v in self.operands], [v.aval for v in program.outputs]

    @property
    def effects(self) -> frozenset[Any]:
        return self.program.effects

    @property
    def recipe(self) -> Jaxpr:
        return self.program.closed.jaxpr

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Update]:
        """The update for some of its results: planned anew, as what it does not make it need not load."""
        needed, program = self.program.only(used)
        if all(used) and all(needed):
            return needed, self
        places = {i: k for k, i in enumerate(i for i, n in enumerate(needed) if n)}
        gradients = tuple(places[i] for i in self.gradients if i in places)
        return needed, dataclasses.replace(self, program=program, gradients=gradients, divided=None)

    def replanned(self, program: Program, gradients: tuple[int, ...]) -> Update:
        """What is left of it: ``program``, whose equations are some of its own."""
        return dataclasses.replace(self, program=program, gradients=gradients, divided=None)

    def emitted(self, args: Sequence[Any]) -> list[Any]:
        """Its results, by the plan."""
        with jax.enable_x64(self.wide):
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


class PartPlan(Protocol):
    """The plan of a part: of a scan with updates inside, of one piece."""

    @property
    def operands(self) -> list[Var]:
        """Those of its equation, as variables of the step."""
        ...

    @property
    def planned(self) -> list[Planned]: ...


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Part:
    """A part of an update that runs elsewhere in a step, inside a scan say.

    Attributes:
      jaxpr: what it does, transfers and all.
      operands: those of its equation, as variables of the step.
      plan: of it, with its slices, to be printed.
    """

    jaxpr: ClosedJaxpr
    operands: list[Var]
    plan: PartPlan

    def __repr__(self) -> str:
        return f"Part({len(self.planned)} slices)"

    @property
    def planned(self) -> list[Planned]:
        return self.plan.planned

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        return [v.aval for v in self.jaxpr.jaxpr.invars], [v.aval for v in self.jaxpr.jaxpr.outvars]

    @property
    def effects(self) -> frozenset[Any]:
        return frozenset(self.jaxpr.effects)

    @property
    def recipe(self) -> Jaxpr:
        return self.jaxpr.jaxpr

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Part]:
        jaxpr, needed = without_dead_code(self.jaxpr.jaxpr, used)
        operands = [v for v, n in zip(self.operands, needed, strict=True) if n]
        return needed, dataclasses.replace(self, jaxpr=closed(jaxpr), operands=operands)

    def emitted(self, args: Sequence[Any]) -> list[Any]:
        return jax_fun(self.jaxpr)(*args)


def marked(run: Callable[[Sequence[Any]], list[Any]], args: Sequence[Any], plan: PartPlan) -> list[Any]:
    """``run(args)`` as one equation, a ``Part`` of an update."""
    traced, _ = jaxpr_of(lambda *args: run(args), *args)
    if traced.consts or not all(type(effect).__name__ in KEPT_EFFECTS for effect in traced.effects):
        return run(args)
    inner = traced.jaxpr
    handed_on = dict(zip(inner.invars, args, strict=True))
    made = [v for v in inner.outvars if not isinstance(v, Literal) and v not in handed_on]
    jaxpr = Jaxpr([], inner.invars, made, inner.eqns, inner.effects, nameless(inner.debug_info))
    part = Part(closed(jaxpr), plan.operands, plan)
    results = handed_on | dict(zip(made, _region.bind(*args, **params_of(part)), strict=True))
    return [as_array(v) if isinstance(v, Literal) else results[v] for v in inner.outvars]


def bound(update: Update, args: Sequence[Any]) -> list[Any]:
    """``update`` of these arguments, as one equation of the trace; outside of any trace it runs.

    Arguments that are handed on are no results of the equation: jax would copy them where nobody donates.
    """
    program = update.program
    # what the recipe closes over becomes operands: a tracer among an equation's parameters would outlive its trace
    operands, shift = [*program.consts, *args], len(program.consts)
    if not any(isinstance(x, Tracer) for x in operands):
        return update.emitted(args)
    if not all(type(effect).__name__ in KEPT_EFFECTS for effect in update.effects):
        return update.emitted(args)  # mutable arrays and checks are known to jax in its own equations only
    handed_on = dict(zip(program.inputs, operands, strict=True))
    results = handed_on
    made = {v: k for k, v in enumerate(program.outputs) if not isinstance(v, Literal) and v not in handed_on}

    def without_the_rest(program: Program) -> Program:
        return dataclasses.replace(program, consts=[], outputs=[program.outputs[k] for k in made.values()])

    if made or update.effects:
        update = dataclasses.replace(
            update,
            program=without_the_rest(program),
            gradients=tuple(shift + i for i in update.gradients),
            divided=None if update.divided is None else without_the_rest(update.divided),
        )
        results = handed_on | dict(zip(made, _region.bind(*operands, **params_of(update)), strict=True))
    return [as_array(v) if isinstance(v, Literal) else results[v] for v in program.outputs]


def without_updates(step: Any, *, divided: bool = False) -> Program:
    """A step's closed jaxpr as a program, with the recipes of its updates in their places.

    ``divided``: whether updates that these would gather stay divided.
    """

    def expand(eqn: Any) -> Program | None:
        if eqn.primitive is not _region:
            return None
        update = eqn.params["update"]
        if not isinstance(update, Update):
            return as_program(equations(update))
        return update.divided if divided and update.divided is not None else update.program

    return without_round_trips(flat(step, expand=expand))


def emitted(step: Any) -> Any:
    """A step's closed jaxpr, with what its updates emit in their places: the equations that are lowered."""

    def expand(eqn: Any) -> Program | None:
        return as_program(equations(eqn.params["update"])) if eqn.primitive is _region else None

    return closed(expanded(step.jaxpr, expand), step.consts)


@dataclasses.dataclass(frozen=True)
class Found:
    """An update in a traced step.

    Attributes:
      update: it.
      origins: argument of its program -> variable of the step, where it is one, through branches, loops and moves.
    """

    update: Update | Part
    origins: Mapping[Var, Var]

    def inputs_of(self, arguments: Iterable[Var]) -> Iterator[Var]:
        """Those variables of the step that these arguments of its program are, where they are one."""
        return (self.origins[v] for v in arguments if v in self.origins)

    @property
    def loads(self) -> list[tuple[list[Var], Planned]]:
        """For every slice, in the order of loading, the variables of the step that it loads, and how."""
        return [(list(self.inputs_of(p.slice.loads)), p) for p in self.update.planned]


def is_update(eqn: Equation) -> bool:
    """Whether an equation is an update that can be emitted anew."""
    return eqn.primitive is _region and isinstance(eqn.params["update"], Update)


def holds_update(eqn: Equation) -> bool:
    """Whether an equation is an update, or has one in a branch, a loop or a call."""
    return eqn.primitive is _region or any(holds_update(inner) for jaxpr, _ in sub_jaxprs(eqn) for inner in jaxpr.eqns)


def updates_in(step: Any) -> list[Found]:
    """The updates in a step's closed jaxpr, in its branches and loops too, in the order of the trace."""
    jaxpr = step.jaxpr
    own = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    moved = {v for eqn in jaxpr.eqns if eqn.primitive.name in _MOVES for v in eqn.outvars}
    results = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    return list(_found(jaxpr, {v: v for v in own - moved | own & results}))


_MOVES = ("device_put", "sharding_constraint", "reshard", "copy", "optimization_barrier", "jax_offload_donation")

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")


def _found(jaxpr: Any, origin: dict[Var, Var]) -> Iterator[Found]:
    """``origin``: variables of the jaxpr -> those of the step that they are. Moves are looked through where it does not
    tell."""

    def known(inner: Sequence[Var], operands: Sequence[Any]) -> dict[Var, Var]:
        pairs = zip(inner, operands, strict=True)
        return {v: origin[x] for v, x in pairs if not isinstance(x, Literal) and x in origin}

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVES:
            for v, x in known(eqn.outvars, eqn.invars).items():
                origin.setdefault(v, x)
        elif eqn.primitive is _region:
            update = eqn.params["update"]
            yield Found(update, known(update.operands, eqn.invars))
        else:
            for inner, operands in sub_jaxprs(eqn):
                own = known(inner.invars, operands)
                yield from _found(inner, own)
                if eqn.primitive.name in _CALLS:  # a gate, say, hands on what it is given
                    for v, x in zip(eqn.outvars, inner.outvars, strict=True):
                        if not isinstance(x, Literal) and x in own:
                            origin[v] = own[x]
