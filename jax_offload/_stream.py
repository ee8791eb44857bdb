"""The order of the slices, and the gates between them: load → update → store through a bounded window.

XLA's scheduler hoists every host-to-device copy to the start of a program, because nothing holds it back; then every
loaded leaf lives until its update, and the peak is that of a resident state. A gate holds it back: an
``optimization_barrier`` over the host leaf and a value that earlier work produced, *whose outputs are used from then
on in place of both* (a barrier with an unused output is optimised away).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer

from jax_offload._alike import traced_once
from jax_offload._dataflow import Pass, Slice, cut, joined, usual_load
from jax_offload._loop import buffers, in_chunks, or_whole
from jax_offload._memory import is_host_aval, on_host, to_host
from jax_offload._placement import nbytes
from jax_offload._sharding import constrained, is_manual, typed_sharding, varying_over
from jax_offload._trace import Program, Var
from jax_offload._turns import Turns, in_turn, is_large, small, waiting

# Slices of up to 256 MiB, or a 32nd of the state, are loaded whole, and the window has room for two and a half.
# Larger ones go through a window of that size in chunks: far beyond what the latency of a copy can be felt in (see
# docs/streaming.md).
DEFAULT_WINDOW, DEFAULT_SHARE = 2**28, 32
# And none of more than an eighth of the state: whole, a stacked leaf of a small model is the state, twice as it is
# updated (12x1536x1536, compiled for an H200: 651 MiB, resident 501, so 285). Below 1 MiB a copy is only its latency.
SMALL_SHARE, LEAST_WINDOW = 8, 2**20
# The window is made for slices up to the size within which this share of the state is: an embedding does not count.
USUAL = 0.8
# Copies of smaller slices hide little, and XLA's scheduler puts off what the backward pass should free for them
# (48 layers of 256x256, 512 tokens: 116 MiB, resident 69). They run in a loop of their own, out of its sight: 39 MiB.
LEAST_HIDDEN = 2**23


@dataclasses.dataclass(frozen=True)
class Window:
    """Bytes of the state on one device at a time while it streams, and why so many.

    Attributes:
      apart: whether all slices run in a loop of their own, once the backward pass is over.
      leaf: the path of the first leaf that streams through it, as far as it is known.
    """

    nbytes: int
    why: str
    apart: bool = False
    leaf: str = ""


@dataclasses.dataclass(frozen=True)
class Load:
    """That a slice loads some leaves: their ``id`` in the arguments, how, and through which window."""

    ids: list[int]
    how: str
    window: Window


_LOADS: contextvars.ContextVar[list[Load] | None] = contextvars.ContextVar("loads", default=None)


@contextlib.contextmanager
def loads_of_updates() -> Iterator[list[Load]]:
    """Collects what every traced update loads, in the order of loading."""
    loads: list[Load] = []
    token = _LOADS.set(loads)
    try:
        yield loads
    finally:
        _LOADS.reset(token)


def stream(
    program: Program,
    args: Sequence[Any],
    *,
    gradients: Sequence[int],
    turns: Turns,
    reuse: Mapping[int, int],
    rank: Callable[[int], int],
    window: int | None,
) -> list[Any]:
    """Runs a traced update slice by slice; returns its results.

    Args:
      program: the usual recipe (load all, update, store all) as a program.
      args: its arguments.
      gradients: positions in ``args`` of the incoming updates, which gate the loads, in the order of the backward
        pass.
      turns: which of them wait for each other.
      reuse: position of a result -> position of the argument that it is the next value of.
      rank: position in ``args`` of a host leaf -> its place in the order of the backward pass.
      window: bytes of host leaves on one device at a time. ``None``: two and a half of the largest usual slice (two
        are the least with which one loads while another is updated, the half is for slices that differ); but where
        that slice is larger than 256 MiB and a 32nd of the state, that.
    """
    first = len(program.consts)
    env: dict[Var, Any] = dict(zip(program.inputs, [*program.consts, *args], strict=True))
    position = {v: i - first for i, v in enumerate(program.inputs)}
    grads = [program.inputs[first + i] for i in gradients]
    next_of = {
        program.outputs[i]: program.inputs[first + j]
        for i, j in reuse.items()
        if not isinstance(program.outputs[i], jex.Literal)
    }
    passes, chosen = plan(program, next_of, window)
    if chosen.apart and not all(_can_run_apart(each.slices, next_of) for each in passes):
        chosen = dataclasses.replace(chosen, apart=False)
    tracing = any(isinstance(x, Tracer) for x in env.values())
    passes = traced_once(passes) if tracing else passes
    before: list[Var] = []  # what the loads of a pass wait for
    for each in passes:
        if tracing:
            _run_in_turn(each.prelude, env, grads, set(next_of), turns)
        else:
            _run(each.prelude, env)
        slices = sorted(each.slices, key=lambda s: min((rank(position[v]) for v in s.loads), default=0))
        if (loads := _LOADS.get()) is not None:
            loads += [Load([id(args[position[v]]) for v in s.loads], s.how, chosen) for s in slices]
        if tracing:
            made = [_made(s, next_of) for s in slices]
            run = _run_apart if chosen.apart else _run_gated
            run(slices, made, env, set(grads), chosen.nbytes, before, next_of)
            before = made[-1] if slices else before
        else:  # no program to order: each slice runs, and frees what it loaded, before the next
            for s in slices:
                _run(dataclasses.replace(s, run=jax.jit(s.run)) if s.in_chunks else s, env)
    return [_array(v) if isinstance(v, jex.Literal) else env[v] for v in program.outputs]


def plan(program: Program, next_of: Mapping[Var, Var], window: int | None) -> tuple[list[Pass], Window]:
    """The slices, those that are larger than the window in chunks if that can be, and the window.

    One pass if that is enough, and a second one, ahead, for numbers that need the state, if that lowers what is on the
    device at once.
    """
    state = sum(nbytes(v.aval) // math.prod(program.shards.get(v, ())) for v in program.inputs if is_host_aval(v.aval))
    default = default_window(state)
    best: tuple[int, list[Pass], Window] | None = None
    for numbers_apart in False, True:
        passes = cut(program, numbers_apart)
        usual = usual_load(passes, USUAL)
        chosen = _chosen(window, default, usual, program)
        size = chosen.nbytes
        passes = [
            dataclasses.replace(p, slices=_fitted(p.slices, lambda s, size=size: in_chunks(s, next_of, size), size))
            for p in passes
        ]
        at_once = max((size if s.in_chunks else s.loaded_bytes for p in passes for s in p.slices), default=0)
        if best is None or at_once < best[0]:
            best = at_once, passes, chosen
        # An embedding may be larger than the window: up to twice what a small model's may be, not worth a pass.
        if at_once <= max(size, window or min(_large(state), 2 * default.nbytes)):
            break
    assert best is not None  # two were tried
    return best[1], best[2]


def default_window(state: int) -> Window:
    """For slices that are larger than it, given the bytes of host leaves on one device."""
    large, small = _large(state), max(LEAST_WINDOW, state // SMALL_SHARE)
    if small < large:
        return Window(small, "an eighth of the state" if small > LEAST_WINDOW else "1 MiB, the least")
    return Window(
        large,
        "a 32nd of the state, less than its usual pieces"
        if large > DEFAULT_WINDOW
        else "256 MiB, less than its usual pieces",
    )


def _large(state: int) -> int:
    return max(DEFAULT_WINDOW, state // DEFAULT_SHARE)


def _chosen(given: int | None, default: Window, usual: int, program: Program) -> Window:
    if given:
        return Window(given, "as given")
    fits = usual <= default.nbytes
    chosen = Window(5 * usual // 2, "two and a half of its usual pieces") if fits else default
    # Where something is divided, collectives are in the scheduler's sight anyway.
    alone = all(math.prod(shards) == 1 for shards in program.shards.values())
    return dataclasses.replace(chosen, apart=alone and 0 < usual < LEAST_HIDDEN)


def _fitted(slices: list[Slice], chunked_by: Callable[[Slice], Slice], window: int) -> list[Slice]:
    """The slices, those that are larger than the window in chunks if that can be.

    A loop over one host leaf uses one direction of the link at a time, because nothing can be read from a buffer while
    it is written. So such leaves share a loop, if they have as many rows and one row of each fits.
    """
    fitted: list[Slice] = []
    shared: dict[int, Slice] = {}  # number of rows -> leaves that share a loop
    for s in slices:
        chunked = chunked_by(s) if s.loaded_bytes > window else s
        if not chunked.in_chunks or (len(s.loads), len(s.stores)) != (1, 1):
            fitted.append(chunked)
            continue
        rows = s.loads[0].aval.shape[0]
        if (others := shared.get(rows)) is not None:
            together = joined(others, s)
            if together.loaded_bytes <= rows * (window // 2) and chunked_by(together).in_chunks:
                shared[rows] = together
                continue
            fitted.append(chunked_by(others))
        shared[rows] = s
    return fitted + [chunked_by(s) for s in shared.values()]


def _array(literal: Any) -> jax.Array:
    """A result that the trace found to be a constant, as the array that the optimizer would have returned."""
    return jnp.asarray(literal.val, None if literal.aval.weak_type else literal.aval.dtype)


def _run_gated(
    slices: Sequence[Slice],
    made: Sequence[Sequence[Var]],
    env: dict[Var, Any],
    gradients: Set[Var],
    window: int,
    before: Sequence[Var],
    next_of: Mapping[Var, Var],
) -> None:
    """A slice loads once there is room, and the gradient of the first slice that is still in the window."""
    sizes = [min(s.loaded_bytes, window) for s in slices]
    done = 0
    for k in range(len(slices)):
        back = _must_be_back(sizes, k, window)
        for s in slices[done : back + 1]:
            _run(s, env)
        done = max(done, back + 1)
        # The larger the window, the earlier a load: when the first of those in flight can be updated. Then no gradient
        # waits for its state. The first chunk of a loop would lie there through the whole backward pass.
        after = slices[k] if slices[k].in_chunks else slices[done] if done < k else None
        grads = [v for v in after.inputs if v in gradients] if after else []
        _gate(env, slices[k].loads, [*grads, *(made[back] if back >= 0 else before)])
    for s in slices[done:]:
        _run(s, env)


def _can_run_apart(slices: Sequence[Slice], next_of: Mapping[Var, Var]) -> bool:
    """Whether a loop can carry all results: those on the host in the buffers that they are the next values of."""
    carried = set(_carried(slices, next_of))
    made = {v for s in slices for v in s.outputs}
    plain = all(v in carried or not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in made)
    stored = carried.issuperset(v for v in made if is_host_aval(v.aval))
    return plain and stored and not any(s.jaxpr.effects for s in slices) and not is_manual()


def _zeros(aval: Any) -> jax.Array:
    return constrained(jnp.zeros(aval.shape, aval.dtype), typed_sharding(aval))


def _carried(slices: Sequence[Slice], next_of: Mapping[Var, Var]) -> dict[Var, Var]:
    """Result -> the operand whose buffer it takes."""
    pairs = [pair for s in slices for pair in zip(s.outputs, buffers(s, next_of), strict=True)]
    return {v: old for v, old in pairs if old is not None}


def _run_apart(
    slices: Sequence[Slice],
    made: Sequence[Sequence[Var]],
    env: dict[Var, Any],
    gradients: Set[Var],
    window: int,
    before: Sequence[Var],
    next_of: Mapping[Var, Var],
) -> None:
    """As ``_run_gated``, in a loop that runs once, which XLA does not see."""
    outputs = list(dict.fromkeys(v for s in slices for v in s.outputs))
    inputs = list(dict.fromkeys([*(v for s in slices for v in s.inputs), *before]))
    carried = _carried(slices, next_of)

    def gated(*operands: Any) -> list[Any]:
        inner = dict(zip(inputs, operands, strict=True))
        _run_gated(slices, made, inner, gradients, window, before, next_of)
        return [inner[v] for v in outputs]

    def looped(*operands: Any) -> list[Any]:
        given = dict(zip(inputs, operands, strict=True))
        start = [given[carried[v]] if v in carried else _zeros(v.aval) for v in outputs]

        def once(carry: Any) -> Any:
            now = given | {carried[v]: x for v, x in zip(outputs, carry[1], strict=True) if v in carried}
            return jnp.zeros_like(carry[0]), gated(*(now[v] for v in inputs))

        return jax.lax.while_loop(lambda c: c[0], once, (jax.lax.optimization_barrier(jnp.array(True)), start))[1]

    results = or_whole(looped, gated)(*(env[v] for v in inputs)) if outputs else []
    env.update(zip(outputs, results, strict=True))


def _made(s: Slice, next_of: Mapping[Var, Var]) -> list[Var]:
    """What tells that a slice is through: its stores, or its part of a number where it only computes that.

    And parameters that it has gathered: else XLA keeps all of them, whole, until the last is there.
    """
    pins = s.pins
    return [*s.stores, *(v for v in s.outputs if v in pins and v in next_of)] or s.outputs[:1]


def _must_be_back(sizes: Sequence[int], k: int, window: int) -> int:
    """The last slice that must be stored before slice ``k`` is loaded; -1 where none need be."""
    i, in_flight = k, 0
    while i >= 0 and (i == k or in_flight + sizes[i] <= window):
        in_flight += sizes[i]
        i -= 1
    return i


def _run_in_turn(
    prelude: Slice, env: dict[Var, Any], gradients: Sequence[Var], results: Set[Var], turns: Turns
) -> None:
    """Of the gradients, in their order, each is used once the one before it has been."""
    if turns is Turns.NONE:
        _run(prelude, env)
        return
    parts, large = in_turn(prelude, gradients), [v for v in gradients if is_large(v.aval)]
    # Leaves that stay on the device are updated here. What is only stored, the last gradient say, is on the host.
    updated = [v for g, part in parts if g in large and not small(part, g) for v in part.outputs if v in results]
    updated = [v for v in updated if not is_host_aval(v.aval)]
    everywhere = varying_over(jnp.zeros(()))
    if updated and turns is Turns.ALL and all(varying_over(env[v]) == everywhere for v in large):
        held, zero = waiting([env[v] for v in large])
        env.update(zip(large, held, strict=True))
        _run(prelude, env)
        last = min(updated, key=lambda v: nbytes(v.aval))
        env[last] = jnp.where(zero == 0, env[last], jnp.zeros((), env[last].dtype))
        return
    used: list[Var] = []
    for gradient, part in parts:
        if gradient is not None:
            _gate(env, [gradient], used)
            used = small(part, gradient) or used
        _run(part, env)


def _run(s: Slice, env: dict[Var, Any]) -> None:
    env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))


def _gate(env: dict[Var, Any], held: Sequence[Var], waits_for: Sequence[Var]) -> None:
    """Inside ``shard_map`` only among what varies over the same axes: jax 0.10 makes all outputs vary over all."""
    for varying in {varying_over(env[v]) for v in held}:
        waiting, first = ([v for v in vs if varying_over(env[v]) == varying] for vs in (held, waits_for))
        if first:
            names = [*waiting, *first]
            env.update(zip(names, _GATE([env[v] for v in names]), strict=True))


@jax.custom_jvp
def _together(values: list[Any]) -> list[Any]:
    """A gate. Tangents pass it one by one: those that are zero are made on the device, also of host leaves."""
    return jax.lax.optimization_barrier(values)


@_together.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (values,), (tangents,) = primals, tangents
    return _together(values), [to_host(t) if on_host(x) else t for x, t in zip(values, tangents, strict=True)]


_GATE = jax.jit(_together, inline=True)  # traced once for gates of equal types, and gone from the program
