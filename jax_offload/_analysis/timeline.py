"""A scheduled program as a timeline: how long a step takes, and how much of its transfers nothing hides.

A model, not a measurement: no latency, no launch, no contention. Arithmetic runs in the order of the schedule, matmuls
at a share of the chip's peak, all else at the speed of its memory. Beside it run, each on a queue of its own, copies
from the host, copies to it, collectives, and asynchronous copies within the device. What waits for a queue is exposed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.costs import Costs, Scope
from jax_offload._analysis.hlo import Op, computations, started, trips

LOAD, STORE, COLLECTIVES, WITHIN = "load", "store", "collectives", "within the device"


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Of one run of a program, seconds and bytes: ``step`` is ``compute + exposed + exposed_collectives``.

    Attributes:
      compute: arithmetic, with waits for copies within the device.
      link: the busier direction between host and device alone.
      collectives: all of them, those that are not asynchronous too.
      exposed: waits for copies between host and device.
      exposed_collectives: waits for collectives.
      loaded, stored: bytes from the host, and to it.
    """

    step: float
    compute: float
    link: float
    collectives: float
    exposed: float
    exposed_collectives: float
    loaded: int
    stored: int

    @property
    def exposed_share(self) -> float:
        """0 where all copies are hidden, 1 where arithmetic hides none; more where both directions wait in turn."""
        return self.exposed / self.link if self.link else 0.0


@dataclasses.dataclass(frozen=True)
class Compute:
    seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    key: str
    queue: str
    seconds: float
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Wait:
    key: str


@dataclasses.dataclass(frozen=True)
class Rename:
    """Of what is in flight: an asynchronous operation may go through others before it is done."""

    key: str
    to: str


@dataclasses.dataclass(frozen=True)
class Run:
    """Another computation, some times."""

    name: str
    times: int


Event = Compute | Start | Wait | Rename | Run


class Program:
    """The computations of a module as events, each costed once."""

    def __init__(self, text: str, chip: Chip) -> None:
        found = computations(text)
        self.chip, self.costs = chip, Costs(found)
        partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self.devices = int(partitions[1]) if partitions else 1
        self.known: dict[str, list[Event]] = {}

    def events(self, name: str) -> list[Event]:
        if name not in self.known:
            scope = self.costs.scopes[name]
            self.known[name] = [event for op in scope.ops for event in self._events(scope, op)]
        return self.known[name]

    def _events(self, scope: Scope, op: Op) -> list[Event]:
        if op.opcode in ("while", "call", "conditional"):
            return self._calls(op)
        if op.opcode.endswith("-done"):
            return [Wait(op.operand)]
        if op.opcode.endswith("-update"):
            return [Rename(op.operand, op.name)]
        if copy := started(op):
            return [self._copy(op.name, copy.loads, copy.nbytes)]
        nbytes = self.costs.collective(scope, op, self.devices)
        if nbytes is not None:
            return self._collective(op, nbytes / self.chip.reached.interconnect)
        return self._arithmetic(scope, op)

    def _calls(self, op: Op) -> list[Event]:
        if op.opcode == "while":
            return [Run(op.called("body"), trips(op, self.costs.scopes[op.called("condition")].ops))]
        if op.opcode == "call":
            return [Run(op.called("to_apply"), 1)]
        branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
        last = re.findall(r"%([\w.\-]+)", branches[1])[-1] if branches else op.called("true_computation")
        return [Run(last, 1)]

    def _copy(self, key: str, loads: bool, nbytes: int) -> Start:
        return Start(key, LOAD if loads else STORE, 2 * nbytes / self.chip.host_link_both, nbytes)

    def _collective(self, op: Op, seconds: float) -> list[Event]:
        # A TPU starts and ends one by a custom call in a fusion; the two have the channel in common.
        targets = self.costs.targets(op)
        if "AsyncCollectiveStart" in targets:
            return [Start(self._channel(op), COLLECTIVES, seconds)]
        if "AsyncCollectiveDone" in targets:
            return [Wait(self._channel(op))]
        start = Start(op.name, COLLECTIVES, seconds)
        return [start] if op.opcode.endswith("-start") else [start, Wait(op.name)]

    def _channel(self, op: Op) -> str:
        found = (re.search(r"channel_id=\d+", o.rest) for _, o in self.costs.inside(op))
        return next(channel[0] for channel in found if channel)

    def _arithmetic(self, scope: Scope, op: Op) -> list[Event]:
        moved = self.costs.moved(scope, op)
        matmuls = self.costs.matmuls(scope, op)
        traffic = sum(m.nbytes for m in moved if not m.array.host and not self._cached(m.array.layout))
        seconds = max(sum(self._multiplied(m.dtypes, m.flops) for m in matmuls), traffic / self.chip.reached.hbm)
        if op.opcode.endswith("-start") and not matmuls:
            return [Start(op.name, WITHIN, seconds)]
        # What reads or writes the host's memory itself, the arithmetic waits for at once.
        starts: list[Event] = []
        for loads in (True, False):
            if nbytes := sum(m.nbytes for m in moved if m.array.host and m.written is not loads):
                starts.append(self._copy(f"{op.name} {loads}", loads, nbytes))
        waits = [Wait(start.key) for start in starts if isinstance(start, Start)]
        return [*starts, *waits, *([Compute(seconds)] if seconds else [])]

    def _cached(self, layout: str) -> bool:
        return self.chip.platform == "tpu" and "S(1)" in layout  # its memory on the chip

    def _multiplied(self, dtypes: tuple[str, ...], flops: float) -> float:
        narrow = any(dtype in ("bf16", "f16") for dtype in dtypes)
        return flops / (self.chip.reached.bf16 if narrow else self.chip.reached.f32)


class Clock:
    """Plays events: the time, and of each queue when it is free, how long it was busy and how long waited for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.now = self.compute = 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.nbytes: defaultdict[str, int] = defaultdict(int)

    def play(self, name: str) -> None:
        in_flight: dict[str, tuple[float, str]] = {}
        for event in self.program.events(name):
            match event:
                case Compute(seconds):
                    self.now += seconds
                    self.compute += seconds
                case Start(key):
                    in_flight[key] = self._start(event), event.queue
                case Wait(key):
                    if key in in_flight:
                        self._wait(*in_flight.pop(key))
                case Rename(key, to):
                    if key in in_flight:
                        in_flight[to] = in_flight.pop(key)
                case Run(inner, times):
                    for _ in range(times):
                        self.play(inner)
        for end, queue in sorted(in_flight.values()):
            self._wait(end, queue)

    def _start(self, start: Start) -> float:
        end = max(self.now, self.free[start.queue]) + start.seconds
        self.free[start.queue] = end
        self.busy[start.queue] += start.seconds
        self.nbytes[start.queue] += start.nbytes
        return end

    def _wait(self, end: float, queue: str) -> None:
        if end > self.now:
            self.waited[queue] += end - self.now
            self.now = end


def timeline(text: str, chip: str | Chip) -> Timeline:
    """Of a module's text, on a chip."""
    clock = Clock(Program(text, chip_of(chip)))
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
    )
