"""Slices of an update whose leaves are on disk: whole, or some rows at a time with rows of the state as arrays.

Arrays on the device are handed from part to part, and each part writes its rows into the same buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np

from jax_offload._base.jaxprs import Atom, Var, jaxpr_of, values_of, variables
from jax_offload._base.memory import is_host_aval
from jax_offload._base.on_disk import Ends, Range
from jax_offload._emit.region import Update
from jax_offload._emit.rows import group_looped
from jax_offload._emit.run import functions
from jax_offload._ir.program import Builder, Program, as_program, numbered, structure
from jax_offload._ir.slices import Slice, slice_of
from jax_offload._plan.plan import Chunked, Planned
from jax_offload._plan.transfers import in_parts


@dataclasses.dataclass
class ByRows:
    """The slices of a step that read and write leaves on disk.

    Attributes:
      ends: leaf on disk, read or made -> where the ranges of rows end that are together in its files.
      parts: leaf that is read or written in parts -> the variables of its parts, and the rows of each shard that they
        have.
      starts: number of a first row -> its variable, an operand of parts.
      next_of: result of a part -> the variable that it is the next value of.
      traced: kind of a slice -> what it does. Slices that do the same are traced once.
    """

    ends: Mapping[Var, Ends]
    parts: dict[Var, list[tuple[Var, Range]]] = dataclasses.field(default_factory=dict[Var, list[tuple[Var, Range]]])
    starts: dict[int, Var] = dataclasses.field(default_factory=dict[int, Var])
    next_of: dict[Var, Var] = dataclasses.field(default_factory=dict[Var, Var])
    traced: dict[Hashable, Program] = dataclasses.field(default_factory=dict[Hashable, Program])
    key_of: Callable[[Any], Hashable] = dataclasses.field(default_factory=numbered)

    def slices_of(self, update: Update, planned: Sequence[Planned]) -> Iterator[Slice]:
        """Yield the slices of an update, in the step's variables, each whole or in parts."""
        slices = [s for each in update.passes for s in (each.prelude, *(p.slice for p in each.slices))]
        again = {v for s in slices for v in s.inputs}  # a leaf that another slice reads is written whole
        for p in planned:
            ranges = self._ranges(p, again)
            how = in_parts(p, update.next_values, update.on_disk) if ranges else None
            if isinstance(how, Chunked) and how.shape[0] == how.shards * ranges[-1][1]:
                yield from self._parts(p, how, update, ranges)
            else:
                yield self._whole(p, update)

    def _ranges(self, p: Planned, again: Set[Var]) -> list[Range]:
        """Return the ranges of rows that are together in the files of all leaves; none if there are not several."""
        ends = [self.ends.get(v, ()) for v in p.slice.loads]
        ends += [() if v in again else self.ends.get(v, ()) for v in p.slice.stores]
        common = sorted(set[int].intersection(*map(set, ends))) if ends else []
        return [*pairwise([0, *common])] if len(common) > 1 else []

    def _whole(self, p: Planned, update: Update) -> Slice:
        def run(*args: Any) -> list[Any]:
            env = dict(zip(p.slice.inputs, args, strict=True))
            functions([p], update.names, lowered=True)(p, env)
            return values_of(env, p.slice.outputs)

        how = (p.transfer.axis, p.transfer.rows, p.transfer.shape) if isinstance(p.transfer, Chunked) else None
        return self._slice_by(run, p.slice.inputs, p.slice.outputs, (structure(p.slice.jaxpr, self.key_of), how))

    def _parts(self, p: Planned, how: Chunked, update: Update, ranges: Sequence[Range]) -> Iterator[Slice]:
        s = p.slice
        now = {v: v for v in s.inputs}  # what earlier parts have left, in whose buffer a result goes
        into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
        places = tuple(s.inputs.index(v) if v in now else None for v in into)
        same = structure(s.jaxpr, self.key_of), how.axis, how.shards, places, p.window.nbytes
        for begin, end in ranges:
            n, rows = end - begin, (begin, end)
            before = [v for v in s.outputs if v in now]
            given = {v: self._part(v, how.shards, rows) if is_host_aval(v.aval) else now[v] for v in s.inputs}
            operands = [self._start(begin), *given.values(), *(now[v] for v in before)]
            results = list[Var]()
            for v, of in zip(s.outputs, into, strict=True):
                if is_host_aval(v.aval):
                    new, old = self._part(v, how.shards, rows), given.get(of)
                else:
                    new = v if end == ranges[-1][1] else Var(v.aval)
                    old = now.get(of, update.next_values.get(v))
                    now[of] = new
                self.next_of |= {} if old is None else {new: old}
                results.append(new)
            run = _of_rows(group_looped(s, how, update.names, n), len(s.inputs), before)
            yield self._slice_by(run, operands, results, (*same, n, bool(before)))

    def _part(self, of: Var, shards: int, rows: Range) -> Var:
        """A variable for some rows of each shard of a leaf: of its type, in its memory and divided in the same way."""
        shape = (shards * (rows[1] - rows[0]), *of.aval.shape[1:])
        found = Var(of.aval.update(shape=shape))
        self.parts.setdefault(of, []).append((found, rows))
        return found

    def _start(self, begin: int) -> Var:
        if begin not in self.starts:
            traced, _ = jaxpr_of(lambda x: x, np.int32(begin))
            self.starts[begin] = Var(traced.jaxpr.invars[0].aval)
        return self.starts[begin]

    def _slice_by(
        self, run: Callable[..., Any], inputs: Sequence[Atom], outputs: Sequence[Var], kind: Hashable
    ) -> Slice:
        """Return a function as a slice; functions of one ``kind`` share a trace."""
        if kind not in self.traced:
            self.traced[kind] = as_program(jaxpr_of(run, *(v.aval for v in inputs))[0])
        new, program = Builder(), self.traced[kind]
        inner = new.inside(program, inputs)
        inner.copy(*program.eqns, results=dict(zip(variables(program.outputs), outputs, strict=True)))
        return slice_of(new.eqns, [*outputs], program.debug_info, {})


def _of_rows(run: Callable[..., list[Any]], n: int, before: Sequence[Var]) -> Callable[..., list[Any]]:
    """Return a function of a first row, ``n`` operands, and the results ``before`` that earlier parts have left."""
    return lambda start, *values: run(start, values[:n], dict(zip(before, values[n:], strict=True)))
