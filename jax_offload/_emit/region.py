"""An update as one equation of the trace around it, which is not emitted yet.

The equation carries the recipe and everything that decides its plan. It is planned when somebody asks, and emitted
where it is lowered, at the latest: so whoever sees a traced step (``placement``, the cut of a step) finds its updates
and can emit them otherwise. Under ``vmap`` and derivatives the emitted equations take its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
from jax.core import Tracer

from jax_offload._disk.leaves import UpdatedFromDisk
from jax_offload._emit.rows import Names
from jax_offload._emit.run import follow
from jax_offload._program.donation import guarded
from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    jax_fun,
    nameless,
    only_callbacks,
    values_of,
    variables,
)
from jax_offload._program.own_primitives import call_primitive, params_of
from jax_offload._program.private import without_dead_code
from jax_offload._program.program import Builder, Program, Var, flat
from jax_offload._program.trace import Backward
from jax_offload._schedule.after import schedules_of
from jax_offload._schedule.in_scan import InScan
from jax_offload._schedule.options import Claim, apart
from jax_offload._schedule.schedule import Planned, Schedule

NAME = "jax_offload_update"
REGION = call_primitive(NAME)  # whose equations `find` finds


class UpdatedOnCores(ValueError):
    """A program for the device is made of an update by the host's cores."""

    def __init__(self) -> None:
        super().__init__(
            "update_on: an update by the host's cores is no part of a program for the device. Fix: jo.jit(step), "
            "called and not lowered, outside of any other jit, vmap, derivative or jax.disable_jit(): it cuts the step "
            "there; or update_on='device'."
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Update:
    """A traced update that is not emitted yet.

    Attributes:
      program: the usual recipe (load all, update, store all).
      gradients: its operands that are gradients, in the order of the backward pass, which the trace around it knows.
      take_turns: whether its gradients may wait for each other.
      names: the names of the state's leaves and of their next values.
      next_values: result -> the argument whose next value it is.
      claims: the claims of the offloads in it.
      rank: leaf of the state -> its place in the order of the backward pass.
      manual: whether it was traced inside ``shard_map``.
      wide: whether it was traced with types of 64 bits; jax may lower it where they are off.
      backward: the passes that made its gradients, where only gates in the update hold them back.
      stays: why leaves are not updated within the passes, forward and backward; only ``jax_offload.jit`` asks.
      gated: whether each of its slices runs by itself, between gates of the passes.
      ordered: whether the trace around it tells in what order its gradients are made; if not, and without an
        ``order``, ``rank`` is guessed from paths.
    """

    program: Program
    gradients: tuple[Var, ...]
    take_turns: bool
    names: Names
    next_values: Mapping[Var, Var]
    claims: Sequence[Claim]
    rank: Mapping[Var, int]
    manual: bool
    wide: bool = dataclasses.field(default_factory=lambda: bool(jax.config.jax_enable_x64))  # pyright: ignore
    backward: Backward | None = None
    stays: tuple[str, ...] = ()
    gated: bool = False
    ordered: bool = True

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"Update({sum(len(each.slices) for each in self.passes)} slices)"

    @functools.cached_property
    def passes(self) -> Sequence[Schedule]:
        """The schedules of its passes over the host leaves."""
        return schedules_of(
            self.program, self.next_values, apart(self.claims, self.program.inputs), lambda v: self.rank.get(v, -1),
            manual=self.manual, backward=self.backward, gradients=self.gradients, take_turns=self.take_turns,
            gated=self.gated,
        )  # fmt: skip

    @property
    def operands(self) -> list[Var]:
        """The operands of its equation, as variables of its own."""
        return self.program.inputs[len(self.program.consts) :]

    @property
    def planned(self) -> list[Planned]:
        """Its slices, in the order of loading."""
        return [p for each in self.passes for p in each.slices]

    @property
    def on_cores(self) -> Set[Var]:
        """The leaves that the host's cores update."""
        return frozenset[Var]().union(*(each.on_cores for each in self.claims)) & {*self.program.inputs}

    @property
    def on_disk(self) -> Set[Var]:
        """The leaves that are read from disk."""
        return frozenset[Var]().union(*(each.on_disk for each in self.claims)) & {*self.program.inputs}

    @property
    def driven(self) -> bool:
        """Whether a part of it cannot be in a program for the device alone."""
        return bool(self.on_cores or self.on_disk)

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        program = self.program
        return [v.aval for v in self.operands], [v.aval for v in program.outputs]

    @property
    def effects(self) -> frozenset[Any]:
        return self.program.effects

    @property
    def recipe(self) -> Jaxpr:
        return self.program.placing_equations

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Update]:
        """Reduce the update to some of its results. It is planned anew, because it need not load for the others."""
        needed, program = self.program.only(used)
        if all(used) and all(needed):
            return needed, self
        given = {*program.inputs}
        gradients = tuple(v for v in self.gradients if v in given)
        return needed, dataclasses.replace(self, program=program, gradients=gradients)

    def updated_by(self, cores: bool) -> Update:
        """The update with all of its leaves, or none, on the host's cores."""
        claims = [dataclasses.replace(c, on_cores=c.leaves if cores else frozenset[Var]()) for c in self.claims]
        return dataclasses.replace(self, claims=claims)

    def emitted(self, args: Sequence[Any], *, lowered: bool = False, for_cpu: bool = False) -> list[Any]:
        """Emit the update as planned, and return its results.

        Raises:
          UpdatedOnCores, UpdatedFromDisk: part of it is not for the device; whoever drives the step from Python has
            cut it there.
        """
        if self.on_cores:
            raise UpdatedOnCores
        if self.on_disk:
            raise UpdatedFromDisk
        with jax.enable_x64(self.wide):
            env = dict(zip(self.program.inputs, [*self.program.consts, *args], strict=True))
            for each in self.passes:
                follow(each, self.names, env, lowered=lowered, for_cpu=for_cpu)
            results = values_of(env, self.program.outputs)
            names = [self.names.get(v) if isinstance(v, Var) else None for v in self.program.outputs]
            homes = [claim.options.home for claim in self.claims if claim.options.home is not None]
            return guarded(results, list(args), names=names, home=homes[-1] if homes else None)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Moved:
    """A part of an update that runs elsewhere in a step, for example inside a scan.

    Attributes:
      jaxpr: its equations, including transfers.
      operands: its equation's operands, as variables of the step.
      plan: where it runs, with its slices, to be printed.
    """

    jaxpr: ClosedJaxpr
    operands: list[Var]
    plan: InScan | Planned

    def __repr__(self) -> str:
        return f"Moved({len(self.planned)} slices)"

    @property
    def planned(self) -> list[Planned]:
        return self.plan.planned if isinstance(self.plan, InScan) else [self.plan]

    @property
    def avals(self) -> tuple[list[Any], list[Any]]:
        return [v.aval for v in self.jaxpr.jaxpr.invars], [v.aval for v in self.jaxpr.jaxpr.outvars]

    @property
    def effects(self) -> frozenset[Any]:
        return frozenset(self.jaxpr.effects)

    @property
    def recipe(self) -> Jaxpr:
        return self.jaxpr.jaxpr

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Moved]:
        jaxpr, needed = without_dead_code(self.jaxpr.jaxpr, used)
        operands = [v for v, n in zip(self.operands, needed, strict=True) if n]
        return needed, dataclasses.replace(self, jaxpr=ClosedJaxpr(jaxpr, []), operands=operands)

    def emitted(self, args: Sequence[Any], *, lowered: bool = False, for_cpu: bool = False) -> list[Any]:
        return jax_fun(self.jaxpr)(*args)


def moved(
    new: Builder, traced: ClosedJaxpr, operands: Sequence[Var], plan: InScan | Planned, like: Equation
) -> list[Atom]:
    """Append a jaxpr of a step's variables as one equation, a ``Moved`` of an update, and return its results.

    ``like``: an equation of an update of the step.
    """
    given = new.read(operands)
    if traced.consts or not only_callbacks(traced.effects):
        return new.call(flat(traced), given)
    j = traced.jaxpr
    made = [v for v in dict.fromkeys(variables(j.outvars)) if v not in {*j.invars}]
    part = Moved(
        ClosedJaxpr(Jaxpr([], j.invars, made, j.eqns, j.effects, nameless(j.debug_info)), []), [*operands], plan
    )
    results = [Var(v.aval) for v in made]
    new.eqns.append(like.replace(invars=given, outvars=results, params=params_of(part), effects=part.effects))
    return Builder(names=dict(zip([*j.invars, *made], [*given, *results], strict=True))).read(j.outvars)


def bound(update: Update, args: Sequence[Any]) -> list[Any]:
    """``update`` of these arguments, as one equation of the trace; outside of any trace it runs."""
    program = update.program
    # arrays that the recipe closes over become operands: a tracer in an equation's parameters would outlive its trace
    operands = [*program.consts, *args]
    if not any(isinstance(x, Tracer) for x in operands) or not only_callbacks(update.effects):
        return update.emitted(args)
    values = dict(zip(program.inputs, operands, strict=True))
    # Operands that are handed on are no results of the equation: jax would copy them where nobody donates.
    made = [v for v in dict.fromkeys(variables(program.outputs)) if v not in values]
    update = dataclasses.replace(update, program=dataclasses.replace(program, consts=[], outputs=[*made]))
    if made or update.effects:
        values.update(zip(made, REGION.bind(*operands, **params_of(update)), strict=True))
    return values_of(values, program.outputs)
