"""Find the updates in a traced step and the origins of their leaves, and replace updates with their recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_offload._disk.leaves import READ
from jax_offload._emit.region import MOVED, REGION, Moved, Update
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import ClosedJaxpr, Equation, Literal, holds, inner_of, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import is_loop
from jax_offload._program.program import Program, Var, expanded, flat, without_round_trips
from jax_offload._schedule.in_scan import InScan
from jax_offload._schedule.schedule import Planned


def without_updates(step: Any) -> Program:
    """A step's closed jaxpr as a program, with the recipes of its updates in their places."""

    def expand(eqn: Any) -> Program | None:
        if eqn.primitive is not REGION:
            return None
        return eqn.params["update"].program

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
    """Whether the host's cores have a part in an update in an equation, or its state is on disk."""
    return holds_update(eqn, lambda update: update.driven)


def updates_in(step: Any) -> list[Found]:
    """The updates in a step's closed jaxpr, in its branches and loops too, in the order of the trace."""
    jaxpr = step.jaxpr
    own = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    moved = {v for eqn in jaxpr.eqns if eqn.primitive.name in _MOVES for v in eqn.outvars}
    results = {*variables(jaxpr.outvars)}
    return list(_found(jaxpr, {v: v for v in own - moved | own & results}))


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
    if sum(nbytes(v.aval) for v in hosts[0].hosts) < LEAST_ROWS * hosts[0].scan.length:
        return False
    inside = [each for eqn in step.jaxpr.eqns for each in _bodies(eqn)]
    return not any(holds(eqn, is_loop) for eqn in inside) and not _use_buffers_again(step.jaxpr.eqns)


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


def _bodies(eqn: Equation) -> Iterator[Equation]:
    """The equations in the loops of an equation."""
    for inner in inner_of(eqn):
        for each in inner.jaxpr.eqns:
            yield from [each] if is_loop(eqn) else _bodies(each)


def kept_on_host(step: Any) -> list[bool] | None:
    """For each argument of a step's closed jaxpr, whether an update keeps it in host memory, wherever it arrives.

    ``None`` where there is no update in the step.
    """
    found = updates_in(step)
    kept = {
        v
        for each in found
        if isinstance(each.update, Update)
        for new, old in each.update.next_values.items()
        if is_host_aval(new.aval)
        for v in each.inputs_of([old])
    }
    return [v in kept for v in step.jaxpr.invars] if found else None


_MOVES = (
    "device_put",
    "sharding_constraint",
    "reshard",
    "copy",
    "optimization_barrier",
    "jax_offload_donation",
    READ.name,
)

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
