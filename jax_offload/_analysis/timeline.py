"""A scheduled program, played: when it computes, when it copies each way, and what it holds in device memory.

A model, not a measurement: no latency, no launch, no contention. Arithmetic runs in the order of the schedule, matmuls
at a share of the chip's peak, all else at the speed of its memory. Beside it run, each on a queue of its own, copies
from the host, copies to it, collectives, and asynchronous copies within the device. What waits for a queue is exposed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_offload._analysis.buffers import WINDOW, Buffers, Sharing
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.hlo import Costs, Op, Scope, computations, started, trips
from jax_offload._analysis.units import in_seconds

COMPUTE, LOAD, STORE = "compute", "load", "store"
COLLECTIVES, WITHIN = "collectives", "within the device"
UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True)
class Compute:
    seconds: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Start:
    key: str
    queue: str
    seconds: float
    nbytes: int = 0
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Wait:
    key: str


@dataclasses.dataclass(frozen=True)
class Rename:
    """Another name for something in flight: an asynchronous operation may pass through others before it is done."""

    key: str
    to: str


@dataclasses.dataclass(frozen=True)
class Run:
    """Another computation, run some number of times."""

    name: str
    times: int


@dataclasses.dataclass(frozen=True)
class Hold:
    """A change of device memory, in bytes of each kind."""

    nbytes: tuple[tuple[str, int], ...]


Event = Compute | Start | Wait | Rename | Run | Hold


@dataclasses.dataclass(frozen=True)
class Segment:
    """Something that takes time: its lane, its begin and end in seconds, its name, and the bytes that it copies.

    Attributes:
      waited: of a copy, when the program began to wait for it, to its end; else its end.
    """

    lane: str
    begin: float
    end: float
    name: str
    nbytes: int = 0
    waited: float = 0.0


class Program:
    """The computations of a module as events, each costed once."""

    def __init__(self, text: str, chip: Chip, roles: Mapping[int, str] | None = None) -> None:
        self.chip, self.costs = chip, Costs(computations(text))
        self.cache = "S(1)" if chip.platform == "tpu" else ""  # its memory on the chip
        self.buffers = Buffers(text, self.costs, roles or {}, self.cache)
        partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self.devices = int(partitions[1]) if partitions else 1
        self.known: dict[str, list[Event]] = {}

    def events(self, name: str) -> list[Event]:
        if name not in self.known:
            scope = self.costs.scopes[name]
            held = self.buffers.held(name)
            self.known[name] = [
                event
                for op, memory in zip(scope.ops, held, strict=True)
                for event in (
                    *([Hold(memory.begin)] if memory.begin else []),
                    *self._events(name, scope, op),
                    *([Hold(memory.end)] if memory.end else []),
                )
            ]
        return self.known[name]

    def _events(self, at: str, scope: Scope, op: Op) -> list[Event]:
        if op.opcode in ("while", "call", "conditional"):
            return self._calls(op)
        if op.opcode.endswith("-done"):
            return [Wait(op.operand)]
        if op.opcode.endswith("-update"):
            return [Rename(op.operand, op.name)]
        if copy := started(op):
            return [self._copy(op.name, copy.loads, copy.nbytes, leaf_of(self.buffers.sharing, at, op, copy.loads))]
        nbytes = self.costs.collective(scope, op, self.devices)
        if nbytes is not None:
            return self._collective(op, nbytes / self.chip.reached.interconnect)
        return self._arithmetic(at, scope, op)

    def _calls(self, op: Op) -> list[Event]:
        if op.opcode == "while":
            return [Run(op.called("body"), trips(op, self.costs.scopes[op.called("condition")].ops))]
        if op.opcode == "call":
            return [Run(op.called("to_apply"), 1)]
        branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
        last = re.findall(r"%([\w.\-]+)", branches[1])[-1] if branches else op.called("true_computation")
        return [Run(last, 1)]

    def _copy(self, key: str, loads: bool, nbytes: int, leaf: str) -> Start:
        return Start(key, LOAD if loads else STORE, 2 * nbytes / self.chip.host_link_both, nbytes, leaf)

    def _collective(self, op: Op, seconds: float) -> list[Event]:
        # A TPU starts and ends a collective by custom calls in two fusions, which share the channel.
        targets = self.costs.targets(op)
        if "AsyncCollectiveStart" in targets:
            return [Start(self._channel(op), COLLECTIVES, seconds)]
        if "AsyncCollectiveDone" in targets:
            return [Wait(self._channel(op))]
        start = Start(op.name, COLLECTIVES, seconds, 0, op.opcode.removesuffix("-start"))
        return [start] if op.opcode.endswith("-start") else [start, Wait(op.name)]

    def _channel(self, op: Op) -> str:
        found = (re.search(r"channel_id=\d+", o.rest) for _, o in self.costs.inside(op))
        return next(channel[0] for channel in found if channel)

    def _arithmetic(self, at: str, scope: Scope, op: Op) -> list[Event]:
        moved = self.costs.moved(scope, op)
        matmuls = self.costs.matmuls(scope, op)
        traffic = sum(m.nbytes for m in moved if not m.array.host and not self._cached(m.array.layout))
        seconds = max(sum(self._multiplied(m.dtypes, m.flops) for m in matmuls), traffic / self.chip.reached.hbm)
        if op.opcode.endswith("-start") and not matmuls:
            return [Start(op.name, WITHIN, seconds)]
        # An operation that reads or writes host memory itself waits for the copy at once.
        starts: list[Event] = []
        for loads in (True, False):
            if nbytes := sum(m.nbytes for m in moved if m.array.host and m.written is not loads):
                starts.append(
                    self._copy(f"{op.name} {loads}", loads, nbytes, leaf_of(self.buffers.sharing, at, op, loads))
                )
        waits = [Wait(start.key) for start in starts if isinstance(start, Start)]
        return [*starts, *waits, *([Compute(seconds, label(op))] if seconds else [])]

    def _cached(self, layout: str) -> bool:
        return bool(self.cache) and self.cache in layout

    def _multiplied(self, dtypes: tuple[str, ...], flops: float) -> float:
        narrow = any(dtype in ("bf16", "f16") for dtype in dtypes)
        return flops / (self.chip.reached.bf16 if narrow else self.chip.reached.f32)


class Clock:
    """Plays events, and keeps the time, and when each queue is free, how long it was busy and how long it was awaited.

    Attributes:
      segments: what took time, in the order of starting.
      memory: (time, bytes in device memory) whenever that changes, and at the most ``at_most`` by kind.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.now = self.compute = 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.nbytes: defaultdict[str, int] = defaultdict(int)
        self.segments: list[Segment] = []
        self.kinds: defaultdict[str, int] = defaultdict(int, program.buffers.standing())
        self.total = sum(self.kinds.values())
        self.memory = [(0.0, self.total)]
        self.most, self.at_most = self.total, dict(self.kinds)
        self.window = self.kinds[WINDOW]  # the most that it was

    def play(self, name: str) -> None:
        in_flight: dict[str, int] = {}  # the place of its segment
        for event in self.program.events(name):
            match event:
                case Compute(seconds, name):
                    self.segments.append(Segment(COMPUTE, self.now, self.now + seconds, name))
                    self.now += seconds
                    self.compute += seconds
                case Start(key):
                    in_flight[key] = self._start(event)
                case Wait(key):
                    if key in in_flight:
                        self._wait(in_flight.pop(key))
                case Hold(nbytes):
                    self._hold(nbytes)
                case Rename(key, to):
                    if key in in_flight:
                        in_flight[to] = in_flight.pop(key)
                case Run(inner, times):
                    for _ in range(times):
                        self.play(inner)
        for place in sorted(in_flight.values(), key=lambda place: self.segments[place].end):
            self._wait(place)

    def _start(self, start: Start) -> int:
        begin = max(self.now, self.free[start.queue])
        end = begin + start.seconds
        self.free[start.queue] = end
        self.busy[start.queue] += start.seconds
        self.nbytes[start.queue] += start.nbytes
        self.segments.append(Segment(start.queue, begin, end, start.name, start.nbytes, end))
        return len(self.segments) - 1

    def _wait(self, place: int) -> None:
        copy = self.segments[place]
        if copy.end > self.now:
            self.waited[copy.lane] += copy.end - self.now
            self.segments[place] = dataclasses.replace(copy, waited=self.now)
            self.now = copy.end

    def _hold(self, nbytes: tuple[tuple[str, int], ...]) -> None:
        for kind, more in nbytes:
            self.kinds[kind] += more
            self.total += more
        if self.memory[-1][0] == self.now:
            self.memory[-1] = self.now, max(self.total, self.memory[-1][1] if nbytes[0][1] > 0 else self.total)
        else:
            self.memory.append((self.now, self.total))
        self.window = max(self.window, self.kinds[WINDOW])
        if self.total > self.most:
            self.most, self.at_most = self.total, dict(self.kinds)


def label(op: Op) -> str:
    """The name that jax gives an operation, without the functions around it."""
    scope = op.scope.partition(";")[0]
    if ours := re.search(r"jax_offload/(?:update|prefetch|write-back)/(.*)/", scope):
        return f"update of {ours[1]}"
    words = [word for word in scope.split("/") if word and not word.startswith("jit(")]
    return "/".join(words[-4:]) or op.name


def leaf_of(sharing: Sharing, at: str, op: Op, loads: bool) -> str:
    """The leaf that a copy belongs to: the argument that it reads or writes, else the leaf in its jax name."""
    places = [(operand, ()) for operand in op.operands]
    places = places if loads else [(op.name, place) for place, array in op.leaves.items() if array.host] + places
    for value, place in places:
        argument = sharing.argument(at, value, place)
        if argument is not None and argument.arrays and argument.arrays[0].host:
            return argument.scope or argument.name
    named = re.search(r"jax_offload/(?:prefetch|write-back)/(.*)/", op.scope)
    return named[1] if named else UNKNOWN


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """The timeline of one step, in seconds and bytes: ``step`` is ``compute + exposed + exposed_collectives``.

    ``jax_offload.inspect`` and ``jax_offload.profile`` hold one. A simulated timeline is a model, not a measurement: it
    knows no latency, no launch and no contention.

    Attributes:
      step: seconds of the whole step.
      compute: seconds of arithmetic, including waits for copies within the device.
      link: seconds that the busier direction between host and device would take alone.
      collectives: seconds of all collectives, asynchronous or not.
      exposed: seconds of waits for copies between host and device.
      exposed_collectives: seconds of waits for collectives.
      loaded: bytes from the host.
      stored: bytes to the host.
      chip: the chip whose speeds the simulation uses; empty if measured.
      segments: the operations and waits, each with ``lane``, ``begin``, ``end``, ``name``, ``nbytes``.
      memory: pairs of seconds and bytes in device memory, one for each change; empty if measured.
      peak: the peak of ``memory``, in bytes by kind.
      window: the most bytes of the state, old and new values, in device memory at a time.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> t = jo.inspect(jax.jit(lambda x: x @ x), jnp.ones((256, 256)), chip="h200").timeline
      >>> t.loaded, t.exposed, isinstance(t, jo.types.Timeline)
      (0, 0.0, True)
    """

    step: float
    compute: float
    link: float
    collectives: float
    exposed: float
    exposed_collectives: float
    loaded: int
    stored: int
    chip: str = ""
    segments: tuple[Segment, ...] = dataclasses.field(default=(), repr=False)
    memory: tuple[tuple[float, int], ...] = dataclasses.field(default=(), repr=False)
    peak: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    window: int = 0

    @property
    def exposed_share(self) -> float:
        """``exposed / link``: 0 if all copies are hidden, 1 if none is, and more if both directions wait in turn."""
        return self.exposed / self.link if self.link else 0.0

    def save(self, path: str | Path) -> None:
        """Write a picture, ``.png`` or ``.svg``, or with ``.json`` a trace that https://ui.perfetto.dev opens.

        The picture has a lane for compute and one for each direction of the link, with waits in red, and below them the
        device memory in use. It needs matplotlib (the extra ``plot``).

        Args:
          path: the path of the file, which ends with ``.png``, ``.svg`` or ``.json``.

        Raises:
          ValueError: the path has another ending, or matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(trace(self)))
        elif path.suffix in (".png", ".svg"):
            draw(self, path)
        else:
            raise ValueError(f"save(): path {str(path)!r} ends with {path.suffix!r}; expected .png, .svg or .json.")

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON types, without segments and memory."""
        left_out = ("segments", "memory", "peak")
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}


def timeline(text: str, chip: str | Path | Chip, roles: Mapping[int, str] | None = None) -> Timeline:
    """Play a module's text on a chip. ``roles`` maps an argument's number to one of ``buffers.KINDS``."""
    return played(Program(text, chip_of(chip), roles))


def played(program: Program) -> Timeline:
    """Play a program on its chip."""
    clock = Clock(program)
    clock.play("ENTRY")
    return Timeline(
        step=clock.now,
        compute=clock.compute + clock.waited[WITHIN],
        link=max(clock.busy[LOAD], clock.busy[STORE]),
        collectives=clock.busy[COLLECTIVES],
        exposed=clock.waited[LOAD] + clock.waited[STORE],
        exposed_collectives=clock.waited[COLLECTIVES],
        loaded=clock.nbytes[LOAD],
        stored=clock.nbytes[STORE],
        chip=program.chip.name,
        segments=tuple(clock.segments),
        memory=tuple(clock.memory),
        peak=clock.at_most,
        window=clock.window,
    )


_LANES = {
    COMPUTE: ("compute", "#4c6a92"),
    LOAD: ("host to device", "#3f8f6b"),
    STORE: ("device to host", "#c9862c"),
    COLLECTIVES: ("collectives", "#7d5ba6"),
    WITHIN: ("within device", "#8a8a8a"),
}
_WAIT = "#c0392b"
_LABELLED = 0.03  # of the time a segment needs, to have its name written in it
_HEIGHT = 0.72  # of a lane's bars


def lanes_of(timeline: Timeline) -> list[str]:
    """The lanes of a picture, from the top: the first three always."""
    used = {segment.lane for segment in timeline.segments}
    return [lane for lane in _LANES if lane in used or lane in (COMPUTE, LOAD, STORE)]


def waits(timeline: Timeline) -> list[tuple[float, float]]:
    """When nothing is computed, as arithmetic waits for a copy or a collective: pairs of seconds."""
    return sorted((s.waited, s.end) for s in timeline.segments if s.lane not in (COMPUTE, WITHIN) and s.waited < s.end)


def draw(timeline: Timeline, path: Path) -> None:
    """Lanes, with the curve of device memory under them, as a ``.png`` or ``.svg``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "save(): a picture needs matplotlib: pip install 'jax_offload[plot]'; a .json needs nothing."
        ) from error
    lanes, end, curve = lanes_of(timeline), timeline.step or 1e-9, bool(timeline.memory)
    figure = Figure(figsize=(13, 0.62 * len(lanes) + 1.6 + 2.2 * curve), layout="constrained")
    ratios: Any = {"height_ratios": [0.62 * len(lanes) + 0.3, 2.0]} if curve else {}
    axes: Any = figure.subplots(2 if curve else 1, 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for row, lane in enumerate(lanes):
        segments = [s for s in timeline.segments if s.lane == lane]
        _bars(axes[0], row, [(s.begin, s.end) for s in segments], _LANES[lane][1])
        for s in segments:
            if (share := (s.end - s.begin) / end) >= _LABELLED and s.name:
                letters = int(share * 150)
                text = s.name if len(s.name) <= letters else "…" + s.name[1 - letters :] if letters > 4 else ""
                axes[0].text(1e3 * (s.begin + s.end) / 2, row, text, ha="center", va="center", fontsize=7,
                             color="white", clip_on=True)  # fmt: skip
    _bars(axes[0], 0, waits(timeline), _WAIT)
    moved = [sum(s.nbytes for s in timeline.segments if s.lane == lane) for lane in lanes]
    names = [_LANES[lane][0] + (f"\n{n / 2**20:.0f} MiB" if n else "") for lane, n in zip(lanes, moved, strict=True)]
    axes[0].set_yticks(range(len(lanes)), names)
    axes[0].set_ylim(len(lanes) - 0.4, -0.6)
    axes[0].set_xlim(0, end * 1e3)
    axes[0].set_title(_title(timeline), loc="left", fontsize=10)
    if curve:
        _memory(axes[1], timeline, end * 1e3)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, row: int, spans: list[tuple[float, float]], color: str) -> None:
    bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
    many = len(bars) > 200  # as one image, even in an .svg
    axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), color=color, linewidth=0, rasterized=many)


def _title(t: Timeline) -> str:
    step, compute, exposed = map(in_seconds, (t.step, t.compute, t.exposed))
    if not t.chip:
        return f"measured: {step}, of which {compute} of compute, {exposed} of transfers alone"
    how = f"simulated on {t.chip}, not measured"
    return f"one step, {how}: {step} = {compute} of compute + {exposed} of waits for transfers (red)" + (
        f" + {in_seconds(t.exposed_collectives)} for collectives" if t.collectives else ""
    )


def _memory(axes: Any, timeline: Timeline, end: float) -> None:
    times = [1e3 * seconds for seconds, _ in timeline.memory] + [end]
    unit, name = (2**30, "GiB") if max(n for _, n in timeline.memory) > 4 * 2**30 else (2**20, "MiB")
    values = [nbytes / unit for _, nbytes in timeline.memory]
    most = max(values)
    axes.stairs(values, times, fill=True, color="#d5dde8")
    axes.stairs(values, times, color="#4c6a92", linewidth=1.0)
    axes.axhline(most, color="#8a8a8a", linewidth=0.7, linestyle=":")
    parts = (f"{kind} {n / unit:.4g}" for kind, n in timeline.peak.items() if n / unit > 0.01 * most)
    axes.text(0.005 * end, most, f"{most:.4g} {name}: {', '.join(parts)}", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.18 * most)
    axes.set_ylabel(f"device memory, {name}")


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return Chrome's trace format, which Perfetto opens: a thread for each lane, a counter for device memory."""
    lanes = lanes_of(timeline)
    events: list[Mapping[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": k, "name": name, "args": args}
        for k, lane in enumerate(lanes)
        for name, args in (("thread_name", {"name": _LANES[lane][0]}), ("thread_sort_index", {"sort_index": k}))
    ]
    for s in timeline.segments:
        args = {"bytes": s.nbytes, "waited_us": 1e6 * max(s.end - s.waited, 0)} if s.lane != COMPUTE else {}
        times = {"ts": 1e6 * s.begin, "dur": 1e6 * (s.end - s.begin)}
        events.append({"ph": "X", "pid": 1, "tid": lanes.index(s.lane), "name": s.name, "args": args} | times)
    for seconds, nbytes in timeline.memory:
        events.append({"ph": "C", "pid": 1, "name": "device memory", "ts": 1e6 * seconds, "args": {"bytes": nbytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"what": _title(timeline)}}
