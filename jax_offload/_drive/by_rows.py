"""Slices that run row by row, some rows a piece: these rows of the state come from disk and return there as arrays.

Arrays on the device go from piece to piece, and each piece writes its rows into the same buffer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jax_offload._base.jaxprs import Atom, Aval, Jaxpr, Var, jaxpr_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends, Place, Range
from jax_offload._emit.chunks import group_looped
from jax_offload._emit.region import Update
from jax_offload._ir.program import structure
from jax_offload._plan.plan import Chunked, Planned
from jax_offload._plan.transfers import in_parts


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a stage: ``outputs`` from ``inputs`` by ``run``; pieces of one ``kind`` do the same.

    ``jaxpr``: what ``run`` does, where that is known.
    """

    inputs: list[Atom]
    outputs: list[Var]
    run: Callable[..., Sequence[Any]]
    kind: Hashable = None
    jaxpr: Jaxpr | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a leaf on disk; ``None``: all."""

    leaf: Place
    rows: Range | None = None

    def meets(self, other: Part) -> bool:
        """Whether two parts of one leaf share rows."""
        if self.rows is None or other.rows is None:
            return True
        return self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]


@dataclasses.dataclass
class ByRows:
    """Leaves of a step that are read and written by rows.

    Attributes:
      ends: of leaves on disk, read or made: where the ranges of rows end that are together in files.
      parts: such a leaf -> the variables of its parts, and which rows of each shard they are.
      starts: the numbers of first rows, which are operands of the pieces.
      next_of: what a part is the next value of.
    """

    ends: Mapping[Var, Ends]
    parts: dict[Var, list[tuple[Var, Range]]] = dataclasses.field(default_factory=dict[Var, list[tuple[Var, Range]]])
    starts: dict[int, Var] = dataclasses.field(default_factory=dict[int, Var])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])

    def pieces(self, p: Planned, update: Update, names: Mapping[Var, Any], defined: Mapping[Var, Var]) -> list[Piece]:
        """A slice as pieces of some rows each; none where it takes its leaves whole.

        Args:
          p: the slice.
          update: whose it is.
          names: variable of the update -> variable of the step.
          defined: what `produced_once` finds.
        """
        s = p.slice
        ends = [self.ends.get(names.get(v, v)) for v in s.loads]
        ends += [self.ends.get(defined[v]) if v in defined else None for v in s.stores]
        known = [each for each in ends if each is not None]
        common = sorted(set[int].intersection(*map(set, known))) if known and len(known) == len(ends) else []
        if len(common) < 2:
            return []
        how = in_parts(p, update.next_values, update.on_disk)
        if not isinstance(how, Chunked) or how.shape[0] != how.shards * common[-1]:
            return []
        return list(self._pieces(p, how, update, names, [*pairwise([0, *common])]))

    def _pieces(
        self, p: Planned, how: Chunked, update: Update, names: Mapping[Var, Any], ranges: Sequence[Range]
    ) -> Iterator[Piece]:
        s = p.slice
        now: list[Any] = [names.get(v, v) for v in s.inputs]  # of each operand, as earlier pieces have left it
        left: list[Var | None] = [None for _ in s.outputs]  # and each result
        place = {v: i for i, v in enumerate(s.inputs)}
        buffers = [None if old is None else place[old] for old in how.buffers]
        same = structure(s.jaxpr), how.axis, how.shards, tuple(buffers), p.window.nbytes
        runs: dict[int, Any] = {}
        for begin, end in ranges:
            n, first, last = end - begin, begin == 0, end == ranges[-1][1]
            inputs, outputs = list(now), list[Var]()
            for i, v in enumerate(s.inputs):
                if is_host_aval(v.aval):
                    inputs[i] = self._part(now[i], v.aval, n * how.shards, (begin, end))
            for k, v in enumerate(s.outputs):
                if is_host_aval(v.aval):
                    new = self._part(v, v.aval, n * how.shards, (begin, end))
                    old = inputs[i] if (i := buffers[k]) is not None else None
                else:
                    i, new = buffers[k], v if last else Var(v.aval)
                    old = left[k] if i is None else now[i]
                    old = self._was(update, names, v) if first and old is None else old
                self.next_of |= {} if old is None else {new: old}
                outputs.append(new)
            before = [None if is_host_aval(v.aval) or i is not None else x
                      for v, i, x in zip(s.outputs, buffers, left, strict=True)]  # fmt: skip
            if n not in runs:
                runs[n] = group_looped(s, how, update.names, n)
            yield Piece(
                [self._start(begin), *inputs, *(x for x in before if x is not None)],
                outputs,
                _called(runs[n], len(inputs), [x is not None for x in before]),
                (*same, n, tuple(x is None for x in before)),
            )
            for k, v in enumerate(s.outputs):
                if not is_host_aval(v.aval):
                    left[k] = outputs[k]
                    if (i := buffers[k]) is not None:
                        now[i] = outputs[k]

    def _was(self, update: Update, names: Mapping[Var, Any], v: Var) -> Var | None:
        old = update.next_values.get(v)
        found = None if old is None else names.get(old, old)
        return found if isinstance(found, Var) else None

    def _part(self, of: Var, aval: Aval, rows: int, which: Range) -> Var:
        """A variable for some rows of a leaf."""
        found = Var(with_rows(aval, rows))
        self.parts.setdefault(of, []).append((found, which))
        return found

    def _start(self, begin: int) -> Var:
        if begin not in self.starts:
            traced, _ = jaxpr_of(lambda x: x, np.int32(begin))
            self.starts[begin] = Var(traced.jaxpr.invars[0].aval)
        return self.starts[begin]


def produced_once(update: Update, results: Sequence[Var]) -> dict[Var, Var]:
    """Map an update's results to the step's variables, unless the step has one twice or the update reads it again."""
    slices = [s for each in update.passes for s in (each.prelude, *(p.slice for p in each.slices))]
    times = Counter([v for s in slices for v in s.inputs] + variables(update.program.outputs))
    pairs = zip(results, update.program.outputs, strict=True)
    return {v: x for x, v in pairs if isinstance(v, Var) and times[v] == 1}


def with_rows(aval: Any, rows: int) -> Aval:
    """The type of an array with so many rows, in the same memory and divided in the same way."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def _called(run: Any, n: int, given: Sequence[bool]) -> Any:
    def called(start: Any, *values: Any) -> list[Any]:
        rest = iter(values[n:])
        return run(start, values[:n], [next(rest) if there else None for there in given])

    return called
