"""A schedule, emitted: load → update → store, slice after slice, through a bounded window."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from jax_offload._program.arrays import row_indices
from jax_offload._program.jaxprs import (
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    called_by,
    jax_fun,
    jaxpr_of,
    jit,
)
from jax_offload._program.memory import constrained, is_host_aval, padded, to_device, to_host, typed_sharding, zeros
from jax_offload._program.primitives import gate, opaque, read_once, written_after
from jax_offload._program.program import numbered, structure
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
Chunk = tuple[Any, int]  # its first row, which may be traced, and its number of rows
State = tuple[Values, Values]  # whole arrays; and rows of host leaves, on the device, that are not stored yet


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
    key_of: Callable[[Any], Hashable] = dataclasses.field(default_factory=numbered)

    def read(self, v: Var, x: Any, start: Any, n: int = 1) -> Any:
        """``n`` rows of each shard of ``x``, which is the array ``v``.

        Rows outside of it are the first or the last ones. XLA copies with the GPU's copy engines only where a loop's
        slices begin at multiples of its counter; it leaves clamping to the copy. Where the start is another function
        of the counter, a kernel reads the host's memory.
        """
        if not isinstance(dim := self.dims.get(v), Rows):
            return x
        axis, parts = self._by_shard(v, x, dim.dim)
        sizes = [*parts.shape[:axis], n, *parts.shape[axis + 1 :]]
        starts = _starts(parts, start, axis)
        return self._merged(v, jax.lax.dynamic_slice(parts, starts, sizes, allow_negative_indices=False), dim.dim)

    def write(self, wholes: Arrays, v: Var, rows: Any, start: Any) -> None:
        """Write rows, as ``read`` returns them, into their array."""
        dim, sharding = self._dim(v), self.pins.get(v)
        (axis, into), (_, rows) = (self._by_shard(v, x, dim) for x in (wholes[v], rows))
        into = jax.lax.dynamic_update_slice(into, rows, _starts(into, start, axis), allow_negative_indices=False)
        pin = sharding if axis == dim else _sharding_by_shard(sharding, into.ndim - 1, dim)
        wholes[v] = self._merged(v, constrained(into, pin), dim)

    def load(self, wholes: Arrays, v: Var, start: Any, n: int = 1) -> Any:
        with prefetch(v, self.names):
            return to_device(self.read(v, wholes[v], start, n))

    def store(self, wholes: Arrays, v: Var, rows: Any, start: Any) -> None:
        with write_back(v, self.names):
            dim = self._dim(v)
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
        kind = structure(jaxpr, self.key_of), how.dims, how.where, n

        def update_rows(start: Any, *given: Any) -> list[Any]:  # the name that profiles show
            return run_chunk(jaxpr, how.dims, how.where, row_indices(how.where.size, start, n, self.shards), *given)

        with update_of(s.loads, self.names):
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

    def _dim(self, v: Var) -> int:
        dim = self.dims[v]
        assert isinstance(dim, Rows)  # a sum has no rows to write
        return dim.dim

    def _by_shard(self, v: Var, x: Any, dim: int) -> tuple[int, Any]:
        """An array with axis ``dim`` as two, shards and the rows of each; and the axis of these rows."""
        x, sharding = constrained(x, self.pins.get(v)), self.pins.get(v)
        if self.shards == 1:
            return dim, x
        shape = (*x.shape[:dim], self.shards, x.shape[dim] // self.shards, *x.shape[dim + 1 :])
        typed = _sharding_by_shard(typed_sharding(jax.typeof(x)), x.ndim, dim)
        pin = _sharding_by_shard(sharding, x.ndim, dim)
        return dim + 1, constrained(jax.lax.reshape(x, shape, out_sharding=typed), pin)

    def _merged(self, v: Var, x: Any, dim: int) -> Any:
        """The array again, of shards and the rows of each."""
        if self.shards == 1:
            return x
        shape = (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
        typed = typed_sharding(jax.typeof(x))
        if typed is not None:
            spec = padded(typed.spec, x.ndim)
            typed = typed.update(spec=PartitionSpec(*spec[: dim + 1], *spec[dim + 2 :]))
        return constrained(jax.lax.reshape(x, shape, out_sharding=typed), self.pins.get(v))


def _starts(x: jax.Array, start: Any, dim: int) -> list[Any]:
    if getattr(start, "dtype", None) != np.int32:  # jnp.asarray takes as long as ten equations
        start = jnp.asarray(start, np.int32)
    return [start if k == dim else np.int32(0) for k in range(x.ndim)]


def _sharding_by_shard(sharding: NamedSharding | None, ndim: int, dim: int) -> NamedSharding | None:
    if sharding is None:
        return None
    spec = padded(sharding.spec, ndim)
    return sharding.update(spec=PartitionSpec(*spec[: dim + 1], None, *spec[dim + 1 :]))


# ---- a slice as a loop over chunks of its leaves


def looped(s: Slice, how: RowWise, names: Names) -> Callable[..., list[Any]]:
    """Return ``run(*operands)``, which computes the slice's results chunk by chunk."""
    run = group_looped(s, how, names, how.where.size // how.shards)
    return lambda *operands: run(0, operands, {})


def group_looped(s: Slice, how: RowWise, names: Names, size: int) -> Callable[..., list[Any]]:
    """``run(start, operands, before)``: the slice's results for ``size`` rows of each shard, from row ``start`` on.

    Operands and results on the host have just these rows, and those on the device have all rows. ``before`` has what
    earlier groups have left of the results that overwrite no operand, and is empty in the first group.

    It loads and updates the first chunk; then, chunk by chunk, it stores that while the next is loaded, and updates the
    next. No chunk is updated after the loop: XLA would merge the writing of its rows with whatever uses the whole, in a
    buffer of its own.
    """
    into = [v if old is None else old for v, old in zip(s.outputs, how.buffers, strict=True)]
    dims = dict(zip(into, how.out_dims, strict=True)) | dict(zip(s.inputs, how.dims, strict=True))
    pins = {x: s.pins[v] for v, x in zip(s.outputs, into, strict=True) if v in s.pins} | s.pins
    loads, rows = [v for v in s.inputs if v in s.core.loads], min(how.rows, size)

    def run(start: Any, operands: Sequence[Any], before: Mapping[Var, Any]) -> list[Any]:
        given, buffers = dict(zip(s.inputs, operands, strict=True)), Buffers(dims, pins, names, how.shards)

        def updated(wholes: Values, loaded: Values, chunk: Chunk) -> State:
            """Update a chunk, and write the part of it that stays on the device."""
            wholes, (at, n) = Values(wholes), chunk
            now, row = ChainMap(wholes, given), start + at
            xs = {
                v: buffers.read(v, now[v], at if is_host_aval(v.aval) else row, n) for v in s.inputs if v not in loads
            }
            held = [v for v in xs if v in wholes]
            xs |= zip(held, read_once([xs[v] for v in held]), strict=True)
            return wholes, buffers.update(s, how, xs | loaded, wholes, row, n)[1]

        def exchanged(wholes: Values, new: Values, at: Any, then: Chunk | None) -> State:
            """Store ``new`` from row ``at`` on, and load chunk ``then``. Each leaf is stored while the next one is
            loaded, and the last one while the first is, which is stored by then."""
            arrays, loaded, left = ChainMap[Var, Any](Values(wholes), given), Values(), dict(new)
            first, n = then or (0, 0)
            for k, v in enumerate(loads):
                stored = {v: left.pop(v)} if v in left else {}
                if stored and v in loaded:
                    stored[v], loaded[v] = written_after(stored[v], loaded[v])
                loaded |= buffers.exchange(arrays, stored, at, loads[k + 1 : k + 2] if then else [], first, n)
            loaded |= buffers.exchange(arrays, left, at, loads[:1] if then else [], first, n)
            return Values(arrays.maps[0]), loaded

        def advance(i: Any, state: State) -> State:
            i = jnp.minimum(i, full)  # not the counter itself, which is written when every copy has read it
            chunk = i * rows, rows
            wholes, loaded = exchanged(state[0], state[1], (i - 1) * rows, chunk)
            return updated(wholes, loaded, chunk)

        full, rest = divmod(size, rows)
        chunk = (full * rows, rest) if rest else (0, rows)
        wholes = Values((v, given[v]) for v in into if v in given)
        for v, old, dim in zip(s.outputs, how.buffers, how.out_dims, strict=True):
            if old is None and isinstance(dim, Rows):
                blank = jnp.zeros(v.aval.shape, v.aval.dtype)
                wholes[v] = constrained(blank, typed_sharding(v.aval) or s.pins.get(v))
        wholes |= before
        state = updated(wholes, Values((v, buffers.load(given, v, *chunk)) for v in loads), chunk)
        if rest:
            state = updated(*exchanged(*state, chunk[0], (0, rows)), (0, rows))
        if full > 1:
            state = jax.lax.fori_loop(1, opaque(jnp.int32(2)) if full == 2 else full, advance, state)
        wholes, new = state
        wholes, _ = exchanged(wholes, new, (full - 1) * rows, None)
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

_PREFETCH = "jax_offload/prefetch"


def prefetch(v: Var, names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope in which a leaf, or rows of it, is read and moved to the device."""
    return jax.named_scope(f"{_PREFETCH}/{names.get(v, 'state')}")


def is_prefetch(eqn: Equation) -> bool:
    """Whether an equation stands in such a scope."""
    return _PREFETCH in str(eqn.source_info.name_stack)


def put_whole(eqns: Sequence[Equation]) -> set[Var]:
    """Return the host arrays that a step itself moves to the device, as it does if an update runs ahead of a scan."""
    found = set[Var]()
    for eqn in eqns:
        if eqn.primitive.name == "device_put" and not is_prefetch(eqn):
            moves = zip(eqn.invars, eqn.outvars, strict=True)
            moved = {x for x, y in moves if not isinstance(x, Literal) and not is_host_aval(y.aval)}
            found |= {x for x in moved if is_host_aval(x.aval)}
        elif eqn.primitive.name == "jit":  # both halves of a pipelined step
            inner = called_by(eqn).jaxpr
            put, taken = put_whole(inner.eqns), zip(eqn.invars, inner.invars, strict=True)
            found |= {x for x, own in taken if not isinstance(x, Literal) and own in put}
    return found


def write_back(v: Var, names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope in which a leaf, or rows of it, is moved to the host and written."""
    return jax.named_scope(f"jax_offload/write-back/{names.get(v, 'state')}")


def update_of(leaves: Sequence[Var], names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope of an update that needs these leaves together; it has the name of the first."""
    return jax.named_scope(f"jax_offload/update/{names.get(leaves[0], 'state') if leaves else 'state'}")


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
    run = SliceRunner(each.slices, names, lowered=lowered)
    _in_order(each.first, run, env)
    if each.carried is not None and not for_cpu:
        _in_own_loop(each, run, env, lowered=lowered)
    else:
        _in_order(each.order, run, env)


def _in_order(order: Iterable[Slice | Planned | Gate], run: Callable[[Planned, Env], None], env: Env) -> None:
    for step in order:
        if isinstance(step, Gate):
            gate(env, step.held, step.waits_for)
        elif isinstance(step, Slice):
            env.update(zip(step.outputs, step.run(*(env[v] for v in step.inputs)), strict=True))
        else:
            run(step, env)


def _in_own_loop(each: Schedule, run: Callable[[Planned, Env], None], env: Env, *, lowered: bool) -> None:
    """Run the slices of a pass in a loop that runs once; XLA does not know that it runs once."""
    slices, carried = [p.slice for p in each.slices], each.carried or {}
    outputs = list(dict.fromkeys(v for s in slices for v in s.outputs))
    waits_for = [v for step in each.order if isinstance(step, Gate) for v in step.waits_for if v not in outputs]
    inputs = list(dict.fromkeys([*(v for s in slices for v in s.inputs), *waits_for]))

    def gated(*operands: Any) -> list[Any]:
        inner = dict(zip(inputs, operands, strict=True))
        _in_order(each.order, run, inner)
        return [inner[v] for v in outputs]

    def looped(*operands: Any) -> list[Any]:
        given = dict(zip(inputs, operands, strict=True))

        def once(carry: Any) -> Any:
            now = given | {carried[v]: x for v, x in zip(outputs, carry[1], strict=True) if v in carried}
            return jnp.zeros_like(carry[0]), gated(*(now[v] for v in inputs))

        start = [given[carried[v]] if v in carried else zeros(v.aval) for v in outputs]
        return jax.lax.while_loop(lambda c: c[0], once, (opaque(jnp.array(True)), start))[1]

    all_of_it = looped if lowered else or_batched(looped, gated)
    env.update(zip(outputs, all_of_it(*(env[v] for v in inputs)), strict=True))


# ---- slices that do the same to leaves of the same types, traced and lowered once: a network's layers, say


class SliceRunner:
    """Runs slices of a program.

    Slices that are alike call one function, which XLA inlines, instead of tracing their own equations.

    Args:
      planned: the slices.
      names: the names of the state's leaves, and of their next values.
      lowered: whether neither ``vmap`` nor a derivative sees the slices.
    """

    def __init__(self, planned: Sequence[Planned], names: Names, *, lowered: bool = False) -> None:
        key_of = numbered()
        self._names, self._lowered = names, lowered
        self._kind = {id(p): structure(p.slice.jaxpr, key_of) for p in planned if not p.in_chunks}
        self._times = Counter(self._kind.values())
        self._updates: dict[Hashable, tuple[Callable[..., list[Any]], Sequence[int]]] = {}

    def __call__(self, p: Planned, env: Env) -> None:
        """Run a slice in an environment, to which its results are added."""
        env.update(zip(p.slice.outputs, self._run(p, [env[v] for v in p.slice.inputs]), strict=True))

    def equations(self, p: Planned) -> ClosedJaxpr:
        """Trace a slice."""
        return jaxpr_of(lambda *operands: self._run(p, [*operands]), *(v.aval for v in p.slice.inputs))[0]

    def _run(self, p: Planned, operands: list[Any]) -> list[Any]:
        s, names = p.slice, self._names
        if p.in_chunks:
            loop = looped(s, p.how, names)
            return (loop if self._lowered else or_batched(loop, s.run))(*operands)
        update, loaded = self._update_for(p)
        for i in loaded:
            with prefetch(s.inputs[i], names):
                operands[i] = to_device(operands[i])
        with update_of(s.loads, names):
            results = update(*operands)
        for k, v in enumerate(s.outputs):
            if is_host_aval(v.aval):
                with write_back(v, names):
                    results[k] = to_host(results[k])
        return results

    def _update_for(self, p: Planned) -> tuple[Callable[..., list[Any]], Sequence[int]]:
        """Return what a slice does between its transfers, and the places of the operands that it loads."""
        kind = self._kind[id(p)]
        if kind not in self._updates:
            inner = p.slice.core
            run = jax_fun(ClosedJaxpr(inner.jaxpr, []))

            def update_slice(*args: Any) -> Any:  # the name that profiles show
                return run(*args)

            shared = self._times[kind] > 1 and not p.slice.jaxpr.effects
            loaded = [i for i, v in enumerate(p.slice.inputs) if v in inner.loads]
            self._updates[kind] = (jit(update_slice) if shared else run), loaded
        return self._updates[kind]
