"""Reads ahead of the stages of a step that runs, and writes behind them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
from jax.sharding import Sharding

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Literal, Var, values_of, variables
from jax_offload._base.on_disk import Place
from jax_offload._drive.by_rows import Part
from jax_offload._drive.files import OnFiles
from jax_offload._drive.stages import BEFORE, GROUP, Staged
from jax_offload._drive.tasks import Task

# How many stages' leaves are being read, or written, while another stage runs, and how many bytes of them each way: a
# row of a leaf may be gigabytes, and then the one that is needed is enough.
DEPTH, AT_ONCE = 2, 2**29


def beside(sizes: Iterable[int]) -> int:
    """How many groups of so many bytes, the nearest first, are read, or written, beside the one that is needed."""
    return sum(total <= AT_ONCE for total in itertools.accumulate(itertools.islice(sizes, DEPTH)))


def _bytes_of(leaves: Iterable[Var]) -> int:
    return sum(nbytes(v.aval) for v in leaves)


class Moving:
    """The reads and writes of one run of a step.

    Args:
      what: of it is on disk.
      step: its stages.
      tasks: they, as they run.
      values: of its inputs, and of all that is made of them.
      places: where what is read is to be, on its way to the device.
    """

    def __init__(
        self,
        what: OnFiles,
        step: Staged,
        tasks: Sequence[Task],
        values: dict[Var, Any],
        places: Mapping[Var, Sharding],
    ) -> None:
        self._what, self._values, self._places = what, values, places
        self._reads = {v: Part(leaf) for v, (_, leaf) in what.reads.items()}
        self._reads |= {w: Part(leaf, rows) for v, (_, leaf) in what.reads.items() for w, rows in step.parts.get(v, ())}
        self._read_by: dict[Place, list[tuple[Part, int]]] = {}  # leaf -> the tasks that read it, and what of it
        for k, task in enumerate(tasks):
            for part in (self._reads[v] for v in task.inputs if v in self._reads):
                self._read_by.setdefault(part.leaf, []).append((part, k))
        self._held: dict[Var, None] = {}  # made, and not written yet
        self._outputs = step.outputs[: what.n_others]
        self._unwritten: dict[Var, list[Part]] = {}
        for v, leaf in zip(step.outputs[what.n_others :], what.writes, strict=True):
            for w, rows in step.parts.get(cast(Var, v)) or [(cast(Var, v), None)]:
                self._unwritten.setdefault(w, []).append(Part(leaf, rows))
        self._reading: dict[Var, Future[jax.Array]] = {}
        self._writing: deque[tuple[int, list[Future[None]]]] = deque()  # with how many bytes they are
        for token, leaf in what.reads.values():
            leaf.home.check(token.val if isinstance(token, Literal) else values[token])

    def read(self, task: Task, following: Sequence[Task]) -> None:
        """What it needs, and what those that read files next are going to need starts on its way.

        Waits until that is there; before, until what was made long ago has been written, as its memory is for these.
        """
        while self._writing and (self._first_is_written() or self._writes_too_much(task)):
            for writing in self._writing.popleft()[1]:
                writing.exception()  # which is said when the step ends: other processes are in it too
        now, ahead = self._read_of(task), [*itertools.islice(filter(None, map(self._read_of, following)), DEPTH)]
        if not now and not self._writing and ahead:  # the first of them is the one that is needed
            now, *ahead = ahead
        for v in itertools.chain(now, *ahead[: beside(map(_bytes_of, ahead))]):
            if v not in self._reading:
                part = self._reads[v]
                self._reading[v] = part.leaf.home.fetch(part.leaf.name, self._places[v], part.rows)
        self._values |= {v: self._reading.pop(v).result() for v in task.inputs if v in self._reads}

    def _read_of(self, task: Task) -> list[Var]:
        return [v for v in task.inputs if v in self._reads]

    def _first_is_written(self) -> bool:
        return all(writing.done() for writing in self._writing[0][1])

    def _writes_too_much(self, task: Task) -> bool:
        """The pass waits for none, and what only follows the groups needs no memory for bytes of them."""
        if task.stage.name == BEFORE:
            return False
        if task.stage.name != GROUP:
            return len(self._writing) > DEPTH
        return len(self._writing) > beside((size for size, _ in reversed(self._writing)))

    def write(self, number: int, task: Task) -> None:
        """What this and earlier ones have made is being written, as far as no later one reads the old value: a gradient
        that is only stored is there first. Nothing of it is held here any more."""
        for v in task.inputs:
            if v in self._reads:
                self._values.pop(v, None)
        self._held |= dict.fromkeys(v for v in task.outputs if v in self._unwritten)
        self._write(number)

    def _write(self, number: float) -> None:
        now = [v for v in self._held if all(self._last_read(part) <= number for part in self._unwritten[v])]
        parts = [(part, v) for v in now for part in self._unwritten.pop(v)]
        if parts:
            writing = [each.leaf.home.put(each.leaf.name, self._values[v], each.rows) for each, v in parts]
            self._writing.append((_bytes_of(v for _, v in parts), writing))
        for v in now:
            del self._held[v]
        for v in {*now}.difference(variables(self._outputs)):
            del self._values[v]

    def _last_read(self, part: Part) -> int:
        """The last of the tasks that read something of it."""
        return max((k for other, k in self._read_by.get(part.leaf, ()) if other.meets(part)), default=-1)

    def results(self) -> list[Any]:
        """The step's results."""
        self._held |= dict.fromkeys(self._unwritten)  # with what no stage has made
        self._write(math.inf)
        others = values_of(self._values, self._outputs)
        homes = dict.fromkeys(leaf.home for leaf in self._what.tokens.values())
        tokens, rest = {home: home.advance() for home in homes}, iter(others)
        n = len(others) + len(self._what.tokens)
        return [tokens[leaf.home] if (leaf := self._what.tokens.get(k)) else next(rest) for k in range(n)]
