"""Make the plan of a traced update, in the order in which its trace makes the gradients.

This only decides; ``_emit`` follows the plan.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import DebugInfo, Equation, Var, flops, variables
from jax_offload._program.memory import is_host_aval
from jax_offload._program.primitives import PLACED
from jax_offload._program.private import equation_of, equations_of_trace, is_result, variable_of
from jax_offload._program.program import Program, flat
from jax_offload._program.propagate import forward, needed_for, union
from jax_offload._program.slices import Slice, consecutive, cut, repeats_effects
from jax_offload._schedule.schedule import (
    ON_CORES,
    WHOLE,
    Gate,
    Options,
    Planned,
    Schedule,
    Window,
    buffers,
    transfer_of,
)

# ---- what a trace tells about gradients: their order, and the passes that make them

LARGE = 1 << 16  # elements; the activations of smaller gradients do not matter


@dataclasses.dataclass(frozen=True)
class Backward:
    """The forward and backward passes that made the gradients, as far as the trace shows them.

    Attributes:
      held: bytes that the last operations before the gradients read; they stay alive if all these operations are put
        off.
      flops: floating point operations of matmuls and convolutions.
      scaled: whether a gradient is scaled by a number made of other gradients, as clipping by their norm outside does.
    """

    held: int
    flops: float
    scaled: bool


class Produced(NamedTuple):
    """How a trace produces gradients. The backward pass is traced in the order in which they appear.

    Attributes:
      order: for each gradient, the number of the operation that made it. Equations that cast, scale or move a gradient
        come later, in the order of the tree, and do not count. ``None`` if a gradient is an argument or belongs to
        another trace, so that the caller has to guess.
      constrained: for each gradient, whether that operation was a sharding constraint.
      backward: the passes that made the large gradients. ``None`` if the trace makes none, because they are arguments,
        or because ``vmap`` or a derivative around the update traces them.
    """

    order: list[int] | None
    constrained: list[bool]
    backward: Backward | None


def production_of(gradients: Sequence[Any]) -> Produced:
    """Read off the trace how gradients are produced."""
    eqns, known, traces = list[Equation](), set[Var](), 0
    traced = [k for k, x in enumerate(gradients) if is_result(x)]
    for k in traced:
        if variable_of(gradients[k]) not in known:  # in a branch, say, some are from the trace around it
            eqns += equations_of_trace(gradients[k])
            known.update(v for eqn in eqns for v in eqn.outvars)
            traces += 1
    outputs = [variable_of(gradients[k]) for k in traced]
    program = flat(Program([], outputs, eqns, [], DebugInfo("jit", "gradients", None, None)).closed, any_call=True)
    made, fills = dict[Var, int](), set[Var]()  # arrays of one number say nothing about the gradient beside them
    for k, eqn in enumerate(program.eqns):
        for v in eqn.outvars:
            arrays = _viewed(eqn, v)
            fills.update([v] if arrays == [] else [])
            made[v] = max((made[x] for x in arrays or () if x in made and x not in fills), default=k)
    at = {k: made[v] for k, v in zip(traced, program.outputs, strict=True) if isinstance(v, Var) and v in made}
    large = [v for v in variables(program.outputs) if _size(v) >= LARGE]
    return Produced(
        [*at.values()] if len(at) == len(gradients) and traces == 1 else None,
        [k in at and program.eqns[at[k]].primitive.name == "sharding_constraint" for k in range(len(gradients))],
        _passes(large, program.eqns) if large else None,
    )


_VIEWS = frozenset(
    """convert_element_type mul div neg max min clamp select_n transpose reshape squeeze add_any add sub integer_pow
    copy optimization_barrier pad slice split concatenate broadcast_in_dim""".split()
)
_LOOPS = frozenset(("scan", "while", "cond"))


def _viewed(eqn: Equation, made: Var) -> list[Var] | None:
    """The arrays that an equation casts, scales, moves or adds to make a result; ``None`` if it does anything else."""
    name, inputs = eqn.primitive.name, variables(eqn.invars)
    if name not in _VIEWS and not (name == "reduce_sum" and inputs and _size(inputs[0]) == _size(made)):
        return None
    return [v for v in inputs if _size(v) >= _size(made) and _is_floating(v)]


def _passes(gradients: Sequence[Var], eqns: Sequence[Equation]) -> Backward:
    """Go back from gradients to the operations that make them, through scaling and the like."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    held, scales, ends = dict[Var, None](), list[Var](), set[int]()
    visited, todo = set[Var](), [*gradients]
    while todo:
        x = todo.pop()
        if x in visited or (made := makers.get(x)) is None:
            continue
        visited.add(x)
        if (arrays := _viewed(made, x)) is not None:
            todo += arrays
            scales += [v for v in variables(made.invars) if v not in arrays]
        else:
            ends.add(id(made))
            if made.primitive.name not in _LOOPS:  # the results of a loop appear all at once
                held |= dict.fromkeys(v for v in variables(made.invars) if _is_floating(v))
    scaled = any(id(eqn) in ends for eqn in needed_for(eqns, scales)[0])  # their results make a gradient's scale
    return Backward(sum(nbytes(v.aval) for v in held), sum(map(flops, eqns)), scaled)


def _is_floating(v: Any) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.floating))


def _size(v: Var) -> int:
    return math.prod(v.aval.shape)


def was_on_host(value: Any) -> bool:
    """Whether a traced value in device memory was loaded from host memory in its trace."""
    shape = np.shape(value)
    eqn = equation_of(value) if isinstance(value, Tracer) else None
    return eqn is not None and any(is_host_aval(v.aval) and v.aval.shape == shape for v in variables(eqn.invars))


# Slices up to this size, or up to this share of the state, are loaded whole, and the window holds two and a half of
# them. Larger slices go through a window of that size in chunks, which are too long for a copy's latency to matter.
DEFAULT_WINDOW, DEFAULT_SHARE = 2**28, 32
# A slice larger than this share of the state is not loaded whole: one stacked leaf of a small model may be the whole
# state, and the device would hold it twice during its update. A copy below the least window costs only its latency.
SMALL_SHARE, LEAST_WINDOW = 8, 2**20
# Pieces between gates may be half of the state: no two are on the device in full, and XLA runs no loop over chunks
# beside a matmul.
GATED_SHARE = 2
# A usual slice is one of those that hold this share of the state: an embedding is none.
USUAL = 0.8
# Smaller slices hide little, and XLA's scheduler would delay equations of the backward pass to fit their copies in. So
# they run in a loop of their own, which hides them from the scheduler.
LEAST_HIDDEN = 2**23
SMALL_PIECES = "as pieces this small hide little"
# XLA also puts matmuls off if a step computes for much longer than it moves its state, as nothing then holds them
# back. Moving the state afterwards costs little there. An H200 does 13000 operations while its link moves a byte.
FLOPS_PER_BYTE = 24000
PUT_OFF = "or XLA would put off the matmuls that make the gradients; jax_offload.jit can hide these transfers"


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Recipe:
    """A traced update, and everything that decides its plan.

    Attributes:
      program: the usual recipe (load all, update, store all).
      gradients: its gradients, in the order in which the surrounding trace makes them, if that is known.
      take_turns: whether its gradients may wait for each other.
      next_values: result -> the argument whose next value it is.
      options: the options of the offloads in it.
      offload_of: leaf of a state -> the number of the offload that streams it, in ``options``.
      on_cores, on_disk: the leaves that the host's cores update, and those that are read from disk.
      rank: leaf of the state -> its place in the order of the backward pass.
      manual: whether it was traced inside ``shard_map``.
      backward: the passes that make its gradients, if only the update's own gates hold them back.
      gated: whether each of its slices runs by itself, between gates of the passes.
    """

    program: Program
    gradients: tuple[Var, ...]
    take_turns: bool
    next_values: Mapping[Var, Var]
    options: Sequence[Options]
    offload_of: Mapping[Var, int]
    on_cores: frozenset[Var]
    on_disk: frozenset[Var]
    rank: Mapping[Var, int]
    manual: bool
    backward: Backward | None = None
    gated: bool = False


def schedules_of(recipe: Recipe) -> list[Schedule]:
    """Plan the slices of a traced update. Slices larger than their window go in chunks if their rows can be kept apart.

    Scalars that need the state get a pass of their own, ahead of the other one, if that lowers the memory on the
    device.
    """
    next_of, hosts = recipe.next_values, [v for v in recipe.program.inputs if is_host_aval(v.aval)]
    on_cores = recipe.on_cores.intersection(hosts)  # their slices run there
    given = [each.window for each in recipe.options]
    given.append(max(filter(None, given), default=None))  # for leaves that a wrapper changed
    owner = {v: recipe.offload_of.get(v, len(recipe.options)) for v in hosts}
    best: tuple[int, list[tuple[Slice, list[Planned], Mapping[Var, Var] | None]]] | None = None
    for scalars_ahead in False, True:
        passes = cut(recipe.program, scalars_ahead)
        if scalars_ahead and repeats_effects(recipe.program, passes):
            break
        of = {id(s): _owner(s, owner, given) for each in passes for s in each.slices}
        streamed = [s for each in passes for s in each.slices if on_cores.isdisjoint(s.loads)]
        ungated = {*recipe.gradients} & {*passes[0].prelude.inputs}
        own_loop = _own_loop(recipe, {v: given[k] for v, k in owner.items()}, streamed, ungated)
        carried = [_carried(each.slices, next_of) if own_loop else None for each in passes]
        if any(each.slices and loop is None for each, loop in zip(passes, carried, strict=True)):
            own_loop, carried = "", [None for _ in passes]
        usual = [_usual([s for s in streamed if of[id(s)] == k]) for k in range(len(given))]
        leaves = [[v for v in hosts if owner[v] == k] for k in range(len(given))]
        windows = [_window(recipe, *each, own_loop) for each in zip(given, leaves, usual, strict=True)]
        found, most, enough = list[tuple[Slice, list[Planned], Mapping[Var, Var] | None]](), 0, True
        for each, loop in zip(passes, carried, strict=True):
            found.append((each.prelude, [], loop))
            for s in each.slices:
                window, large = windows[of[id(s)]]
                stays, fits = not on_cores.isdisjoint(s.loads), s.loaded_bytes <= window.nbytes
                how = ON_CORES if stays else WHOLE if fits else transfer_of(s, next_of, window.nbytes)
                found[-1][1].append(p := Planned(s, how, window, _token(s, next_of, recipe.gradients)))
                most, enough = max(most, p.bytes_at_once), enough and p.bytes_at_once <= large
        best = (most, found) if best is None or most < best[0] else best
        if enough:
            break
    assert best is not None  # the loop has tried at least one way
    schedules, before = list[Schedule](), tuple[Var, ...]()
    for prelude, planned, loop in best[1]:
        planned.sort(key=lambda p: min((recipe.rank.get(v, -1) for v in p.slice.loads), default=0))
        first = in_turn(prelude, recipe.gradients) if recipe.take_turns or recipe.gated else (prelude,)
        schedules.append(Schedule(prelude, first, tuple(_gated(planned, {*recipe.gradients}, before)), loop))
        before = planned[-1].token if planned else before
    return schedules


def _owner(s: Slice, owner: Mapping[Var, int], given: Sequence[int | None]) -> int:
    """The offload that streams a slice: among those that have leaves in it, the one with the smallest window."""
    own = sorted({owner[v] for v in s.loads if v in owner})
    return min(own, key=lambda k: math.inf if (window := given[k]) is None else window, default=0)


def _own_loop(recipe: Recipe, given: Mapping[Var, int | None], streamed: Sequence[Slice], ungated: Set[Var]) -> str:
    """Say why no slice can run among the matmuls of the backward pass; return an empty string if slices can.

    XLA's scheduler runs everything as late as the copies allow. The memory that this costs is bounded if all gradients
    that it puts off take less than the state on the host. The delay is short if a load waits for each gradient, and
    takes about as long as the layer's arithmetic. No load waits for the ``ungated`` gradients: their leaves stay on the
    device, or only a norm needs them. ``given`` are the windows that the user gave the offloads of host leaves.

    Where arrays are sharded, XLA's scheduler sees collectives anyway, and may also see small pieces. A gather (ZeRO-1)
    is a collective itself, beside which nothing would run.
    """
    program, backward = recipe.program, recipe.backward
    moved = sum(nbytes(v.aval) for v in given if v not in recipe.on_cores)
    is_divided = any(math.prod(shards) > 1 for shards in program.shards.values())
    gathers = is_divided and any(eqn.primitive.name in PLACED - {"device_put"} for eqn in program.eqns)
    if recipe.manual or gathers:
        return ""
    if backward is not None and 2 * backward.held > moved:
        late = backward.scaled or any(math.prod(v.aval.shape) >= LARGE for v in ungated)
        if late or backward.flops > FLOPS_PER_BYTE * moved:
            return PUT_OFF
    small = 0 < _usual(streamed) < LEAST_HIDDEN and not is_divided
    return SMALL_PIECES if small and all(window is None for window in given.values()) else ""


def _window(recipe: Recipe, given: int | None, leaves: Sequence[Var], usual: int, own_loop: str) -> tuple[Window, int]:
    """Choose the window for the slices of an offload, and the most bytes at once that need no pass of their own."""
    if given is not None:
        return Window(given, "as given", own_loop), given
    state = sum(nbytes(v.aval) // math.prod(recipe.program.shards.get(v, ())) for v in leaves)
    large, small = max(DEFAULT_WINDOW, state // DEFAULT_SHARE), max(LEAST_WINDOW, state // SMALL_SHARE)
    default = min(large, small)
    if usual <= max(default, min(large, state // GATED_SHARE) if recipe.gated else 0):
        chosen = Window(5 * usual // 2, "two and a half of its usual pieces", own_loop)
    elif small < large:
        chosen = Window(small, "an eighth of the state" if small > LEAST_WINDOW else "1 MiB, the least", own_loop)
    else:
        share = "a 32nd of the state" if large > DEFAULT_WINDOW else "256 MiB"
        chosen = Window(large, f"{share}, less than its usual pieces", own_loop)
    # An embedding may be larger than the window, up to twice what a small model's may be.
    return chosen, max(chosen.nbytes, min(large, 2 * default))


def _usual(slices: Sequence[Slice]) -> int:
    """The size of a usual slice, in bytes of host leaves on one device: slices up to it hold most of the state."""
    sizes = sorted(s.loaded_bytes for s in slices)
    return next((n for n, so_far in zip(sizes, accumulate(sizes), strict=True) if so_far >= USUAL * sum(sizes)), 0)


def _gated(slices: Sequence[Planned], gradients: Set[Var], before: tuple[Var, ...]) -> Iterator[Planned | Gate]:
    """Order the loads and updates of slices, which are sorted by the backward pass, and say what each load waits for.

    A slice loads once there is room, and once a gradient exists. The larger the window, the earlier the gradient: it
    belongs to the first slice in flight, so that no gradient waits for its state. The first chunk of a loop would stay
    loaded through all of the backward pass, so it waits for its own gradient.

    Args:
      slices: the slices of a pass.
      gradients: the operands that the backward pass makes.
      before: the values for which the first loads wait.
    """
    sizes, done = [p.bytes_at_once for p in slices], 0
    for k, p in enumerate(slices):
        stored, in_flight = k - 1, sizes[k]  # the last slice that must be stored before this one is loaded
        while stored >= 0 and in_flight + sizes[stored] <= p.window.nbytes:
            in_flight += sizes[stored]
            stored -= 1
        yield from slices[done : stored + 1]
        done = max(done, stored + 1)
        awaited = slices[k if p.in_chunks else done].slice.inputs if p.in_chunks or done < k else []
        room = slices[stored].token if stored >= 0 else before
        yield Gate(tuple(p.slice.loads), (*(v for v in awaited if v in gradients), *room))
    yield from slices[done:]


def _token(s: Slice, next_of: Mapping[Var, Var], gradients: Sequence[Var]) -> tuple[Var, ...]:
    """The completion token of a slice: its stores, or its part of a scalar if it computes nothing else.

    Gathered parameters belong to it: otherwise XLA keeps all of them, whole, until the last one exists.
    """
    pins = s.pins
    gathered = [v for v in s.outputs if v in pins and v in next_of and next_of[v] not in gradients]
    return (*s.stores, *gathered) or tuple(s.outputs[:1])


def _carried(slices: Sequence[Slice], next_of: Mapping[Var, Var]) -> Mapping[Var, Var] | None:
    """Map each result to the operand whose buffer it takes in a loop around the slices.

    ``None`` if they need no loop, or cannot have one: host leaves must take the buffers of their old values.
    """
    if not slices or any(s.jaxpr.effects for s in slices):
        return None
    # XLA rounds arithmetic in float16 where a fusion ends, and a loop moves that: 3 units in the last place.
    if any(v.aval.dtype == jnp.float16 for s in slices for v in (*s.inputs, *s.outputs)):
        return None
    pairs = [pair for s in slices for pair in zip(s.outputs, buffers(s, next_of), strict=True)]
    carried = {v: old for v, old in pairs if old is not None}
    fresh = [v for v, old in pairs if old is None]
    extended = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in fresh)
    return None if extended or any(is_host_aval(v.aval) for v in fresh) else carried


# ---- gradients in turn


def in_turn(prelude: Slice, gradients: Sequence[Var]) -> tuple[Slice | Gate, ...]:
    """Divide a prelude into parts, to be run one after the other: each uses a gradient once the one before has been.

    Numbers that need all gradients, such as a norm, take them as the backward pass makes them. Otherwise nothing needs
    a gradient before the last one exists, and XLA's latency-hiding scheduler puts the weights' matmuls off to the end
    of the backward pass: the activations and cotangents that they need are alive for all layers at once.

    Args:
      prelude: the slice that a pass runs first.
      gradients: operands of the update, in the order of the backward pass.
    """
    needs = {v: 1 << i for i, v in enumerate(gradients)}
    parts = [list[Equation]() for _ in range(len(gradients) + 2)]  # none, one after the other, several
    for eqn in prelude.jaxpr.eqns:
        mask = union(forward(eqn, needs))
        needs.update(dict.fromkeys(eqn.outvars, mask))  # of an equation that stands in one part, such as a cond
        parts[-1 if mask.bit_count() > 1 else mask.bit_length()].append(eqn)
    if prelude.jaxpr.effects or sum(map(bool, parts[1:-1])) < 2:
        return (prelude,)
    slices = consecutive(parts, prelude.outputs, prelude.jaxpr.debug_info, prelude.shards)
    found, used = list[Slice | Gate](), tuple[Var, ...]()
    for gradient, part in zip([None, *gradients, None], slices, strict=True):
        if part.jaxpr.eqns:
            found += [Gate((gradient,), used), part] if gradient is not None and used else [part]
            if gradient is not None:  # a result that is tiny beside the gradient, such as its part of a sum
                few = max(32, math.prod(gradient.aval.shape))
                used = tuple(v for v in part.outputs if 32 * math.prod(v.aval.shape) <= few)[:1] or used
    return tuple(found)
