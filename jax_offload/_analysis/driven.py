"""A step that is driven in several programs, as the host's cores have a part in its update, or its state is on disk.

The first, "before", has its peak as a rule: the forward and the backward pass, and the gradients' way down to the
cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_offload._base.arrays import is_traced
from jax_offload._base.jaxprs import ClosedJaxpr
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, on_a_mesh
from jax_offload._base.on_disk import TOKEN, Home, OnDisk, Place, is_on_disk
from jax_offload._base.shardings import sharding_of
from jax_offload._drive.run import Driven
from jax_offload._drive.stages import BEFORE
from jax_offload._emit.find import holds_driven_update, updates_in
from jax_offload._emit.region import Update

SAYS = (
    "jo.jit drives this step in several programs, as the host's cores update a part of the state, or it is on disk. "
    f"This is the first, {BEFORE!r}: the forward and the backward pass; then the update comes, group by group. "
    "It is looked at in one piece, whatever programs jo.jit cuts it into"
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
    """Whether the host's cores have a part in an update of a traced step, or some of its state is on disk."""
    return any(map(holds_driven_update, step.jaxpr.eqns))


def _has_files(args: Any) -> bool:
    return any(map(is_on_disk, jax.tree.leaves(args, is_leaf=is_on_disk)))


def in_memory(args: Any) -> Any:
    """A step's arguments with those on disk as they would be in host memory, abstract."""
    if not _has_files(args):
        return args
    place = _in(_device_of(jax.tree.leaves(args)), HOST_KIND)

    def moved(x: Any) -> Any:
        return on_a_mesh(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)) if is_on_disk(x) else x

    return jax.tree.map(moved, args, is_leaf=is_on_disk)


class _Nowhere(Home):
    """The home of leaves on disk in an abstract state."""

    def array(self, name: str, token: Any) -> Any:
        raise TypeError(f"disk: {name} is abstract, and has no values.")

    def ends(self, name: str) -> tuple[int, ...]:
        return ()  # of an update that is not looked at

    def sharded(self, name: str, token: Any, sharding: Any) -> Any:
        return self.array(name, token)

    def fill(self, leaves: Any, values: Any) -> Any:
        raise TypeError("disk: an abstract state has no files.")


def on_files(args: Any, step: ClosedJaxpr) -> Any:
    """A step's arguments with those on disk that its updates read there. ``step``: traced with them."""
    if _has_files(args):
        return args
    index_of = {v: k for k, v in enumerate(step.jaxpr.invars)}
    found = [(each, each.update.on_disk) for each in updates_in(step) if isinstance(each.update, Update)]
    there = {index_of[v] for each, leaves in found for v in each.inputs_of(leaves) if v in index_of}
    if not there:
        return args
    leaves, treedef = jax.tree.flatten(args)
    home, arrays = _Nowhere(), [k for k, x in enumerate(leaves) if is_traced(x)]
    for number in there:
        x = leaves[k := arrays[number]]
        there_to = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_KIND)
        place = Place(home, f"leaf {number}", tuple(x.shape), np.dtype(x.dtype), there_to)
        leaves[k] = OnDisk(jax.ShapeDtypeStruct((), TOKEN), place)
    return jax.tree.unflatten(treedef, leaves)


def on_abstract(x: Any) -> bool:
    """Whether the mesh that an argument is on has no devices."""
    return isinstance(getattr(sharding_of(x), "mesh", None), jax.sharding.AbstractMesh)


def first_program(
    step: ClosedJaxpr,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    shown: Sequence[Any] | None = None,
) -> First:
    """Of a traced step, with its flat arguments; ``shown``: these, with what is on disk in the place of its tokens.

    Raises:
      ValueError: it cannot be driven.
    """
    if any(on_abstract(x) for x in leaves):
        raise ValueError(
            "step: its arguments are on an AbstractMesh, and a step that is driven from Python (update_on=, disk=) is "
            "cut for devices. Give a Mesh of as many, which may be the CPU's: "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    driven = Driven(step, leaves, donated, {}, {}, segments=False)
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

    device = _device_of(leaves)
    hosted = [is_host_aval(v.aval) for v in task.outputs] + [True for _ in task.down]
    out = [_in(device, HOST_KIND if host else DEVICE_KIND) for host in hosted]
    taken = {*wanted}
    return First(
        jax.jit(before, donate_argnums=0, out_shardings=out),
        (given[0], given[1]),
        {name: x for k, (name, x) in enumerate(zip(names, shown or leaves, strict=True)) if k not in taken},
    )


def _device_of(leaves: Sequence[Any]) -> Any:
    """Where they are: a sharding."""
    places = map(sharding_of, leaves)
    return next((s for s in places if s is not None), None) or SingleDeviceSharding(jax.devices()[0])


def _in(sharding: Any, kind: str) -> Any:
    (device, *_) = sharding.device_set
    return SingleDeviceSharding(device, memory_kind=kind)


def _names(step: ClosedJaxpr, n: int) -> list[str]:
    """Of the arguments, each another."""
    names = [str(name) for name in step.jaxpr.debug_info.arg_names or ()][-n:]
    names = names if len(names) == n else [f"argument {k}" for k in range(n)]
    return [name if name and names.index(name) == k else f"{name or 'argument'} {k}" for k, name in enumerate(names)]


def leaves_of(args: Any) -> list[Any]:
    """The arrays in a step's arguments."""
    return [x for x in jax.tree.leaves(args) if is_traced(x)]
