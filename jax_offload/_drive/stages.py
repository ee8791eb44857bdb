"""A cut step as stages, one program each: the pass, the device's share of the update, groups of the cores, the rest.

What each stage reads, makes and frees, and which buffers it may reuse, is decided here too, and run in ``run.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.barriers import opaque, together
from jax_offload._base.jaxprs import (
    Atom,
    DropVar,
    Equation,
    Jaxpr,
    Var,
    jaxpr_of,
    nameless,
    renamed,
    values_of,
    variables,
)
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends, Range
from jax_offload._drive.by_rows import ByRows, produced_once
from jax_offload._drive.cores import is_sent
from jax_offload._emit.find import holds_driven_update, is_update
from jax_offload._emit.region import Update, bound
from jax_offload._emit.run import functions
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import Builder, Program, as_program, numbered, structure
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._ir.trace import LARGE
from jax_offload._plan.plan import Chunked, Planned
from jax_offload._step.cut import Cut

# Bytes of state in a group. Updating them takes the cores a hundred times what starting a program takes, and the last
# group's parameters are all that comes back while nothing is updated.
GROUP_BYTES = 2**26
BEFORE = "before"  # the name of the stages that make the gradients
GROUP = "group"  # the name of stages whose state is on disk, or beside a state on disk
DRIVEN = ("while", "cond")  # what an update may stand in


@dataclasses.dataclass(frozen=True)
class Stage:
    """One program of a step.

    Attributes:
      slices: what it runs, one after the other, in variables of the step.
      on_cores: whether the host's cores run it.
      inner: a ``while`` or a ``cond`` of the step that holds an update. Python drives it too, and there are no slices.
    """

    name: str
    slices: tuple[Slice, ...] = ()
    on_cores: bool = False
    inner: Equation | None = None

    @property
    def makes(self) -> list[Var]:
        if self.inner is not None:
            return _results(self.inner)
        return [v for s in self.slices for v in s.outputs]

    @property
    def reads(self) -> list[Var]:
        if self.inner is not None:
            return list(dict.fromkeys(variables(self.inner.invars)))
        defined = {*self.makes}
        return list(dict.fromkeys(v for s in self.slices for v in s.inputs if v not in defined))

    def jaxpr(self, inputs: Sequence[Var], outputs: Sequence[Var]) -> Jaxpr:
        """Its equations, with inputs and results in this order."""
        eqns = [eqn for s in self.slices for eqn in s.jaxpr.eqns]
        effects = frozenset[Any]().union(*(s.jaxpr.effects for s in self.slices))
        return Jaxpr([], inputs, outputs, eqns, effects, nameless(self.slices[0].jaxpr.debug_info))


@dataclasses.dataclass(frozen=True)
class Staged:
    """A step as stages.

    Attributes:
      outputs: its results.
      next_of: result of an update -> the variable of the step that it is the next value of.
      in_turn: gradients that wait for one another, in the order of the backward pass.
      host_leaves: host leaf of an update with a part on disk -> whether ``offload`` keeps it on disk.
      scattered: gradient that such an update divides further (ZeRO-1) -> its sharding. The program that makes it
        divides it; otherwise every device would hold it whole until the update.
      parts: leaf on disk that is read or written in parts -> the parts.
    """

    inputs: list[Var]
    consts: list[Any]
    stages: list[Stage]
    outputs: list[Atom]
    next_of: Mapping[Var, Var]
    in_turn: Sequence[Var] = ()
    host_leaves: Mapping[Var, bool] = dataclasses.field(default_factory=dict[Var, bool])
    scattered: Mapping[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])
    parts: Mapping[Var, Sequence[tuple[Var, Range]]] = dataclasses.field(
        default_factory=dict[Var, Sequence[tuple[Var, Range]]]
    )

    @property
    def results(self) -> list[Var]:
        """The variables that the stages make for the caller; parts in place of leaves that are made in parts."""
        return [w for v in variables(self.outputs) for w in ([x for x, _ in self.parts.get(v, ())] or [v])]

    def with_first(self, *slices: Slice) -> Staged:
        """The step with other slices in its first program."""
        first, *later = self.stages
        return dataclasses.replace(self, stages=[dataclasses.replace(first, slices=slices), *later])

    @property
    def with_one_slice_first(self) -> Staged:
        """The step whose first program is one slice, with its gradients in turn."""
        slices = self.stages[0].slices
        if len(self.in_turn) > 1:
            slices = (*_in_turn(slices[0], self.in_turn), *slices[1:])
        return self.with_first(_joined(slices))


def _joined(slices: Sequence[Slice]) -> Slice:
    """Join slices. Each equation of a later slice comes as soon as its operands exist, so that the update's groups wait
    for a learning rate, and not for the gradients of leaves that stay on the device."""
    made: dict[Var, int] = {}  # by which equation of the first slice, the pass
    found: list[tuple[int, Equation]] = []
    for s in slices:
        for k, eqn in enumerate(s.jaxpr.eqns):
            at = k if s is slices[0] else max((made.get(v, -1) for v in variables(eqn.invars)), default=-1)
            found.append((at, eqn))
            made.update(dict.fromkeys(eqn.outvars, at))
    eqns = [eqn for _, eqn in sorted(found, key=lambda each: each[0])]
    return slice_of(eqns, [v for s in slices for v in s.outputs], slices[0].jaxpr.debug_info, {})


def _in_turn(first: Slice, gradients: Sequence[Var]) -> list[Slice]:
    """Let each large gradient of the pass wait for the one before, and the smallest result wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    others = [v for v in first.outputs if v not in {*gradients}]
    others = [v for v in others if not is_host_aval(v.aval) and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)]
    last = min(others or gradients, key=lambda v: nbytes(v.aval))
    held = list(dict.fromkeys([*gradients, last]))
    raw: dict[Var, Var] = {v: Var(v.aval) for v in held}

    def wait(*values: Any) -> list[Any]:
        # a number of each gradient, masked to nothing by an opaque zero, is made of it and is used
        found, read, zero = list(values), opaque(jnp.int32(0)), opaque(jnp.int32(0))
        for i, _ in enumerate(gradients):
            found[i], read = together((found[i], read))
            first = jax.lax.slice(found[i], [0] * found[i].ndim, [1] * found[i].ndim).reshape(())
            read |= jnp.real(first).astype(jnp.int32) & zero
        k = held.index(last)
        found[k] = jnp.where(read == 0, found[k], jnp.zeros((), found[k].dtype))
        return found

    def own(eqn: Equation) -> Equation:
        ins = [renamed(raw, v) for v in eqn.invars]  # pyright: ignore[reportArgumentType]
        return eqn.replace(invars=ins, outvars=[raw.get(v, v) for v in eqn.outvars])

    eqns, outputs = [own(eqn) for eqn in first.jaxpr.eqns], [raw.get(v, v) for v in first.outputs]
    waits = inlined(as_program(jaxpr_of(wait, *(v.aval for v in held))[0]), [*raw.values()], held)
    return [slice_of(eqns, outputs, first.jaxpr.debug_info, {}), waits]


def inlined(program: Program, inputs: Sequence[Atom], outputs: Sequence[Var]) -> Slice:
    """A program of these inputs as a slice that makes these results."""
    new = Builder()
    names = dict(zip(variables(new.call(program, inputs)), outputs, strict=True))
    eqns = [
        eqn.replace(
            invars=[renamed(names, v) for v in eqn.invars],  # pyright: ignore[reportArgumentType]
            outvars=[names.get(v, v) for v in eqn.outvars],
        )
        for eqn in new.eqns
    ]
    return slice_of(eqns, [*outputs], program.debug_info, {})


def staged(cut: Cut, ends: Mapping[Var, Ends] = MappingProxyType({})) -> Staged:
    """The stages of a step.

    Args:
      cut: the step.
      ends: leaf on disk, read or made -> where the ranges of rows end that are contiguous in its files.

    Raises:
      ValueError: an update that must be driven stands in a scan or the like.
    """
    found = _Found(ByRows(ends))
    found.on_device(BEFORE, found.in_step(cut.before))
    for eqn in cut.update.jaxpr.eqns:
        if not holds_driven_update(eqn):
            between = slice_of([eqn], _results(eqn), cut.program.debug_info, {})
            found.on_device("between", found.in_step(between))
        elif eqn.primitive.name in DRIVEN:
            found.stages.append(Stage("inner", inner=eqn.replace(invars=found.atoms(eqn.invars))))
        elif is_update(eqn):
            found.add(eqn, cut.before)
        else:
            raise stands_in(eqn, "update_on")
    if cut.after.outputs:
        found.on_device("after", found.in_step(cut.after))
    return found.staged(cut.program)


def stands_in(eqn: Equation, option: str) -> ValueError:
    """The error of a step whose update stands in an equation that cannot be driven."""
    name = "jax.checkpoint" if eqn.primitive.name in CHECKPOINT else eqn.primitive.name
    return ValueError(
        f"{option}: the update stands in a {name} of the step, which cannot be cut there. Fix: update once a step, "
        "outside of scans, jax.checkpoint and shard_map; skip= and a branch may skip it."
    )


@dataclasses.dataclass
class _Found:
    """The stages of a step, as they are found.

    Attributes:
      rules: decides which slices are updated some rows at a time.
      names: operand or result of an update -> the atom that stands for it in the stages.
      visited: the ids of the updates so far.
      traced: kind of a slice -> what it does. Slices that do the same are traced once.
    """

    rules: ByRows
    stages: list[Stage] = dataclasses.field(default_factory=list[Stage])
    names: dict[Var, Atom] = dataclasses.field(default_factory=dict[Var, Atom])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    visited: set[int] = dataclasses.field(default_factory=set[int])
    in_turn: list[Var] = dataclasses.field(default_factory=list[Var])
    on_disk: dict[Var, bool] = dataclasses.field(default_factory=dict[Var, bool])
    scattered: dict[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])
    traced: dict[Hashable, Program] = dataclasses.field(default_factory=dict[Hashable, Program])
    key_of: Callable[[Any], Hashable] = dataclasses.field(default_factory=numbered)

    def atoms(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [renamed(self.names, v) for v in atoms]

    def in_step(self, s: Slice) -> Slice:
        """A slice of an update in variables of the step."""
        if self.names.keys().isdisjoint(s.inputs):
            return s
        eqns = [eqn.replace(invars=self.atoms(eqn.invars)) for eqn in s.jaxpr.eqns]
        return slice_of(eqns, s.outputs, s.jaxpr.debug_info, s.shards)

    def slice_by(
        self, run: Callable[..., Any], inputs: Sequence[Atom], outputs: Sequence[Var], kind: Hashable
    ) -> Slice:
        """What a function does, as a slice; functions of one ``kind`` do the same."""
        if kind not in self.traced:
            self.traced[kind] = as_program(jaxpr_of(run, *(v.aval for v in inputs))[0])
        return inlined(self.traced[kind], inputs, outputs)

    def on_device(self, name: str, *slices: Slice) -> None:
        """Add slices to the last program of the device, or begin another."""
        last = self.stages[-1] if self.stages else None
        if last is not None and not last.on_cores and last.inner is None and last.name != GROUP:
            self.stages[-1] = dataclasses.replace(last, slices=(*last.slices, *slices))
        else:
            self.stages.append(Stage(name, slices))

    def add(self, eqn: Equation, before: Slice) -> None:
        """Add the stages of an update."""
        update: Update = eqn.params["update"]
        if id(update) in self.visited:
            raise ValueError("step: runs one jitted update twice, which update_on cannot drive yet; unjit it.")
        self.visited.add(id(update))
        self.names.update(zip(update.operands, self.atoms(eqn.invars), strict=True))
        handed_on = [self.names.get(v, v) if v in {*update.operands} else v for v in update.program.outputs]
        self.names.update(zip(eqn.outvars, handed_on, strict=True))
        pairs = ((v, self.names.get(old)) for v, old in update.next_values.items())
        self.next_of.update((v, x) for v, x in pairs if isinstance(x, Var))
        if update.on_disk:
            self.add_from_disk(update, eqn)
        else:
            self.add_shares(update, eqn, before)

    def add_from_disk(self, update: Update, eqn: Equation) -> None:
        """Add groups of slices, or of some rows of them, for an update whose state is on disk."""
        hosts = ((self.names[v], v in update.on_disk) for v in update.operands if is_host_aval(v.aval))
        self.on_disk |= {v: known for v, known in hosts if isinstance(v, Var)}
        self.scattered |= {x: s for v, s in _scattered(update) if isinstance(x := self.names[v], Var)}
        defined = produced_once(update, eqn.outvars)
        for each in update.passes:
            self.on_device("scalars", self.in_step(each.prelude))
            self.stages += _grouped(GROUP, [*self.from_disk(each.slices, update, defined)], on_cores=False)

    def from_disk(self, planned: Sequence[Planned], update: Update, defined: Mapping[Var, Var]) -> Iterator[Slice]:
        for p in planned:
            parts = [*self.rules.parts_of(p, update, self.names, defined)]
            yield from (self.slice_by(*part) for part in parts) if parts else [self.whole_slice(p, update)]

    def whole_slice(self, p: Planned, update: Update) -> Slice:
        def run(*args: Any) -> list[Any]:
            env = dict(zip(p.slice.inputs, args, strict=True))
            functions([p], update.names, lowered=True)(p, env)
            return values_of(env, p.slice.outputs)

        how = (p.transfer.axis, p.transfer.rows, p.transfer.shape) if isinstance(p.transfer, Chunked) else None
        kind = structure(p.slice.jaxpr, self.key_of), how
        return self.slice_by(run, self.atoms(p.slice.inputs), p.slice.outputs, kind)

    def add_shares(self, update: Update, eqn: Equation, before: Slice) -> None:
        """Add the device's part of an update, and the cores' part in groups."""
        device, cores = _shares(update)
        if len(self.stages) == 1:
            self.in_turn = _gradients_in_turn(update, device, eqn, {*before.outputs})
        first, *later = cores.passes
        self.on_device(BEFORE, self.in_step(first.prelude))
        if device.planned:
            self.stages.append(Stage("device", (self.whole(device),)))
        elif any(v not in {*device.operands} for v in variables(device.program.outputs)):
            self.on_device(BEFORE, self.whole(device))
        self.stages += _grouped("cores", [self.in_step(p.slice) for p in first.slices])
        for each in later:
            self.stages.append(Stage("scalars", (self.in_step(each.prelude),), on_cores=True))
            self.stages += _grouped("cores", [self.in_step(p.slice) for p in each.slices])

    def whole(self, update: Update) -> Slice:
        """Return an update as one slice, which streams as in any program of the device."""
        outputs = [v for v in variables(update.program.outputs) if v not in {*update.operands}]
        places = [update.program.outputs.index(v) for v in outputs]
        run = lambda *xs: [bound(update, xs)[k] for k in places]  # noqa: E731
        return self.slice_by(run, self.atoms(update.operands), outputs, id(update))

    def staged(self, program: Program) -> Staged:
        outputs, rules = self.atoms(program.outputs), self.rules
        scattered = {v: s for v, s in self.scattered.items() if v not in {*variables(outputs)}}
        inputs, consts = [*rules.starts.values(), *program.inputs], [*map(np.int32, rules.starts), *program.consts]
        next_of = self.next_of | rules.next_of
        stages, turn = self.stages, self.in_turn
        return Staged(inputs, consts, stages, outputs, next_of, turn, self.on_disk, scattered, rules.parts)


def _scattered(update: Update) -> Iterator[tuple[Var, NamedSharding]]:
    """Return the gradients that an update divides first, with their shardings, where types do not tell."""
    gradients = {*update.gradients}
    for eqn in update.program.eqns:
        if eqn.primitive.name == "sharding_constraint" and isinstance(v := eqn.invars[0], Var) and v in gradients:
            s = eqn.params["sharding"]
            yield from [(v, s)] if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) else []


def _results(eqn: Equation) -> list[Var]:
    return [v for v in eqn.outvars if not isinstance(v, DropVar)]


def _shares(update: Update) -> tuple[Update, Update]:
    """Divide an update into the device's part and the cores' part, by its plan."""
    cores = {v for p in update.planned if p.on_cores for v in p.slice.outputs}
    of_cores = [v in cores for v in update.program.outputs]
    _, device = update.only([not own for own in of_cores])
    _, host = update.only(of_cores)
    return device.updated_by(cores=False), host.updated_by(cores=True)


def _gradients_in_turn(update: Update, device: Update, eqn: Equation, defined: Set[Var]) -> list[Var]:
    """Return the large gradients if some of them stay on the device; none if their sharding is unknown."""
    of = dict(zip(update.operands, eqn.invars, strict=True))
    stay = {*variables(of[v] for v in of.keys() & {*device.operands})} & defined
    large = [v for x in update.gradients if (v := of[x]) in defined and math.prod(v.aval.shape) >= LARGE]
    return [] if not update.take_turns or stay.isdisjoint(large) else [*variables(large)]


def _grouped(name: str, slices: Sequence[Slice], *, on_cores: bool = True) -> Iterator[Stage]:
    """Group consecutive slices into stages of about ``GROUP_BYTES`` each."""
    group: list[Slice] = []
    size = 0
    for s in slices:
        group.append(s)
        size += sum(nbytes(v.aval) for v in s.loads)
        if size >= GROUP_BYTES or s is slices[-1]:
            yield Stage(name, tuple(group), on_cores=on_cores)
            group, size = [], 0


# ---- what stages exchange --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """A stage, and what it exchanges with the others.

    Attributes:
      inputs: the values that it reads.
      outputs: the results that others read in the memory in which the stage makes them.
      down: the results of a program of the device that the cores read: it copies them to host memory.
      up: the results of the cores that are read on the device.
      over: the inputs that nobody reads afterwards.
      free: the ones that the step made or was given to donate: their buffers may be reused.
      reused: the positions of the inputs whose buffers the results of a program of the device take.
    """

    stage: Stage
    inputs: list[Var]
    outputs: list[Var]
    down: list[Var]
    up: list[Var]
    over: list[Var]
    free: frozenset[Var]
    reused: tuple[int, ...]

    @property
    def sends(self) -> bool:
        """Whether it is a program of the device that copies to the host and nothing back."""
        own = self.stage.name == BEFORE and any(is_host_aval(v.aval) for v in self.outputs)
        return bool(self.down) or own

    @property
    def jaxpr(self) -> Jaxpr:
        return self.stage.jaxpr(self.inputs, [*self.outputs, *self.down])


def tasks_of(step: Staged, donated: Set[Var]) -> list[Task]:
    """Decide what each stage of a step leaves for the others; ``donated``: the donated inputs."""
    stages, results = step.stages, {*step.results}
    last = {v: k for k, stage in enumerate(stages) for v in stage.reads}
    by_cores = {v for stage in stages if stage.on_cores for v in stage.reads}
    by_device = {v for stage in stages if not stage.on_cores for v in stage.reads} | results
    # the caller's: inputs that were not donated, and what a loop that does not run hands on
    others = {*step.inputs} - donated | {v for stage in stages if stage.inner is not None for v in stage.makes}
    tasks: list[Task] = []
    for k, stage in enumerate(stages):
        defined = [v for v in stage.makes if v in results or last.get(v, -1) > k]
        inputs, defined = _side_by_side(stage.reads, defined, step.next_of)
        over = [v for v in inputs if last[v] == k and v not in results]
        sends = not stage.on_cores and stage.inner is None
        down = [v for v in defined if v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)] if sends else []
        outputs = [v for v in defined if v in by_device or v not in down]
        up = [v for v in defined if v in by_device] if stage.on_cores else []
        free = frozenset(over) - others
        reused = () if stage.on_cores else _reusable(inputs, free, outputs)
        tasks.append(Task(stage, inputs, outputs, down, up, over, free, reused))
    return tasks


def _side_by_side(
    inputs: Sequence[Var], results: Sequence[Var], next_of: Mapping[Var, Var]
) -> tuple[list[Var], list[Var]]:
    """Sort inputs and results so that each input stands where its next value does among the results.

    jax pairs donated inputs with results in their order. Two moments would otherwise be written into each other's
    buffers, which XLA would have to copy first.
    """
    next_values = {next_of[v]: v for v in results if v in next_of}
    old = [v for v in inputs if v in next_values]
    new = [next_values[v] for v in old]
    rest, others = {*old}, {*new}
    return [*old, *(v for v in inputs if v not in rest)], [*new, *(v for v in results if v not in others)]


def _reusable(inputs: Sequence[Var], free: Set[Var], outputs: Sequence[Var]) -> tuple[int, ...]:
    """Return the positions of the inputs whose buffers results may take, one for each result of a type and memory."""

    def kind(v: Var) -> Hashable:
        return v.aval.shape, v.aval.dtype, is_host_aval(v.aval)

    wanted, found = Counter(map(kind, outputs)), list[int]()
    for k, v in enumerate(inputs):
        if v in free and wanted[kind(v)] > 0:
            wanted[kind(v)] -= 1
            found.append(k)
    return tuple(found)
