"""Play a scheduled program: when it computes, and when it copies in each direction.

This is the package's one model of time, not a measurement: it knows no latency, no launches and no contention for
device memory. Arithmetic runs in the order of the schedule, matmuls at a share of the chip's peak, everything else at
the speed of its memory. Four queues run beside it: copies from the host, copies to the host, collectives, and
asynchronous copies within the device. Copies in both directions share the link. Time in which arithmetic waits for a
queue is exposed. Without a schedule, ``link_time`` and ``compute_time`` give the same speeds.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.chips import Chip
from jax_offload._look.hlo import RUNS, Buffers, Computation, Module, Op

Span = tuple[float, float]  # from when to when, in seconds

COMPUTE, LOAD, STORE = "compute", "load", "store"
COLLECTIVES, WITHIN = "collectives", "within the device"
SECONDS = ("step", "compute", "loading", "storing", "overlap", "exposed", "collectives", "exposed_collectives", "idle")
UNKNOWN = "not known"
_LANES = {
    COMPUTE: "compute",
    LOAD: "host to device",
    STORE: "device to host",
    COLLECTIVES: "collectives",
    WITHIN: "within device",
}
_OTHER_WAY = {LOAD: STORE, STORE: LOAD}
_ROUNDED = (None, "default", "fastest", "bfloat16")  # precisions at which a TPU rounds what its matmuls read


def link_time(chip: Chip, loaded: float, stored: float) -> float:
    """Return the seconds of copies in both directions at once, and then of the rest in one direction."""
    together, rest = min(loaded, stored), abs(loaded - stored)
    return 2 * together / chip.host_link_both + rest / chip.host_link


def compute_time(chip: Chip, operations: float, dtype: str) -> float:
    """Return the seconds of matmuls in ``dtype``; a TPU rounds to bfloat16 unless jax is told not to."""
    rounds = chip.platform == "tpu" and jax.config.jax_default_matmul_precision in _ROUNDED  # pyright: ignore
    fast = rounds or dtype in ("bfloat16", "float16")
    return operations / (chip.bf16 if fast else chip.f32)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A span of time on a lane, with its begin and end in seconds, its name, and the bytes that it copies."""

    lane: str
    begin: float
    end: float
    name: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The transfers of one leaf in one direction during one step.

    Attributes:
      leaf: the argument, as jax names it, with its path.
      loads: whether from the host.
      nbytes: per device.
      pieces: how many copies.
      hidden: of the time that the copies take, the share in which something is computed; simulated.
    """

    leaf: str
    loads: bool
    nbytes: int
    pieces: int
    hidden: float


def merged(segments: Iterable[Segment]) -> list[Span]:
    """Return the spans of time in which any of the segments runs, in order."""
    found = list[Span]()
    for begin, end in sorted((s.begin, s.end) for s in segments):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of ``spans`` in which none of ``others`` runs; both are in order and do not overlap."""
    found, ends = list[Span](), [end for _, end in others]
    for begin, end in spans:
        for other in others[bisect.bisect_right(ends, begin) :]:
            if other[0] >= end:
                break
            found += [(begin, other[0])] if begin < other[0] else []
            begin = other[1]
        found += [(begin, end)] if begin < end else []
    return found


def length(spans: Iterable[Span]) -> float:
    return sum((end - begin for begin, end in spans), 0.0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The effects of one operation of the schedule, in the order of the attributes.

    Attributes:
      starts: the copies and collectives that it starts, each on a queue beside the arithmetic, from 0 on, by the key
        that ``waits`` names.
      waits: the keys of the copies and collectives that it waits for.
      runs: another computation that it runs, and how often.
      seconds: the seconds of its arithmetic.
      name: the name of its arithmetic.
    """

    starts: Mapping[str, Segment] = dataclasses.field(default_factory=dict)
    waits: tuple[str, ...] = ()
    runs: tuple[Computation, int] | None = None
    seconds: float = 0.0
    name: str = ""


class Program:
    """A module on a chip. It works out the cost of each computation once, and plays the schedule.

    Attributes:
      segments: all that runs, in the order of the starts.
      free: when each queue is free.
      held: the loaded bytes in device memory now; ``window`` is the most that they were.
    """

    def __init__(self, module: Module, chip: Chip) -> None:
        self.chip, self.module = chip, module
        self.cache = "S(1)" if chip.platform == "tpu" else "none"  # a TPU's on-chip memory
        self.buffers = Buffers(module)
        self.costs = functools.cache(self._costs)
        self.now, self.free = 0.0, defaultdict[str, float](float)
        self.segments: list[Segment] = []
        self.held = self.window = 0

    def _costs(self, at: Computation) -> list[tuple[Cost, int, int]]:
        """Return each operation's cost, the loaded bytes that it begins to hold, and those that it releases."""
        found = [(self._cost(op), *held) for op, held in zip(at.ops, self.buffers.held(at), strict=True)]
        return [each for each in found if each != (Cost(), 0, 0)]

    def _cost(self, op: Op) -> Cost:
        if op.opcode in RUNS:  # of branches the last one, or the one where it is true
            first = "true_computation" in op.rest
            return Cost(runs=(op.callees[0 if first else -1], op.trips if op.opcode == "while" else 1))
        if op.opcode.endswith("-done"):
            return Cost(waits=(op.begun.name,))
        if op.opcode.endswith("-update"):
            return Cost()
        if copy := op.copy:
            return Cost(starts={op.name: self._copy(op, *copy)})
        if (nbytes := op.collective) is not None:
            return _collective(op, nbytes / self.chip.interconnect)
        moved = op.moved
        traffic = sum(nbytes for x, nbytes, _ in moved if not x.host and self.cache not in x.layout)
        matmuls = sum(n / (self.chip.bf16 if narrow else self.chip.f32) for n, narrow in op.operations)
        seconds = max(matmuls, traffic / self.chip.hbm_bandwidth)
        if op.starts and not matmuls:
            return Cost(starts={op.name: Segment(WITHIN, 0.0, seconds, "")})
        # An operation that reads or writes host memory itself waits for the copy at once.
        starts = {
            f"{op.name} {loads}": self._copy(op, loads, nbytes)
            for loads in (True, False)
            if (nbytes := sum(nbytes for x, nbytes, written in moved if x.host and written is not loads))
        }
        return Cost(starts=starts, waits=(*starts,), seconds=seconds, name=label(op))

    def _copy(self, op: Op, loads: bool, nbytes: int) -> Segment:
        seconds = nbytes / self.chip.host_link
        return Segment(LOAD if loads else STORE, 0.0, seconds, leaf_of(self.buffers, op, loads), nbytes)

    def play(self, at: Computation) -> None:
        """Run a computation from now on."""
        in_flight: dict[str, int] = {}  # the place of its segment
        for cost, begin, end in self.costs(at):
            self.held += begin
            self.window = max(self.window, self.held)
            for key, start in cost.starts.items():
                in_flight[key] = self._start(start)
            for key in cost.waits:
                if key in in_flight:
                    self._wait(in_flight.pop(key))
            for inner in [cost.runs[0]] * cost.runs[1] if cost.runs else ():
                self.play(inner)
            if cost.seconds:
                self.segments.append(Segment(COMPUTE, self.now, self.now + cost.seconds, cost.name))
                self.now += cost.seconds
            self.held -= end
        for place in sorted(in_flight.values(), key=lambda place: self.segments[place].end):
            self._wait(place)

    def _start(self, start: Segment) -> int:
        begin = max(self.now, self.free[start.lane])
        end = self.free[start.lane] = begin + self._seconds(start, begin)
        self.segments.append(dataclasses.replace(start, begin=begin, end=end))
        return len(self.segments) - 1

    def _seconds(self, start: Segment, begin: float) -> float:
        """Return how long something runs on its queue. If two copies share the link, the one in flight keeps its speed,
        and the other one gets the rest of the speed that both directions reach together."""
        shared = max(0.0, self.free[_OTHER_WAY[start.lane]] - begin) if start.lane in _OTHER_WAY else 0.0
        if not shared:
            return start.end
        alone, rest = self.chip.host_link, max(0.0, self.chip.host_link_both - self.chip.host_link)
        if start.nbytes <= rest * shared:
            return start.nbytes / rest
        return shared + (start.nbytes - rest * shared) / alone

    def _wait(self, place: int) -> None:
        of = self.segments[place]
        if of.end > self.now:
            if of.lane == WITHIN:  # the arithmetic's own copies count as arithmetic
                self.segments.append(Segment(COMPUTE, self.now, of.end, "copy within the device"))
            self.now = of.end

    def timeline(self) -> Timeline:
        """Play the whole program."""
        self.play(self.module.entry)
        found = Timeline(tuple(self.segments), self.chip.name, window=self.window)
        return dataclasses.replace(found, link=link_time(self.chip, found.loaded, found.stored))


def _collective(op: Op, seconds: float) -> Cost:
    # A TPU starts and ends a collective by custom calls in two fusions, which share the channel.
    targets, own = {x.target for x in op.inside}, Segment(COLLECTIVES, 0.0, seconds, op.base)
    if {"AsyncCollectiveStart", "AsyncCollectiveDone"} & targets:
        channel = next(of[0] for x in op.inside if (of := re.search(r"channel_id=\d+", x.rest)))
        return Cost(starts={channel: own}) if "AsyncCollectiveStart" in targets else Cost(waits=(channel,))
    return Cost(starts={op.name: own}, waits=() if op.starts else (op.name,))


def label(op: Op) -> str:
    """The name that jax gives an operation, without the functions around it."""
    scope = op.scope.partition(";")[0]
    if ours := re.search(r"jax_offload/(?:update|prefetch|write-back)/(.*)/", scope):
        return f"update of {ours[1]}"
    words = [word for word in scope.split("/") if word and not word.startswith("jit(")]
    return "/".join(words[-4:]) or op.name


def leaf_of(buffers: Buffers, op: Op, loads: bool) -> str:
    """The leaf of a copy: the argument that it reads or writes, else gradients, else the leaf in its name."""
    made = [(op, place) for place, array in op.leaves.items() if array.host]
    for value, place in (values := [*([] if loads else made), *((x, ()) for x in op.operands)]):
        argument = buffers.argument(value, place)
        if argument is not None and argument.array and argument.array.host:
            return argument.scope or argument.name
    gradients = any(buffers.find(*value) in buffers.gradients for value in values)
    named = re.search(r"jax_offload/(?:prefetch|write-back)/(.*)/", op.scope)
    return "gradients" if gradients else named[1] if named else UNKNOWN


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """The timeline of a step, in seconds and bytes; for several measured steps, the figures are per step.

    ``jax_offload.inspect`` and ``jax_offload.profile`` return one. A simulated timeline is a model, not a measurement:
    it ignores latency, kernel launches and contention. Everything is read off the segments, and ``step`` is
    ``compute + exposed + exposed_collectives + idle``.

    Attributes:
      segments: everything that ran, each with ``lane``, ``begin``, ``end``, ``name`` and ``nbytes``.
      chip: the chip whose speeds the simulation uses; empty if measured.
      link: seconds that the copies between host and device would take alone, in both directions at once; if measured,
        seconds in which the busier direction is in use.
      window: the most bytes from the host that are in device memory at a time, before their last use; 0 if measured.
      steps: the number of steps.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> t = jo.inspect(jax.jit(lambda x: x @ x), jnp.ones((256, 256)), chip="h200").timeline
      >>> t.loaded, t.exposed, isinstance(t, jo.types.Timeline)
      (0, 0.0, True)
    """

    segments: tuple[Segment, ...] = dataclasses.field(repr=False)
    chip: str = ""
    link: float = 0.0
    window: int = 0
    steps: int = 1

    def __str__(self) -> str:
        how = f"simulated on {self.chip}, not measured" if self.chip else f"measured, per step of {self.steps}"
        names = (name for name in SECONDS if self.collectives or "collectives" not in name)
        return "\n".join([f"ms, {how}", *(f"{name:22}{1e3 * getattr(self, name):10.3f}" for name in names)])

    def spans(self, *lanes: str) -> list[Span]:
        """Return the intervals in which any of these lanes is busy."""
        return merged(s for s in self.segments if s.lane in lanes)

    def _seconds(self, *lanes: str) -> float:
        return length(self.spans(*lanes)) / self.steps

    @cached_property
    def step(self) -> float:
        """The seconds of a step, from its first operation to the end of its last."""
        return max((s.end for s in self.segments), default=0.0) / self.steps

    @cached_property
    def compute(self) -> float:
        """The seconds of arithmetic, with waits for copies within the device."""
        return self._seconds(COMPUTE)

    @cached_property
    def loading(self) -> float:
        """The seconds of copies from the host."""
        return self._seconds(LOAD)

    @cached_property
    def storing(self) -> float:
        """The seconds of copies to the host."""
        return self._seconds(STORE)

    @cached_property
    def overlap(self) -> float:
        """The seconds in which copies overlap with arithmetic."""
        return self.compute + self._seconds(LOAD, STORE) - self._seconds(COMPUTE, LOAD, STORE)

    @cached_property
    def collectives(self) -> float:
        """The seconds of collectives."""
        return self._seconds(COLLECTIVES)

    @cached_property
    def exposed_collectives(self) -> float:
        """The seconds of collectives beside which nothing is computed."""
        return length(without(self.spans(COLLECTIVES), self.spans(COMPUTE))) / self.steps

    @cached_property
    def exposed(self) -> float:
        """The seconds of copies that overlap with neither arithmetic nor collectives."""
        return length(without(self.spans(LOAD, STORE), self.spans(COMPUTE, COLLECTIVES))) / self.steps

    @cached_property
    def idle(self) -> float:
        """The remaining seconds."""
        return max(0.0, self.step - self._seconds(COMPUTE, LOAD, STORE, COLLECTIVES))

    @cached_property
    def loaded(self) -> int:
        """Bytes from the host."""
        return sum(s.nbytes for s in self.segments if s.lane == LOAD) // self.steps

    @cached_property
    def stored(self) -> int:
        """Bytes to the host."""
        return sum(s.nbytes for s in self.segments if s.lane == STORE) // self.steps

    @property
    def waits(self) -> list[Span]:
        """The intervals in which a copy or a collective runs and nothing is computed."""
        return without(self.spans(LOAD, STORE, COLLECTIVES), self.spans(COMPUTE))

    def save(self, path: str | Path) -> None:
        """Write a trace that https://ui.perfetto.dev opens, with a lane for compute and one for each direction.

        Args:
          path: the path of the file, which ends with ``.json``.

        Raises:
          ValueError: the path has another ending.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise ValueError(f"save(): path {str(path)!r} ends with {path.suffix!r}; expected .json, for Perfetto.")
        used = {segment.lane for segment in self.segments}
        lanes = [lane for lane in _LANES if lane in used or lane in (COMPUTE, LOAD, STORE)]
        events: list[Mapping[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": k, "name": name, "args": args}
            for k, lane in enumerate(lanes)
            for name, args in (("thread_name", {"name": _LANES[lane]}), ("thread_sort_index", {"sort_index": k}))
        ]
        for s in self.segments:
            args = {"bytes": s.nbytes} if s.lane != COMPUTE else {}
            times = {"ts": 1e6 * s.begin, "dur": 1e6 * (s.end - s.begin)}
            events.append({"ph": "X", "pid": 1, "tid": lanes.index(s.lane), "name": s.name, "args": args} | times)
        how = f"simulated on {self.chip}, not measured" if self.chip else "measured"
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"what": how}}))

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON types, without segments."""
        return {name: getattr(self, name) for name in (*SECONDS, "link", "loaded", "stored", "window", "chip", "steps")}


def transfers(played: Timeline, unknown: str = UNKNOWN) -> tuple[Transfer, ...]:
    """Return the transfers of a run, one for each leaf and direction, in the order of their starts.

    ``unknown``: what moves where no leaf is known.
    """
    computing = played.spans(COMPUTE)
    found: dict[tuple[str, bool], list[Segment]] = {}
    for s in played.segments:
        if s.lane in (LOAD, STORE):
            found.setdefault((unknown if s.name == UNKNOWN else s.name, s.lane == LOAD), []).append(s)
    result = []
    for (leaf, loads), copies in found.items():
        busy = merged(copies)
        seconds, nbytes = length(busy), sum(s.nbytes for s in copies)
        hidden = 1 - length(without(busy, computing)) / seconds if seconds else 1.0
        result.append(Transfer(leaf, loads, nbytes, len(copies), hidden))
    return tuple(result)
