"""Runs a staged step: before; for each group: the next one's operands under way, update, write back; after."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jax_offload._base.donation import guarded
from jax_offload._base.jaxprs import (
    ClosedJaxpr,
    Equation,
    Var,
    closed,
    jax_fun,
    values_of,
    variables,
    without_dead_code,
)
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, to_device, to_host, with_kind
from jax_offload._drive.cores import Cores, cores_beside, is_sent
from jax_offload._drive.stages import Stage, Staged, staged
from jax_offload._step import cut_step

Jit = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A stage, compiled, and what it takes and leaves.

    Attributes:
      outputs: what others read of it, on the device or, of the cores, where they left it.
      down: what the cores read of a program of the device, which it leaves in host memory.
      up: what is read on the device of what the cores have made.
      over: what nobody reads after it.
    """

    stage: Stage
    inputs: list[Var]
    outputs: list[Var]
    down: list[Var]
    up: list[Var]
    over: list[Var]
    run: Callable[..., Sequence[Any]]


class Driven:
    """A step for arguments of some types and places.

    Args:
      step: its closed jaxpr.
      args: such arguments.
      donated: for each whether it is.
      options: of ``jax.jit``, for the programs of the device.
    """

    def __init__(
        self, step: ClosedJaxpr, args: Sequence[Any], donated: Sequence[bool], options: Mapping[str, Any]
    ) -> None:
        self._step = found = staged(cut_step(step))
        self._options = options
        placed = [getattr(x, "sharding", None) for x in args]
        self._devices = {d for s in placed if s is not None for d in s.device_set} or {*jax.devices()[:1]}
        self._cores = cores_beside(self._devices)
        own = found.inputs[len(found.consts) :]
        self._places: dict[Var, Sharding] = {v: s for v, s in zip(own, placed, strict=True) if s is not None}
        self._places |= {v: self._places[old] for v, old in found.next_of.items() if old in self._places}
        self._donated = {v for v, given in zip(own, donated, strict=True) if given}
        self._compiled: dict[Hashable, Jit] = {}
        self._tasks = self._linked(found)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The step's results, flat, of its flat arguments."""
        values = _Values(self._cores, dict(zip(self._step.inputs, [*self._step.consts, *args], strict=True)))
        following: list[Task | None] = [*self._tasks[1:], None]
        for task, next_task in zip(self._tasks, following, strict=True):
            if next_task is not None:
                values.send(next_task)
            values.put(task, task.run(*values.operands(task)), self._place)
            values.drop(task.over, self._donated)
        return values_of(values.here, self._step.outputs)

    def _place(self, v: Var) -> Sharding:
        """Where on the accelerator a value lives."""
        return self._places.get(v) or SingleDeviceSharding(next(iter(self._devices)))

    def _linked(self, step: Staged) -> list[Task]:
        """The stages, with what each leaves for which."""
        results = {*variables(step.outputs)}
        last = {v: k for k, stage in enumerate(step.stages) for v in stage.reads}
        by_cores = {v for stage in step.stages if stage.on_cores for v in stage.reads}
        by_device = {v for stage in step.stages if not stage.on_cores for v in stage.reads} | results
        # not ours: what was not donated, and what a loop that did not run hands on
        others = {*step.inputs} - self._donated | {v for s in step.stages if s.loop is not None for v in s.makes}
        tasks: list[Task] = []
        sent: set[Var] = set()
        for k, stage in enumerate(step.stages):
            made = [v for v in stage.makes if v in results or last.get(v, -1) > k]
            inputs, made = _side_by_side(stage.reads, made, step.next_of)
            over = [v for v in inputs if last[v] == k and v not in results]
            down: list[Var] = []
            if not stage.on_cores and stage.loop is None:
                down = [v for v in made if v in by_cores and is_sent(v.aval) and not is_host_aval(v.aval)]
            sent.update(down)
            outputs = [v for v in made if v in by_device or v not in down]
            run = self._program(stage, inputs, outputs, down, {*over} - others, sent)
            up = [v for v in made if v in by_device] if stage.on_cores else []
            tasks.append(Task(stage, inputs, outputs, down, up, over, run))
        return tasks

    def _program(
        self, stage: Stage, inputs: list[Var], outputs: list[Var], down: list[Var], free: Set[Var], sent: Set[Var]
    ) -> Callable[..., Sequence[Any]]:
        """A stage, compiled when it first runs. ``free``: whose buffers it may have."""
        if stage.loop is not None:
            return _Loop(stage.loop, inputs, outputs, free, self._options)
        kept = stage.on_cores and self._cores.cpu is not None
        donated = () if kept else _reusable(inputs, free, outputs, sent if stage.on_cores else set())
        places = [*map(self._result_place, outputs), *(None for _ in down)]
        key = stage.kind([*inputs, *outputs, *down])
        key = key if key is None else (key, len(inputs), len(down), donated, stage.on_cores, tuple(places))
        if key is not None and key in self._compiled:
            return self._compiled[key]

        def program(*operands: Any) -> list[Any]:
            env = dict(zip(inputs, operands, strict=True))
            if stage.on_cores:
                env = {v: x if is_host_aval(v.aval) else to_device(x) for v, x in env.items()}
            stage.run(env)
            return guarded([*(env[v] for v in outputs), *(to_host(env[v]) for v in down)], list(operands))

        program.__name__ = f"step_{stage.name}"
        options = {} if kept else {**self._options, "out_shardings": places}
        compiled = jax.jit(program, donate_argnums=donated, **options)
        if key is not None:
            self._compiled[key] = compiled
        return compiled

    def _result_place(self, v: Var) -> Sharding | None:
        """That of what it is the next value of, where it is divided."""
        place = self._places.get(v)
        if not isinstance(place, NamedSharding):
            return None
        return with_kind(place, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)


class _Values:
    """The values of a step that runs: ``here`` in the step's own memory, ``there`` for the cores."""

    def __init__(self, cores: Cores, given: dict[Var, Any]) -> None:
        self.here, self._there, self._cores = given, dict[Var, Any](), cores

    def send(self, task: Task) -> None:
        """What the cores are going to need starts on its way, as far as it is there."""
        for v in task.inputs if task.stage.on_cores else ():
            if v in self.here and v not in self._there:
                self._there[v] = self._cores.sent(self.here[v])

    def operands(self, task: Task) -> list[Any]:
        self.send(task)
        if not task.stage.on_cores:
            return [self.here[v] for v in task.inputs]
        return [self._cores.lent(self._there[v]) for v in task.inputs]

    def put(self, task: Task, results: Sequence[Any], place: Callable[[Var], Sharding]) -> None:
        n = len(task.outputs)
        made, down = dict(zip(task.outputs, results[:n], strict=True)), zip(task.down, results[n:], strict=True)
        if task.stage.on_cores:
            self._there |= made
            self.here |= {v: self._cores.brought_back(made[v], place(v)) for v in task.up}
        else:
            self.here |= made
            self._there |= down

    def drop(self, over: Sequence[Var], donated: Set[Var]) -> None:
        """Forgets values, and frees those that were donated, unless they are handed on under another name."""
        gone = {v: self.here.pop(v, None) for v in over}
        for v in over:
            self._there.pop(v, None)
        left = [x for v, x in gone.items() if v in donated and isinstance(x, jax.Array) and not x.is_deleted()]
        if left:
            live = {id(x) for x in self.here.values()}
            for x in left:
                if id(x) not in live:
                    x.delete()


class _Loop:
    """A ``while`` of the step that holds an update, ``skip=`` is one: its condition is read, its body driven."""

    def __init__(
        self,
        loop: Equation,
        reads: Sequence[Var],
        outputs: Sequence[Var],
        free: Set[Var],
        options: Mapping[str, Any],
    ) -> None:
        self._eqn, self._reads, self._free, self._options = loop, reads, free, options
        self._places = [self._eqn.outvars.index(v) for v in outputs]
        self._body: Driven | None = None
        condition, self._used = without_dead_code(self._eqn.params["cond_jaxpr"].jaxpr)
        self._condition = jax.jit(jax_fun(closed(condition, self._eqn.params["cond_jaxpr"].consts)))

    def __call__(self, *operands: Any) -> list[Any]:
        params = self._eqn.params
        given = values_of(dict(zip(self._reads, operands, strict=True)), self._eqn.invars)
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        consts, carry = given[n:m], given[m:]
        while self._holds([*given[:n], *carry]):
            if self._body is None:
                donated = [False] * len(consts) + [v in self._free for v in self._eqn.invars[m:]]
                self._body = Driven(params["body_jaxpr"], [*consts, *carry], donated, self._options)
            carry = self._body([*consts, *carry])
        return [carry[k] for k in self._places]

    def _holds(self, operands: Sequence[Any]) -> bool:
        (holds,) = self._condition(*(x for x, used in zip(operands, self._used, strict=True) if used))
        return bool(np.asarray(holds))


def _side_by_side(
    inputs: Sequence[Var], results: Sequence[Var], next_of: Mapping[Var, Var]
) -> tuple[list[Var], list[Var]]:
    """Both, first the inputs whose next values are among the results, in the same order as these.

    jax pairs what is donated with results in their order: of two moments, neither is then written into the other's
    buffer, which XLA would have to copy first.
    """
    next_values = {next_of[v]: v for v in results if v in next_of}
    old = [v for v in inputs if v in next_values]
    new = [next_values[v] for v in old]
    rest, others = {*old}, {*new}
    return [*old, *(v for v in inputs if v not in rest)], [*new, *(v for v in results if v not in others)]


def _reusable(inputs: Sequence[Var], free: Set[Var], outputs: Sequence[Var], sent: Set[Var]) -> tuple[int, ...]:
    """The places of the inputs whose buffers results may take: as many as there are results of their type and memory.

    ``sent``: those that are in host memory whatever their types say.
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
