"""A cut step as stages, one program each: the pass, the device's share of the update, groups of the cores, the rest.

What each stage reads, makes and frees, and which buffers it may reuse, is decided here too, and run in ``driver.py``.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_offload._disk.leaves import Ends, Place, Range
from jax_offload._emit.region import Update, holds_driven_update, holds_update, is_update
from jax_offload._emit.run import Names, SliceRunner, group_looped
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Equation,
    Jaxpr,
    Scan,
    Var,
    flops,
    jaxpr_like,
    jaxpr_of,
    nameless,
    renamed,
    scan_of,
    values_of,
    variables,
)
from jax_offload._program.memory import HOST_KIND, is_host_aval, on_host, to_host
from jax_offload._program.primitives import CHECKPOINT, ELEMENTWISE, opaque, together
from jax_offload._program.program import Builder, Program, as_program
from jax_offload._program.propagate import needed_for
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._rewrite.inlined import equation_of, localised
from jax_offload._rewrite.parts import computed_again, cut_step
from jax_offload._schedule.after import LARGE
from jax_offload._schedule.schedule import Chunked, Planned, Schedule, in_parts

# Bytes of state in a group. Updating a group takes a hundred times as long as starting its program. Only the last
# group's parameters come back while nothing is updated.
GROUP_BYTES = 2**26
BEFORE = "before"  # the name of the stages that make the gradients
GROUP = "group"  # the name of stages whose state is on disk, or beside a state on disk
CORES = "cores"  # the name of stages that the host's cores run
INNER = "inner"  # the name of a stage whose branches, or loop, update
DRIVEN = ("cond", "while")  # the equations whose branches or bodies may hold a driven update


@dataclasses.dataclass(frozen=True)
class Stage:
    """One program of a step, or a branch or loop that updates. It runs ``slices``, in variables of the step, in turn.

    Attributes:
      inputs: the values that it reads.
      outputs: the values that it makes; after ``linked``, those that others read in the memory in which it makes them.
      down: the results of a program of the device that the cores read: it copies them to host memory.
      up: the results of the cores that are read on the device.
      over: the inputs that nobody reads afterwards.
      free: the ones that the step made or was given to donate: their buffers may be reused.
      fetched: the inputs that come from files.
      due: the results that can be written to files after it.
    """

    name: str
    slices: tuple[Slice, ...]
    inputs: Sequence[Var]
    outputs: Sequence[Var]
    down: Sequence[Var] = ()
    up: Sequence[Var] = ()
    over: Sequence[Var] = ()
    free: frozenset[Var] = frozenset()
    fetched: Sequence[Var] = ()
    due: Sequence[Var] = ()

    @classmethod
    def of(cls, name: str, *slices: Slice) -> Stage:
        made = [v for s in slices for v in s.outputs]
        return cls(name, slices, [*dict.fromkeys(v for s in slices for v in s.inputs if v not in {*made})], made)

    @property
    def on_cores(self) -> bool:
        return self.name == CORES

    @property
    def inner(self) -> Equation | None:
        """The ``cond`` or ``while`` that holds an update, whose jaxprs are driven from Python in their turn."""
        return self.slices[0].jaxpr.eqns[0] if self.name == INNER else None

    @functools.cached_property
    def reused(self) -> tuple[int, ...]:
        """The positions of the inputs whose buffers a device program reuses for its results, each for a result of its
        type and memory."""

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
        return Jaxpr([], [*self.inputs], [*self.outputs, *self.down], eqns, effects, debug_info)


Part = tuple[Place, Range | None]  # a leaf on disk, or some of its rows


@dataclasses.dataclass(frozen=True)
class OnFiles:
    """A step whose reads and writes of leaves on disk are inputs and results of its program.

    Attributes:
      program: the step. Its last inputs are the leaves to read, and its last results are the leaves to write.
      outputs: the step's results that are not tokens.
      given: the tokens that the step reads, each with its leaf.
      returned: position of a result of the step that is a token -> its leaf.
      reads: variable that is read -> its leaf, or its rows of a leaf.
      writes: variable that is written -> the leaves, or rows of leaves, whose value it is. A leaf that the step hands
        on unchanged is not written.
    """

    program: Program
    outputs: Sequence[Atom]
    given: Sequence[tuple[Atom, Place]]
    returned: Mapping[int, Place]
    reads: dict[Var, Part]
    writes: dict[Var, list[Part]]

    @functools.cached_property
    def ends(self) -> dict[Var, Ends]:
        """Return where ranges of rows end in the files, for leaves that are read and results that are only written."""
        used = {*variables(self.outputs)}.union(*(variables(eqn.invars) for eqn in self.program.eqns))
        found = {v: leaf for v, (leaf, _) in self.reads.items()}
        found |= {v: parts[0][0] for v, parts in self.writes.items() if len(parts) == 1 and v not in used}
        return {v: leaf.home.ends(leaf.name) for v, leaf in found.items()}

    def part(self, of: Var, shards: int, rows: Range) -> Var:
        """Return a variable of a leaf's type for some rows of each shard; it is read or written if the leaf is."""
        found = Var(of.aval.update(shape=(shards * (rows[1] - rows[0]), *of.aval.shape[1:])))
        if of in self.reads:
            self.reads[found] = self.reads[of][0], rows
        if of in self.writes:
            self.writes[found] = [(leaf, rows) for leaf, _ in self.writes[of]]
        return found

    def places(self, devices: Set[Any]) -> dict[Var, Sharding]:
        """Return where each leaf goes in host memory, in a step on these devices.

        Raises:
          ValueError: the state is divided between other devices.
        """
        alone = SingleDeviceSharding(*devices, memory_kind=HOST_KIND) if len(devices) == 1 else None
        found = dict[Var, Sharding]()
        for v, ((leaf, _), *_) in [*self.writes.items(), *((v, [part]) for v, part in self.reads.items())]:
            found[v] = place = leaf.sharding
            if alone is not None and place.device_set != devices:
                found[v] = alone
            elif not place.device_set <= devices:
                there, here = (", ".join(sorted(map(str, each))) for each in (place.device_set, devices))
                raise ValueError(
                    f"disk: the state is on {there}, {leaf.name} as {place}, and the step runs on {here}. Fix: "
                    "disk.resume(target) with the shardings that the parameters have now, "
                    "jo.abstract_state(tx, params) in the state's place."
                )
        return found


@dataclasses.dataclass
class Staged:
    """A step as stages.

    Attributes:
      files: the step, with its leaves on disk.
      stages: its programs, in order.
      next_of: result of an update -> the variable of the step whose next value it is.
      in_turn: gradients that wait for one another, in the order of the backward pass.
      scattered: gradient that an update from disk divides further (ZeRO-1) -> its sharding. The program that makes it
        divides it; otherwise every device would hold it whole until the update.
      starts: number of a first row -> its variable, an operand of parts.
    """

    files: OnFiles
    stages: list[Stage] = dataclasses.field(default_factory=list[Stage])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    in_turn: list[Var] = dataclasses.field(default_factory=list[Var])
    scattered: dict[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])
    starts: dict[int, Var] = dataclasses.field(default_factory=dict[int, Var])

    @property
    def program(self) -> Program:
        return self.files.program

    @property
    def consts(self) -> dict[Var, Any]:
        """Its constants: the numbers of first rows, and the arrays that the step closes over."""
        starts = {v: np.int32(row) for row, v in self.starts.items()}
        return starts | dict(zip(self.program.inputs, self.program.consts, strict=False))

    @property
    def arguments(self) -> list[Var]:
        return self.program.inputs[len(self.program.consts) :]

    @property
    def results(self) -> list[Var]:
        """The variables that the stages make for the caller; parts in place of leaves that are made in parts."""
        return list(dict.fromkeys([*variables(self.files.outputs), *self.files.writes]))

    def on_device(self, name: str, *slices: Slice) -> None:
        """Add slices to the last program of the device, or begin another."""
        if self.stages and self.stages[-1].name not in (CORES, GROUP, INNER):
            slices = (*self.stages[-1].slices, *slices)
            name = self.stages.pop().name
        self.stages.append(Stage.of(name, *slices))

    def add(self, update: Update, eqn: Equation) -> None:
        """Add an update: the device's share at once, and what comes from disk, or goes to the cores, in groups."""
        self.next_of |= update.next_values
        if update.on_disk:
            self.scattered |= _scattered(update)
            for each in update.passes:
                self.on_device("scalars", each.prelude)
                self.stages += _grouped(GROUP, [*self._from_disk(update, each.slices)])
            return
        device, (first, *later) = _shares(update)
        first, device = _made_once(first, device)
        if len(self.stages) == 1:
            self.in_turn = _gradients_in_turn(update, device, self.stages[0])
        self.on_device(BEFORE, first.prelude)
        if made := variables(device.program.outputs):
            whole = slice_of([equation_of(device, eqn)], made, self.program.debug_info, {})
            if device.planned:
                self.stages.append(Stage.of("device", whole))
            else:
                self.on_device(BEFORE, whole)
        self.stages += _grouped(CORES, [p.slice for p in first.slices])
        for each in later:
            self.stages.append(Stage.of(CORES, each.prelude))
            self.stages += _grouped(CORES, [p.slice for p in each.slices])

    def _from_disk(self, update: Update, planned: Sequence[Planned]) -> Iterator[Slice]:
        """Yield the slices of an update whose leaves are on disk, each whole or in parts with some rows of the leaves.

        Arrays on the device are handed from part to part, and each part writes its rows into the same buffer.
        """
        slices = [s for each in update.passes for s in (each.prelude, *(p.slice for p in each.slices))]
        again = {v for s in slices for v in s.inputs}  # a leaf that another slice reads is written whole
        for p in planned:
            ranges = self._ranges(p, again)
            how = in_parts(p, update.next_values, update.on_disk) if ranges else None
            if isinstance(how, Chunked) and how.shape[0] == how.shards * ranges[-1][1]:
                yield from self._parts(p, how, update, ranges)
            else:
                yield _whole(p, update.names)

    def _ranges(self, p: Planned, again: Set[Var]) -> list[Range]:
        """Return the ranges of rows that are together in the files of all leaves; none if there are not several."""
        ends = [self.files.ends.get(v, ()) for v in p.slice.loads]
        ends += [() if v in again else self.files.ends.get(v, ()) for v in p.slice.stores]
        common = sorted(set[int].intersection(*map(set, ends))) if ends else []
        return [*pairwise([0, *common])] if len(common) > 1 else []

    def _parts(self, p: Planned, how: Chunked, update: Update, ranges: Sequence[Range]) -> Iterator[Slice]:
        s = p.slice
        now = {v: v for v in s.inputs}  # what earlier parts have left, in whose buffer a result goes
        into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
        for begin, end in ranges:
            rows = begin, end
            before = [v for v in s.outputs if v in now]
            given = {v: self.files.part(v, how.shards, rows) if is_host_aval(v.aval) else now[v] for v in s.inputs}
            start = self.starts.setdefault(begin, Var(jax.typeof(np.int32(begin))))
            operands = [start, *given.values(), *(now[v] for v in before)]
            results = list[Var]()
            for v, of in zip(s.outputs, into, strict=True):
                if is_host_aval(v.aval):
                    new, old = self.files.part(v, how.shards, rows), given.get(of)
                else:
                    new = v if end == ranges[-1][1] else Var(v.aval)
                    old = now.get(of, update.next_values.get(v))
                    now[of] = new
                self.next_of |= {} if old is None else {new: old}
                results.append(new)
            run = _of_rows(group_looped(s, how, update.names, end - begin), len(s.inputs), before)
            yield _slice_by(run, operands, results)
        for v in s.outputs:
            self.files.writes.pop(v, None)  # its parts are written instead


def _whole(p: Planned, names: Names) -> Slice:
    """Return a slice that runs on whole leaves."""

    def run(*args: Any) -> list[Any]:
        env = dict(zip(p.slice.inputs, args, strict=True))
        SliceRunner([p], names, lowered=True)(p, env)
        return values_of(env, p.slice.outputs)

    return _slice_by(run, p.slice.inputs, p.slice.outputs)


def _slice_by(run: Callable[..., Any], inputs: Sequence[Atom], outputs: Sequence[Var]) -> Slice:
    """Return a function as a slice."""
    new, program = Builder(), as_program(jaxpr_of(run, *(v.aval for v in inputs))[0])
    inner = new.inside(program, inputs)
    inner.copy(*program.eqns, results=dict(zip(variables(program.outputs), outputs, strict=True)))
    return slice_of(new.eqns, [*outputs], program.debug_info, {})


def _of_rows(run: Callable[..., list[Any]], n: int, before: Sequence[Var]) -> Callable[..., list[Any]]:
    """Return a function of a first row, ``n`` operands, and the results ``before`` that earlier parts have left."""
    return lambda start, *values: run(start, values[:n], dict(zip(before, values[n:], strict=True)))


def staged(files: OnFiles) -> Staged:
    """Return the stages of a step; a step that updates nothing is a single stage.

    Raises:
      ValueError: an update that must be driven stands in a scan or the like.
    """
    program, step = files.program, Staged(files)
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
            step.stages.append(Stage.of(INNER, alone))
        elif not is_update(eqn):
            raise stands_in(eqn, "update_on")
        else:
            step.add(localised(eqn), eqn)
    if cut.after.outputs or cut.after.jaxpr.effects:
        step.on_device("after", cut.after)
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
    silent = [e for e in update.program.eqns if not (e.effects and all(isinstance(v, DropVar) for v in e.outvars))]
    quiet = dataclasses.replace(update, program=dataclasses.replace(update.program, eqns=silent))
    _, device = quiet.only([not own for own in of_cores])  # the cores' part calls back
    _, host = update.only(of_cores)
    return device.updated_by(cores=False), host.updated_by(cores=True).passes


def _made_once(cores: Schedule, device: Update) -> tuple[Schedule, Update]:
    """Return the cores' first pass and the device's part, whose results that pass's prelude makes, such as a count."""
    prelude = cores.prelude
    made = {v for eqn in prelude.jaxpr.eqns for v in eqn.outvars}
    both = [v for v in variables(device.program.outputs) if v in made]
    if not both:
        return cores, device
    outputs = list(dict.fromkeys([*prelude.outputs, *both]))
    prelude = slice_of([*prelude.jaxpr.eqns], outputs, prelude.jaxpr.debug_info, prelude.shards)
    _, device = device.only([v not in made for v in device.program.outputs])
    return dataclasses.replace(cores, prelude=prelude), device


def _gradients_in_turn(update: Update, device: Update, pass_: Stage) -> list[Var]:
    """Return the large gradients if some of them stay on the device; none if their sharding is unknown."""
    made = {*pass_.outputs}
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
            yield Stage.of(name, *group)
            group, size = [], 0


# ---- exchange between stages -----------------------------------------------------------------------------------------


def linked(step: Staged, donated: Set[Var]) -> list[Stage]:
    """Decide which values each stage of a step leaves for the others; ``donated``: the donated inputs."""
    stages, results = step.stages, {*step.results}
    last = {v: k for k, stage in enumerate(stages) for v in stage.inputs}
    by_cores = {v for stage in stages if stage.on_cores for v in stage.inputs}
    by_device = {v for stage in stages if not stage.on_cores for v in stage.inputs} | results
    # buffers that somebody else may have: inputs that were not donated, and whatever a branch or a loop may hand on
    others = {*step.consts, *step.arguments} - donated
    due, found = _due(step.files, stages, last), list[Stage]()
    for k, stage in enumerate(stages):
        made = [v for v in stage.outputs if v in results or last.get(v, -1) > k]
        # jax pairs donated inputs with results in their order. Two moments would otherwise be written into each
        # other's buffers, which XLA would have to copy first.
        pairs = {step.next_of[v]: v for v in made if v in step.next_of}
        old = [v for v in stage.inputs if v in pairs]
        inputs, made = dict.fromkeys([*old, *stage.inputs]), dict.fromkeys([*(pairs[v] for v in old), *made])
        over = [v for v in inputs if last[v] == k and v not in results]
        sends = stage.name not in (CORES, INNER)
        down = [v for v in made if sends and v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)]
        outputs = [v for v in made if v in by_device or v not in down]
        up = [v for v in made if v in by_device] if stage.on_cores else []
        free, fetched = frozenset(over) - others, [v for v in inputs if v in step.files.reads]
        found.append(Stage(stage.name, stage.slices, [*inputs], outputs, down, up, over, free, fetched, due[k]))
        others |= {*inputs, *made} if stage.inner is not None else set()
    return found


def _due(files: OnFiles, stages: Sequence[Stage], last: Mapping[Var, int]) -> list[list[Var]]:
    """Return the results to write to files after each stage: no later one reads them or the old values of their rows.

    Args:
      last: value -> the number of the last stage that reads it.
    """

    def meet(a: Range | None, b: Range | None) -> bool:
        return a is None or b is None or (a[0] < b[1] and b[0] < a[1])

    read_by: dict[Place, list[tuple[Range | None, int]]] = {}
    for v, (leaf, rows) in files.reads.items():
        read_by.setdefault(leaf, []).append((rows, last.get(v, 0)))
    made = {v: k for k, stage in enumerate(stages) for v in stage.outputs}
    due: list[list[Var]] = [[] for _ in stages]
    for v, parts in files.writes.items():
        old = [k for leaf, rows in parts for other, k in read_by.get(leaf, ()) if meet(other, rows)]
        due[max([made.get(v, 0), last.get(v, 0), *old])].append(v)
    return due


def is_sent(x: Any) -> bool:
    """Whether an array, or a type, comes to the cores through host memory: no scalar, no PRNG keys."""
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


# ---- the forward and backward pass: its gradients leave it as early as they can
#
# It runs as several programs, so that the first gradients' update need not wait for the last: all results of a
# program become ready together. If one ends where the gradients of a group exist, the cores or the drives can start
# on them while the rest of the pass runs.
#
# XLA fuses nothing across programs: each value that crosses from one program to a later one is an array in memory. So
# cheap values (elementwise arithmetic) are computed again if their operands are no larger.

# The least share of the arithmetic in each program but the first: the host needs a tenth of a program's run time to
# start it. A state on disk takes longer, and with more programs gradients are freed earlier.
FOR_CORES, FOR_DISK = 1 / 12, 1 / 32
_NOT_AGAIN = {"optimization_barrier", "device_put", "sharding_constraint", "reshard"}
_VIEWS = ["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]
CHEAP = ELEMENTWISE.union(_VIEWS) - _NOT_AGAIN
LATE = frozenset(("convert_element_type", "mul", "div", "neg"))  # arithmetic that the cores do as well
LEAST_ROW = 2**16  # bytes; smaller rows go down together, at the end of the program


def arranged(step: Staged, *, may_be_cut: bool) -> Staged:
    """Return the step with its first program, the pass, as one slice, or cut into several programs.

    Groups of the cores follow all segments, which have been started by then; each group waits for its own gradients.
    Groups whose state is on disk run on the device, after the segment that follows the one with their gradients: the
    device has work while the host waits for a file.
    """
    step = _with_late_arithmetic(step)
    (first, *rest), groups = step.stages, _groups(step)
    (pass_,) = first.slices
    jaxpr = pass_.jaxpr
    if not may_be_cut or not groups or any(eqn.effects for eqn in jaxpr.eqns):
        return step
    on_disk, ready = groups[0].name == GROUP, list[int]()
    made_by = {v: k + 1 for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for group in groups:  # some rows of a parameter are written after others
        ready.append(max((made_by.get(v, 0) for v in group.inputs), default=0))
        made_by.update(dict.fromkeys(group.outputs, ready[-1]))
    cuts = _cuts(jaxpr, ready, FOR_DISK if on_disk else FOR_CORES)
    segments = [Stage.of(BEFORE, part) for part in divided(jaxpr, {*pass_.outputs}, cuts)]
    stages = [*_interleaved(segments, cuts, groups, ready), *rest[len(groups) :]] if on_disk else [*segments, *rest]
    return dataclasses.replace(step, stages=stages)


def _with_late_arithmetic(step: Staged) -> Staged:
    """Let the cores do the last arithmetic on gradients that only they read, and join the slices of the pass.

    A gradient that is cast to float32 then goes to host memory in bfloat16.
    """
    first, *later = step.stages
    eqns = [eqn for s in first.slices for eqn in s.jaxpr.eqns]
    made = {v: k for k, v in enumerate(v for eqn in eqns for v in eqn.outvars)}
    others = {*step.results}.union(*(s.inputs for s in later if not s.on_cores))
    sent = {v for s in later if s.on_cores for v in s.inputs if v in made and is_sent(v.aval)} - others
    late, starts = computed_again(sent, frozenset(), [*filter(_is_late, eqns)])

    def with_arithmetic(s: Slice) -> Slice:
        own, _ = needed_for(late, s.inputs)
        return slice_of([*own, *s.jaxpr.eqns], s.outputs, s.jaxpr.debug_info, s.shards) if own else s

    def instead(values: Iterable[Var]) -> list[Var]:
        """Replace the results of late arithmetic by its operands."""
        each = ({v} if v not in sent else needed_for(late, [v])[1] & starts for v in values)
        return list(dict.fromkeys(x for found in each for x in sorted(found & made.keys(), key=made.__getitem__)))

    later = [Stage.of(CORES, *map(with_arithmetic, s.slices)) if s.on_cores else s for s in later]
    pass_ = Stage.of(first.name, _joined(first.slices, instead(first.outputs)))
    return dataclasses.replace(step, stages=[pass_, *later], in_turn=instead(step.in_turn))


def _is_late(eqn: Equation) -> bool:
    """Whether the cores' kernels do an equation as well."""
    return eqn.primitive.name in LATE and all(v.aval.dtype in (np.float32, jnp.bfloat16) for v in eqn.invars)


def _joined(slices: Sequence[Slice], outputs: list[Var]) -> Slice:
    """Join slices. Each equation of a later slice comes as soon as its operands exist, so that the update's groups wait
    for a learning rate, and not for the gradients of leaves that stay on the device."""
    made: dict[Var, int] = {}  # by which equation of the first slice, the pass
    found: list[tuple[int, Equation]] = []
    for s in slices:
        for k, eqn in enumerate(s.jaxpr.eqns):
            at = k if s is slices[0] else max((made.get(v, -1) for v in variables(eqn.invars)), default=-1)
            found.append((at, eqn))
            made.update(dict.fromkeys(eqn.outvars, at))
    eqns, _ = needed_for(
        [eqn for _, eqn in sorted(found, key=lambda each: each[0])], outputs, kept=lambda e: bool(e.effects)
    )
    return slice_of(eqns, outputs, slices[0].jaxpr.debug_info, {})


def _groups(step: Staged) -> list[Stage]:
    """Return the groups of the update that follow the first program immediately."""
    rest = step.stages[1:]
    on_disk = [*itertools.takewhile(lambda s: s.name == GROUP, rest)]
    return on_disk or [*itertools.takewhile(lambda s: s.on_cores, (s for s in rest if s.name != "device"))]


def _interleaved(
    segments: Sequence[Stage], cuts: Sequence[int], groups: Sequence[Stage], ready: Sequence[int]
) -> Iterator[Stage]:
    """Yield the segments; the groups that a segment's gradients update come after the next segment."""
    after = [min(bisect.bisect_left(cuts, at) + 1, len(segments) - 1) for at in ready]
    for k, segment in enumerate(segments):
        yield segment
        yield from (group for group, at in zip(groups, after, strict=True) if at == k)


def _cuts(jaxpr: Jaxpr, ready: Sequence[int], least: float) -> list[int]:
    """Return the number of equations after which each program but the last ends: with the gradients of a group.

    The first program ends with the first group's gradients. Each later one has its share of the arithmetic.

    Args:
      jaxpr: the pass.
      ready: for each group of the update, the number of equations after which its gradients exist.
      least: the least share of the arithmetic in a program.
    """
    done = [0.0, *itertools.accumulate(map(flops, jaxpr.eqns))]
    cuts: list[int] = []
    for place in sorted({*ready} - {0})[:-1]:
        beside = [done[-1] - done[place], *(done[place] - done[cut] for cut in cuts[-1:])]
        if min(beside) >= least * done[-1] > 0:
            cuts.append(place)
    return cuts


def divided(jaxpr: Jaxpr, results: Set[Var], cuts: Sequence[int]) -> list[Slice]:
    """Divide the equations at the cuts into programs of their own, each with the values that it computes again."""
    eqns, given = jaxpr.eqns, {*jaxpr.invars}
    producer = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    crossing: set[Var] = set()  # the values that later parts read
    parts: list[Slice] = []
    for start, end in reversed([*itertools.pairwise([0, *cuts, len(eqns)])]):
        own = eqns[start:end]
        outputs = [v for eqn in own for v in eqn.outvars if v in results or v in crossing]
        crossing -= {v for eqn in own for v in eqn.outvars}
        reads = {v for eqn in own for v in variables(eqn.invars) if producer.get(v, start) < start}
        cheap = [eqn for eqn in eqns[:start] if eqn.primitive.name in CHEAP]
        again, more = computed_again(reads, crossing | given, cheap)
        crossing |= more
        parts.append(slice_of([*again, *own], outputs, jaxpr.debug_info, {}))
    return parts[::-1]


# ---- within one of the programs --------------------------------------------------------------------------------------


def sending_rows(jaxpr: Jaxpr, n: int) -> Jaxpr:
    """Let scans send the results after the first ``n`` to host memory row by row, if nothing else in it reads them.

    Such a stack never exists on the device, and its rows are copied during the matmuls of the pass.
    """
    times = Counter(v for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in variables(atoms))
    sent = {v for v in variables(jaxpr.outvars[n:]) if times[v] == 1}
    hosts: dict[Var, Var] = {}
    eqns: list[Equation] = []
    for eqn in jaxpr.eqns:
        scan = scan_of(eqn)
        ys = [y for y in scan.ys if y in sent and nbytes(y.aval) >= scan.length * LEAST_ROW] if scan else []
        if scan is not None and ys and not scan.body.consts:
            hosts |= {y: Var(cast(Any, y.aval).update(memory_space=jax.memory.Space.Host)) for y in ys}
            eqn = _sending(scan, [hosts.get(y, y) for y in scan.ys])
        eqns.append(eqn)
    return jaxpr_like(jaxpr, eqns, [renamed(hosts, v) for v in jaxpr.outvars]) if hosts else jaxpr


def _sending(scan: Scan, ys: Sequence[Var]) -> Equation:
    """Return the equation of a scan whose stacks are ``ys``, some of them in host memory."""
    body, n, new = scan.body.jaxpr, len(scan.carry), Builder([*scan.body.jaxpr.eqns])
    with scan.eqn.ctx.manager:
        rows = zip(body.outvars[n:], ys, scan.ys, strict=True)
        sent = [x if y is old else new.run(to_host, x)[0] for x, y, old in rows]
    traced = ClosedJaxpr(jaxpr_like(body, new.eqns, [*body.outvars[:n], *sent]), [])
    # not unrolled: rows of several iterations would be put together in host memory
    return scan.eqn.replace(params=scan.eqn.params | {"jaxpr": traced, "unroll": 1}, outvars=[*scan.carry, *ys])


def in_turn(results: Sequence[Any], turns: Sequence[int]) -> list[Any]:
    """Let each of some results wait for the one before, and the smallest of the others wait for all.

    Nothing else asks for gradients that stay on the device: XLA would put their matmuls off to the end of the program,
    and keep the activations of all layers. Gradients that are all copied to the host need no such order.
    """
    found, turns = list(results), [k for k in turns if not on_host(results[k])]
    if len(turns) < 2:
        return found
    # XLA must compute each gradient when its turn comes, because one of its numbers counts, times a zero unknown to XLA
    read, zero = opaque(jnp.int32(0)), opaque(jnp.int32(0))
    for k in turns:
        found[k], read = together((found[k], read))
        first = jax.lax.slice(found[k], [0] * found[k].ndim, [1] * found[k].ndim).reshape(())
        read |= jnp.real(first).astype(jnp.int32) & zero
    others = {*range(len(found))}.difference(turns)
    others = [k for k in others if not on_host(found[k]) and not jnp.issubdtype(found[k].dtype, jax.dtypes.extended)]
    last = min(others or turns, key=lambda k: nbytes(jax.typeof(found[k])))
    found[last] = jnp.where(read == 0, found[last], jnp.zeros((), found[last].dtype))
    return found
