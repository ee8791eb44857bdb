"""Loops of the cores, compiled by numba where that is installed (extra ``cores``), and the threads that run them."""

from __future__ import annotations

import functools
import math
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_offload._base.jaxprs import Var, variables
from jax_offload._drive.loop_source import LoopSource, loop_source, stored_type
from jax_offload._drive.pieces import Piece

# Elements that a thread takes at least: what one takes 50 us for, five times what it takes to be told. As many parts
# as this for each thread, for threads that others keep waiting. The interpreter is free meanwhile.
_AT_LEAST, _PARTS = 2**16, 8
_MOST_CORES = 4096  # of a host; more share their numbers
_ALIGNED = 64  # bytes; XLA takes memory that is as it is, without a copy

Kernel = Callable[..., None]


def loops_of(pieces: Sequence[Piece], over: Sequence[Mapping[int, int]]) -> list[tuple[Kernel, LoopSource]] | None:
    """The loop of each piece; ``None`` where one of them is no loop, or numba is missing.

    ``over``: of each piece its results that are written over an input.
    """
    if not has_numba() or any(piece.jaxpr is None for piece in pieces):
        return None
    sources = [loop_source(piece.jaxpr, each) for piece, each in zip(pieces, over, strict=True) if piece.jaxpr]
    found = [source for source in sources if source is not None]
    return [(_compiled(source.text, source.types), source) for source in found] if len(found) == len(pieces) else None


def independent(pieces: Sequence[Piece]) -> list[list[int]]:
    """The pieces in their order, those together of which none reads what another makes, or writes over it."""
    levels: list[list[int]] = []
    defined: set[Var] = set()
    for k, piece in enumerate(pieces):
        if not levels or not defined.isdisjoint(variables(piece.inputs)):
            levels.append([])
            defined = set()
        levels[-1].append(k)
        defined.update(piece.outputs)
    return levels


def calls_of(kernel: Kernel, size: int, arguments: Sequence[Any]) -> list[Callable[[], None]]:
    """A loop over so many elements as calls for threads, a part of them each."""
    part = max(_AT_LEAST, -(-size // (_PARTS * threads())))
    return [functools.partial(kernel, k, min(k + part, size), *arguments) for k in range(0, size, part)]


def work(parts: Sequence[Callable[[], None]]) -> None:
    """All of them, each by the thread that is free for it."""
    left = iter(parts)

    def worker() -> None:
        for part in left:  # the interpreter's lock hands out one at a time
            part()

    others = [_threads().submit(worker) for _ in range(min(len(parts), threads()) - 1)]
    worker()
    for other in others:
        other.result()


def aligned(shape: Sequence[int], dtype: Any) -> Any:
    """Memory for a result, as a NumPy array of the type that the loop writes."""
    dtype = np.dtype(stored_type(np.dtype(dtype)))
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


@functools.cache
def has_numba() -> bool:
    """Whether loops can be compiled (extra ``cores``)."""
    try:
        import numba  # noqa: F401  # pyright: ignore
    except ImportError:
        return False
    return True


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "jax_offload")


@functools.cache
def threads() -> int:
    """As many as the process may use cores; of those that others of the job may use too, its share."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    if jax.process_count() == 1:
        return len(cores)
    mine = np.zeros(_MOST_CORES, np.int32)
    mine[[core % _MOST_CORES for core in cores]] = 1
    host = np.int32(zlib.crc32(socket.gethostname().encode()) >> 1)
    # All processes are here, as each comes to its first loop in the same step.
    hosts, masks = multihost_utils.process_allgather((host, mine))
    return fair_share(mine, masks[hosts == host])


def fair_share(mine: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> int:
    """How many of its cores a process takes, at least one.

    Args:
      mine: of each core whether the process may use it.
      masks: the same of all processes of the host, a row for each.
    """
    return max(1, int((mine / np.maximum(masks.sum(0), 1)).sum() + 1e-6))


@functools.lru_cache(256)
def _compiled(text: str, types: tuple[str, ...]) -> Kernel:
    """A loop's machine code, and once for all leaves that are updated alike, whatever their shapes."""
    import numba  # pyright: ignore

    names = {"float32", "int32", "uint32", "uint16"}
    scope: dict[str, Any] = {name: getattr(np, name) for name in names} | _roundings()
    scope |= {"sqrt": math.sqrt, "copysign": math.copysign, "inf": math.inf, "nan": math.nan}
    exec(text, scope)
    arguments = [f"{t[:-2]}[::1]" if t.endswith("[]") else t.replace("bool", "boolean") for t in types]
    signature = f"void(int64, int64, {', '.join(arguments)})".replace("bool[", "boolean[")
    return numba.njit(signature, nogil=True, error_model="numpy", fastmath={"contract"})(scope["kernel"])


@functools.cache
def _roundings() -> dict[str, Any]:
    """bfloat16 numbers, as bits, to float32 and back: to the nearest, of two to the even one; NaN stays NaN."""
    import numba  # pyright: ignore
    from llvmlite import ir  # pyright: ignore
    from numba.extending import intrinsic  # pyright: ignore

    word, half = ir.IntType(32), ir.IntType(16)

    def widened(builder: Any, bits: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(bits, word), word(16)), ir.FloatType())

    def narrowed(builder: Any, x: Any) -> Any:
        bits = builder.bitcast(x, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        nearest = builder.lshr(builder.add(bits, builder.add(odd, word(0x7FFF))), word(16))
        return builder.select(builder.fcmp_unordered("uno", x, x), half(0x7FC0), builder.trunc(nearest, half))

    @intrinsic
    def from_bfloat16(typing: Any, x: Any) -> Any:
        return numba.float32(numba.uint16), lambda context, b, signature, args: widened(b, args[0])

    @intrinsic
    def to_bfloat16(typing: Any, x: Any) -> Any:
        return numba.uint16(numba.float32), lambda context, b, signature, args: narrowed(b, args[0])

    @intrinsic
    def rounded(typing: Any, x: Any) -> Any:
        return numba.float32(numba.float32), lambda context, b, signature, args: widened(b, narrowed(b, args[0]))

    return {"from_bfloat16": from_bfloat16, "to_bfloat16": to_bfloat16, "rounded": rounded}
