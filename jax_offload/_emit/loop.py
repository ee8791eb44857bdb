"""A slice as a loop over chunks of its leaves: what a stacked or a huge leaf needs.

Such a leaf is one buffer, which a copy would load whole. The loop carries the host buffers, and the arrays on the
device that the update may overwrite: it reads a chunk of each, runs the slice on it, and writes the results into the
same buffers at the same place. XLA keeps them where they are and aliases them through the loop; as ``xs`` and ``ys``
of a scan they would stand in host memory twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding

from jax_offload._base.arrays import row_indices
from jax_offload._base.barriers import opaque, read_once, written_after
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.rows import read_rows, write_rows
from jax_offload._emit.transfers import Names, prefetch, update_of, write_back
from jax_offload._ir.slices import Core, Slice, core
from jax_offload._plan.plan import Chunked, tiles
from jax_offload._plan.rules import Partial, Rows, run_chunk

Chunk = tuple[Any, int]  # its first row, which may be traced, and its number of rows
Results = list[Any]  # of the slice, as far as they are written; ``None``: a sum that has not begun
New = dict[int, Any]  # by the number of the result: rows of a chunk, on the device, that are not stored yet
Loaded = dict[int, Any]  # by the number of the operand: rows of a chunk


def looped(s: Slice, how: Chunked, names: Names) -> Callable[..., list[Any]]:
    """Loads and updates the first chunk; then, chunk by chunk, stores it while the next is loaded, and updates that.

    A host buffer cannot be read and written at the same time: XLA would copy it. So the buffers take turns: while the
    first is written, the second is read; while the second is written, once it has been read, the third is read; and
    while the last is written, the first is read, as it is by then. No chunk is updated after the loop: XLA would merge
    the writing of its rows with whatever uses the whole, in a buffer of its own.
    """
    inner = core(s)

    def run(*operands: Any) -> list[Any]:
        loop, rows = _Loop(s, how, names, inner, operands), how.rows
        full, rest = divmod(how.shape[how.axis] // how.shards, rows)
        first = (full * rows, rest) if rest else (0, rows)
        state = loop.first(first)
        if rest:
            state = loop.advance(first[0], (0, rows), state)
        if full > 1:
            end = opaque(jnp.int32(2)) if full == 2 else full
            state = jax.lax.fori_loop(1, end, lambda i, st: loop.advance((i - 1) * rows, (i * rows, rows), st), state)
        results, new = state
        return loop.exchange(results, new, (full - 1) * rows, None)[0]

    return run


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What happens to the chunks of a slice, given all of its operands.

    Attributes:
      inner: the slice without its transfers.
    """

    s: Slice
    how: Chunked
    names: Names
    inner: Core
    operands: Sequence[Any]

    @functools.cached_property
    def carried(self) -> dict[Var, int]:
        """Operand -> the result that is written into its buffer."""
        return {v: k for k, v in enumerate(self.how.buffers) if v is not None}

    @functools.cached_property
    def swaps(self) -> list[tuple[int, int | None]]:
        """The operands that are loaded, each with the result that is its next value: they take turns."""
        return [(i, self.carried.get(v)) for i, v in enumerate(self.s.inputs) if v in self.inner.loads]

    @functools.cached_property
    def stored(self) -> list[int]:
        """The results that are stored."""
        return [k for k, v in enumerate(self.s.outputs) if is_host_aval(v.aval)]

    @functools.cached_property
    def pins(self) -> dict[Var, NamedSharding]:
        return self.s.pins

    def first(self, chunk: Chunk) -> tuple[Results, New]:
        """What there is once the first chunk is updated."""
        given = dict(zip(self.s.inputs, self.operands, strict=True))
        results: Results = [None if old is None else given[old] for old in self.how.buffers]
        for k, (v, dim) in enumerate(zip(self.s.outputs, self.how.out_dims, strict=True)):
            if results[k] is None and isinstance(dim, Rows):  # a sum over chunks starts with that of the first
                results[k] = constrained(
                    jnp.zeros(v.aval.shape, v.aval.dtype), typed_sharding(v.aval) or self.pins.get(v)
                )
        return self.update(results, {i: self.load(results, i, chunk) for i, _ in self.swaps}, chunk)

    def advance(self, at: Any, then: Chunk, state: tuple[Results, New]) -> tuple[Results, New]:
        """Stores the chunk that begins at row ``at``; loads and updates chunk ``then``."""
        return self.update(*self.exchange(*state, at, then), then)

    def update(self, results: Results, loaded: Loaded, chunk: Chunk) -> tuple[Results, New]:
        """Updates a chunk, and writes what stays on the device."""
        s, how = self.s, self.how
        args = [loaded[i] if i in loaded else self.read(results, i, chunk) for i in range(len(s.inputs))]
        held = [i for i, v in enumerate(s.inputs) if v in self.carried and i not in loaded]
        for i, x in zip(held, read_once([args[i] for i in held]), strict=True):
            args[i] = x
        where = how.shape[how.axis], how.shape, how.axis
        with update_of(s.loads, self.names):
            new = run_chunk(self.inner.jaxpr, how.dims, where, row_indices(where[0], *chunk, how.shards), *args)
        results = list(results)
        for k in set(range(len(new))) - set(self.stored):
            self.write(results, k, new[k], chunk[0])
        return results, {k: new[k] for k in self.stored}

    def exchange(self, results: Results, new: New, start: Any, then: Chunk | None) -> tuple[Results, Loaded]:
        """Stores ``new`` in the rows from ``start`` on; loads chunk ``then``."""
        results, new, loaded = list(results), dict(new), Loaded()
        for place, (i, k) in enumerate(self.swaps):
            if then and place + 1 < len(self.swaps):
                following, _ = self.swaps[place + 1]
                loaded[following] = self.load(results, following, then)
            if k is not None:
                x = new.pop(k)
                if i in loaded:
                    x, loaded[i] = written_after(x, loaded[i])
                self.store(results, k, x, start)
        for k, x in new.items():
            self.store(results, k, x, start)
        if then and self.swaps:
            first, _ = self.swaps[0]
            loaded[first] = self.load(results, first, then)
        return results, loaded

    def load(self, results: Results, i: int, chunk: Chunk) -> Any:
        with prefetch(self.s.inputs[i], self.names):
            return to_device(self.read(results, i, chunk))

    def store(self, results: Results, k: int, x: Any, start: Any) -> None:
        v, to = self.s.outputs[k], self.how.out_dims[k]
        assert isinstance(to, Rows)  # a sum stays on the device
        with write_back(v, self.names):
            shards, pin = self.how.shards, self.pins.get(v)
            n = x.shape[to.dim] // shards
            for begin, end in tiles(n, to.dim, x.ndim):
                rows = x if end - begin == n else read_rows(x, to.dim, begin, end - begin, shards, pin)
                self.write(results, k, to_host(rows), start + begin)

    def read(self, results: Results, i: int, chunk: Chunk) -> Any:
        """A chunk of an operand, from its buffer; or all of what has no rows."""
        v, dim = self.s.inputs[i], self.how.dims[i]
        x = results[self.carried[v]] if v in self.carried else self.operands[i]
        return x if dim is None else read_rows(x, dim.dim, *chunk, self.how.shards, self.pins.get(v))

    def write(self, results: Results, k: int, x: Any, start: Any) -> None:
        """A chunk of a result, into its buffer; or added to its sum."""
        if isinstance(to := self.how.out_dims[k], Partial):
            results[k] = x if results[k] is None else to.combine(results[k], x)
        else:
            pin = self.pins.get(self.s.outputs[k])
            results[k] = write_rows(results[k], x, to.dim, start, self.how.shards, pin)


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
