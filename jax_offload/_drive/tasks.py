"""What each stage of a step reads, makes and frees, and which buffers it may reuse: decided here, run elsewhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

from jax.sharding import Sharding

from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._drive.cores import is_sent, on_cpus
from jax_offload._drive.stages import BEFORE, Stage, Staged

WRITABLE = ("cpu", "gpu", "cuda", "rocm")  # platforms whose host memory has an address for us


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
      reused: the positions of the inputs whose buffers the results take.
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
    def kind(self) -> Hashable:
        """A key that is equal for tasks that one program can run; ``None`` if that is not known."""
        kind = self.stage.kind([*self.inputs, *self.outputs, *self.down])
        return None if kind is None else (kind, len(self.inputs), len(self.down), self.reused, self.stage.on_cores)


def tasks_of(step: Staged, donated: Set[Var]) -> list[Task]:
    """Decide what each stage of a step leaves for the others; ``donated``: the donated inputs."""
    stages, results = step.stages, {*step.results}
    last = {v: k for k, stage in enumerate(stages) for v in stage.reads}
    by_cores = {v for stage in stages if stage.on_cores for v in stage.reads}
    by_device = {v for stage in stages if not stage.on_cores for v in stage.reads} | results
    # the caller's: inputs that were not donated, and what a loop that does not run hands on
    others = {*step.inputs} - donated | {v for stage in stages if stage.loop is not None for v in stage.makes}
    tasks: list[Task] = []
    sent: set[Var] = set()
    for k, stage in enumerate(stages):
        defined = [v for v in stage.makes if v in results or last.get(v, -1) > k]
        inputs, defined = _side_by_side(stage.reads, defined, step.next_of)
        over = [v for v in inputs if last[v] == k and v not in results]
        sends = not stage.on_cores and stage.loop is None
        down = [v for v in defined if v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)] if sends else []
        sent.update(down)
        outputs = [v for v in defined if v in by_device or v not in down]
        up = [v for v in defined if v in by_device] if stage.on_cores else []
        free = frozenset(over) - others
        reused = _reusable(inputs, free, outputs, sent if stage.on_cores else set())
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


def _reusable(inputs: Sequence[Var], free: Set[Var], outputs: Sequence[Var], sent: Set[Var]) -> tuple[int, ...]:
    """Return the positions of the inputs whose buffers results may take, one for each result of that type and memory.

    ``sent``: values that are in host memory whatever their types say.
    """

    def kind(v: Var) -> Hashable:
        return v.aval.shape, v.aval.dtype, is_host_aval(v.aval) or v in sent

    wanted: Counter[Hashable] = Counter((v.aval.shape, v.aval.dtype, is_host_aval(v.aval)) for v in outputs)
    found = []
    for k, v in enumerate(inputs):
        if v in free and wanted[kind(v)] > 0:
            wanted[kind(v)] -= 1
            found.append(k)
    return tuple(found)


def to_be_written(
    tasks: Sequence[Task], donated: Set[Var], places: Mapping[Var, Sharding], devices: Set[Any]
) -> set[Var]:
    """Return the donated leaves in host memory that the cores may overwrite: at most one task beside the first reads
    them."""
    if any(device.platform not in WRITABLE for device in devices):
        return set()
    read_by = Counter(v for task in tasks[1:] for v in task.inputs)  # the first has been started when they are taken
    found = {v for v in donated if is_host_aval(v.aval) or on_cpus(devices)}
    # an argument without a place, such as a NumPy array, is not committed to these devices
    return {v for v in found if read_by[v] == 1 and v in places and {*places[v].device_set} == {*devices}}


def check_processes(task: Task, processes: int) -> None:
    """Raises ``ValueError`` where a task takes leaves whole that are divided between processes."""
    if processes > 1 and any(is_sent(v.aval) for v in task.inputs):
        raise ValueError(
            "update_on: an update that is more than arithmetic on elements (LAMB, Adafactor, Muon), or any without "
            f"numba, takes every leaf whole, and the step runs in {processes} processes. Fix: pip install "
            "jax_offload[cores] for AdamW and the like; else update_on='device', and shard_over= for less of the state."
        )
