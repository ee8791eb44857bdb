"""Play a scheduled program: when it computes, and when it copies in each direction.

This is the package's one model of time, not a measurement: it knows no latency, no launches and no contention for
device memory. Arithmetic runs in the order of the schedule, matmuls at a share of the chip's peak, everything else at
the speed of its memory. Four queues run beside it: copies from the host, copies to the host, collectives, and
asynchronous copies within the device. Copies in both directions share the link. Time in which arithmetic waits for a
queue is exposed. Without a schedule, ``link_time`` and ``compute_time`` give the same speeds.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.chips import Chip
from jax_offload._look.hlo import CACHE, RUNS, SCOPE, Buffers, Computation, Module, Op

Span = tuple[float, float]  # from when to when, in seconds
COMPUTE, LOAD, STORE = "compute", "load", "store"
COLLECTIVES, WITHIN = "collectives", "within the device"
_LANES = {
    COMPUTE: "compute",
    LOAD: "host to device",
    STORE: "device to host",
    COLLECTIVES: "collectives",
    WITHIN: "within device",
}
SECONDS = ("step", "compute", "loading", "storing", "overlap", "exposed", "collectives", "exposed_collectives", "idle")
UNKNOWN = "not known"
_OTHER_WAY = {LOAD: STORE, STORE: LOAD}
_ROUNDED = (None, "default", "fastest", "bfloat16")  # precisions at which a TPU rounds what its matmuls read


def link_time(chip: Chip, loaded: float, stored: float) -> float:
    """Return the seconds of copies in both directions at once, and then of the rest in one direction."""
    return 2 * min(loaded, stored) / chip.host_link_both + abs(loaded - stored) / chip.host_link


def compute_time(chip: Chip, operations: float, dtype: str) -> float:
    """Return the seconds of matmuls in ``dtype``; a TPU rounds to bfloat16 unless jax is told not to."""
    rounded = chip.platform == "tpu" and jax.config.jax_default_matmul_precision in _ROUNDED  # pyright: ignore
    return operations / (chip.bf16 if rounded or dtype in ("bfloat16", "float16") else chip.f32)


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
    own = [x for x in segments if x.lane in lanes or x.lane in beside]
    ends = [(x.begin, 0, x.lane) for x in own] + [(x.end, 1, x.lane) for x in own]
    edges, running = list[float](), {True: 0, False: 0}
    for at, is_end, lane in sorted(ends):  # at equal times begins sort first, so that touching spans join
        running[lane in lanes] += -1 if is_end else 1
        within = len(edges) % 2 == 1
        if within != (running[True] > 0 and not running[False]):
            edges.append(at)
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


class Program:
    """A simulation of a module on a chip. It computes the cost of each operation once, and plays the schedule.

    Attributes:
      segments: everything that runs, in the order in which the schedule queues it.
      free: the time at which each queue is free.
      held: the loaded bytes in device memory now; ``window`` is their maximum so far.
    """

    def __init__(self, module: Module, chip: Chip) -> None:
        self.module, self.chip, self.buffers = module, chip, Buffers(module)
        self.segments, self.free, self.now = list[Segment](), defaultdict[str, float](float), 0.0
        self.held = self.window = 0
        self._held, self._steps = cache(self.buffers.held), cache(self._steps_of)

    def timeline(self) -> Timeline:
        """Play the whole program."""
        self.play(self.module.entry)
        played = Timeline(tuple(self.segments), self.chip.name, window=self.window)
        return dataclasses.replace(played, link=link_time(self.chip, played.loaded, played.stored))

    def play(self, at: Computation) -> None:
        """Run a computation from now on."""
        in_flight = defaultdict[Hashable, list[Segment]](list)
        for op, (begins, ends) in zip(at.ops, self._held(at), strict=True):
            self.held += begins
            self.window = max(self.window, self.held)
            key, steps = self._steps(op)
            for step in steps:
                if step is None:
                    self._wait(in_flight.pop(key, []))
                elif isinstance(step, Segment):
                    in_flight[key].append(self._queue(step))
                else:
                    self.play(step)
            self.held -= ends

    def _wait(self, started: Iterable[Segment]) -> None:
        for segment in sorted(started, key=lambda segment: segment.end):
            if segment.lane == WITHIN and segment.end > self.now:  # the arithmetic's own copies count as arithmetic
                self.segments.append(Segment(COMPUTE, self.now, segment.end, "copy within the device"))
            self.now = max(self.now, segment.end)

    def _queue(self, segment: Segment) -> Segment:
        """Put a segment on its queue and return it as it runs.

        If two copies share the link, the one in flight keeps its speed, and the other one gets the rest of the speed
        that both directions reach together.
        """
        begin, seconds = max(self.now, self.free[segment.lane]), segment.end
        if segment.lane in _OTHER_WAY:
            shared = max(0.0, self.free[_OTHER_WAY[segment.lane]] - begin)
            share = min(1.0, max(0.0, self.chip.host_link_both / self.chip.host_link - 1))
            seconds = seconds / share if seconds < share * shared else seconds + (1 - share) * shared
        self.free[segment.lane] = begin + seconds
        self.segments.append(dataclasses.replace(segment, begin=begin, end=begin + seconds))
        return self.segments[-1]

    def _steps_of(self, op: Op) -> tuple[Hashable, Sequence[Segment | Computation | None]]:
        """Return a key and the steps of an operation.

        A segment, which begins at 0, is queued under the key; ``None`` waits for all segments under the key; a
        computation runs.
        """
        if op.opcode in RUNS:  # of branches the last one, or the one where it is true
            return op, op.trips * [*(op.called.get("true_computation") or op.callees[-1:])]
        if op.opcode.endswith("-done"):
            return op.operands[0], [None]
        if (sent := op.collective) is not None:
            # A TPU starts and ends a collective by custom calls in two fusions, which share the channel.
            targets, channels = {x.target for x in op.inside}, [x.attribute(r"channel_id=(\d+)") for x in op.inside]
            begins, ends = "AsyncCollectiveStart" in targets, "AsyncCollectiveDone" in targets
            started = [] if ends else [Segment(COLLECTIVES, 0.0, sent / self.chip.interconnect, op.opcode)]
            key = next(filter(None, channels)) if begins or ends else op
            return key, [*started, *([] if begins or op.starts else [None])]
        crossing = {LOAD: op.crossing(loads=True), STORE: op.crossing(loads=False)}
        leaf, link = leaf_of(self.buffers, op), self.chip.host_link
        copies = [Segment(lane, 0.0, nbytes / link, leaf, nbytes) for lane, nbytes in crossing.items() if nbytes]
        matmuls = sum(n / (self.chip.bf16 if narrow else self.chip.f32) for n, narrow in op.matmuls)
        cached = CACHE if self.chip.platform == "tpu" else None
        traffic = sum(nbytes for x, nbytes, _ in op.traffic if not x.host and x.space != cached)
        seconds = max(matmuls, traffic / self.chip.hbm_bandwidth)
        if matmuls or not op.starts:  # a synchronous operation waits for its own copies
            return op, [*copies, None, *([Segment(COMPUTE, 0.0, seconds, label(op)), None] if seconds else [])]
        return op, [*copies] or [Segment(WITHIN, 0.0, seconds, "")]


def label(op: Op) -> str:
    """The name that jax gives an operation, without the functions around it."""
    scope = op.scope.partition(";")[0]
    if (ours := SCOPE.search(scope)) and ours[2]:
        return f"update of {ours[2]}"
    return "/".join([word for word in scope.split("/") if word and not word.startswith("jit(")][-4:]) or op.name


def leaf_of(buffers: Buffers, op: Op) -> str:
    """The leaf of a copy: the name of its buffer in host memory, else the leaf in its own name."""
    named, own = (buffers.name(x) for x in (op, *op.operands) if x.array.host), SCOPE.search(op.scope)
    return next(filter(None, named), "") or (own and own[2]) or UNKNOWN


def _seconds(played: Timeline, *lanes: str, beside: Collection[str] = ()) -> float:
    return length(busy(played.segments, lanes, beside)) / played.steps


def _figure(*lanes: str, beside: Collection[str] = (), says: str) -> cached_property[float]:
    """Make a figure of a timeline: the seconds during which one of ``lanes`` is in use and none of ``beside`` is."""
    figure = cached_property[float](lambda played: _seconds(played, *lanes, beside=beside))
    figure.__doc__ = says
    return figure


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

    compute = _figure(COMPUTE, says="Seconds of arithmetic, with waits for copies within the device.")
    loading = _figure(LOAD, says="Seconds of copies from the host.")
    storing = _figure(STORE, says="Seconds of copies to the host.")
    exposed = _figure(LOAD, STORE, beside=(COMPUTE, COLLECTIVES), says="Seconds of copies that nothing hides.")
    collectives = _figure(COLLECTIVES, says="Seconds of collectives.")
    exposed_collectives = _figure(COLLECTIVES, beside=(COMPUTE,), says="Seconds of collectives that nothing hides.")

    def __str__(self) -> str:
        how = f"simulated on {self.chip}, not measured" if self.chip else f"measured, per step of {self.steps}"
        shown = [name for name in SECONDS if self.collectives or "collectives" not in name]
        return "\n".join([f"ms, {how}", *(f"{name:22}{1e3 * getattr(self, name):10.3f}" for name in shown)])

    @cached_property
    def step(self) -> float:
        """The seconds of a step, from its first operation to the end of its last."""
        return max((x.end for x in self.segments), default=0.0) / self.steps

    @cached_property
    def overlap(self) -> float:
        """The seconds in which copies overlap with arithmetic."""
        return self.compute + _seconds(self, LOAD, STORE) - _seconds(self, COMPUTE, LOAD, STORE)

    @cached_property
    def idle(self) -> float:
        """The remaining seconds."""
        return max(0.0, self.step - _seconds(self, COMPUTE, LOAD, STORE, COLLECTIVES))

    @cached_property
    def loaded(self) -> int:
        """Bytes from the host."""
        return sum(x.nbytes for x in self.segments if x.lane == LOAD) // self.steps

    @cached_property
    def stored(self) -> int:
        """Bytes to the host."""
        return sum(x.nbytes for x in self.segments if x.lane == STORE) // self.steps

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
        used = {COMPUTE, LOAD, STORE, *(x.lane for x in self.segments)}
        tids = {lane: k for k, lane in enumerate(lane for lane in _LANES if lane in used)}

        def event(kind: str, lane: str, name: str, args: dict[str, Any], **when: float) -> dict[str, Any]:
            return {"ph": kind, "pid": 1, "tid": tids[lane], "name": name, "args": args, **when}

        events = [event("M", lane, "thread_name", {"name": _LANES[lane]}) for lane in tids]
        events += [event("M", lane, "thread_sort_index", {"sort_index": k}) for lane, k in tids.items()]
        for x in self.segments:
            args = {} if x.lane == COMPUTE else {"bytes": x.nbytes}
            events.append(event("X", x.lane, x.name, args, ts=1e6 * x.begin, dur=1e6 * (x.end - x.begin)))
        what = f"simulated on {self.chip}, not measured" if self.chip else "measured"
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"what": what}}))

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON types, without segments."""
        return {x: getattr(self, x) for x in (*SECONDS, "link", "loaded", "stored", "window", "chip", "steps")}


def transfers(played: Timeline, unknown: str = UNKNOWN) -> tuple[Transfer, ...]:
    """Return the transfers of a run, one for each leaf and direction, in the order of their starts.

    ``unknown``: what moves where no leaf is known.
    """
    copies = defaultdict[tuple[str, str], list[Segment]](list)
    for x in played.segments:
        if x.lane in (LOAD, STORE):
            copies[unknown if x.name == UNKNOWN else x.name, x.lane].append(x)
    computing = [Segment(COMPUTE, begin, end, "") for begin, end in busy(played.segments, (COMPUTE,))]
    found = []
    for (leaf, lane), own in copies.items():
        whole, alone = length(busy(own, (lane,))), length(busy([*own, *computing], (lane,), beside=(COMPUTE,)))
        hidden = 1 - alone / whole if whole else 1.0
        found.append(Transfer(leaf, lane == LOAD, sum(x.nbytes for x in own), len(own), hidden))
    return tuple(found)
