"""Make the plan of a traced update. This only decides; ``_emit`` follows the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import nbytes
from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import is_host_aval
from jax_offload._ir.primitives import PLACED
from jax_offload._ir.program import Program
from jax_offload._ir.slices import Pass, Slice, cut, joined, repeats_effects
from jax_offload._ir.trace import LARGE, Backward
from jax_offload._plan.options import Claim
from jax_offload._plan.plan import OnCores, Planned, PlannedPass, Whole, Window
from jax_offload._plan.serialise import SerialPart, in_turn
from jax_offload._plan.transfers import buffers, transfer_of

# Slices up to this size, or this share of the state, are loaded whole, and the window has room for two and a half.
# Larger ones go through a window of that size in chunks, which are far too long for the latency of a copy to matter.
DEFAULT_WINDOW, DEFAULT_SHARE = 2**28, 32
# A slice of more than this share of the state is not loaded whole: a stacked leaf of a small model is all of the
# state, and there twice while it is updated. Below the least window a copy is only its latency.
SMALL_SHARE, LEAST_WINDOW = 8, 2**20
# Pieces between gates may be half of the state: no two are on the device in full, and XLA runs no loop over chunks
# beside a matmul.
GATED_SHARE = 2
# The window is made for slices up to the size within which this share of the state is: an embedding does not count.
USUAL = 0.8
# Copies of smaller slices hide little, and XLA's scheduler puts off what the backward pass should free for them. They
# run in a loop of their own, out of its sight.
LEAST_HIDDEN = 2**23
SMALL_PIECES = "as pieces this small hide little"
# So it does wherever a step computes much longer than it moves its state: there nothing holds the gradients' matmuls
# back, and little is lost by moving the state afterwards. An H200 does 13000 operations while its link moves a byte.
FLOPS_PER_BYTE = 24000
PUT_OFF = "or XLA would put off the matmuls that make the gradients; jax_offload.jit can hide these transfers"


def passes_of(
    program: Program,
    next_of: Mapping[Var, Var],
    claims: Sequence[Claim],
    rank: Callable[[Var], int],
    *,
    manual: bool,
    backward: Backward | None = None,
    gradients: Sequence[Var] = (),
    take_turns: bool = False,
    gated: bool = False,
) -> list[PlannedPass]:
    """Plan the slices of a traced update; slices larger than their window go in chunks if their rows can be kept apart.

    There is one pass, and a second one ahead of it for scalars that need the state if that lowers the memory on the
    device.

    Args:
      program: the usual recipe (load all, update, store all) as a program.
      next_of: result -> the operand that it is the next value of.
      claims: the offloads; every host leaf belongs to one of them.
      rank: a host leaf's place in the order of the backward pass.
      manual: whether the update is traced inside ``shard_map``.
      backward: the passes through the network, where gates in the update are all that holds these back.
      gradients: operands of the program, in the order of the backward pass.
      take_turns: whether they may wait for each other.
      gated: whether each slice runs by itself, between gates of the passes.
    """
    best: tuple[int, list[Pass], list[list[Planned]]] | None = None
    on_cores = frozenset[Var]().union(*(claim.on_cores for claim in claims))  # and with them all of their slices
    hosts = frozenset[Var]().union(*(claim.leaves for claim in claims)) - on_cores
    for scalars_ahead in False, True:
        passes = cut(program, scalars_ahead)
        if scalars_ahead and repeats_effects(program, passes):
            break
        found: list[list[Planned]] = [[] for _ in passes]
        enough, most = True, 0
        own_loop = _put_off(backward, program, hosts, {*gradients} & {*passes[0].prelude.inputs})
        for claim in claims:
            own = [[s for s in p.slices if _claim(s, claims) is claim] for p in passes]
            stay = [[s for s in slices if not on_cores.isdisjoint(s.loads)] for slices in own]
            own = [[s for s in slices if on_cores.isdisjoint(s.loads)] for slices in own]
            window, large = _window(claim, [s.loaded_bytes for slices in own for s in slices], program, own_loop, gated)
            for slices, here, planned in zip(own, stay, found, strict=True):
                planned += (Planned(s, OnCores(), window) for s in here)
                fitted = _fitted(slices, next_of, window)
                planned += fitted
                most = max([most, *(p.bytes_at_once for p in fitted)])
                enough &= all(p.bytes_at_once <= large for p in fitted)
        if best is None or most < best[0]:
            best = most, passes, found
        if enough:
            break
    assert best is not None  # two were tried
    _, passes, found = best
    carried = [_carried(slices, next_of, manual) for slices in found]
    if any(slices and loop is None for slices, loop in zip(found, carried, strict=True)):
        found, carried = _in_sight(found), [None for _ in found]
    return [
        PlannedPass(
            each.prelude,
            _scheduled(slices, rank, next_of),
            in_turn(each.prelude, gradients) if take_turns or gated else (SerialPart(each.prelude),),
            loop,
        )
        for each, slices, loop in zip(passes, found, carried, strict=True)
    ]


def _in_sight(found: Sequence[Sequence[Planned]]) -> list[list[Planned]]:
    """The slices of all passes, none to run in a loop of its own."""
    windows = {id(p.window): p.window for slices in found for p in slices}
    windows = {key: dataclasses.replace(window, own_loop="") for key, window in windows.items()}
    return [[dataclasses.replace(p, window=windows[id(p.window)]) for p in slices] for slices in found]


def _claim(s: Slice, claims: Sequence[Claim]) -> Claim:
    """The offload that streams a slice: among those that have leaves in it, the one with the smallest window."""
    loads = set(s.loads)
    return min(
        (c for c in claims if loads & c.leaves),
        key=lambda c: math.inf if c.options.window is None else c.options.window,
        default=claims[0],
    )


def _put_off(backward: Backward | None, program: Program, hosts: Set[Var], ungated: Set[Var]) -> str:
    """Why no slice can run among the matmuls of the backward pass; empty where they can.

    XLA's scheduler does all as late as the copies allow. That is bounded where putting off every gradient takes less
    than the state that is away, and it is late by little where every gradient is awaited by a load that is not much
    shorter than the layer's arithmetic: not the ``ungated``, which stay on the device, or which only a norm needs.
    """
    moved = sum(nbytes(v.aval) for v in program.inputs if v in hosts)
    if backward is None or 2 * backward.held <= moved:
        return ""
    late = backward.scaled or any(math.prod(v.aval.shape) >= LARGE for v in ungated)
    return PUT_OFF if late or backward.flops > FLOPS_PER_BYTE * moved else ""


def _window(
    claim: Claim, sizes: Sequence[int], program: Program, own_loop: str = "", gated: bool = False
) -> tuple[Window, int]:
    """The window for slices of these bytes, and up to how many bytes at once are not worth a pass of their own."""
    # Where something is divided, collectives are in the scheduler's sight anyway, and small pieces may be. What gathers
    # (ZeRO-1) is a collective itself, beside which nothing would run.
    is_divided = any(math.prod(shards) > 1 for shards in program.shards.values())
    if is_divided and any(eqn.primitive.name in PLACED - {"device_put"} for eqn in program.eqns):
        own_loop = ""
    if (given := claim.options.window) is not None:
        return Window(given, "as given", own_loop=own_loop), given
    state = sum(nbytes(v.aval) // math.prod(program.shards.get(v, ())) for v in claim.leaves)
    default, usual = default_window(state), _usual(sizes)
    largest = min(_large(state), state // GATED_SHARE) if gated else default.nbytes
    fits = usual <= max(largest, default.nbytes)
    chosen = Window(5 * usual // 2, "two and a half of its usual pieces") if fits else default
    own_loop = own_loop or (SMALL_PIECES if not is_divided and 0 < usual < LEAST_HIDDEN else "")
    chosen = dataclasses.replace(chosen, own_loop=own_loop)
    # An embedding may be larger than the window, up to twice what a small model's may be.
    return chosen, max(chosen.nbytes, min(_large(state), 2 * default.nbytes))


def default_window(state: int) -> Window:
    """For slices that are larger than it, given the bytes of host leaves on one device."""
    large, small = _large(state), max(LEAST_WINDOW, state // SMALL_SHARE)
    if small < large:
        return Window(small, "an eighth of the state" if small > LEAST_WINDOW else "1 MiB, the least")
    share = "a 32nd of the state" if large > DEFAULT_WINDOW else "256 MiB"
    return Window(large, f"{share}, less than its usual pieces")


def _large(state: int) -> int:
    return max(DEFAULT_WINDOW, state // DEFAULT_SHARE)


def _usual(sizes: Sequence[int]) -> int:
    """Bytes of host leaves, on one device, that a slice needs together: slices up to it are most of them all."""
    sizes = sorted(sizes)
    return next((n for n, so_far in zip(sizes, accumulate(sizes), strict=True) if so_far >= USUAL * sum(sizes)), 0)


def _fitted(slices: Sequence[Slice], next_of: Mapping[Var, Var], window: Window) -> list[Planned]:
    """Plan the slices; those larger than the window go in chunks if their rows can be kept apart.

    A loop over one host leaf uses one direction of the link at a time, because nothing can be read from a buffer while
    it is written. So such leaves share a loop, if they have as many rows and one row of each fits.
    """

    def chunked(s: Slice) -> Planned:
        return Planned(s, transfer_of(s, next_of, window.nbytes), window)

    fitted: list[Planned] = []
    shared: dict[int, Slice] = {}  # number of rows -> leaves that share a loop
    for s in slices:
        planned = chunked(s) if s.loaded_bytes > window.nbytes else Planned(s, Whole(), window)
        if not planned.in_chunks or (len(s.loads), len(s.stores)) != (1, 1):
            fitted.append(planned)
            continue
        rows = s.loads[0].aval.shape[0]
        if (others := shared.get(rows)) is not None:
            together = joined(others, s)
            if together.loaded_bytes <= rows * (window.nbytes // 2) and chunked(together).in_chunks:
                shared[rows] = together
                continue
            fitted.append(chunked(others))
        shared[rows] = s
    return fitted + [chunked(s) for s in shared.values()]


def _scheduled(
    planned: Sequence[Planned], rank: Callable[[Var], int], next_of: Mapping[Var, Var]
) -> tuple[Planned, ...]:
    """Order the slices of a pass by the backward pass, and say what each load waits for.

    The larger the window, the earlier a load: when the first of those in flight can be updated. Then no gradient waits
    for its state. The first chunk of a loop would lie there through all of the backward pass.
    """
    slices = sorted(planned, key=lambda p: min(map(rank, p.slice.loads), default=0))
    sizes = [p.bytes_at_once for p in slices]
    found: list[Planned] = []
    done = 0
    for k, p in enumerate(slices):
        stored = _must_be_back(sizes, k, p.window.nbytes)
        done = max(done, stored + 1)
        awaited = k if p.in_chunks else done if done < k else None
        found.append(dataclasses.replace(p, token=_token(p.slice, next_of), once_stored=stored, once_produced=awaited))
    return tuple(found)


def _must_be_back(sizes: Sequence[int], k: int, window: int) -> int:
    """The last slice that must be stored before slice ``k`` is loaded; -1 where none need be."""
    i, in_flight = k, 0
    while i >= 0 and (i == k or in_flight + sizes[i] <= window):
        in_flight += sizes[i]
        i -= 1
    return i


def _token(s: Slice, next_of: Mapping[Var, Var]) -> tuple[Var, ...]:
    """Its stores, or its part of a scalar where it only computes that.

    And parameters that it has gathered: otherwise XLA keeps all of them, whole, until the last one exists.
    """
    pins = s.pins
    return (*s.stores, *(v for v in s.outputs if v in pins and v in next_of)) or tuple(s.outputs[:1])


def _carried(slices: Sequence[Planned], next_of: Mapping[Var, Var], manual: bool) -> Mapping[Var, Var] | None:
    """The values that a loop around the slices would carry in place; ``None`` if they need no loop, or cannot have one:
    host leaves must take the buffers of the values that they replace."""
    if manual or not slices or not all(p.window.own_loop for p in slices) or any(p.slice.jaxpr.effects for p in slices):
        return None
    # XLA rounds arithmetic in float16 where a fusion ends, and a loop moves that: 3 units in the last place.
    if any(v.aval.dtype == jnp.float16 for p in slices for v in (*p.slice.inputs, *p.slice.outputs)):
        return None
    pairs = [pair for p in slices for pair in zip(p.slice.outputs, buffers(p.slice, next_of), strict=True)]
    carried = {v: old for v, old in pairs if old is not None}
    fresh = [v for v, old in pairs if old is None]
    extended = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in fresh)
    return None if extended or any(is_host_aval(v.aval) for v in fresh) else carried
