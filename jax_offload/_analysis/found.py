"""What a compiled step does with its state: each transfer, the loops with transfers in them, and what is wrong."""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from jax_offload._analysis.buffers import SCOPE
from jax_offload._analysis.compiled import Compiled, arguments_of
from jax_offload._analysis.hlo import aliases, computations, handed, results, started, trips
from jax_offload._analysis.schedule import COMPUTE, LOAD, STORE, UNKNOWN, Program, Segment, leaf_of
from jax_offload._analysis.timeline import Timeline

_MIB = 2**20
_LARGE = 64 * _MIB  # below it, loading all of a state at once costs nothing
# Of what is loaded, the share from which on nothing holds loads back. XLA for a TPU begins some late by itself: of four
# leaves and their moments 0.75 are there at once, of sixteen 0.94.
_MOST, _MOST_OF_A_STREAM = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What moves of a leaf in one step, one way.

    Attributes:
      leaf: the argument, as jax names it, with its path.
      loads: whether from the host.
      nbytes: per device.
      pieces: how many copies.
      hidden: of the time that the copies take, the share for which the program does not wait; simulated.
      behind: the operation across which most of it moves; empty where nothing is computed meanwhile.
    """

    leaf: str
    loads: bool
    nbytes: int
    pieces: int
    hidden: float
    behind: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that moves chunks: of which leaves, how often it runs, and the bytes of an iteration, both ways."""

    leaves: tuple[str, ...]
    times: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong, and how to mend it; with which leaf, if with one; whether it makes the offload unreal."""

    what: str
    leaf: str = ""
    error: bool = True


def transfers(played: Timeline) -> tuple[Transfer, ...]:
    """Of a simulated or measured run, one for each leaf and direction, in the order of their beginning."""
    computing = [s for s in played.segments if s.lane == COMPUTE]
    begins = [s.begin for s in computing]
    found: dict[tuple[str, bool], list[Segment]] = {}
    for s in played.segments:
        if s.lane in (LOAD, STORE):
            found.setdefault((s.name, s.lane == LOAD), []).append(s)
    result = []
    for (leaf, loads), copies in found.items():
        seconds = sum(s.end - s.begin for s in copies)
        waited = sum(min(s.end - s.waited, s.end - s.begin) for s in copies)
        behind: Counter[str] = Counter()
        for s in copies:
            for other in computing[
                max(bisect.bisect_right(begins, s.begin) - 1, 0) : bisect.bisect_left(begins, s.end)
            ]:
                behind[other.name] += max(0.0, min(s.end, other.end) - max(s.begin, other.begin))  # pyright: ignore
        most = behind.most_common(1)
        nbytes, share = sum(s.nbytes for s in copies), 1 - waited / seconds if seconds else 1.0
        result.append(Transfer(leaf, loads, nbytes, len(copies), share, most[0][0] if most and most[0][1] > 0 else ""))
    return tuple(result)


def loops(program: Program) -> tuple[Loop, ...]:
    """Those with transfers in them, in the order of the text."""
    found = []
    for name in program.buffers.sharing.reached:
        for op in program.buffers.ops(name):
            body = op.called("body") if op.opcode == "while" else ""
            if body in program.costs.scopes:
                copies = [(o, copy) for o in program.buffers.ops(body) if (copy := started(o))]
                leaves = dict.fromkeys(leaf_of(program.buffers.sharing, body, o, copy.loads) for o, copy in copies)
                if copies:
                    times = trips(op, program.buffers.ops(op.called("condition")))
                    found.append(Loop(tuple(leaves), times, sum(copy.nbytes for _, copy in copies)))
    return tuple(found)


def problems(program: Compiled, schedule: Program, played: Timeline) -> tuple[Problem, ...]:
    """What is wrong with a step that is meant to be offloaded, errors first."""
    found = [
        *_nothing_there(program),
        *_not_where_they_should_be(program),
        *_crossed(program),
        *_all_at_once(program, played),
        *_host_arithmetic(schedule),
    ]
    return tuple(sorted(found, key=lambda problem: not problem.error))


def _nothing_there(program: Compiled) -> list[Problem]:
    if any(given.host for given in (*program.given.values(), *program.elsewhere)) or "S(5)" in program.text:
        return []
    arrays = handed(program.text)
    state = [arrays[number,].nbytes for number, given in program.given.items() if given.state]
    if not state:
        return [
            Problem(
                "nothing that this step is given is in host memory, nor is it an optimizer's state: what no result "
                "needs is left out by the compiler. Give the step a state, and return the new one"
            )
        ]
    return [
        Problem(
            f"nothing that this step is given is in host memory; its optimizer state has {len(state)} leaves, "
            f"{sum(state) / _MIB:.2f} MiB, on the device. Wrap the optimizer, "
            "jax_offload.offload(...), and make the state with its init; or move one that is there: "
            "jax_offload.to_host(tx, state)"
        )
    ]


def _not_where_they_should_be(program: Compiled) -> list[Problem]:
    entry = arguments_of(computations(program.text)["ENTRY"])
    arrays = {number: array for (number, *_), array in handed(program.text).items() if number in entry}
    # by type: a compiled program does not say which result is the next value of which argument
    taken = Counter((x.dtype, x.shape) for x in arrays.values() if x.host)
    given_back = Counter((x.dtype, x.shape) for x in results(program.text).values() if x.host)
    found = []
    for number, array in arrays.items():
        given, scope = program.given.get(number), entry[number].scope
        if given is None:
            continue
        kind = array.dtype, array.shape
        kept = given.kept_on_host
        if kept is None:  # no update is seen
            kept = given.state and given_back[kind] > taken[kind]
        if given.host and not array.host:
            found.append(Problem("is handed over in host memory, and the program takes it on the device", scope))
        elif kept and not given.host:
            found.append(
                Problem(
                    "belongs in host memory and arrives on the device, where it stays throughout the step. Move it "
                    "before, jax_offload.to_host(tx, state), or restore into "
                    "jax_offload.abstract_state(tx, params)",
                    scope,
                )
            )
    for (dtype, shape), times in taken.items():
        leaves = [entry[number].scope for number, x in arrays.items() if (x.dtype, x.shape) == (dtype, shape)]
        if times > given_back[dtype, shape]:
            found.append(
                Problem(
                    f"{times - given_back[dtype, shape]} of {times} leaves {dtype}{list(shape)} in host memory are not "
                    "returned there: the next step finds them on the device. Return the state, with out_shardings of "
                    "jax_offload.abstract_state(tx, params) where there are any",
                    leaves[0] if len(leaves) == 1 else "",
                )
            )
    return found


def _crossed(program: Compiled) -> list[Problem]:
    """Donated buffers that are paired with a result in another memory, by the compiled program or before it."""
    pairs: list[tuple[str, str]] = []
    entry = computations(program.text)["ENTRY"]
    arguments, root = arguments_of(entry), next((op for op in entry if op.root), None)
    for place, number in aliases(program.text).items():
        result = root.leaves.get(place) if root is not None else None
        if result is not None and result.host != arguments[number].arrays[0].host:
            pairs.append((arguments[number].scope, f"result {place[0] if place else 0}"))
    signature = re.search(r"func\.func public @main\((.*?)\) -> \(?(.*?)\)? \{\n", program.lowered, re.DOTALL)
    if signature and not pairs:
        takes, gives = (re.split(r"tensor<", part)[1:] for part in signature.groups())
        kinds = [_kind(text) for text in gives]
        for k, text in enumerate(takes):
            to = re.search(r"tf\.aliasing_output = (\d+)", text)
            if to and int(to[1]) < len(kinds) and _kind(text) != kinds[int(to[1])]:
                scope = arguments[k].scope if k in arguments else f"argument {k}"
                pairs.append((scope, f"result {to[1]}"))
    return [
        Problem(
            f"is donated, and its buffer is given to {result}, in another memory: that aborts on a CPU, and overwrites "
            "memory on a GPU. Return what is donated in its order, or jit with jax_offload.jit",
            leaf,
        )
        for leaf, result in pairs
    ]


def _kind(text: str) -> str:
    found = re.search(r'mhlo\.memory_kind = "(\w+)"', text)
    return found[1] if found else "device"


def _all_at_once(program: Compiled, played: Timeline) -> list[Problem]:
    state = sum(given.nbytes for given in program.given.values() if given.host)
    loaded = defaultdict(int)
    for s in played.segments:
        if s.lane == LOAD and s.name != UNKNOWN:
            loaded[s.name] += s.nbytes
    held, total = played.window, sum(loaded.values())
    ours = SCOPE.search(program.text) is not None
    if not state or not total or held < (_MOST_OF_A_STREAM if ours else _MOST) * total or (ours and held < _LARGE):
        return []
    leaves = _leaves(sorted(loaded, key=lambda leaf: (-loaded[leaf], leaf)))
    why = (
        "its leaves are loaded whole: jax_offload.placement(step, *args) says why"
        if ours
        else "nothing holds the loads back, as by the usual recipe of device_put, update, device_put: the step's peak "
        "does not fall. Let jax_offload.offload(...) load, update and store"
    )
    return [
        Problem(
            f"{held / _MIB:.2f} MiB of the state are on the device at once, of {total / _MIB:.2f} ({leaves}): {why}",
            error=not ours,
        )
    ]


def _host_arithmetic(schedule: Program) -> list[Problem]:
    found: dict[str, dict[str, None]] = {}
    scopes, sharing = schedule.costs.scopes, schedule.buffers.sharing
    for at in sharing.reached:
        for op in scopes[at].ops:
            host = '_xla_compute_type="host"' in op.rest or 'custom_call_target="HostExecute"' in op.rest
            if not host or op.opcode.endswith("-done"):
                continue
            called = re.search(r"\b(?:calls=|called_computations=\{)%([\w.\-]+)", op.rest)
            body = scopes.get(called[1]) if called else None
            computed = [x for x in (body.ops if body else [op]) if x.opcode not in ("parameter", "copy", "tuple")]
            what = "is copied within host memory by the host's cores, as XLA does not write it in place"
            if computed:
                name = next((x.scope for x in (op, *computed) if x.scope), op.name)
                what = (
                    f"{name} is computed by the host's cores, as its operand is in host memory: move it to the device "
                    "first, jax_offload.to_device or jax.device_put(x, jax.memory.Space.Device)"
                )
            read = [of for x in op.operands if (of := sharing.argument(at, x)) and of.arrays[0].host]
            found.setdefault(what, {}).update((of.scope, None) for of in read)
    return [Problem(what, _leaves(sorted(leaves)), error=False) for what, leaves in found.items()]


def _leaves(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)
