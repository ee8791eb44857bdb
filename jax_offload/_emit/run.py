"""A schedule, emitted: load → update → store, slice after slice, through a bounded window."""

import contextlib
import dataclasses
import functools
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._program.arrays import row_indices
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Var,
    called_by,
    jax_fun,
    jit,
)
from jax_offload._program.memory import constrained, is_host_aval, padded, to_device, to_host, typed_sharding, zeros
from jax_offload._program.primitives import gate, opaque, read_once, written_after
from jax_offload._program.program import structures
from jax_offload._program.rules import Dim, Partial, Rows, run_chunk
from jax_offload._program.slices import Slice
from jax_offload._schedule.schedule import Gate, Planned, RowWise, Schedule, tiles

# ---- rows of whole arrays, in a loop: over chunks, in a scan, or from disk
#
# A stacked or a huge leaf is one buffer, which a copy would load whole. So a loop carries the host buffers, and the
# arrays on the device that the update may overwrite: it reads some rows of each, runs the slice on them, and writes
# the results into the same buffers at the same place. XLA keeps them where they are and aliases them through the
# loop; as ``xs`` and ``ys`` of a scan they would stand in host memory twice.
#
# A chunk has the same rows of every shard of its axis, so no device needs another's rows, and XLA sees that. A given
# sharding is pinned at every step: otherwise XLA may divide the loop's carry like the rows written into it, and
# gather the whole each time.

Names = Mapping[Var, str]  # the leaf's path in the state, of each of its values
Values = OrderedDict[Var, Any]  # a tree, with variables as its keys
Arrays = MutableMapping[Var, Any]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """How rows of whole arrays are read and written.

    Attributes:
      dims: where the rows of each array are; one that has none is read whole.
      pins: the shardings of arrays.
      names: the names of the state's leaves.
      shards: into how many parts the axis of the rows is divided between devices.
      laid_out: a function of rows on the device and their array, applied before the rows are written.
      kinds: the functions that update rows; slices that are alike share one, which is traced once and inlined by XLA.
    """

    dims: Mapping[Var, Dim]
    pins: Mapping[Var, NamedSharding]
    names: Names
    shards: int = 1
    laid_out: Callable[[Var, Any], Any] = lambda _, x: x
    kinds: dict[Hashable, Callable[..., list[Any]]] = dataclasses.field(default_factory=dict)
    structure: Callable[[Any], Hashable] = dataclasses.field(default_factory=structures)

    def read(self, v: Var, x: Any, start: Any, n: int = 1) -> Any:
        """``n`` rows of each shard of ``x``, which is the array ``v``.

        Rows outside of it are the first or the last ones. XLA copies with the GPU's copy engines only where a loop's
        slices begin at multiples of its counter; it leaves clamping to the copy. Where the start is another function
        of the counter, a kernel reads the host's memory.
        """
        if not isinstance(self.dims.get(v), Rows):
            return x
        parts, axis, _, merged = self._by_shard(v, x)
        start = _int32(start)
        return merged(jax.lax.dynamic_slice_in_dim(parts, start, n, axis, allow_negative_indices=False))

    def write(self, wholes: Arrays, v: Var, rows: Any, start: Any) -> None:
        """Write rows, as ``read`` returns them, into their array."""
        (into, axis, pin, merged), (rows, *_) = (self._by_shard(v, x) for x in (wholes[v], rows))
        start = _int32(start)
        into = jax.lax.dynamic_update_slice_in_dim(into, rows, start, axis, allow_negative_indices=False)
        wholes[v] = merged(constrained(into, pin))

    def load(self, wholes: Arrays, v: Var, start: Any, n: int = 1) -> Any:
        with prefetch(v, self.names):
            return to_device(self.read(v, wholes[v], start, n))

    def store(self, wholes: Arrays, v: Var, rows: Any, start: Any) -> None:
        with write_back(v, self.names):
            dim = cast(Rows, self.dims[v]).dim  # a sum is not stored
            n = rows.shape[dim] // self.shards
            for begin, end in tiles(n, dim, rows.ndim):
                some = rows if end - begin == n else self.read(v, rows, begin, end - begin)
                self.write(wholes, v, to_host(some), start + begin)

    def exchange(self, wholes: Arrays, stored: Arrays, at: Any, loaded: Sequence[Var], then: Any, n: int = 1) -> Values:
        """Store rows of some leaves, from row ``at`` on, while loading ``n`` rows of others, from ``then`` on.

        A host buffer that is read and written at the same time would be copied, so leaves take turns: a leaf is loaded
        before the exchange that stores it, or after.
        """
        found = Values((v, self.load(wholes, v, then, n)) for v in loaded)
        for v, rows in stored.items():
            self.store(wholes, v, rows, at)
        return found

    def update(
        self,
        s: Slice,
        how: RowWise,
        given: Mapping[Var, Any],
        wholes: Arrays,
        start: Any,
        n: int = 1,
        first: Any = None,
    ) -> tuple[Values, Values]:
        """Compute a slice's results for some rows, and write those that stay on the device into their arrays.

        Args:
          s, how: the slice, and how it runs on rows.
          given: the rows of its operands, on the device.
          wholes: the arrays, which change. A sum that does not exist yet begins with these rows; a result without an
            array is only returned.
          start, n: the first row, and the number of rows of each shard.
          first: whether these are the first rows of an existing sum, if only the program knows it.

        Returns:
          All new rows; and the rows of host leaves, which are not stored yet.
        """
        jaxpr = s.core.jaxpr
        kind = self.structure(jaxpr), how.dims, how.where, n

        def update_rows(start: Any, *given: Any) -> list[Any]:  # the name that profiles show
            return run_chunk(jaxpr, how.dims, how.where, row_indices(how.where.size, start, n, self.shards), *given)

        with update_of(next(iter(s.loads), None), self.names):
            new = self.kinds.setdefault(kind, jit(update_rows))(start, *(given[v] for v in s.inputs))
        stored = Values()
        for v, old, dim, x in zip(s.outputs, how.buffers, how.out_dims, new, strict=True):
            into = v if old is None else old
            if isinstance(dim, Partial):
                total = x if v not in wholes else dim.combine(wholes[v], x)
                wholes[v] = total if first is None else jnp.where(first, x, total)
            elif is_host_aval(v.aval):
                stored[into] = x
            elif into in wholes:
                self.write(wholes, into, self.laid_out(into, x), start)
        return Values(zip(s.outputs, new, strict=True)), stored

    def _by_shard(self, v: Var, x: Any) -> tuple[Any, int, NamedSharding | None, Callable[[Any], Any]]:
        """Split the axis of an array's rows into two axes: the shards, and the rows of each shard.

        Returns:
          The array, the axis of a shard's rows, the array's sharding, and the function that merges the two axes.
        """
        dim, pin = cast(Rows, self.dims[v]).dim, self.pins.get(v)
        x = constrained(x, pin)
        if self.shards == 1:
            return x, dim, pin, lambda x: x
        typed = typed_sharding(jax.typeof(x))

        def divided(sharding: NamedSharding | None) -> NamedSharding | None:
            if sharding is None:
                return None
            spec = padded(sharding.spec, x.ndim)
            return sharding.update(spec=PartitionSpec(*spec[: dim + 1], None, *spec[dim + 1 :]))

        def merged(parts: Any) -> Any:
            shape = (*parts.shape[:dim], self.shards * parts.shape[dim + 1], *parts.shape[dim + 2 :])
            return constrained(jax.lax.reshape(parts, shape, out_sharding=typed), pin)

        shape = (*x.shape[:dim], self.shards, x.shape[dim] // self.shards, *x.shape[dim + 1 :])
        parts = jax.lax.reshape(x, shape, out_sharding=divided(typed))
        return constrained(parts, divided(pin)), dim + 1, divided(pin), merged


def _int32(start: Any) -> Any:  # jnp.asarray takes as long as ten equations
    return start if getattr(start, "dtype", None) == np.int32 else jnp.asarray(start, np.int32)


# ---- a slice as a loop over chunks of its leaves


def group_looped(s: Slice, how: RowWise, names: Names, size: int) -> Callable[..., list[Any]]:
    """Return ``run(start, before, *operands)``, which updates ``size`` rows of each shard, from row ``start`` on.

    Host operands and results contain only these rows; device ones contain all rows. ``before`` contains the results of
    earlier groups that overwrite no operand, and is empty for the first group.

    It loads and updates one chunk. Each iteration of the loop stores that chunk while it loads the next one, which it
    then updates. No chunk is updated after the loop, because XLA would fuse the write of its rows with a later use of
    the whole array, and give both a new buffer.
    """
    into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
    dims = dict(zip(into, how.out_dims, strict=True)) | dict(zip(s.inputs, how.dims, strict=True))
    pins = {x: s.pins[v] for v, x in zip(s.outputs, into, strict=True) if v in s.pins} | s.pins
    loads, rows = [v for v in s.inputs if v in s.core.loads], min(how.rows, size)
    full, rest = divmod(size, rows)

    def run(start: Any, before: Mapping[Var, Any], *operands: Any) -> list[Any]:
        given, buffers = dict(zip(s.inputs, operands, strict=True)), Buffers(dims, pins, names, how.shards)

        def updated(wholes: Values, loaded: Values, at: Any, n: int) -> tuple[Values, Values]:
            """Update a chunk and write its device results; return the whole arrays and the rows to store."""
            now, row = ChainMap[Var, Any](wholes, given), start + at
            xs = {
                v: buffers.read(v, now[v], at if is_host_aval(v.aval) else row, n) for v in s.inputs if v not in loads
            }
            held = [v for v in xs if v in wholes]
            xs |= zip(held, read_once([xs[v] for v in held]), strict=True)
            return wholes, buffers.update(s, how, xs | loaded, wholes, row, n)[1]

        def advanced(wholes: Values, new: Values, at: Any, then: Any) -> tuple[Values, Values]:
            """Store ``new`` from row ``at`` on, load a chunk from row ``then`` on, and update it.

            Each leaf is stored while the next one is loaded. The first one, stored by then, is loaded last.
            """
            arrays, loaded, left = ChainMap[Var, Any](wholes, given), Values(), dict(new)
            for v, following in zip(loads, [*loads[1:], None], strict=True):
                stored = {v: left.pop(v)} if v in left else {}
                if stored and v in loaded:
                    stored[v], loaded[v] = written_after(stored[v], loaded[v])
                loaded |= buffers.exchange(arrays, stored, at, [following] if following else [], then, rows)
            loaded |= buffers.exchange(arrays, left, at, loads[:1], then, rows)
            return updated(wholes, loaded, then, rows)

        def advance(i: Any, state: tuple[Values, Values]) -> tuple[Values, Values]:
            i = jnp.minimum(i, full)  # not the counter itself, which is written when every copy has read it
            then = i * rows
            return advanced(*state, (i - 1) * rows, then)

        wholes = Values((v, given[v]) for v in into if v in given)
        for v, old, dim in zip(s.outputs, how.buffers, how.out_dims, strict=True):
            if old is None and isinstance(dim, Rows):
                blank = jnp.zeros(v.aval.shape, v.aval.dtype)
                wholes[v] = constrained(blank, typed_sharding(v.aval) or s.pins.get(v))
        wholes |= before
        first = (full * rows, rest) if rest else (0, rows)
        state = updated(wholes, buffers.exchange(given, {}, 0, loads, *first), *first)
        if rest:
            state = advanced(*state, full * rows, 0)
        if full > 1:
            state = jax.lax.fori_loop(1, opaque(jnp.int32(2)) if full == 2 else full, advance, state)
        wholes, new = state
        buffers.exchange(wholes, new, (full - 1) * rows, [], 0)
        return [wholes[v] for v in into]

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


# ---- what happens to a leaf of the state, by the names that a profile and the compiled program show


def _scope(what: str, v: Var | None, names: Names) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(f"jax_offload/{what}/{'state' if v is None else names.get(v, 'state')}")


# These scopes name the work on a leaf or its rows: ``prefetch`` reads and loads them, ``write_back`` stores and writes
# them, and ``update_of`` updates all leaves of a slice under the name of the first one.
prefetch, update_of, write_back = (functools.partial(_scope, what) for what in ("prefetch", "update", "write-back"))


def put_whole(eqns: Sequence[Equation]) -> set[Var]:
    """Return the host arrays that a step itself moves to the device, as it does if an update runs ahead of a scan."""
    found = set[Var]()
    for eqn in eqns:
        if eqn.primitive.name == "device_put" and "jax_offload/prefetch" not in str(eqn.source_info.name_stack):
            moves = [(x, y) for x, y in zip(eqn.invars, eqn.outvars, strict=True) if isinstance(x, Var)]
            found |= {x for x, y in moves if is_host_aval(x.aval) and not is_host_aval(y.aval)}
        elif eqn.primitive.name == "jit":  # both halves of a pipelined step
            inner = called_by(eqn).jaxpr
            put, taken = put_whole(inner.eqns), zip(eqn.invars, inner.invars, strict=True)
            found |= {x for x, own in taken if isinstance(x, Var) and own in put}
    return found


Env = dict[Var, Any]


def follow(each: Schedule, names: Names, env: Env, *, lowered: bool, for_cpu: bool = False) -> None:
    """Run the slices and gates of a schedule in an environment.

    Args:
      each: the schedule.
      names: the names of the state's leaves, and of their next values.
      env: the values of its operands; its results are added.
      lowered: whether the update is lowered in this form, so that neither ``vmap`` nor a derivative sees its loops.
      for_cpu: whether it is lowered for a CPU. Its compiler hoists no transfers, so no loop has to hold them, and
        takes five times as long for a loop that runs once.
    """
    run = runner(each.slices, names, lowered=lowered)
    _in_order(each.first, run, env)
    if each.carried is not None and lowered and not for_cpu:
        _in_own_loop(each, each.carried, run, env)
    else:
        _in_order(each.order, run, env)


def _in_order(order: Iterable[Slice | Planned | Gate], run: Callable[..., list[Any]], env: Env) -> None:
    for step in order:
        if isinstance(step, Gate):
            gate(env, step.held, step.waits_for)
            continue
        s, results_of = (step, step.run) if isinstance(step, Slice) else (step.slice, functools.partial(run, step))
        env.update(zip(s.outputs, results_of(*(env[v] for v in s.inputs)), strict=True))


def _in_own_loop(each: Schedule, carried: Mapping[Var, Var], run: Callable[..., list[Any]], env: Env) -> None:
    """Run the slices of a pass in a loop that runs once; XLA does not know that it runs once."""
    outputs = dict.fromkeys(v for p in each.slices for v in p.slice.outputs)
    start = Values((v, env[carried[v]] if v in carried else zeros(v.aval)) for v in outputs)

    def once(carry: tuple[Any, Values]) -> tuple[Any, Values]:
        inner = env | {carried[v]: x for v, x in carry[1].items() if v in carried}
        _in_order(each.order, run, inner)
        return jnp.zeros_like(carry[0]), Values((v, inner[v]) for v in outputs)

    env.update(jax.lax.while_loop(lambda carry: carry[0], once, (opaque(jnp.array(True)), start))[1])


# ---- slices that do the same to leaves of the same types, traced and lowered once: a network's layers, say


def runner(planned: Sequence[Planned], names: Names, *, lowered: bool = False) -> Callable[..., list[Any]]:
    """Return ``run(p, *operands)``, which runs one of these slices of a program.

    Identical slices call one function, which XLA inlines, so that jax traces their equations only once.

    Args:
      planned: the slices.
      names: the names of the state's leaves, and of their next values.
      lowered: whether neither ``vmap`` nor a derivative sees the slices.
    """
    structure = structures()
    kind_of = {id(p): structure(p.slice.jaxpr) for p in planned if not p.in_chunks}
    times = Counter(kind_of.values())
    kinds = dict[Hashable, tuple[Callable[..., list[Any]], Sequence[int]]]()  # the integers number the loaded operands

    def run(p: Planned, *operands: Any) -> list[Any]:
        s, values = p.slice, list(operands)
        if p.in_chunks:
            loop = functools.partial(group_looped(s, p.how, names, p.how.where.size // p.how.shards), 0, {})
            return (loop if lowered else or_batched(loop, s.run))(*operands)
        kind = kind_of[id(p)]
        if kind not in kinds:
            core = jax_fun(ClosedJaxpr(s.core.jaxpr, []))

            def update_slice(*args: Any) -> Any:  # the name that profiles show
                return core(*args)

            shared = times[kind] > 1 and not s.jaxpr.effects
            kinds[kind] = (
                (jit(update_slice) if shared else core),
                [k for k, v in enumerate(s.inputs) if v in s.core.loads],
            )
        update, loaded = kinds[kind]
        for k in loaded:
            with prefetch(s.inputs[k], names):
                values[k] = to_device(values[k])
        with update_of(next(iter(s.loads), None), names):
            results = update(*values)
        for k, v in enumerate(s.outputs):
            if is_host_aval(v.aval):
                with write_back(v, names):
                    results[k] = to_host(results[k])
        return results

    return run
