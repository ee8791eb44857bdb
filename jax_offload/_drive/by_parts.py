"""Loops of the cores beside accelerators, part by part: each process updates what its own accelerators have of a leaf.

A loop does the same to every element, so it needs no leaf whole: what is divided between accelerators, or processes,
stays divided, and is updated where it is in host memory; of what is replicated one copy is. A new parameter that is
divided further than it is to be (ZeRO-1) goes up as its parts, and the accelerators put it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_offload._base.jaxprs import Literal, Var
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, well_typed, with_kind
from jax_offload._drive.cores import is_sent, one_of
from jax_offload._drive.loop_source import LoopSource, as_scalar, stored_type
from jax_offload._drive.loops import Kernel, aligned, calls_of, independent, loops_of, work
from jax_offload._drive.pieces import Piece
from jax_offload._drive.stages import Stage
from jax_offload._drive.tasks import Task

Box = tuple[tuple[int, int], ...]  # from where to where, along each axis


class ByParts:
    """Pieces of the cores as one function of arrays as the accelerators have sent them.

    Its results are divided as the operands of their piece are, those that are divided furthest.

    Args:
      pieces: one after the other, all of them loops.
      inputs, outputs: of the function.
      up: results that go to the accelerators at once; the others stay in host memory.
      kernels: of each piece its loop.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        inputs: Sequence[Var],
        outputs: Sequence[Var],
        up: Set[Var],
        kernels: Sequence[tuple[Kernel, LoopSource]],
    ) -> None:
        self._pieces, self._inputs, self._outputs, self._up, self._kernels = pieces, inputs, outputs, up, kernels
        self._levels = independent(pieces)

    def __call__(self, *operands: Any) -> list[Any]:
        env = dict(zip(self._inputs, operands, strict=True))
        for together in self._levels:
            started = [_started(*self._kernels[k], self._pieces[k], env) for k in together]
            work([part for parts, _ in started for part in parts])
            for _, by_box in started:
                env.update((v, make(DEVICE_KIND if v in self._up else HOST_KIND)) for v, make in by_box.items())
        return [env[v] for v in self._outputs]


def by_parts(task: Task) -> ByParts | None:
    """A task of the cores part by part; ``None`` where a piece of it is no loop, or numba is missing."""
    pieces = task.stage.pieces
    found = loops_of(pieces, [{} for _ in pieces])
    up = {v for v in task.up if not is_host_aval(v.aval)}
    return None if found is None else ByParts(pieces, task.inputs, task.outputs, up, found)


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
    operands = [given[i] for i in source.arrays]
    scalars = [as_scalar(one_of(given[i])) for i in source.scalars]
    in_parts = [_parts(x) for x in operands]
    most = max(range(len(in_parts)), key=lambda k: len(in_parts[k]))
    boxes, like = list(in_parts[most]), operands[most].sharding
    calls: list[Callable[[], None]] = []
    by_box: list[dict[Box, Any]] = [{} for _ in piece.outputs]
    for box in boxes:
        arrays = [_flat(_within(x, parts, box)) for x, parts in zip(operands, in_parts, strict=True)]
        shape = tuple(end - begin for begin, end in box)
        fresh = [aligned(shape, v.aval.dtype) for v in piece.outputs]
        for results, v, x in zip(by_box, piece.outputs, fresh, strict=True):
            results[box] = x.view(v.aval.dtype)
        calls += calls_of(kernel, arrays[0].size, [*arrays, *(x.reshape(-1) for x in fresh), *scalars])
    return calls, {v: partial(_assembled, v.aval.shape, x, like) for v, x in zip(piece.outputs, by_box, strict=True)}


def _parts(x: Any) -> dict[Box, Any]:
    """What this process has of an array, each part once. Waits until it is there."""
    found: dict[Box, Any] = {}
    for shard in x.addressable_shards:
        box = _box(shard.index, x.shape)
        if box not in found:
            found[box] = np.asarray(shard.data)
    return found


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
