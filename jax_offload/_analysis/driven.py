"""A step that is driven in several programs, as the host's cores have a part in its update; the first has its peak.

That is called "before": the forward and the backward pass, and the gradients' way down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jax_offload._base.arrays import is_traced
from jax_offload._base.jaxprs import ClosedJaxpr, Equation, Literal, Var
from jax_offload._base.jaxprs import closed as as_closed
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, on_a_mesh
from jax_offload._base.on_disk import READ, WRITE
from jax_offload._base.shardings import sharding_of
from jax_offload._drive.run import Driven
from jax_offload._emit.find import holds_driven_update, is_update
from jax_offload._ir.program import Program, expanded

FIRST = "before"
SAYS = (
    "jo.jit drives this step in several programs, as the host's cores update a part of the state. This is the first, "
    f"{FIRST!r}: the forward and the backward pass, and the gradients' way down"
)


@dataclasses.dataclass(frozen=True)
class First:
    """The first program of a driven step.

    Attributes:
      jitted: it, a function of two dicts, of which the first is donated.
      args: these, abstract or not, by the arguments' names.
      elsewhere: the step's other arguments, by their names: other programs take them.
    """

    jitted: Any
    args: tuple[dict[str, Any], dict[str, Any]]
    elsewhere: Mapping[str, Any]


def is_driven(step: ClosedJaxpr) -> bool:
    """Whether the host's cores have a part in an update of a traced step.

    Raises:
      ValueError: its state is on disk.
    """
    if any(eqn.primitive in (READ, WRITE) for eqn in step.jaxpr.eqns):
        raise ValueError(
            "step: its state is on disk, of which plan, inspect and verify know nothing yet. Fix: the same step "
            "without disk=, which has the same plan in host memory; jo.placement(step, *args) has the bytes on disk."
        )
    return any(map(holds_driven_update, step.jaxpr.eqns))


def first_program(step: ClosedJaxpr, leaves: Sequence[Any], donated: Sequence[bool]) -> First:
    """Of a traced step, with its flat arguments.

    Raises:
      ValueError: it cannot be driven.
    """
    driven = Driven(step, leaves, donated, {}, {})
    task, program, inputs = driven.first
    names = _names(step, len(leaves))
    at = {v: k for k, v in enumerate(inputs)}
    wanted, free = [at[v] for v in task.inputs if v in at], {*task.reused}
    given = [
        {names[k]: on_a_mesh(leaves[k]) for p, k in enumerate(wanted) if (p in free) is own} for own in (True, False)
    ]
    consts = driven.consts

    def before(donated: dict[str, Any], rest: dict[str, Any]) -> list[Any]:
        values = donated | rest
        return list(program(*(values[names[at[v]]] if v in at else consts[v] for v in task.inputs)))

    places = [sharding_of(x) for x in leaves]
    device = next((s for s in places if s is not None), None) or SingleDeviceSharding(jax.devices()[0])
    hosted = [is_host_aval(v.aval) for v in task.outputs] + [True for _ in task.down]
    out = [_in(device, HOST_KIND if host else DEVICE_KIND) for host in hosted]
    taken = {*wanted}
    return First(
        jax.jit(before, donate_argnums=0, out_shardings=out),
        (given[0], given[1]),
        {name: x for k, (name, x) in enumerate(zip(names, leaves, strict=True)) if k not in taken},
    )


def _in(sharding: Any, kind: str) -> Any:
    (device, *_) = sharding.device_set
    return SingleDeviceSharding(device, memory_kind=kind)


def _names(step: ClosedJaxpr, n: int) -> list[str]:
    """Of the arguments, each another."""
    names = [str(name) for name in step.jaxpr.debug_info.arg_names or ()][-n:]
    names = names if len(names) == n else [f"argument {k}" for k in range(n)]
    return [name if name and names.index(name) == k else f"{name or 'argument'} {k}" for k, name in enumerate(names)]


def on_the_device(step: ClosedJaxpr) -> ClosedJaxpr:
    """A traced step with all of its updates on the device."""

    def moved(eqn: Equation) -> Program | None:
        if not is_update(eqn) or not holds_driven_update(eqn):
            return None
        update = eqn.params["update"].updated_by(cores=False)
        ins = [Var(v.aval) if isinstance(v, Literal) else v for v in eqn.invars]
        other = eqn.replace(params=eqn.params | {"update": update}, invars=ins)
        return Program(ins, list(eqn.outvars), [other], [], step.jaxpr.debug_info)

    return as_closed(expanded(step.jaxpr, moved), step.consts)


def leaves_of(args: Any) -> list[Any]:
    """The arrays in a step's arguments."""
    return [x for x in jax.tree.leaves(args) if is_traced(x)]
