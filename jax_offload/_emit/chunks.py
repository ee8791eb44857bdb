"""A slice as a loop over chunks of its leaves, which a stacked or a huge leaf needs.

Such a leaf is one buffer, which a copy would load whole. The loop carries the host buffers, and the arrays on the
device that the update may overwrite: it reads a chunk of each, runs the slice on it, and writes the results into the
same buffers at the same place. XLA keeps them where they are and aliases them through the loop; as ``xs`` and ``ys``
of a scan they would stand in host memory twice.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_offload._base.barriers import opaque, read_once, written_after
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._emit.rows import Buffers, Names, Values, buffers_of, fresh
from jax_offload._ir.slices import Slice
from jax_offload._plan.plan import Chunked

Chunk = tuple[Any, int]  # its first row, which may be traced, and its number of rows
State = tuple[Values, Values]  # whole arrays; and rows of host leaves, on the device, that are not stored yet


def looped(s: Slice, how: Chunked, names: Names) -> Callable[..., list[Any]]:
    """``run(*operands)``: the slice's results, chunk by chunk."""
    run = group_looped(s, how, names, how.where.size // how.shards)
    return lambda *operands: run(0, operands, {})


def group_looped(s: Slice, how: Chunked, names: Names, size: int) -> Callable[..., list[Any]]:
    """``run(start, operands, before)``: the slice's results for ``size`` rows of each shard, from row ``start`` on.

    Operands and results on the host have just these rows, and those on the device have all rows. ``before`` has what
    earlier groups have left of the results that overwrite no operand, and is empty in the first group.

    It loads and updates the first chunk; then, chunk by chunk, it stores that while the next is loaded, and updates the
    next. No chunk is updated after the loop: XLA would merge the writing of its rows with whatever uses the whole, in a
    buffer of its own.
    """
    into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
    loads, rows = s.core.loads, min(how.rows, size)

    def run(start: Any, operands: Sequence[Any], before: Values) -> list[Any]:
        given = dict(zip(s.inputs, operands, strict=True))
        loop = _Loop(s, how, buffers_of(s, how, names), given, [v for v in s.inputs if v in loads], start)
        full, rest = divmod(size, rows)
        first = (full * rows, rest) if rest else (0, rows)
        state = loop.first({v: given[v] for v in into if v in given} | fresh(s, how) | before, first)
        if rest:
            state = loop.advance(first[0], (0, rows), state)
        if full > 1:
            end, keys = opaque(jnp.int32(2)) if full == 2 else full, [[*values] for values in state]

            def advance(i: Any, values: Any) -> Any:
                wholes, new = (dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, values, strict=True))
                i = jnp.minimum(i, full)  # not the counter itself, which is written when every copy has read it
                after = loop.advance((i - 1) * rows, (i * rows, rows), (wholes, new))
                return [[x[v] for v in vs] for vs, x in zip(keys, after, strict=True)]

            values = jax.lax.fori_loop(1, end, advance, [[*values.values()] for values in state])
            wholes, new = (dict(zip(vs, xs, strict=True)) for vs, xs in zip(keys, values, strict=True))
            state = wholes, new
        wholes, _ = loop.exchange(*state, (full - 1) * rows, None)
        return [wholes[v] for v in into]

    return run


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The loop over the chunks of a slice.

    Attributes:
      given: the slice's operands.
      loads: the operands that are loaded.
      start: the number of the first row that is on the host.
    """

    s: Slice
    how: Chunked
    buffers: Buffers
    given: Values
    loads: Sequence[Var]
    start: Any

    def first(self, wholes: Values, chunk: Chunk) -> State:
        """The values after the first chunk's update."""
        return self.update(wholes, {v: self.buffers.load(self.given, v, *chunk) for v in self.loads}, chunk)

    def advance(self, at: Any, then: Chunk, state: State) -> State:
        """Stores the chunk that begins at row ``at``; loads and updates chunk ``then``."""
        return self.update(*self.exchange(*state, at, then), then)

    def update(self, wholes: Values, loaded: Values, chunk: Chunk) -> State:
        """Updates a chunk, and writes the part of it that stays on the device."""
        wholes, s, (at, n) = dict(wholes), self.s, chunk
        now, row = ChainMap(wholes, self.given), self.start + at
        reads = self.buffers.read
        given = [
            loaded[v] if v in loaded else reads(v, now[v], at if is_host_aval(v.aval) else row, n) for v in s.inputs
        ]
        held = [i for i, v in enumerate(s.inputs) if v in wholes and v not in loaded]
        for i, x in zip(held, read_once([given[i] for i in held]), strict=True):
            given[i] = x
        new = self.buffers.updated(s, self.how, given, row, n)
        return wholes, self.buffers.keep(s, self.how, new, wholes, row)

    def exchange(self, wholes: Values, new: Values, at: Any, then: Chunk | None) -> State:
        """Stores ``new`` from row ``at`` on; loads chunk ``then``. Each leaf is stored while the next one is loaded,
        and the last one while the first is, which is stored by then."""
        arrays, loaded, left = ChainMap(dict(wholes), self.given), Values(), dict(new)
        start, n = then or (0, 0)
        for k, v in enumerate(self.loads):
            stored = {v: left.pop(v)} if v in left else {}
            if stored and v in loaded:
                stored[v], loaded[v] = written_after(stored[v], loaded[v])
            loaded |= self.buffers.exchange(arrays, stored, at, self.loads[k + 1 : k + 2] if then else [], start, n)
        loaded |= self.buffers.exchange(arrays, left, at, self.loads[:1] if then else [], start, n)
        return dict(arrays.maps[0]), loaded


def or_batched(looped: Any, at_once: Any) -> Any:
    """``looped``, but ``at_once`` under ``vmap`` and differentiation: a batched slice of a host buffer is a gather."""
    batched = custom_vmap(looped)

    @batched.def_vmap
    def _(size: int, in_batched: list[bool], *args: Any) -> Any:
        axes = [0 if b else None for b in in_batched]
        out = jax.vmap(at_once, in_axes=axes, axis_size=size)(*args)
        return out, [True] * len(out)

    differentiable = jax.custom_jvp(batched)

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(at_once, primals, tangents)

    return differentiable
