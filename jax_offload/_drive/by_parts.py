"""Loops of the cores beside accelerators, part by part: each process updates what its own accelerators have of a leaf.

A loop does the same to every element, so it needs no leaf whole: what is divided between accelerators, or processes,
stays divided, and is updated where it is in host memory; of what is replicated one copy is. A new parameter that is
divided further than it is to be (ZeRO-1) goes up as its parts, and the accelerators put it together.

Leaves of the state that were donated are written in place: XLA hands their memory over first, through a program that
they are donated to. It runs when whatever else reads them has ended, and marks them as deleted for everybody else. No
later program of the step reads the old value there: only leaves that no other program reads are written.

Beside one accelerator a large leaf goes by groups of rows where its gradient does (``row_groups.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.jaxprs import Literal, Var, variables
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, copy_on_host, is_host_aval, well_typed, with_kind
from jax_offload._drive.cores import is_sent, one_of
from jax_offload._drive.loop_source import LoopSource, as_scalar, stored_type
from jax_offload._drive.loops import Kernel, aligned, calls_of, independent, loops_of, work
from jax_offload._drive.one_pass import handed_over, over_of, view_of, written_by
from jax_offload._drive.pieces import Joined, Piece
from jax_offload._drive.row_groups import Copied, Parts, Rows, begun, due, ends_of_piece, written
from jax_offload._drive.stages import Stage
from jax_offload._drive.tasks import Task

BY_ROWS = (Rows, Parts)  # what comes in groups of rows
WRITABLE = ("cpu", "gpu", "cuda", "rocm")
Box = tuple[tuple[int, int], ...]  # from where to where, along each axis


class ByParts:
    """Pieces of the cores as one function of arrays as the accelerators have sent them.

    Its results are divided as the operands of their piece are, those that are divided furthest.

    Args:
      pieces: one after the other, all of them loops.
      inputs, outputs: of the function.
      up: results that go to the accelerators at once; the others stay in host memory.
      kernels: of each piece its loop.
      into: results that go up -> what they are written into, where that comes by rows.
      joined: gradients that are there in parts.

    Attributes:
      written: inputs that results are written over, where they are divided as these.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        inputs: Sequence[Var],
        outputs: Sequence[Var],
        up: Set[Var],
        kernels: Sequence[tuple[Kernel, LoopSource]],
        into: Mapping[Var, Var],
        joined: Sequence[Joined] = (),
    ) -> None:
        self._pieces, self._inputs, self._outputs, self._up, self._kernels = pieces, inputs, outputs, up, kernels
        self._into, self._joined = into, joined
        self._rows = {v: ends_of_piece(p)[0] for p in pieces for v in variables(p.inputs)}  # of a group
        self._levels = independent(pieces)
        each = zip(pieces, kernels, strict=True)
        self.written = [v for piece, (_, source) in each for v in written_by(piece, source).values()]

    def __call__(self, *operands: Any) -> list[Any]:
        env = dict(zip(self._inputs, operands, strict=True))
        for piece in self._joined:
            (v,) = piece.outputs
            env[v] = Parts([env[x] for x in variables(piece.inputs)], piece.ranges, self._rows[v])
        for together in self._levels:
            by_rows = [
                k for k in together if any(isinstance(env[v], BY_ROWS) for v in variables(self._pieces[k].inputs))
            ]
            started = [_started(*self._kernels[k], self._pieces[k], env) for k in together if k not in by_rows]
            work([part for parts, _ in started for part in parts])
            for _, by_box in started:
                env.update((v, make(DEVICE_KIND if v in self._up else HOST_KIND)) for v, make in by_box.items())
            runs = [self._by_rows(*self._kernels[k], self._pieces[k], env) for k in by_rows]
            for _ in zip_longest(*runs):  # of all leaves the first part of their gradients, and then the next
                pass
        return [env[v] for v in self._outputs]

    def _by_rows(self, kernel: Kernel, source: LoopSource, piece: Piece, env: dict[Var, Any]) -> Iterator[None]:
        """Updates a piece in groups of rows, and stops ahead of each part of its gradient."""
        given = [v.val if isinstance(v, Literal) else env[v] for v in piece.inputs]
        scalars = [as_scalar(one_of(given[i])) for i in source.scalars]
        rows = {i: x for i in source.arrays if isinstance(x := given[i], BY_ROWS)}
        like, over = next(iter(rows.values())), source.over.values()
        uncut = {i: x.there if isinstance(x := given[i], Copied) else x for i in source.arrays if i not in rows}
        here = {i: next(iter(_parts(x, i in over).values())) for i, x in uncut.items()}
        own = [v for k, v in enumerate(piece.outputs) if k not in source.over]
        stay = {v: aligned(v.aval.shape, v.aval.dtype) for v in own if v not in self._up}
        into = {v: given[piece.inputs.index(self._into[v])] if v in self._into else None for v in own}
        up, waiting, gone = dict[Var, jax.Array](), deque[tuple[int, dict[Var, Any]]](), 0
        for k, (begin, end) in enumerate(like.groups):
            if isinstance(like, Parts) and like.is_first(k):
                yield
            values = [rows[i].taken(k) if i in rows else here[i][begin:end] for i in source.arrays]
            results = {v: aligned((end - begin, *v.aval.shape[1:]), v.aval.dtype) for v in own if v in self._up}
            arrays = [
                *map(_flat, values),
                *((stay[v][begin:end] if v in stay else results[v]).reshape(-1) for v in own),
            ]
            work(calls_of(kernel, arrays[0].size, [*arrays, *scalars]))
            waiting.append((begin, results))
            while gone < due(like, k):
                (at, new), gone = waiting.popleft(), gone + 1
                for v, x in new.items():
                    to = up[v] if v in up else begun(v.aval, like, into[v])
                    up[v] = written(to, x.view(v.aval.dtype), at, into[v])
        place = with_kind(like.place, HOST_KIND)
        env |= {v: jax.device_put(x.view(v.aval.dtype), place, may_alias=True) for v, x in stay.items()}
        env |= up | {piece.outputs[k]: given[i] for k, i in source.over.items()}


def by_parts(task: Task, next_of: Mapping[Var, Var], own: Set[Var]) -> ByParts | None:
    """A task of the cores part by part; ``None`` where a piece of it is no loop, or numba is missing.

    Args:
      next_of: result -> what it is the next value of.
      own: what may be written over.
    """
    joined = [piece for piece in task.stage.pieces if isinstance(piece, Joined)]
    pieces = [piece for piece in task.stage.pieces if not isinstance(piece, Joined)]
    found = loops_of(pieces, [over_of(piece, pieces, next_of, own & task.free) for piece in pieces])
    up = {v for v in task.up if not is_host_aval(v.aval)}
    by_rows = {*task.by_rows, *task.copied}
    into = {v: old for v in up if (old := next_of.get(v)) in by_rows and old in task.free and _are_alike(v, old)}
    return None if found is None else ByParts(pieces, task.inputs, task.outputs, up, found, into, joined)


def _are_alike(v: Var, old: Var) -> bool:
    return (v.aval.shape, v.aval.dtype) == (old.aval.shape, old.aval.dtype)


def to_be_written(
    tasks: Sequence[Task], donated: Set[Var], places: Mapping[Var, Sharding], devices: Set[Any]
) -> set[Var]:
    """Of what was donated, what the cores may write where it is: host leaves that one task alone reads.

    Not of a TPU, whose host memory has no address for us.
    """
    if any(device.platform not in WRITABLE for device in devices):
        return set()
    read_by = Counter(v for task in tasks for v in task.inputs)
    return {v for v in donated if is_host_aval(v.aval) and read_by[v] == 1 and {*places[v].device_set} == {*devices}}


def taken_over(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Arrays that were donated, in memory of the step's own: where they are, without a copy. Waits for nothing.

    On a GPU XLA refuses where somebody holds a NumPy view of one, which a checkpoint may; then they are copied.
    """
    try:
        return handed_over(arrays)
    except jax.errors.JaxRuntimeError:
        if any(x.is_deleted() for x in arrays):
            raise
        copies = [copy_on_host(x) for x in arrays]
        for x in arrays:
            x.delete()
        return copies


def check_by_parts(stage: Stage, processes: int) -> None:
    """Raises ``ValueError`` where a stage takes leaves whole, which are divided between processes."""
    if processes > 1 and any(is_sent(v.aval) for v in stage.reads):
        raise ValueError(
            "update_on: an update that is more than arithmetic on elements (LAMB, Adafactor, Muon), or any without "
            f"numba, takes every leaf whole, and the step runs in {processes} processes. Fix: pip install "
            "jax_offload[cores] for AdamW and the like; else update_on='device', and shard_over= for less of the state."
        )


def _started(
    kernel: Kernel, source: LoopSource, piece: Piece, env: Mapping[Var, Any]
) -> tuple[list[Callable[[], None]], dict[Var, Callable[[str], Any]]]:
    """One piece as calls for threads; and its results, to be asked for after them, in a kind of memory."""
    given = [v.val if isinstance(v, Literal) else env[v] for v in piece.inputs]
    scalars = [as_scalar(one_of(given[i])) for i in source.scalars]
    over = {i: k for k, i in source.over.items()}
    operands = {i: given[i] for i in source.arrays}
    in_parts = {i: _parts(x, i in over) for i, x in operands.items()}
    most = max(operands, key=lambda i: len(in_parts[i]))
    boxes, like = list(in_parts[most]), operands[most].sharding
    in_place = {i for i in over if in_parts[i].keys() == in_parts[most].keys()}
    calls: list[Callable[[], None]] = []
    by_box: list[dict[Box, Any]] = [{} for _ in piece.outputs]
    for box in boxes:
        values = {i: _within(x, in_parts[i], box) for i, x in operands.items()}
        values |= {i: np.array(values[i]) for i in over.keys() - in_place}
        shape = tuple(end - begin for begin, end in box)
        fresh = {k: aligned(shape, v.aval.dtype) for k, v in enumerate(piece.outputs) if k not in source.over}
        for k, x in (fresh | {over[i]: values[i] for i in over}).items():
            by_box[k][box] = x.view(piece.outputs[k].aval.dtype)
        arrays = [*map(_flat, values.values()), *(x.reshape(-1) for x in fresh.values())]
        calls += calls_of(kernel, arrays[0].size, [*arrays, *scalars])
    assembled = {v: partial(_assembled, v.aval.shape, x, like) for v, x in zip(piece.outputs, by_box, strict=True)}
    return calls, assembled | {piece.outputs[over[i]]: partial(_where_it_was, operands[i]) for i in in_place}


def _parts(x: Any, written: bool) -> dict[Box, Any]:
    """What this process has of an array, each part once, to read or to be ``written``. Waits until it is there."""
    if written:
        jax.block_until_ready(x)
    found: dict[Box, Any] = {}
    for shard in x.addressable_shards:
        box = _box(shard.index, x.shape)
        if box not in found:
            found[box] = _memory(shard.data) if written else np.asarray(shard.data)
    return found


def _memory(x: jax.Array) -> Any:
    """An array's memory, to write. XLA is not told, as a view would be, and hands it over in the next step."""
    return view_of(x).view(x.dtype).reshape(x.shape)


def _where_it_was(x: jax.Array, _: str) -> jax.Array:
    """A leaf that has been written: of each part one copy, which the others are made like."""
    first: dict[Box, Any] = {}
    for shard in x.addressable_shards:
        here = _memory(shard.data)
        there = first.setdefault(_box(shard.index, x.shape), here)
        if there is not here:
            here[...] = there
    return x


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))


def _within(x: Any, parts: Mapping[Box, Any], box: Box) -> Any:
    """The values in a box: a part itself, or of a larger one."""
    if box in parts:
        return parts[box]
    for own, values in parts.items():
        if all(a <= begin and end <= b for (a, b), (begin, end) in zip(own, box, strict=True)):
            return values[tuple(slice(begin - a, end - a) for (a, _), (begin, end) in zip(own, box, strict=True))]
    return np.asarray(x)[tuple(slice(*each) for each in box)]  # divided along another axis


class _Lent:
    """An array's memory as NumPy takes it, not marked as read-only: a loop's types say that of no operand."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.__array_interface__ = {**values.__array_interface__, "data": (values.ctypes.data, False)}


def _flat(values: Any) -> Any:
    """An array's memory, flat, of the type that the loop reads."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return np.asarray(_Lent(flat.view(stored_type(flat.dtype))))


def _assembled(shape: tuple[int, ...], parts: Mapping[Box, Any], like: Sharding, kind: str) -> jax.Array:
    shards: list[jax.Array] = []
    for device, index in like.addressable_devices_indices_map(shape).items():
        place = with_kind(SingleDeviceSharding(device), kind)
        shards.append(jax.device_put(parts[_box(index or (), shape)], place, may_alias=True))
    return well_typed(jax.make_array_from_single_device_arrays(shape, with_kind(like, kind), shards))
