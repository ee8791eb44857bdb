"""Updates of leaves on disk, some rows at a time: each part is a slice whose rows of the state are arrays of their own.

Arrays on the device are handed from part to part, and each part writes its rows into the same buffer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jax_offload._base.jaxprs import Atom, Var, jaxpr_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends, Range
from jax_offload._emit.region import Update
from jax_offload._emit.rows import group_looped
from jax_offload._ir.program import structure
from jax_offload._plan.plan import Chunked, Planned
from jax_offload._plan.transfers import in_parts

# A function, its operands and results in the step, and a key that is equal for parts that do the same.
Part = tuple[Callable[..., list[Any]], list[Atom], list[Var], Hashable]


@dataclasses.dataclass
class ByRows:
    """Leaves of a step that are read and written by rows.

    Attributes:
      ends: of leaves on disk, read or made: where the ranges of rows end that are together in files.
      parts: leaf -> the variables of its parts, and the rows of each shard that they have.
      starts: number of a first row -> its variable, an operand of parts.
      next_of: part -> the variable that it is the next value of.
    """

    ends: Mapping[Var, Ends]
    parts: dict[Var, list[tuple[Var, Range]]] = dataclasses.field(default_factory=dict[Var, list[tuple[Var, Range]]])
    starts: dict[int, Var] = dataclasses.field(default_factory=dict[int, Var])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])

    def parts_of(
        self, p: Planned, update: Update, names: Mapping[Var, Any], defined: Mapping[Var, Var]
    ) -> Iterator[Part]:
        """Divide a slice into parts of some rows each; yield nothing if it takes its leaves whole.

        Args:
          p: the slice.
          update: the update that it belongs to.
          names: variable of the update -> variable of the step.
          defined: the result of `produced_once`.
        """
        s = p.slice
        ends = [self.ends.get(names.get(v, v)) for v in s.loads]
        ends += [self.ends.get(defined[v]) if v in defined else None for v in s.stores]
        known = [each for each in ends if each is not None]
        common = sorted(set[int].intersection(*map(set, known))) if known and len(known) == len(ends) else []
        if len(common) < 2:
            return
        how = in_parts(p, update.next_values, update.on_disk)
        if isinstance(how, Chunked) and how.shape[0] == how.shards * common[-1]:
            yield from self._parts(p, how, update, names, [*pairwise([0, *common])])

    def _parts(
        self, p: Planned, how: Chunked, update: Update, names: Mapping[Var, Any], ranges: Sequence[Range]
    ) -> Iterator[Part]:
        s = p.slice
        now = {v: names.get(v, v) for v in s.inputs}  # what earlier parts have left, in whose buffer a result goes
        into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
        places = tuple(s.inputs.index(v) if v in now else None for v in into)
        same = structure(s.jaxpr), how.axis, how.shards, places, p.window.nbytes
        for begin, end in ranges:
            n = end - begin
            before = [v for v in s.outputs if v in now]
            given = {
                v: self._part(x, v.aval, n * how.shards, (begin, end)) if is_host_aval(v.aval) else x
                for v, x in ((v, now[v]) for v in s.inputs)
            }
            operands = [self._start(begin), *given.values(), *(now[v] for v in before)]
            results = list[Var]()
            for v, of in zip(s.outputs, into, strict=True):
                if is_host_aval(v.aval):
                    new, old = self._part(v, v.aval, n * how.shards, (begin, end)), given.get(of)
                else:
                    new = v if end == ranges[-1][1] else Var(v.aval)
                    old = now.get(of, self._was(update, names, v))
                    now[of] = new
                self.next_of |= {} if old is None else {new: old}
                results.append(new)
            yield _run(p, how, update, n, before), operands, results, (*same, n, bool(before))

    def _was(self, update: Update, names: Mapping[Var, Any], v: Var) -> Var | None:
        old = update.next_values.get(v)
        found = None if old is None else names.get(old, old)
        return found if isinstance(found, Var) else None

    def _part(self, of: Var, aval: Any, rows: int, which: Range) -> Var:
        """A variable for some rows of a leaf: of the same type, in the same memory and divided in the same way."""
        found = Var(aval.update(shape=(rows, *aval.shape[1:])))
        self.parts.setdefault(of, []).append((found, which))
        return found

    def _start(self, begin: int) -> Var:
        if begin not in self.starts:
            traced, _ = jaxpr_of(lambda x: x, np.int32(begin))
            self.starts[begin] = Var(traced.jaxpr.invars[0].aval)
        return self.starts[begin]


def _run(p: Planned, how: Chunked, update: Update, n: int, before: Sequence[Var]) -> Callable[..., list[Any]]:
    """The function of ``n`` rows; ``before``: the results that earlier parts have left."""
    run, k = group_looped(p.slice, how, update.names, n), len(p.slice.inputs)
    return lambda start, *values: run(start, values[:k], dict(zip(before, values[k:], strict=True)))


def produced_once(update: Update, results: Sequence[Var]) -> dict[Var, Var]:
    """Map an update's results to the step's variables, unless the step has one twice or the update reads it again."""
    slices = [s for each in update.passes for s in (each.prelude, *(p.slice for p in each.slices))]
    times = Counter([v for s in slices for v in s.inputs] + variables(update.program.outputs))
    pairs = zip(results, update.program.outputs, strict=True)
    return {v: x for x, v in pairs if isinstance(v, Var) and times[v] == 1}
