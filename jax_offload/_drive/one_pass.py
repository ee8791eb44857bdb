"""Runs a stage of the cores as loops of one pass, compiled by numba where that is installed (extra ``cores``).

What is the step's own is written in place: the arrays are first handed through a program that does nothing and that
they are donated to, so XLA says whose memory they are, and copies what is not its own (a NumPy array of the user's).
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._base.jaxprs import Literal, Var, variables
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, with_kind
from jax_offload._base.private import address_of
from jax_offload._drive.loop_source import LoopSource, loop_source, stored_type
from jax_offload._drive.stages import Piece

# Elements that a thread takes at least: what one takes 50 us for, five times what it takes to be told. As many parts
# as this for each thread, for threads that others keep waiting. The interpreter is free meanwhile.
_AT_LEAST, _PARTS = 2**16, 8
_ALIGNED = 64  # bytes; XLA takes memory that is as it is, without a copy

Kernel = Callable[..., None]
Run = Callable[..., Sequence[Any]]
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


def one_pass(
    pieces: Sequence[Piece],
    inputs: Sequence[Var],
    outputs: Sequence[Var],
    otherwise: Run,
    next_of: Mapping[Var, Var],
    own: Set[Var],
) -> Run:
    """Pieces of the cores as one function; ``otherwise`` where one of them is no loop, or numba is missing.

    Args:
      pieces: one after the other.
      inputs, outputs: of the function.
      otherwise: runs them as a program of XLA's.
      next_of: result -> what it is the next value of.
      own: inputs that nobody reads later, whose memory is the step's, and of the kind that their types say.
    """
    if not has_numba() or any(piece.jaxpr is None for piece in pieces):
        return otherwise
    over = [_over(piece, pieces, next_of, own) for piece in pieces]
    sources = [loop_source(piece.jaxpr, each) for piece, each in zip(pieces, over, strict=True) if piece.jaxpr]
    found = [source for source in sources if source is not None]
    if len(found) < len(pieces):
        return otherwise
    kernels = [_compiled(source.text, source.types) for source in found]
    turns = _independent(pieces)

    def run(*operands: Any) -> Sequence[Any]:
        if any(len(x.devices()) > 1 for x in operands):
            return otherwise(*operands)
        jax.block_until_ready(operands)
        env = dict(zip(inputs, operands, strict=True))
        old = [v for piece, source in zip(pieces, found, strict=True) for v in _written(piece, source).values()]
        env.update(zip(old, _owned([env[v] for v in old]), strict=True))
        for together in turns:
            started = [_started(kernels[k], pieces[k], found[k], env) for k in together]
            _work([part for parts, _ in started for part in parts])
            for _, made in started:
                env.update((v, make()) for v, make in made.items())
        return [env[v] for v in outputs]

    return run


def _independent(pieces: Sequence[Piece]) -> list[list[int]]:
    """The pieces in their order, those together of which none reads what another makes, or writes over it."""
    turns: list[list[int]] = []
    made: set[Var] = set()
    for k, piece in enumerate(pieces):
        if not turns or not made.isdisjoint(variables(piece.inputs)):
            turns.append([])
            made = set()
        turns[-1].append(k)
        made.update(piece.outputs)
    return turns


def _over(piece: Piece, pieces: Sequence[Piece], next_of: Mapping[Var, Var], own: Set[Var]) -> dict[int, int]:
    """Results and the inputs that they are written over: the next value of one that nobody else reads."""
    read_by = [v for each in pieces for v in {*variables(each.inputs)}]
    found: dict[int, int] = {}
    for k, v in enumerate(piece.outputs):
        old = next_of.get(v)
        if old is None or old not in own or piece.inputs.count(old) != 1 or read_by.count(old) != 1:
            continue
        if all(kind(old.aval) == kind(v.aval) for kind in (_shape, _dtype, is_host_aval)):
            found[k] = piece.inputs.index(old)
    return found


def _written(piece: Piece, source: LoopSource) -> dict[int, Var]:
    return {k: v for k, i in source.over.items() if isinstance(v := piece.inputs[i], Var)}


def _started(
    kernel: Kernel, piece: Piece, source: LoopSource, env: Mapping[Var, Any]
) -> tuple[list[Callable[[], None]], dict[Any, Callable[[], Any]]]:
    """One piece as calls for threads, a part of its elements each; and its results, to be asked for after them."""
    given = [v.val if isinstance(v, Literal) else env[v] for v in piece.inputs]
    like = next(x for x in (given[i] for i in source.arrays) if isinstance(x, jax.Array))
    over = _written(piece, source)
    made: dict[Any, Callable[[], Any]] = {piece.outputs[k]: functools.partial(env.get, v) for k, v in over.items()}
    arrays = [_view(given[i]) for i in source.arrays]
    for v in (v for k, v in enumerate(piece.outputs) if k not in over):
        fresh = _aligned(v.aval)
        arrays.append(fresh.reshape(-1))
        made[v] = functools.partial(jax.device_put, fresh.view(v.aval.dtype), _place(like, v), may_alias=True)
    scalars = [np.asarray(given[i])[()] for i in source.scalars]
    size = arrays[0].size
    part = max(_AT_LEAST, -(-size // (_PARTS * _count())))
    starts = range(0, size, part)
    return [functools.partial(kernel, k, min(k + part, size), *arrays, *scalars) for k in starts], made


def _work(parts: Sequence[Callable[[], None]]) -> None:
    """All of them, each by the thread that is free for it."""
    left = iter(parts)

    def worker() -> None:
        for part in left:  # the interpreter's lock hands out one at a time
            part()

    others = [_threads().submit(worker) for _ in range(min(len(parts), _count()) - 1)]
    worker()
    for other in others:
        other.result()


def _place(like: jax.Array, v: Var) -> Sharding:
    """Where a result lives: with the operands, in its own memory."""
    return with_kind(like.sharding, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)


def _aligned(aval: Any) -> Any:
    """Memory for a result, as a NumPy array of the type that the loop writes."""
    dtype = np.dtype(stored_type(aval.dtype))
    size = math.prod(aval.shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(aval.shape)


def _view(x: Any) -> Any:
    """An array's memory, flat, to read or, where it is the step's own, to write."""
    dtype = np.dtype(stored_type(x.dtype))
    buffer = (ctypes.c_char * (x.size * dtype.itemsize)).from_address(address_of(x))
    return np.frombuffer(buffer, dtype)


def _owned(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The arrays, donated, in memory that is XLA's own: where they were, unless that was somebody else's."""
    return _same(tuple(x.sharding for x in arrays))(*arrays) if arrays else ()


@functools.lru_cache(256)
def _same(shardings: tuple[Sharding, ...]) -> Callable[..., Sequence[jax.Array]]:
    donated = tuple(range(len(shardings)))
    return jax.jit(lambda *xs: xs, donate_argnums=donated, out_shardings=shardings)


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
    return ThreadPoolExecutor(_count(), "jax_offload")


def _count() -> int:
    """As many threads as the process may use cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
