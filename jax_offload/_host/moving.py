"""The leaves on disk of a step: their reads become inputs of its program, and their writes results.

When the step runs, they are read ahead of its stages and written behind them, as ``Moves`` says.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._disk.leaves import IN_MEMORY, READ, WRITE, Ends, Place, Range
from jax_offload._emit.find import holds_driven_update, is_update
from jax_offload._emit.region import Update
from jax_offload._host.stages import DRIVEN, Staged, Task, stands_in
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import Atom, Equation, Var, holds_inside, variables
from jax_offload._program.memory import HOST_KIND
from jax_offload._program.program import Program

# While one stage runs, the leaves of this many other stages are read ahead, and as many are written behind, up to these
# bytes in each direction. Rows may be gigabytes long; then only the leaves of the current stage are read.
DEPTH, AT_ONCE = 2, 2**29


# ---- taken out of the step -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OnFiles:
    """A step whose reads and writes of leaves on disk are inputs and results of its program.

    Attributes:
      program: the step. Its last inputs are the leaves to read, and its last results are the leaves to write.
      reads: input that is read -> its token and its leaf.
      writes: the results that are written, each with its leaf. A leaf that the step hands on unchanged is not written.
      tokens: position of a result of the step that is a token -> its leaf.
    """

    program: Program
    reads: Mapping[Var, tuple[Atom, Place]]
    writes: Sequence[tuple[Atom, Place]]
    tokens: Mapping[int, Place]

    @property
    def outputs(self) -> Sequence[Atom]:
        """The step's results that are not tokens."""
        return self.program.outputs[: len(self.program.outputs) - len(self.writes)]

    @property
    def ends(self) -> dict[Var, Ends]:
        """Return where ranges of rows end in the files, for leaves that are read and results that are only written."""
        times = Counter(variables(self.program.outputs))
        used = {v for eqn in self.program.eqns for v in variables(eqn.invars)}
        found = {v: leaf for v, (_, leaf) in self.reads.items()}
        found |= {v: leaf for v, leaf in self.writes if isinstance(v, Var) and times[v] == 1 and v not in used}
        return {v: leaf.home.ends(leaf.name) for v, leaf in found.items()}

    def places(self, devices: Set[Any]) -> dict[Var, Sharding]:
        """Return where each leaf goes in host memory, in a step on these devices.

        Raises:
          ValueError: the state is divided between other devices.
        """
        found = dict[Var, Sharding]()
        for v, (_, leaf) in self.reads.items():
            found[v] = leaf.sharding
            if len(devices) == 1:
                (device,) = devices
                alone = SingleDeviceSharding(device, memory_kind=HOST_KIND)
                found[v] = found[v] if found[v].device_set == devices else alone
            elif not found[v].device_set <= devices:
                there, here = (", ".join(sorted(map(str, each))) for each in (found[v].device_set, devices))
                raise ValueError(
                    f"disk: the state is on {there}, {leaf.name} as {found[v]}, and the step runs on {here}. Fix: "
                    "disk.resume(target) with the shardings that the parameters have now, "
                    "jo.abstract_state(tx, params) in the state's place."
                )
        return found


def files_of(step: Program) -> OnFiles:
    """Take the reads and writes of leaves on disk out of a step.

    Raises:
      ValueError: the step does something other than update such a leaf, or computes with its token.
    """
    reads: dict[Var, tuple[Atom, Place]] = {}
    written: dict[Var, tuple[Atom, Place]] = {}  # token -> the value to write, and its place
    eqns: list[Equation] = []
    for eqn in step.eqns:
        if is_update(eqn):
            _check_leaves(eqn, reads)
        if eqn.primitive is READ:
            reads[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
        elif eqn.primitive is WRITE:
            written[eqn.outvars[0]] = eqn.invars[0], eqn.params["place"]
        else:
            _check_equation(eqn, reads, written)
            eqns.append(eqn)
    inputs, tokens = {*step.inputs}, {*variables(v for v, _ in reads.values())}
    given = all(isinstance(v, Var) and v in inputs for v, _ in reads.values())
    read_again = any(not tokens.isdisjoint(variables(eqn.invars)) for eqn in eqns)
    if not given or read_again or not reads.keys().isdisjoint(variables(step.outputs)):
        raise ValueError(_COMPUTES)
    found = {k: written[v] for k, v in enumerate(step.outputs) if isinstance(v, Var) and v in written}
    kept = {place for _, place in found.values()}
    homes = {place.home for place in kept}
    if lost := [place for _, place in reads.values() if place.home in homes and place not in kept]:
        raise ValueError(
            f"disk: the step updates a state and returns only a part of it, not {lost[0].name}, which is overwritten "
            "all the same. Fix: return the whole state."
        )
    again = [(x, place) for x, place in found.values() if isinstance(x, Var) and x in reads]  # unchanged
    moved = [(reads[x][1], place) for x, place in again if reads[x][1] != place]
    if moved:
        old, new = moved[0]
        raise ValueError(
            f"disk: the update moves {old.name} unchanged to {new.name}, which may be overwritten by then. Fix: "
            "a select= that leaves them in memory."
        )
    writes = [(x, place) for x, place in found.values() if not isinstance(x, Var) or x not in reads]
    rest = [v for k, v in enumerate(step.outputs) if k not in found]
    program = dataclasses.replace(
        step, inputs=[*step.inputs, *reads], eqns=eqns, outputs=[*rest, *(x for x, _ in writes)],
    )  # fmt: skip
    return OnFiles(program, reads, writes, {k: place for k, (_, place) in found.items()})


_COMPUTES = (
    "disk: the step computes with a state on disk outside its one update: it updates the state again, chooses between "
    "two states, or reads a leaf, for a norm perhaps. Fix: jo.jit(step), where the state goes from argument to one "
    "update to result. For several updates call such a step several times, or accumulate gradients in "
    "jo.offload(optax.MultiSteps(...), disk=...); skip= or lax.cond skips an update; and between "
    "two steps jo.to_device(optax.tree.get(state, 'mu')) reads a part of the state, and jo.save_args saves it."
)


def _check_leaves(eqn: Equation, reads: Mapping[Var, tuple[Atom, Place]]) -> None:
    """Raise ``ValueError`` where an update reads other leaves from disk than its ``offload`` keeps there."""
    update: Update = eqn.params["update"]
    on_disk = update.on_disk
    for v, x in zip(update.operands, eqn.invars, strict=True):
        there, known = isinstance(x, Var) and x in reads, v in on_disk
        if there and not known:
            raise ValueError(
                f"state: {reads[cast(Var, x)][1].name} is on disk, and this offload keeps it in memory. Fix: the "
                "offload, and the host_bytes, with which the state was made; into another one jo.to_host(tx, state) "
                "brings it, with a jo.disk(...) of another directory where some stays on disk."
            )
        if known and not there:
            raise ValueError(f"state: a leaf {v.aval.dtype}{list(v.aval.shape)} {IN_MEMORY}")


def _check_equation(eqn: Equation, reads: Mapping[Var, Any], written: Mapping[Var, Any]) -> None:
    used, updates = {*variables(eqn.invars)}, holds_driven_update(eqn)
    inside = holds_inside(eqn, lambda each: each.primitive in (READ, WRITE))
    if inside and not (updates and eqn.primitive.name in DRIVEN):  # whose branch, or body, is a step of its own
        raise stands_in(eqn, "disk") if updates else ValueError(_COMPUTES)
    if (not used.isdisjoint(reads) and not is_update(eqn)) or not used.isdisjoint(written):
        raise ValueError(_COMPUTES)


# ---- moved while it runs ---------------------------------------------------------------------------------------------


Part = tuple[Place, Range | None]  # a leaf on disk, or some of its rows


class Moves:
    """What moves at each task of a step, decided when the step is made.

    Args:
      what: the leaves on disk.
      step: the stages of the step.
      tasks: the same stages as they run.

    Attributes:
      reads: variable that is read -> its part of a leaf.
      writes: variable -> the parts of leaves that are its values.
      now: for each task, what it reads.
      ahead: for each task, the leaves to start reading, for itself and for the next tasks that use files.
      due: for each task, the results that can be written after it.
    """

    def __init__(self, what: OnFiles, step: Staged, tasks: Sequence[Task]) -> None:
        self.what, parts = what, step.parts
        self.reads = dict[Var, Part]()
        for v, (_, leaf) in what.reads.items():
            self.reads |= {v: (leaf, None), **{w: (leaf, rows) for w, rows in parts.get(v, ())}}
        self.writes: dict[Var, list[Part]] = {}
        for v, leaf in what.writes:
            for w, rows in parts.get(cast(Var, v)) or [(cast(Var, v), None)]:
                self.writes.setdefault(w, []).append((leaf, rows))
        self.now = [[v for v in task.inputs if v in self.reads] for task in tasks]
        self.due = self._when_written(tasks)
        self.ahead, begun = list[list[Var]](), set[Var]()
        for k, now in enumerate(self.now):
            following = [*itertools.islice(filter(None, self.now[k + 1 :]), DEPTH)]
            if not now and not any(self.due[:k]) and following:  # the nearest one is needed first
                now, *following = following
            wanted = itertools.chain(now, *following[: beside(map(bytes_of, following))])
            self.ahead.append([v for v in dict.fromkeys(wanted) if v not in begun])
            begun = begun.union(self.ahead[k]).difference(self.now[k])  # a leaf that is read again is fetched again

    def _when_written(self, tasks: Sequence[Task]) -> list[list[Var]]:
        """Return the results that each task releases for writing: they exist, and no later task reads them or
        the old values of their rows."""
        last = {v: k for k, task in enumerate(tasks) for v in (*task.outputs, *task.inputs)}
        read_by: dict[Place, list[tuple[Range | None, int]]] = {}
        for leaf, rows, k in ((*self.reads[v], k) for v, k in last.items() if v in self.reads):
            read_by.setdefault(leaf, []).append((rows, k))
        due: list[list[Var]] = [[] for _ in tasks]
        for v, parts in self.writes.items():
            old = [k for leaf, rows in parts for other, k in read_by.get(leaf, ()) if _meet(other, rows)]
            due[max([last.get(v, 0), *old])].append(v)
        return due


def _meet(a: Range | None, b: Range | None) -> bool:
    """Whether two ranges of a leaf share rows; ``None`` has all."""
    return a is None or b is None or (a[0] < b[1] and b[0] < a[1])


def beside(sizes: Iterable[int]) -> int:
    """Return how many groups of these sizes, the nearest first, may be under way beside the current one."""
    return sum(total <= AT_ONCE for total in itertools.accumulate(itertools.islice(sizes, DEPTH)))


def bytes_of(leaves: Iterable[Var]) -> int:
    return sum(nbytes(v.aval) for v in leaves)
