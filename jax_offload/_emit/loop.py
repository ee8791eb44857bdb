"""A slice as a loop over chunks of its leaves: what a stacked or a huge leaf needs.

Such a leaf is one buffer, which a copy would load whole. The loop carries the host buffers, and the arrays on the
device that the update may overwrite: it reads a chunk of each, runs the slice on it, and writes the results into the
same buffers at the same place. XLA keeps them where they are and aliases them through the loop; as ``xs`` and ``ys``
of a scan they would stand in host memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_offload._base.memory import is_host_aval, to_device, to_host
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.rows import read_rows, row_indices, write_rows
from jax_offload._emit.transfers import Names, prefetch, update_of, write_back
from jax_offload._ir.core import core
from jax_offload._ir.slices import Slice
from jax_offload._plan.chunk_rules import Partial, Rows, run_chunk
from jax_offload._plan.plan import Chunked

Chunk = tuple[Any, int]  # its first row, which may be traced, and its number of rows


def looped(s: Slice, how: Chunked, names: Names) -> Callable[..., list[Any]]:
    """Loads and updates the first chunk; then, chunk by chunk, stores it while the next is loaded, and updates that.

    A host buffer cannot be read and written at the same time: XLA would copy it. So the buffers take turns: while the
    first is written, the second is read; while the second is written, once it has been read, the third is read; and
    while the last is written, the first is read, as it is by then. No chunk is updated after the loop: XLA would merge
    the writing of its rows with whatever uses the whole, in a buffer of its own.
    """
    inner, shards, rows, dims, out_dims = core(s), how.shards, how.rows, how.dims, how.out_dims
    where = how.shape[how.axis], how.shape, how.axis
    size = where[0] // shards
    carried = {v: k for k, v in enumerate(how.buffers) if v is not None}
    swaps = [(i, carried.get(v)) for i, v in enumerate(s.inputs) if v in inner.loads]  # operand, its next value
    stored = [k for k, v in enumerate(s.outputs) if is_host_aval(v.aval)]
    pins = s.pins

    def run(*operands: Any) -> list[Any]:
        def read(results: Sequence[Any], i: int, start: Any, n: int) -> Any:
            k, dim = carried.get(s.inputs[i]), dims[i]
            x = operands[i] if k is None else results[k]
            return x if dim is None else read_rows(x, dim.dim, start, n, shards, pins.get(s.inputs[i]))

        def write(results: list[Any], k: int, x: Any, start: Any) -> None:
            if isinstance(to := out_dims[k], Partial):
                results[k] = x if results[k] is None else to.combine(results[k], x)
            else:
                results[k] = write_rows(results[k], x, to.dim, start, shards, pins.get(s.outputs[k]))

        def store(results: list[Any], k: int, x: Any, start: Any) -> None:
            with write_back(s.outputs[k], names):
                write(results, k, to_host(x), start)

        def load(results: Sequence[Any], i: int, chunk: Chunk) -> Any:
            with prefetch(s.inputs[i], names):
                return to_device(read(results, i, *chunk))

        def update(results: Sequence[Any], loaded: dict[int, Any], start: Any, n: int) -> tuple[list, dict[int, Any]]:
            args = [loaded[i] if i in loaded else read(results, i, start, n) for i in range(len(s.inputs))]
            # Read once, before the rows are overwritten: XLA copies a buffer that two of its fusions still read. A
            # v5e's peak is 3952 MiB so, else 5488; an H200's the same on jax 0.12, and 56 MiB higher on 0.10.
            held = [i for i, v in enumerate(s.inputs) if v in carried and i not in loaded]
            for i, x in zip(held, jax.lax.optimization_barrier([args[i] for i in held]), strict=True):
                args[i] = x
            with update_of(s.loads, names):
                new = run_chunk(inner.jaxpr, dims, where, row_indices(where[0], start, n, shards), *args)
            results = list(results)
            for k in set(range(len(new))) - set(stored):
                write(results, k, new[k], start)
            return results, {k: new[k] for k in stored}

        def exchange(results: Sequence[Any], new: dict[int, Any], start: Any, then: Chunk | None) -> tuple[list, dict]:
            """Stores ``new`` in the rows from ``start`` on; loads chunk ``then``."""
            results, new, loaded = list(results), dict(new), {}
            for place, (i, k) in enumerate(swaps):
                if then and place + 1 < len(swaps):
                    following, _ = swaps[place + 1]
                    loaded[following] = load(results, following, then)
                if k is not None:
                    x = new.pop(k)
                    if i in loaded:
                        x, loaded[i] = jax.lax.optimization_barrier((x, loaded[i]))
                    store(results, k, x, start)
            for k, x in new.items():
                store(results, k, x, start)
            if then and swaps:
                loaded[swaps[0][0]] = load(results, swaps[0][0], then)
            return results, loaded

        def advance(at: Any, then: Chunk, state: Any) -> tuple[list, dict[int, Any]]:
            results, new = state
            return update(*exchange(results, new, at, then), *then)

        given = dict(zip(s.inputs, operands, strict=True))
        results = [None if old is None else given[old] for old in how.buffers]
        for k, (v, dim) in enumerate(zip(s.outputs, out_dims, strict=True)):
            if results[k] is None and isinstance(dim, Rows):  # a sum over chunks starts with that of the first
                results[k] = constrained(jnp.zeros(v.aval.shape, v.aval.dtype), typed_sharding(v.aval) or pins.get(v))
        full, rest = divmod(size, rows)
        first = (full * rows, rest) if rest else (0, rows)
        state: Any = update(results, {i: load(results, i, first) for i, _ in swaps}, *first)
        if rest:
            state = advance(first[0], (0, rows), state)
        if full > 1:
            # XLA would unroll a loop that runs once, and not update in place (2x4096x4096: 712 MiB, resident 688)
            end = jax.lax.optimization_barrier(jnp.int32(2)) if full == 2 else full
            state = jax.lax.fori_loop(1, end, lambda i, st: advance((i - 1) * rows, (i * rows, rows), st), state)
        results, new = state
        return exchange(results, new, (full - 1) * rows, None)[0]

    return run


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
