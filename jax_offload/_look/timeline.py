"""Play a scheduled program: when it computes, and when it copies in each direction.

This is the package's one model of time, not a measurement: it knows no latency, no launches and no contention for
device memory. Arithmetic runs in the order of the schedule, matmuls at a share of the chip's peak, everything else at
the speed of its memory. Four queues run beside it: copies from the host, copies to the host, collectives, and
asynchronous copies within the device. Copies in both directions share the link. Time in which arithmetic waits for a
queue is exposed. Without a schedule, ``link_time`` and ``compute_time`` give the same speeds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.chips import Chip
from jax_offload._look.hlo import CACHE, RUNS, SCOPE, Buffers, Computation, Module, Op

Span = tuple[float, float]  # from when to when, in seconds

COMPUTE, LOAD, STORE = "compute", "load", "store"
COLLECTIVES, WITHIN = "collectives", "within the device"
SECONDS = ("step", "compute", "loading", "storing", "overlap", "exposed", "collectives", "exposed_collectives", "idle")
UNKNOWN = "not known"
Event = tuple[str, Any, str]  # what happens, to what, and its name
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


def busy(segments: Iterable[Segment], lanes: Collection[str], beside: Collection[str] = ()) -> list[Span]:
    """Return the spans of time in which a segment of ``lanes`` runs and none of the lanes ``beside``, in order."""
    seen = [s for s in segments if s.lane in lanes or s.lane in beside]
    # At one time begins come first, so that spans which touch are one.
    changes = sorted((time, ends, s.lane in beside) for s in seen for time, ends in ((s.begin, False), (s.end, True)))
    found, running, since = list[Span](), {True: 0, False: 0}, None
    for time, ends, other in changes:
        running[other] += -1 if ends else 1
        alone = running[False] > 0 and not running[True]
        if alone and since is None:
            since = time
        elif not alone and since is not None:
            found += [(since, time)] if since < time else []
            since = None
    return found


def length(spans: Iterable[Span]) -> float:
    return sum((end - begin for begin, end in spans), 0.0)


class Program:
    """A module on a chip. It works out the events of each computation once, and plays the schedule.

    Attributes:
      segments: all that runs, in the order of the starts.
      free: when each queue is free.
      held: the loaded bytes in device memory now; ``window`` is the most that they were.
    """

    def __init__(self, module: Module, chip: Chip) -> None:
        self.chip, self.module, self.buffers = chip, module, Buffers(module)
        self.events = functools.cache(lambda at: [event for event in self._events(at) if event[1] != 0])
        self.now, self.free = 0.0, defaultdict[str, float](float)
        self.segments: list[Segment] = []
        self.held = self.window = 0

    def timeline(self) -> Timeline:
        """Play the whole program."""
        self.play(self.module.entry)
        found = Timeline(tuple(self.segments), self.chip.name, window=self.window)
        return dataclasses.replace(found, link=link_time(self.chip, found.loaded, found.stored))

    def play(self, at: Computation) -> None:
        """Run a computation from now on."""
        in_flight = defaultdict[str, list[Segment]](list)
        for what, value, key in self.events(at):
            if what == "hold":
                self.held += value
                self.window = max(self.window, self.held)
            elif what == "run":
                self.play(value)
            elif what == "compute":
                self._compute(self.now + value, key)
            elif what == "start":
                in_flight[key].append(self._start(value))
            else:
                self._wait(in_flight.pop(key, []))
        self._wait([segment for started in in_flight.values() for segment in started])

    def _start(self, segment: Segment) -> Segment:
        """Put a segment on its queue. If two copies share the link, the one in flight keeps its speed, and the other
        one gets the rest of the speed that both directions reach together."""
        begin, seconds = max(self.now, self.free[segment.lane]), segment.end
        if segment.lane in _OTHER_WAY and (shared := self.free[_OTHER_WAY[segment.lane]] - begin) > 0:
            rest = max(0.0, self.chip.host_link_both - self.chip.host_link)
            later = segment.nbytes - rest * shared  # the bytes that are left once the other copy has ended
            seconds = shared + later / self.chip.host_link if later > 0 else segment.nbytes / rest
        end = self.free[segment.lane] = begin + seconds
        self.segments.append(dataclasses.replace(segment, begin=begin, end=end))
        return self.segments[-1]

    def _wait(self, started: Iterable[Segment]) -> None:
        for segment in sorted(started, key=lambda segment: segment.end):
            if segment.end > self.now and segment.lane == WITHIN:  # the arithmetic's own copies count as arithmetic
                self._compute(segment.end, "copy within the device")
            self.now = max(self.now, segment.end)

    def _compute(self, end: float, name: str) -> None:
        self.segments.append(Segment(COMPUTE, self.now, end, name))
        self.now = end

    def _events(self, at: Computation) -> Iterator[Event]:
        """Yield what happens in a computation: loaded bytes that it begins or ceases to hold, computations that it
        runs, seconds of arithmetic, segments that start (as if at 0) and the waits for them."""
        for op, (begin, end) in zip(at.ops, self.buffers.held(at), strict=True):
            yield "hold", begin, ""
            yield from self._effects(op)
            yield "hold", -end, ""

    def _effects(self, op: Op) -> Iterator[Event]:
        if op.opcode in RUNS:  # of branches the last one, or the one where it is true
            (inner,) = op.called.get("true_computation") or op.callees[-1:]
            yield from [("run", inner, "")] * op.trips
        elif op.opcode.endswith("-done"):
            yield "wait", None, op.operands[0].name
        elif (sent := op.collective) is not None:
            # A TPU starts and ends a collective by custom calls in two fusions, which share the channel.
            targets = {x.target for x in op.inside}
            begins, ends = "AsyncCollectiveStart" in targets, "AsyncCollectiveDone" in targets
            channels = (x.attribute(r"(channel_id=\d+)") for x in op.inside)
            key = next(filter(None, channels)) if begins or ends else op.name
            if not ends:
                yield "start", Segment(COLLECTIVES, 0.0, sent / self.chip.interconnect, op.opcode), key
            if not (begins or op.starts):
                yield "wait", None, key
        else:
            copied = {lane: nbytes for lane in (LOAD, STORE) if (nbytes := op.crossing(loads=lane == LOAD))}
            for lane, nbytes in copied.items():
                leaf = leaf_of(self.buffers, op)
                yield "start", Segment(lane, 0.0, nbytes / self.chip.host_link, leaf, nbytes), op.name
            matmuls = sum(n / (self.chip.bf16 if narrow else self.chip.f32) for n, narrow in op.matmuls)
            cached = CACHE if self.chip.platform == "tpu" else None
            traffic = sum(nbytes for x, nbytes, _ in op.traffic if not x.host and x.space != cached)
            seconds = max(matmuls, traffic / self.chip.hbm_bandwidth)
            if matmuls or not op.starts:  # what reads or writes host memory itself waits for the copy at once
                yield "wait", None, op.name
                yield "compute", seconds, label(op)
            elif not copied:
                yield "start", Segment(WITHIN, 0.0, seconds, ""), op.name


def label(op: Op) -> str:
    """The name that jax gives an operation, without the functions around it."""
    scope = op.scope.partition(";")[0]
    if (ours := SCOPE.search(scope)) and ours[2]:
        return f"update of {ours[2]}"
    words = [word for word in scope.split("/") if word and not word.startswith("jit(")]
    return "/".join(words[-4:]) or op.name


def leaf_of(buffers: Buffers, op: Op) -> str:
    """The leaf of a copy: the name of its buffer in host memory, else the leaf in its own name."""
    named = (name for x in (op, *op.operands) if x.array.host and (name := buffers.name(x)))
    scope = SCOPE.search(op.scope)
    return next(named, "") or (scope and scope[2]) or UNKNOWN


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

    def _seconds(self, *lanes: str, beside: Collection[str] = ()) -> float:
        return length(busy(self.segments, lanes, beside)) / self.steps

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
        return self._seconds(COLLECTIVES, beside=(COMPUTE,))

    @cached_property
    def exposed(self) -> float:
        """The seconds of copies that overlap with neither arithmetic nor collectives."""
        return self._seconds(LOAD, STORE, beside=(COMPUTE, COLLECTIVES))

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
        return busy(self.segments, (LOAD, STORE, COLLECTIVES), beside=(COMPUTE,))

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
    computing = [Segment(COMPUTE, *span, "") for span in busy(played.segments, (COMPUTE,))]
    found = defaultdict[tuple[str, str], list[Segment]](list)
    for s in played.segments:
        if s.lane in (LOAD, STORE):
            found[unknown if s.name == UNKNOWN else s.name, s.lane].append(s)
    result = []
    for (leaf, lane), copies in found.items():
        seconds, exposed = (length(busy((*copies, *computing), (lane,), beside)) for beside in ((), (COMPUTE,)))
        hidden = 1 - exposed / seconds if seconds else 1.0
        result.append(Transfer(leaf, lane == LOAD, sum(s.nbytes for s in copies), len(copies), hidden))
    return tuple(result)
