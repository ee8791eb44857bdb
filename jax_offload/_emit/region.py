"""An update as one equation of the trace around it, which is not emitted yet.

The equation carries the recipe and everything that decides its plan. It is planned on demand, and emitted when it is
lowered, at the latest. So code that reads a traced step (``placement``, the cut of a step) finds its updates and can
emit them differently. Under ``vmap`` and derivatives the emitted equations take its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive

from jax_offload._disk.leaves import READ, UpdatedFromDisk
from jax_offload._emit.run import Names, follow
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    holds,
    holds_inside,
    inner_of,
    jax_fun,
    jaxpr_of,
    only_callbacks,
    values_of,
    variables,
)
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import guarded, identity_primitive, is_loop
from jax_offload._program.private import lowered, nonzero, set_rules, zero_tangent
from jax_offload._program.program import Program, Var, expanded, flat, without_round_trips
from jax_offload._schedule.after import Recipe, schedules_of
from jax_offload._schedule.in_scan import InScan
from jax_offload._schedule.schedule import Planned, Schedule


class UpdatedOnCores(ValueError):
    """A program for the device would contain an update that the host's cores run."""

    def __init__(self) -> None:
        super().__init__(
            "update_on: an update by the host's cores is no part of a program for the device. Fix: jo.jit(step), "
            "called and not lowered, outside of any other jit, vmap, derivative or jax.disable_jit(): it cuts the step "
            "there; or update_on='device'."
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Update(Recipe):
    """A traced update that is not emitted yet.

    Attributes:
      names: the names of the state's leaves and of their next values.
      wide: whether it was traced with types of 64 bits; jax may lower it where they are off.
      stays: why leaves are not updated within the passes, forward and backward; only ``jax_offload.jit`` asks.
      ordered: whether the trace around it tells in what order its gradients are made; if not, ``rank`` is
        guessed from paths.
    """

    names: Names
    wide: bool = dataclasses.field(default_factory=lambda: bool(jax.config.jax_enable_x64))  # pyright: ignore
    stays: tuple[str, ...] = ()
    ordered: bool = True

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"Update({len(self.planned)} slices)"

    @functools.cached_property
    def passes(self) -> Sequence[Schedule]:
        """The schedules of its passes over the host leaves."""
        return schedules_of(self)

    @property
    def operands(self) -> list[Var]:
        """The operands of its equation, as variables of its own."""
        return self.program.inputs[len(self.program.consts) :]

    @property
    def planned(self) -> list[Planned]:
        """Its slices, in the order of loading."""
        return [p for each in self.passes for p in each.slices]

    @property
    def driven(self) -> bool:
        """Whether a part of it cannot be in a program for the device alone."""
        return bool(self.on_cores or self.on_disk)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of its equation. jax looks for memories, shardings and callbacks in the jaxprs among them
        before it lowers anything, and drops transfers if it has seen none."""
        return {"update": self, "recipe": self.program.placing_equations}

    @property
    def equations(self) -> ClosedJaxpr:
        """The equations that it emits."""
        return jaxpr_of(self.emitted, [v.aval for v in self.operands])[0]

    def only(self, used: Sequence[bool]) -> tuple[list[bool], Update]:
        """Reduce the update to some of its results. It is planned anew, because it need not load for the others."""
        needed, program = self.program.only(used)
        return needed, self if all(used) and all(needed) else self.with_fewer_inputs(program)

    def with_fewer_inputs(self, program: Program) -> Update:
        """Replace the program by one that reads fewer inputs; facts about the others may stay."""
        own, gradients = {*program.inputs}, tuple(v for v in self.gradients if v in program.inputs)
        on_cores, on_disk = self.on_cores & own, self.on_disk & own
        return dataclasses.replace(self, program=program, gradients=gradients, on_cores=on_cores, on_disk=on_disk)

    def updated_by(self, cores: bool) -> Update:
        """The update with all of its leaves, or none, on the host's cores."""
        leaves = self.offload_of.keys() & {*self.program.inputs}
        return dataclasses.replace(self, on_cores=frozenset(leaves if cores else ()))

    def emitted(self, args: Sequence[Any], *, lowered: bool = False, for_cpu: bool = False) -> list[Any]:
        """Emit the update as planned, and return its results.

        Args:
          args: its operands.
          lowered: whether these equations are lowered unchanged, so that neither ``vmap`` nor a derivative sees them.
          for_cpu: whether they are lowered for a CPU, whose compiler needs no help with the order of transfers.

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
            home = next((each.home for each in reversed(self.options) if each.home is not None), None)
            return guarded(results, list(args), names=names, home=home)


# ---- its equation, which becomes the emitted ones under vmap, under derivatives, and when it is lowered


def _batched(axis: Any, xs: Sequence[Any], dims: Sequence[Any], *, update: Update, recipe: Jaxpr) -> Any:
    axes = tuple(None if d is None else int(d) for d in dims)
    over: dict[str, Any] = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
    out = jax.vmap(jax_fun(update.equations), axes, **over)(*xs)
    return out, [0] * len(out)


def _derived(xs: Sequence[Any], tangents: Sequence[Any], *, update: Update, recipe: Jaxpr) -> Any:
    run, moving = jax_fun(update.equations), {i: t for i, t in enumerate(tangents) if nonzero(t)}

    def of_moving(*moved: Any) -> list[Any]:
        given = dict(zip(moving, moved, strict=True))
        return run(*(given.get(i, x) for i, x in enumerate(xs)))

    primals, found = jax.jvp(of_moving, [xs[i] for i in moving], [*moving.values()])
    return primals, [t if nonzero(t) else zero_tangent(x) for t, x in zip(found, primals, strict=True)]


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Equation | None]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    needed, update = eqn.params["update"].only(list(used))
    invars = [v for v, n in zip(eqn.invars, needed, strict=True) if n]
    outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
    effects = update.program.effects
    return needed, eqn.replace(invars=invars, outvars=outvars, params=update.params, effects=effects)


def _lowered(context: Any, *args: Any, update: Update, recipe: Jaxpr, for_cpu: bool = False) -> Any:
    # Not as a function of its own: XLA's CPU rounds bfloat16 at its edges, as it inlines it too late.
    return lowered(lambda *args: update.emitted(args, lowered=True, for_cpu=for_cpu), context, *args, several=True)


REGION = Primitive("jax_offload_update")
REGION.multiple_results = True
REGION.def_impl(lambda *xs, update, recipe: jax_fun(update.equations)(*xs))
REGION.def_effectful_abstract_eval(
    lambda *_, update, recipe: ([v.aval for v in update.program.outputs], update.program.effects)
)
set_rules(
    REGION,
    lower=_lowered,
    lower_for_cpu=functools.partial(_lowered, for_cpu=True),
    jvp=_derived,
    batch_over=_batched,
    dce=_without_unused,
)


# ---- parts of it that run elsewhere in a step, where they stand as equations, and each behind a mark


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Moved:
    """A part of an update that runs elsewhere in a step, such as inside a scan, as its mark describes it.

    Attributes:
      plan: where it runs, with its slices, to be printed.
    """

    plan: InScan | Planned

    def __repr__(self) -> str:  # a jaxpr prints its parameters
        return f"Moved({len(self.planned)} slices)"

    @property
    def planned(self) -> list[Planned]:
        return self.plan.planned if isinstance(self.plan, InScan) else [self.plan]

    @functools.cached_property
    def loads(self) -> list[Var]:
        """The leaves that it loads, as variables of the step."""
        return list(dict.fromkeys(v for each in self.planned for v in each.slice.loads))


def _keeping_loads(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Equation | None]:
    """Remove the unused results of a part from its mark."""
    eqn = rest[-1]
    n = len(used) - len(eqn.params["moved"].loads)
    kept = [*used[:n], *[any(used)] * (len(used) - n)]
    invars, outvars = ([v for v, k in zip(vs, kept, strict=True) if k] for vs in (eqn.invars, eqn.outvars))
    return kept, eqn.replace(invars=invars, outvars=outvars) if any(used) else None


# Its operands are the results of a part that has moved, and the leaves that the part loads. It returns them.
MOVED = identity_primitive("jax_offload_moved", lambda context, *xs, moved: list(xs))
set_rules(MOVED, jvp=lambda xs, tangents, moved: (MOVED.bind(*xs, moved=moved), list(tangents)), dce=_keeping_loads)


def marked(run: Callable[..., list[Any]], reads: Sequence[Var], plan: InScan | Planned) -> Callable[..., list[Any]]:
    """Return ``run``, which runs a moved part, followed by a mark. ``reads``: the part's operands in the step."""
    moved = Moved(plan)

    def run_marked(*operands: Any) -> list[Any]:
        given, results = dict(zip(reads, operands, strict=True)), run(*operands)
        return MOVED.bind(*results, *(given[v] for v in moved.loads), moved=moved)[: len(results)]

    return run_marked


def bound(update: Update, args: Sequence[Any]) -> list[Any]:
    """Bind ``update`` to these arguments as one equation of the trace; outside any trace, run it."""
    program = update.program
    # arrays that the recipe closes over become operands: a tracer in an equation's parameters would outlive its trace
    operands = [*program.consts, *args]
    if not any(isinstance(x, Tracer) for x in operands) or not only_callbacks(update.program.effects):
        return update.emitted(args)
    values = dict(zip(program.inputs, operands, strict=True))
    # Operands that are handed on are no results of the equation: jax would copy them where nobody donates.
    made = [v for v in dict.fromkeys(variables(program.outputs)) if v not in values]
    update = dataclasses.replace(update, program=dataclasses.replace(program, consts=[], outputs=[*made]))
    if made or update.program.effects:
        values.update(zip(made, REGION.bind(*operands, **update.params), strict=True))
    return values_of(values, program.outputs)


# ---- updates in a traced step, and the origins of their leaves


def without_updates(step: Any) -> Program:
    """A step's closed jaxpr as a program, with the recipes of its updates in their places."""

    def expand(eqn: Equation) -> Program | None:
        return eqn.params["update"].program if is_update(eqn) else None

    return without_round_trips(flat(ClosedJaxpr(expanded(step.jaxpr, expand), step.consts)))


@dataclasses.dataclass(frozen=True)
class Found:
    """An update in a traced step.

    Attributes:
      update: the update.
      origins: argument of its program -> variable of the step, where it is one, through branches, loops and moves.
      times: how often it runs, in scans of the step.
    """

    update: Update | Moved
    origins: Mapping[Var, Var]
    times: int = 1

    def inputs_of(self, arguments: Iterable[Var]) -> Iterator[Var]:
        """The step's variables for these arguments of its program, where they have one."""
        return (self.origins[v] for v in arguments if v in self.origins)

    @property
    def loads(self) -> list[tuple[list[Var], Planned]]:
        """For every slice, in the order of loading, the variables of the step that it loads, and how."""
        return [(list(self.inputs_of(p.slice.loads)), p) for p in self.update.planned]


def is_update(eqn: Equation) -> bool:
    """Whether an equation is an update that can be emitted anew."""
    return eqn.primitive is REGION


def holds_update(eqn: Equation, which: Callable[[Update], bool] = lambda _: True) -> bool:
    """Whether an equation is an update of the kind ``which``, or holds one in a branch, a loop or a call."""
    return holds(eqn, lambda each: is_update(each) and which(each.params["update"]))


def holds_driven_update(eqn: Equation) -> bool:
    """Whether an equation holds an update that the host's cores share, or whose state is on disk."""
    return holds_update(eqn, lambda update: update.driven)


def updates_in(step: Any) -> list[Found]:
    """The updates in a step's closed jaxpr, in its branches and loops too, in the order of the trace."""
    jaxpr = step.jaxpr
    moved = {v for eqn in jaxpr.eqns if eqn.primitive.name in _MOVES for v in eqn.outvars}.difference(
        variables(jaxpr.outvars)
    )
    own = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return list(_found(jaxpr, {v: v for v in own if v not in moved}))


LEAST_ROWS = 2**20  # bytes that an iteration must move, or hiding them is not worth the peak of concurrent graphs


def in_one_scan(step: Any) -> bool:
    """Whether a step is compiled with concurrent CUDA graphs. All of its updates must run in one scan, with rows large
    enough to be worth hiding. Its loops must not be nested, and no loop may reuse the buffers of another. Other scans
    may load rows of parameters."""
    plans = [each.update.plan for each in updates_in(step) if isinstance(each.update, Moved)]
    scans = [plan for plan in plans if isinstance(plan, InScan)]
    hosts = [plan for plan in scans if plan.moves]
    if len(hosts) != 1 or len(scans) < len(plans):
        return False
    if any(holds(eqn, is_loop) for plan in scans if plan.nest for eqn in plan.nest.before.jaxpr.eqns):
        return False  # each group of layers is recomputed, and concurrent graphs would keep all groups
    if sum(nbytes(v.aval) for v in hosts[0].hosts) < LEAST_ROWS * hosts[0].scan.length:
        return False
    nested = any(holds(eqn, lambda e: is_loop(e) and holds_inside(e, is_loop)) for eqn in step.jaxpr.eqns)
    return not nested and not _use_buffers_again(step.jaxpr.eqns)


def _use_buffers_again(eqns: Sequence[Equation]) -> bool:
    """Whether several forward and backward passes run one after the other, so that a later pass can reuse the buffers
    of an earlier one. Concurrent graphs would keep the activations of all passes."""
    loops = [eqn for eqn in eqns if holds(eqn, lambda each: is_loop(each) or is_update(each))]
    marked = {v: x for eqn in eqns if eqn.primitive is MOVED for v, x in zip(eqn.outvars, eqn.invars, strict=True)}
    last = {marked.get(v, v): k for k, eqn in enumerate(loops) for v in variables(eqn.invars)}
    lives = [
        (k, last[v])
        for k, eqn in enumerate(loops)
        for v in eqn.outvars
        if last.get(v, 0) > k and not is_host_aval(v.aval) and nbytes(v.aval) >= LEAST_ROWS
    ]
    return any(end < begin for _, end in lives for begin, _ in lives)


def kept_on_host(step: Any) -> list[bool] | None:
    """For each argument of a step's closed jaxpr, whether an update keeps it in host memory, wherever it arrives.

    ``None`` where there is no update in the step.
    """
    found = updates_in(step)
    updates = [(each, each.update) for each in found if isinstance(each.update, Update)]
    olds = ((each, (old for v, old in update.next_values.items() if is_host_aval(v.aval))) for each, update in updates)
    kept = {v for each, leaves in olds for v in each.inputs_of(leaves)}
    return [v in kept for v in step.jaxpr.invars] if found else None


_MOVES = frozenset("device_put sharding_constraint reshard copy optimization_barrier jax_offload_donation".split()) | {
    READ.name
}
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")


def _found(jaxpr: Any, origin: dict[Var, Var], times: int = 1) -> Iterator[Found]:
    """Yield the updates in a jaxpr. ``origin`` maps its variables to the step's, and is extended through moves."""

    def known(inner: Sequence[Var], operands: Sequence[Any]) -> dict[Var, Var]:
        pairs = zip(inner, operands, strict=True)
        return {v: origin[x] for v, x in pairs if not isinstance(x, Literal) and x in origin}

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVES:
            arrays = [x for x in eqn.invars if not hasattr(x.aval, "inner_aval")]  # a barrier returns no references
            for v, x in known(eqn.outvars, arrays).items():
                origin.setdefault(v, x)
        elif eqn.primitive is REGION:
            update = eqn.params["update"]
            yield Found(update, known(update.operands, eqn.invars), times)
        elif eqn.primitive is MOVED:
            moved = eqn.params["moved"]
            yield Found(moved, known(moved.loads, eqn.invars[len(eqn.invars) - len(moved.loads) :]), times)
        else:
            for inner in inner_of(eqn):
                own = known(inner.jaxpr.invars, eqn.invars[inner.first :])
                yield from _found(inner.jaxpr, own, times * eqn.params.get("length", 1))
                if eqn.primitive.name in _CALLS:  # a gate, for example, hands on its operands
                    for v, x in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
                        if not isinstance(x, Literal) and x in own:
                            origin[v] = own[x]
