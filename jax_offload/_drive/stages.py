"""A cut step as stages, one program each: the pass, the device's share of the update, groups of the cores, the rest.

What each stage reads, makes and frees, and which buffers it may reuse, is decided here too, and run in ``run.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import DropVar, Equation, Jaxpr, Var, nameless, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends
from jax_offload._drive.by_rows import ByRows
from jax_offload._drive.cores import is_sent
from jax_offload._emit.find import holds_driven_update, holds_update, is_update
from jax_offload._emit.region import Update
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import Program
from jax_offload._ir.slices import Slice, consecutive, slice_of
from jax_offload._ir.trace import LARGE
from jax_offload._plan.plan import Schedule
from jax_offload._step.cut import cut_step
from jax_offload._step.inlined import equation_of, localised

# Bytes of state in a group. Updating them takes the cores a hundred times what starting a program takes, and the last
# group's parameters are all that comes back while nothing is updated.
GROUP_BYTES = 2**26
BEFORE = "before"  # the name of the stages that make the gradients
GROUP = "group"  # the name of stages whose state is on disk, or beside a state on disk
CORES = "cores"  # the name of stages that the host's cores run
INNER = "inner"  # the name of a stage whose branches, or loop, update
DRIVEN = ("cond", "while")  # what an update may stand in


@dataclasses.dataclass(frozen=True)
class Stage:
    """One program of a step. It runs ``slices``, in variables of the step, one after the other."""

    name: str
    slices: tuple[Slice, ...]

    @property
    def on_cores(self) -> bool:
        return self.name == CORES

    @property
    def inner(self) -> Equation | None:
        """The ``cond`` or ``while`` that holds an update, whose jaxprs are driven from Python in their turn."""
        return self.slices[0].jaxpr.eqns[0] if self.name == INNER else None

    @property
    def makes(self) -> list[Var]:
        return [v for s in self.slices for v in s.outputs]

    @property
    def reads(self) -> list[Var]:
        defined = {*self.makes}
        return list(dict.fromkeys(v for s in self.slices for v in s.inputs if v not in defined))


@dataclasses.dataclass
class Staged:
    """A step as stages.

    Attributes:
      program: the step.
      rows: the slices of leaves on disk, and the leaves' parts.
      stages: its programs, in order.
      next_of: result of an update -> the variable of the step that it is the next value of.
      in_turn: gradients that wait for one another, in the order of the backward pass.
      scattered: gradient that an update from disk divides further (ZeRO-1) -> its sharding. The program that makes it
        divides it; otherwise every device would hold it whole until the update.
    """

    program: Program
    rows: ByRows
    stages: list[Stage] = dataclasses.field(default_factory=list[Stage])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    in_turn: list[Var] = dataclasses.field(default_factory=list[Var])
    scattered: dict[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])

    @property
    def consts(self) -> dict[Var, Any]:
        """Its constants: numbers of first rows, and what it closes over."""
        starts = {v: np.int32(row) for row, v in self.rows.starts.items()}
        return starts | dict(zip(self.program.inputs, self.program.consts, strict=False))

    @property
    def arguments(self) -> list[Var]:
        return self.program.inputs[len(self.program.consts) :]

    @property
    def results(self) -> list[Var]:
        """The variables that the stages make for the caller; parts in place of leaves that are made in parts."""
        parts = self.rows.parts
        return [w for v in variables(self.program.outputs) for w in ([x for x, _ in parts.get(v, ())] or [v])]

    def on_device(self, name: str, *slices: Slice) -> None:
        """Add slices to the last program of the device, or begin another."""
        if self.stages and self.stages[-1].name not in (CORES, GROUP, INNER):
            slices = (*self.stages[-1].slices, *slices)
            name = self.stages.pop().name
        self.stages.append(Stage(name, slices))

    def add(self, update: Update, eqn: Equation) -> None:
        """Add an update: the device's share at once, and what comes from disk, or goes to the cores, in groups."""
        self.next_of |= update.next_values
        if update.on_disk:
            self.scattered |= _scattered(update)
            for each in update.passes:
                self.on_device("scalars", each.prelude)
                self.stages += _grouped(GROUP, [*self.rows.slices_of(update, each.slices)])
            return
        device, (first, *later) = _shares(update)
        if len(self.stages) == 1:
            self.in_turn = _gradients_in_turn(update, device, self.stages[0])
        self.on_device(BEFORE, first.prelude)
        if made := variables(device.program.outputs):
            whole = slice_of([equation_of(device, eqn)], made, self.program.debug_info, {})
            if device.planned:
                self.stages.append(Stage("device", (whole,)))
            else:
                self.on_device(BEFORE, whole)
        self.stages += _grouped(CORES, [p.slice for p in first.slices])
        for each in later:
            self.stages.append(Stage(CORES, (each.prelude,)))
            self.stages += _grouped(CORES, [p.slice for p in each.slices])


def staged(program: Program, ends: Mapping[Var, Ends] = MappingProxyType({})) -> Staged:
    """The stages of a step.

    Args:
      program: the step. One that updates nothing is a single stage.
      ends: leaf on disk, read or made -> where the ranges of rows end that are contiguous in its files.

    Raises:
      ValueError: an update that must be driven stands in a scan or the like.
    """
    step = Staged(program, ByRows(ends))
    if not any(map(holds_update, program.eqns)):
        if program.eqns:
            step.on_device(BEFORE, *consecutive([program.eqns], program.outputs, program.debug_info, {}))
        return step
    cut = cut_step(program)
    step.on_device(BEFORE, cut.before)
    for eqn in cut.update.jaxpr.eqns:
        results = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        if not results and not eqn.effects:
            continue  # nothing needs it
        alone = slice_of([eqn], results, program.debug_info, {})
        if not holds_driven_update(eqn):
            step.on_device("between", alone)
        elif eqn.primitive.name in DRIVEN:
            step.stages.append(Stage(INNER, (alone,)))
        elif not is_update(eqn):
            raise stands_in(eqn, "update_on")
        else:
            step.add(localised(eqn), eqn)
    if cut.after.outputs:
        step.on_device("after", cut.after)
    step.next_of |= step.rows.next_of
    outputs = {*variables(program.outputs)}
    step.scattered = {v: s for v, s in step.scattered.items() if v not in outputs}
    return step


def stands_in(eqn: Equation, option: str) -> ValueError:
    """The error of a step whose update stands in an equation that cannot be driven."""
    name = "jax.checkpoint" if eqn.primitive.name in CHECKPOINT else eqn.primitive.name
    return ValueError(
        f"{option}: the update stands in a {name} of the step, which cannot be cut there. Fix: update once a step, "
        "outside of scans, jax.checkpoint and shard_map; skip= and a branch may skip it."
    )


def _scattered(update: Update) -> dict[Var, NamedSharding]:
    """Return the gradients that an update divides first, with their shardings, where types do not tell."""
    pins = {eqn.invars[0]: eqn.params["sharding"] for eqn in update.program.eqns
            if eqn.primitive.name == "sharding_constraint" and isinstance(eqn.invars[0], Var)}  # fmt: skip
    named = {v: s for v in update.gradients if isinstance(s := pins.get(v), NamedSharding)}
    return {v: s for v, s in named.items() if isinstance(s.mesh, Mesh)}


def _shares(update: Update) -> tuple[Update, Sequence[Schedule]]:
    """Divide an update into the device's part, and the passes of the cores' part, by its plan."""
    cores = {v for p in update.planned if p.on_cores for v in p.slice.outputs}
    of_cores = [v in cores for v in update.program.outputs]
    _, device = update.only([not own for own in of_cores])
    _, host = update.only(of_cores)
    return device.updated_by(cores=False), host.updated_by(cores=True).passes


def _gradients_in_turn(update: Update, device: Update, pass_: Stage) -> list[Var]:
    """Return the large gradients if some of them stay on the device; none if their sharding is unknown."""
    made = {*pass_.makes}
    large = [v for v in update.gradients if v in made and math.prod(v.aval.shape) >= LARGE]
    return large if update.take_turns and not {*device.operands}.isdisjoint(large) else []


def _grouped(name: str, slices: Sequence[Slice]) -> Iterator[Stage]:
    """Group consecutive slices into stages of about ``GROUP_BYTES`` each."""
    group: list[Slice] = []
    size = 0
    for s in slices:
        group.append(s)
        size += sum(nbytes(v.aval) for v in s.loads)
        if size >= GROUP_BYTES or s is slices[-1]:
            yield Stage(name, tuple(group))
            group, size = [], 0


# ---- what stages exchange --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Stage):
    """A stage with what it exchanges with the others.

    Attributes:
      inputs: the values that it reads.
      outputs: the results that others read in the memory in which the stage makes them.
      down: the results of a program of the device that the cores read: it copies them to host memory.
      up: the results of the cores that are read on the device.
      over: the inputs that nobody reads afterwards.
      free: the ones that the step made or was given to donate: their buffers may be reused.
    """

    inputs: list[Var]
    outputs: list[Var]
    down: list[Var]
    up: list[Var]
    over: list[Var]
    free: frozenset[Var]

    @functools.cached_property
    def reused(self) -> tuple[int, ...]:
        """The positions of the inputs whose buffers the results of a program of the device take, one for each result of
        a type and memory."""

        def kind(v: Var) -> Hashable:
            return v.aval.shape, v.aval.dtype, is_host_aval(v.aval)

        wanted, found = Counter(map(kind, self.outputs)), list[int]()
        for k, v in enumerate(self.inputs):
            if v in self.free and wanted[kind(v)] > 0:
                wanted[kind(v)] -= 1
                found.append(k)
        return tuple(found)

    @property
    def sends(self) -> bool:
        """Whether it is a program of the device that copies to the host and nothing back."""
        own = self.name == BEFORE and any(is_host_aval(v.aval) for v in self.outputs)
        return bool(self.down) or own

    @property
    def jaxpr(self) -> Jaxpr:
        """Its equations."""
        eqns = [eqn for s in self.slices for eqn in s.jaxpr.eqns]
        effects = frozenset[Any]().union(*(s.jaxpr.effects for s in self.slices))
        debug_info = nameless(self.slices[0].jaxpr.debug_info)
        return Jaxpr([], self.inputs, [*self.outputs, *self.down], eqns, effects, debug_info)


def tasks_of(step: Staged, donated: Set[Var]) -> list[Task]:
    """Decide what each stage of a step leaves for the others; ``donated``: the donated inputs."""
    stages, results = step.stages, {*step.results}
    last = {v: k for k, stage in enumerate(stages) for v in stage.reads}
    by_cores = {v for stage in stages if stage.on_cores for v in stage.reads}
    by_device = {v for stage in stages if not stage.on_cores for v in stage.reads} | results
    # buffers that somebody else may have: inputs that were not donated, and whatever a branch or a loop may hand on
    others = {*step.consts, *step.arguments} - donated
    tasks: list[Task] = []
    for k, stage in enumerate(stages):
        defined = [v for v in stage.makes if v in results or last.get(v, -1) > k]
        inputs, defined = _side_by_side(stage.reads, defined, step.next_of)
        over = [v for v in inputs if last[v] == k and v not in results]
        sent = {v for v in defined if v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)}
        down = [v for v in defined if v in sent] if stage.name not in (CORES, INNER) else []
        outputs = [v for v in defined if v in by_device or v not in down]
        up = [v for v in defined if v in by_device] if stage.on_cores else []
        free = frozenset(over) - others
        tasks.append(Task(stage.name, stage.slices, inputs=inputs, outputs=outputs, down=down, up=up,
                          over=over, free=free))  # fmt: skip
        others |= {*inputs, *defined} if stage.inner is not None else set()
    return tasks


def _side_by_side(
    inputs: Sequence[Var], results: Sequence[Var], next_of: Mapping[Var, Var]
) -> tuple[list[Var], list[Var]]:
    """Put first the inputs that have a next value among the results, and these next values in the same order.

    jax pairs donated inputs with results in their order. Two moments would otherwise be written into each other's
    buffers, which XLA would have to copy first.
    """
    next_values = {next_of[v]: v for v in results if v in next_of}
    old = [v for v in inputs if v in next_values]
    return list(dict.fromkeys([*old, *inputs])), list(dict.fromkeys([*(next_values[v] for v in old), *results]))
