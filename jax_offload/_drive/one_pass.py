"""Runs a stage of the cores as loops of one pass, on a CPU, where the step's own memory is the host's.

What is the step's own is written in place: the arrays are first handed through a program that does nothing and that
they are donated to, so XLA says whose memory they are, and copies what is not its own (a NumPy array of the user's).
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_offload._base.jaxprs import Literal, Var, variables
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval, with_kind
from jax_offload._base.private import address_of
from jax_offload._drive.loop_source import LoopSource, as_scalar, stored_type
from jax_offload._drive.loops import Kernel, aligned, calls_of, independent, loops_of, work
from jax_offload._drive.pieces import Piece

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
    kernels = loops_of(pieces, [over_of(piece, pieces, next_of, own) for piece in pieces])
    if kernels is None:
        return otherwise
    levels = independent(pieces)
    old = [v for piece, (_, source) in zip(pieces, kernels, strict=True) for v in written_by(piece, source).values()]

    def run(*operands: Any) -> Sequence[Any]:
        if any(len(x.devices()) > 1 for x in operands):
            return otherwise(*operands)
        jax.block_until_ready(operands)
        env = dict(zip(inputs, operands, strict=True))
        env.update(zip(old, _owned([env[v] for v in old]), strict=True))
        for together in levels:
            started = [_started(*kernels[k], pieces[k], env) for k in together]
            work([part for parts, _ in started for part in parts])
            for _, results in started:
                env.update((v, make()) for v, make in results.items())
        return [env[v] for v in outputs]

    return run


def over_of(piece: Piece, pieces: Sequence[Piece], next_of: Mapping[Var, Var], own: Set[Var]) -> dict[int, int]:
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


def written_by(piece: Piece, source: LoopSource) -> dict[int, Var]:
    """Results and the variables that they are written over."""
    return {k: v for k, i in source.over.items() if isinstance(v := piece.inputs[i], Var)}


def _started(
    kernel: Kernel, source: LoopSource, piece: Piece, env: Mapping[Var, Any]
) -> tuple[list[Callable[[], None]], dict[Any, Callable[[], Any]]]:
    """One piece as calls for threads, a part of its elements each; and its results, to be asked for after them."""
    given = [v.val if isinstance(v, Literal) else env[v] for v in piece.inputs]
    like = next(x for x in (given[i] for i in source.arrays) if isinstance(x, jax.Array))
    over = written_by(piece, source)
    results: dict[Any, Callable[[], Any]] = {piece.outputs[k]: functools.partial(env.get, v) for k, v in over.items()}
    arrays = [view_of(given[i]) for i in source.arrays]
    for v in (v for k, v in enumerate(piece.outputs) if k not in over):
        fresh = aligned(v.aval.shape, v.aval.dtype)
        arrays.append(fresh.reshape(-1))
        results[v] = functools.partial(jax.device_put, fresh.view(v.aval.dtype), _place(like, v), may_alias=True)
    scalars = [as_scalar(given[i]) for i in source.scalars]
    return calls_of(kernel, arrays[0].size, [*arrays, *scalars]), results


def _place(like: jax.Array, v: Var) -> Sharding:
    """Where a result lives: with the operands, in its own memory."""
    return with_kind(like.sharding, HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND)


def view_of(x: Any) -> Any:
    """An array's memory, flat, to read or, where it is the step's own, to write."""
    dtype = np.dtype(stored_type(x.dtype))
    buffer = (ctypes.c_char * (x.size * dtype.itemsize)).from_address(address_of(x))
    return np.frombuffer(buffer, dtype)


def _owned(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The arrays, donated, in memory that is XLA's own: where they were, unless that was somebody else's.

    Waits until that is so: programs that have begun may still read them, or a copy may still be under way.
    """
    return jax.block_until_ready(handed_over(arrays))


def handed_over(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The arrays, through a program that they are donated to."""
    return _same(tuple(x.sharding for x in arrays))(*arrays) if arrays else ()


@functools.lru_cache(256)
def _same(shardings: tuple[Sharding, ...]) -> Callable[..., Sequence[jax.Array]]:
    donated = tuple(range(len(shardings)))
    return jax.jit(lambda *xs: xs, donate_argnums=donated, out_shardings=shardings)
