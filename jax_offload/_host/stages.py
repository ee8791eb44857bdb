"""A step as stages, one program each: the pass, the device's share of the update, groups of the cores, the rest.

``files_of`` takes the leaves on disk out of the step, ``staged`` cuts it at its updates, ``arranged`` divides the pass
so that its gradients leave it early, and ``linked`` decides what each stage leaves for others. ``driver.py`` runs them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_offload._disk.leaves import IN_MEMORY, READ, WRITE, Place, Range, Token
from jax_offload._emit.region import Update, holds_driven_update, holds_update, is_update
from jax_offload._emit.run import group_looped, runner
from jax_offload._program import jaxprs
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Atom, ClosedJaxpr, DropVar, Equation, Jaxpr, Var, variables
from jax_offload._program.memory import HOST_KIND, is_host_aval
from jax_offload._program.primitives import CHECKPOINT, ELEMENTWISE
from jax_offload._program.program import Builder, Program, as_program
from jax_offload._program.propagate import Facts, needed_for, union
from jax_offload._program.rules import Dependent
from jax_offload._program.slices import Slice, consecutive, slice_of
from jax_offload._rewrite.inlined import equation_of, localised
from jax_offload._rewrite.parts import computed_again, cut_step
from jax_offload._schedule.after import LARGE
from jax_offload._schedule.schedule import Planned, RowWise, Schedule, in_parts

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
      down: the results of a program of the device that it copies to host memory, where the cores read them.
      free: the inputs whose buffers it may reuse: nobody reads them afterwards, and the step owns them.
    """

    name: str
    slices: tuple[Slice, ...]
    inputs: Sequence[Var]
    outputs: Sequence[Var]
    down: Sequence[Var] = ()
    free: frozenset[Var] = frozenset()

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
        return self.slices[0].eqns[0] if self.name == INNER else None

    @functools.cached_property
    def reused(self) -> tuple[int, ...]:
        """The positions of the inputs whose buffers a device program reuses, each for a result of its type."""
        wanted = Counter((v.aval.shape, v.aval.dtype, is_host_aval(v.aval)) for v in self.outputs)
        found = list[int]()
        for k, v in enumerate(self.inputs):
            kind = v.aval.shape, v.aval.dtype, is_host_aval(v.aval)
            if v in self.free and wanted[kind] > 0:
                wanted[kind] -= 1
                found.append(k)
        return tuple(found)

    @property
    def sends(self) -> bool:
        """Whether it is a program of the device that copies to the host and nothing back."""
        return bool(self.down) or (self.name == BEFORE and any(is_host_aval(v.aval) for v in self.outputs))

    @property
    def jaxpr(self) -> Jaxpr:
        """Its equations."""
        eqns = [eqn for s in self.slices for eqn in s.eqns]
        return Program([*self.inputs], [*self.outputs, *self.down], eqns, [], self.slices[0].debug_info).jaxpr


# ---- leaves on disk, taken out of the step ---------------------------------------------------------------------------

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

    def due(self, stages: Sequence[Stage]) -> list[list[Var]]:
        """Return the results to write after each stage: no later one reads them or the old values of their rows."""
        last = {v: k for k, stage in enumerate(stages) for v in (*stage.outputs, *stage.inputs)}
        due, read_by = [list[Var]() for _ in stages], dict[Place, list[tuple[Var, Range | None]]]()
        for v, (leaf, rows) in self.reads.items():
            read_by.setdefault(leaf, []).append((v, rows))
        for v, parts in self.writes.items():
            old = [x for leaf, rows in parts for x, other in read_by.get(leaf, ())
                   if other is None or rows is None or max(rows[0], other[0]) < min(rows[1], other[1])]  # fmt: skip
            due[max(last.get(x, 0) for x in (v, *old))].append(v)
        return due


_COMPUTES = (
    "disk: the step computes with a state on disk outside its one update: it updates the state again, chooses between "
    "two states, or reads a leaf, for a norm perhaps. Fix: jo.jit(step), where the state goes from argument to one "
    "update to result. For several updates call such a step several times, or accumulate gradients in "
    "jo.offload(optax.MultiSteps(...), disk=...); skip= or lax.cond skips an update; and between "
    "two steps jo.to_device(optax.tree.get(state, 'mu')) reads a part of the state, and jo.save_args saves it."
)


def files_of(step: Program, args: Sequence[Any]) -> OnFiles:
    """Take the reads and writes of leaves on disk out of a step that is called with arguments like ``args``.

    Raises:
      ValueError: the step does something other than update such a leaf, or computes with its token.
    """
    reads: dict[Var, tuple[Atom, Place]] = {}
    written: dict[Var, tuple[Atom, Place]] = {}  # token -> the value to write, and its place
    eqns: list[Equation] = []
    for eqn in step.eqns:
        if is_update(eqn):
            _check_leaves(eqn, reads)
        if eqn.primitive in (READ, WRITE):
            (reads if eqn.primitive is READ else written)[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
            continue
        eqns.append(eqn)
        if jaxprs.holds_inside(eqn, lambda each: each.primitive in (READ, WRITE)):
            updates = holds_driven_update(eqn)
            if not (updates and eqn.primitive.name in DRIVEN):  # its branches, or its body, are steps of their own
                raise stands_in(eqn, "disk") if updates else ValueError(_COMPUTES)
    tokens = {*variables(token for token, _ in reads.values())}
    given = all(isinstance(token, Var) and token in step.inputs for token, _ in reads.values())
    again = any(not tokens.isdisjoint(variables(eqn.invars)) for eqn in eqns)
    if not given or again or not reads.keys().isdisjoint(variables(step.outputs)):
        raise ValueError(_COMPUTES)
    arguments = step.inputs[len(step.consts) :]
    tokens |= {v for v, x in zip(arguments, args, strict=True) if isinstance(x, Token)}
    tokens = _tokens(step, tokens, {*reads, *written})
    returned = {k: written[v] for k, v in enumerate(step.outputs) if isinstance(v, Var) and v in written}
    kept = {place for _, place in returned.values()}
    homes = {place.home for place in kept}
    if lost := [place for _, place in reads.values() if place.home in homes and place not in kept]:
        raise ValueError(
            f"disk: the step updates a state and returns only a part of it, not {lost[0].name}, which is overwritten "
            "all the same. Fix: return the whole state."
        )
    writes = dict[Var, list[Part]]()
    for x, place in returned.values():
        if x not in reads:
            writes.setdefault(cast(Var, x), []).append((place, None))
        elif (old := reads[cast(Var, x)][1]) != place:
            raise ValueError(
                f"disk: the update moves {old.name} unchanged to {place.name}, which may be overwritten by then. Fix: "
                "a select= that leaves them in memory."
            )
    rest, new, taken = list[Atom](), Builder(eqns), {*step.inputs}
    for v in (v for k, v in enumerate(step.outputs) if k not in returned):
        # as under jax.jit, a result on the device is neither an argument nor another result
        handed_on = isinstance(v, Var) and v in taken and v not in tokens and not is_host_aval(v.aval)
        rest.append(new.run(jnp.copy, v)[0] if handed_on else v)
        taken |= {*variables([v])}
    program = dataclasses.replace(step, inputs=[*step.inputs, *reads], eqns=eqns, outputs=[*rest, *writes])
    parts: dict[Var, Part] = {v: (place, None) for v, (_, place) in reads.items()}
    return OnFiles(program, rest, [*reads.values()], {k: p for k, (_, p) in returned.items()}, parts, writes)


def _check_leaves(eqn: Equation, reads: Mapping[Var, tuple[Atom, Place]]) -> None:
    """Raise ``ValueError`` where an update reads other leaves from disk than its ``offload`` keeps there."""
    update: Update = eqn.params["update"]
    for v, x in zip(update.operands, eqn.invars, strict=True):
        place = reads[x][1] if isinstance(x, Var) and x in reads else None
        if place is not None and v not in update.on_disk:
            raise ValueError(
                f"state: {place.name} is on disk, and this offload keeps it in memory. Fix: the "
                "offload, and the host_bytes, with which the state was made; into another one jo.to_host(tx, state) "
                "brings it, with a jo.disk(...) of another directory where some stays on disk."
            )
        if place is None and v in update.on_disk:
            raise ValueError(f"state: a leaf {v.aval.dtype}{list(v.aval.shape)} {IN_MEMORY}")


_TOKEN, _LEAF = 1, 2  # the token of a state; a leaf that is read, or the token of one that is written


def _tokens(step: Program, tokens: Set[Var], leaves: Set[Var]) -> set[Var]:
    """Return all tokens of a step, given those among its arguments.

    Raises:
      ValueError: an equation, perhaps in a branch, computes with a token, or uses ``leaves`` outside the update.
    """

    def rule(eqn: Equation, facts: Sequence[int]) -> Sequence[int] | None:
        if eqn.primitive is READ or eqn.primitive is WRITE:
            return [_LEAF if eqn.outvars[0] in leaves else _TOKEN if eqn.primitive is WRITE else 0]
        if is_update(eqn):
            return [0] * len(eqn.outvars)
        enters = bool(jaxprs.inner_of(eqn))  # then the rule applies to the equations inside it
        if any(fact & _LEAF or not enters for fact in facts if fact):
            raise ValueError(_COMPUTES)
        return None if enters else [0] * len(eqn.outvars)

    found = Facts[int](0, union, rule, choice_counts=False).spread(step.eqns, dict.fromkeys(tokens, _TOKEN))
    return {v for v, fact in found.items() if fact & _TOKEN}


def stands_in(eqn: Equation, option: str) -> ValueError:
    """The error of a step whose update stands in an equation that cannot be driven."""
    name = "jax.checkpoint" if eqn.primitive.name in CHECKPOINT else eqn.primitive.name
    return ValueError(
        f"{option}: the update stands in a {name} of the step, which cannot be cut there. Fix: update once a step, "
        "outside of scans, jax.checkpoint and shard_map; skip= and a branch may skip it."
    )


# ---- the step, cut at its updates ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Staged:
    """A step as stages.

    Attributes:
      files: the step, with its leaves on disk.
      stages: its programs, in order.
      next_of: result of an update -> the variable of the step whose next value it is.
      in_turn: the large gradients, in the order of the pass, if they wait for one another: some stay on the device.
      scattered: gradient that an update from disk divides further (ZeRO-1) -> its sharding. The program that makes it
        divides it; otherwise every device would hold it whole until the update.
      starts: number of a first row -> its variable, an operand of parts.
    """

    files: OnFiles
    stages: list[Stage] = dataclasses.field(default_factory=list[Stage])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    in_turn: Sequence[Var] = ()
    scattered: dict[Var, NamedSharding] = dataclasses.field(default_factory=dict[Var, NamedSharding])
    starts: dict[int, Var] = dataclasses.field(default_factory=dict[int, Var])

    @property
    def consts(self) -> dict[Var, Any]:
        """Its constants: the numbers of first rows, and the arrays that the step closes over."""
        starts = {v: np.int32(row) for row, v in self.starts.items()}
        return starts | dict(zip(self.files.program.inputs, self.files.program.consts, strict=False))

    @property
    def arguments(self) -> list[Var]:
        return self.files.program.inputs[len(self.files.program.consts) :]

    @property
    def results(self) -> list[Var]:
        """The variables that the stages make for the caller; parts in place of leaves that are made in parts."""
        return list(dict.fromkeys([*variables(self.files.outputs), *self.files.writes]))

    def on_device(self, name: str, *slices: Slice) -> None:
        """Add slices to the last program of the device, or begin another."""
        if self.stages and self.stages[-1].name not in (CORES, GROUP, INNER):
            last = self.stages.pop()
            name, slices = last.name, (*last.slices, *slices)
        self.stages.append(Stage.of(name, *slices))

    def in_groups(self, name: str, slices: Iterable[Slice]) -> None:
        """Add consecutive slices in stages of about ``GROUP_BYTES`` each."""
        slices = [*slices]
        ahead = itertools.accumulate((bytes_of(s.loads) for s in slices), initial=0)
        for _, group in itertools.groupby(zip(ahead, slices, strict=False), key=lambda each: each[0] // GROUP_BYTES):
            self.stages.append(Stage.of(name, *(s for _, s in group)))

    def add(self, eqn: Equation) -> None:
        """Add an update: the device's share at once, and what comes from disk, or goes to the cores, in groups."""
        update, info = localised(eqn), self.files.program.debug_info
        self.next_of |= update.next_values
        device, passes = (None, update.passes) if update.on_disk else _shares(update)
        large = [v for v in update.gradients if math.prod(v.aval.shape) >= LARGE]
        if device is not None and update.take_turns and len(self.stages) == 1 and {*large} & {*device.operands}:
            self.in_turn = large
        for each in passes:
            self.on_device("scalars", each.prelude)
            if device is not None and each is passes[0] and (made := variables(device.program.outputs)):
                whole = slice_of([equation_of(device, eqn)], made, info, {})
                if device.planned:
                    self.stages.append(Stage.of("device", whole))
                else:
                    self.on_device("device", whole)
            slices = (p.slice for p in each.slices) if device is not None else self._from_disk(update, each.slices)
            self.in_groups(GROUP if device is None else CORES, slices)

    def _from_disk(self, update: Update, planned: Sequence[Planned]) -> Iterator[Slice]:
        """Yield the slices of an update whose leaves are on disk, each whole or in parts with some of its rows."""
        files = self.files
        slices = [s for each in update.passes for s in (each.prelude, *(p.slice for p in each.slices))]
        pins = {v: pin for s in slices for v, pin in s.pins.items() if v in update.gradients}
        results, read = {*variables(files.outputs)}, [variables(eqn.invars) for eqn in files.program.eqns]
        self.scattered |= {v: s for v, s in pins.items() if isinstance(s.mesh, Mesh) and v not in results}
        used = results.union(*read, *(s.inputs for s in slices))
        leaves = {v: parts[0][0] for v, parts in files.writes.items() if len(parts) == 1 and v not in used}
        leaves |= {v: leaf for v, (leaf, _) in files.reads.items()}
        for p in planned:
            # ranges of rows that are together in the files of all leaves; a leaf that is used again is written whole
            found = [leaves.get(v) for v in (*p.slice.loads, *p.slice.stores)]
            ends = [{*leaf.home.ends(leaf.name)} if leaf else set[int]() for leaf in found]
            ranges = [*pairwise([0, *sorted(set[int].intersection(*ends))])] if ends else []
            try:
                how = in_parts(p, update.next_values, update.on_disk) if len(ranges) > 1 else None
            except Dependent:
                how = None
            if how is not None and how.shape[0] == how.shards * ranges[-1][1]:
                yield from self._parts(p.slice, how, update, ranges)
            else:
                run = functools.partial(runner([p], update.names, lowered=True), p)
                traced, _ = jaxprs.jaxpr_of(run, *(v.aval for v in p.slice.inputs))
                yield _slice_by(traced, p.slice.inputs, p.slice.outputs)

    def _parts(self, s: Slice, how: RowWise, update: Update, ranges: Sequence[Range]) -> Iterator[Slice]:
        """Yield a slice as parts, which hand arrays on the device from one to the next: each part writes its rows into
        the same buffer."""
        now = {v: v for v in s.inputs}  # what earlier parts have left, in whose buffer a result goes
        into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
        for begin, end in ranges:
            before = [v for v in s.outputs if v in now]
            rows = {
                v: self.files.part(v, how.shards, (begin, end)) for v in (*s.inputs, *s.outputs) if is_host_aval(v.aval)
            }
            given = {v: rows.get(v, now[v]) for v in s.inputs}
            start = self.starts.setdefault(begin, Var(jax.typeof(np.int32(begin))))
            operands, results = [start, *given.values(), *(now[v] for v in before)], list[Var]()
            for v, of in zip(s.outputs, into, strict=True):
                if v in rows:
                    new, old = rows[v], given.get(of)
                else:
                    new = v if end == ranges[-1][1] else Var(v.aval)
                    old = now.get(of, update.next_values.get(v))
                    now[of] = new
                self.next_of |= {} if old is None else {new: old}
                results.append(new)
            run = functools.partial(_of_rows, group_looped(s, how, update.names, end - begin), len(s.inputs), before)
            yield _slice_by(jaxprs.jaxpr_of(run, *(v.aval for v in operands))[0], operands, results)
        for v in s.outputs:
            self.files.writes.pop(v, None)  # its parts are written instead


def bytes_of(values: Iterable[Var]) -> int:
    return sum(nbytes(v.aval) for v in values)


def _slice_by(traced: ClosedJaxpr, inputs: Sequence[Atom], outputs: Sequence[Var]) -> Slice:
    """Return a traced function as a slice."""
    new, program = Builder(), as_program(traced)
    inner = new.inside(program, inputs)
    inner.copy(*program.eqns, results=dict(zip(variables(program.outputs), outputs, strict=True)))
    return slice_of(new.eqns, [*outputs], program.debug_info, {})


def _of_rows(run: Callable[..., list[Any]], n: int, before: Sequence[Var], start: Any, *values: Any) -> list[Any]:
    """Run a slice on rows from ``start`` on, given ``n`` operands, and the results that earlier parts have left."""
    return run(start, dict(zip(before, values[n:], strict=True)), *values[:n])


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
    for eqn in cut.update.eqns:
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
            step.add(eqn)
    if cut.after.outputs or cut.after.effects:
        step.on_device("after", cut.after)
    return step


def _shares(update: Update) -> tuple[Update, Sequence[Schedule]]:
    """Divide an update into the device's part, and the passes of the cores' part, by its plan.

    The first pass's prelude makes what both need, such as a count, and the cores' part calls back.
    """
    cores = {v for p in update.planned if p.on_cores for v in p.slice.outputs}
    first, *later = update.only([v in cores for v in update.program.outputs])[1].updated_by(cores=True).passes
    prelude = first.prelude
    made = {v for eqn in prelude.eqns for v in eqn.outvars}
    both = [v for v in variables(update.program.outputs) if v in made - cores]
    outputs = list(dict.fromkeys([*prelude.outputs, *both]))
    prelude = dataclasses.replace(prelude, outputs=outputs)
    silent = [e for e in update.program.eqns if not (e.effects and all(isinstance(v, DropVar) for v in e.outvars))]
    quiet = dataclasses.replace(update, program=dataclasses.replace(update.program, eqns=silent))
    device = quiet.only([v not in cores | made for v in update.program.outputs])[1]
    return device.updated_by(cores=False), [dataclasses.replace(first, prelude=prelude), *later]


# ---- the pass: its gradients leave it as early as they can -----------------------------------------------------------
#
# It runs as several programs, so that the first gradients' update need not wait for the last: all results of a
# program become ready together. If one ends where the gradients of a group exist, the cores or the drives can start
# on them while the rest of the pass runs.
#
# XLA fuses nothing across programs: each value that crosses from one program to a later one is an array in memory. So
# cheap values (elementwise arithmetic) are computed again if their operands are no larger. The cores do the last
# arithmetic on their gradients in the same way: a gradient that is cast to float32 goes down in bfloat16.

# The least share of the arithmetic in each program but the first, which ends with the first group's gradients: the host
# needs a tenth of a program's run time to start it. A state on disk takes longer, and with more programs gradients are
# freed earlier.
FOR_CORES, FOR_DISK = 1 / 12, 1 / 32
_NOT_AGAIN = {"optimization_barrier", "device_put", "sharding_constraint", "reshard"}
_VIEWS = ["broadcast_in_dim", "iota", "one_minus_square", "reshape", "squeeze", "transpose"]
CHEAP = ELEMENTWISE.union(_VIEWS) - _NOT_AGAIN
# arithmetic that the cores do as well, of these types
LATE, KERNEL_FLOATS = {"convert_element_type", "mul", "div", "neg"}, {np.dtype(np.float32), np.dtype(jnp.bfloat16)}


def arranged(step: Staged, *, may_be_cut: bool) -> Staged:
    """Return the step with its pass in one program, or in several.

    Groups of the cores follow all segments, which have been started by then; each group waits for its own gradients.
    Groups whose state is on disk run on the device, after the segment that follows the one with their gradients: the
    device has work while the host waits for a file.
    """
    first, *rest = step.stages
    eqns, info = _in_one(first.slices), first.slices[0].debug_info
    # what crosses from the pass to others: at first to the device alone, as the cores ask for it in other types
    crossing = {*step.results}.union(*(stage.inputs for stage in rest if not stage.on_cores))

    def repeating(s: Slice, made: Set[Var], cheap: Sequence[Equation], free: Iterable[Var] = ()) -> Slice:
        """Return a slice that runs some ``cheap`` equations again, for values ``made`` earlier that it reads."""
        again, need = computed_again(made & {*s.inputs}, crossing.union(free), cheap)
        crossing.update(need)
        return slice_of([*again, *s.eqns], s.outputs, info, {})

    made = {v for eqn in eqns for v in eqn.outvars}
    late = [eqn for eqn in eqns if eqn.primitive.name in LATE and {v.aval.dtype for v in eqn.invars} <= KERNEL_FLOATS]
    for k, stage in enumerate(rest):
        if stage.on_cores:
            rest[k] = Stage.of(CORES, *(repeating(s, made, late) for s in stage.slices))
    eqns, _ = needed_for(eqns, crossing, kept=lambda eqn: bool(eqn.effects))
    instead = ({v} if v in crossing else needed_for(late, [v])[1] & crossing for v in step.in_turn)
    in_turn = [max(found, key=lambda v: nbytes(v.aval)) for found in instead if found]
    groups = [*itertools.takewhile(lambda s: s.name in (GROUP, CORES, "device"), rest)]
    made_by = {v: k + 1 for k, eqn in enumerate(eqns) for v in eqn.outvars}
    ends, ready = dict(made_by), list[int]()
    for group in groups:  # some rows of a parameter are written after others
        ready.append(max((ends.get(v, 0) for v in group.inputs), default=0))
        ends |= dict.fromkeys(group.outputs, ready[-1])
    on_disk = any(group.name == GROUP for group in groups)
    done, cuts = [0.0, *itertools.accumulate(map(jaxprs.flops, eqns))], list[int]()
    for place in sorted({*ready} - {0}) if may_be_cut and not any(eqn.effects for eqn in eqns) else ():
        shares = [done[-1] - done[place], *(done[place] - done[cut] for cut in cuts[-1:])]
        if min(shares) >= (FOR_DISK if on_disk else FOR_CORES) * done[-1] > 0:
            cuts.append(place)  # the number of equations after which a program ends, with the gradients of a group
    segments = list[Slice]()
    for start, end in reversed([*pairwise([0, *cuts, len(eqns)])]):
        made = {v for eqn in eqns[:start] for v in eqn.outvars}
        own = slice_of(eqns[start:end], [v for v in made_by if start < made_by[v] <= end and v in crossing], info, {})
        crossing.difference_update(own.outputs)
        cheap = [eqn for eqn in eqns[:start] if eqn.primitive.name in CHEAP]
        segments.insert(0, repeating(own, made, cheap, first.inputs))
    after = [min(bisect.bisect_left(cuts, at) + 1, len(cuts)) if on_disk else len(cuts) for at in ready]
    stages = list[Stage]()
    for k, segment in enumerate(segments):
        stages += [Stage.of(BEFORE, segment), *(g for g, at in zip(groups, after, strict=True) if at == k)]
    return dataclasses.replace(step, stages=[*stages, *rest[len(groups) :]], in_turn=in_turn)


def _in_one(slices: Sequence[Slice]) -> list[Equation]:
    """Return the equations of the pass and of slices after it, each of these as soon as its operands exist: the
    update's groups then wait for a learning rate, and not for the gradients of leaves that stay on the device."""
    made, found = dict[Var, int](), list[tuple[int, Equation]]()  # by which equation of the pass
    for s in slices:
        for k, eqn in enumerate(s.eqns):
            at = k if s is slices[0] else max((made.get(v, -1) for v in variables(eqn.invars)), default=-1)
            found.append((at, eqn))
            made.update(dict.fromkeys(eqn.outvars, at))
    return [eqn for _, eqn in sorted(found, key=lambda each: each[0])]


# ---- exchange between stages -----------------------------------------------------------------------------------------


def linked(step: Staged, donated: Set[Var]) -> list[Stage]:
    """Decide which values each stage of a step leaves for the others; ``donated``: the donated inputs."""
    stages, results = step.stages, {*step.results}
    last = {v: k for k, stage in enumerate(stages) for v in stage.inputs}
    by_cores = {v for stage in stages if stage.on_cores for v in stage.inputs}
    by_device = {v for stage in stages if not stage.on_cores for v in stage.inputs} | results
    # buffers that somebody else may have: inputs that were not donated, and whatever a branch or a loop may hand on
    others, found = {*step.consts, *step.arguments} - donated, list[Stage]()
    for k, stage in enumerate(stages):
        made = [v for v in stage.outputs if v in results or last.get(v, -1) > k]
        # jax pairs donated inputs with results in their order. Two moments would otherwise be written into each
        # other's buffers, which XLA would have to copy first.
        pairs = {step.next_of[v]: v for v in made if v in step.next_of}
        old = [v for v in stage.inputs if v in pairs]
        inputs, made = dict.fromkeys([*old, *stage.inputs]), dict.fromkeys([*(pairs[v] for v in old), *made])
        sends = stage.name not in (CORES, INNER)
        down = [v for v in made if sends and v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)]
        outputs = [v for v in made if v in by_device or v not in down]
        free = frozenset(v for v in inputs if last[v] == k and v not in results) - others
        found.append(Stage(stage.name, stage.slices, [*inputs], outputs, down, free))
        others |= {*inputs, *made} if stage.inner is not None else set()
    return found


def is_sent(x: Any) -> bool:
    """Whether an array, or a type, comes to the cores through host memory: no scalar, no PRNG keys."""
    return len(x.shape) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
