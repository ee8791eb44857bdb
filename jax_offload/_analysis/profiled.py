"""A step as it ran: the profiler's trace as a timeline, beside the simulated one."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.compiled import compiled
from jax_offload._analysis.hlo import Module
from jax_offload._analysis.inspection import inspected
from jax_offload._analysis.timeline import COLLECTIVES, COMPUTE, LOAD, STORE, Segment, Timeline
from jax_offload._base.text import aligned
from jax_offload._report.callables import replaced


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """Where the time of a step went, measured, in seconds per step; ``print`` it.

    ``jax_offload.profile`` returns it. ``step`` is ``compute + exposed + exposed_collectives + idle``.

    Attributes:
      step: from the beginning of the first operation to the end of the last, divided by the number of steps.
      compute: the time during which something is computed.
      loading: the time during which something is copied from the host.
      storing: the time during which something is copied to the host.
      overlap: the time during which something is copied and something is computed.
      exposed: the time during which something is copied and nothing is computed.
      collectives: the time during which devices exchange something.
      exposed_collectives: the part of it during which nothing is computed or copied.
      idle: the remaining time.
      steps: the number of measured steps.
      simulated: the simulated timeline; ``None`` if the chip's figures are unknown or the step is several programs.
      timeline: all measured steps, to save as a picture or a trace.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> seen = jo.profile(jax.jit(lambda x: jnp.tanh(x @ x)), jnp.ones((256, 256)))
      >>> isinstance(seen, jo.types.Profile), seen.exposed  # a CPU has no link
      (True, 0.0)
    """

    step: float
    compute: float
    loading: float
    storing: float
    overlap: float
    exposed: float
    collectives: float
    exposed_collectives: float
    idle: float
    steps: int
    simulated: Timeline | None
    timeline: Timeline = dataclasses.field(repr=False)

    @property
    def off(self) -> float | None:
        """The simulation's error: 0.1 if its step is 10 % longer than the measured one; ``None`` without one."""
        return None if self.simulated is None or not self.step else self.simulated.step / self.step - 1

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, without the timeline's segments."""
        figures = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("simulated", "timeline")
        }
        return figures | {"simulated": self.simulated and self.simulated.to_dict(), "off": self.off}

    def __str__(self) -> str:
        names = ["step", "compute", "loading", "storing", "overlap", "exposed", "idle"]
        if self.collectives:
            names[-1:-1] = ["collectives", "exposed_collectives"]
        rows: list[tuple[str, ...]] = [
            (f"ms per step, of {self.steps}", "measured", "simulated" if self.simulated else "")
        ]
        for name in names:
            known = (getattr(t, name, None) for t in (self, self.simulated))
            rows.append((name, *("" if seconds is None else f"{1e3 * seconds:.3f}" for seconds in known)))
        off = [] if self.off is None else [f"the simulation is off by {self.off:+.0%}"]
        return "\n".join([*aligned(rows, (1, 2)), *off])


def measured(segments: Sequence[Segment], steps: int, simulated: Timeline | None = None) -> Profile:
    """Sum up the segments of some steps, per step.

    Raises:
      ValueError: nothing ran.
    """
    if not segments:
        raise ValueError("profile(): the trace has nothing of a device or of XLA: may this user profile it?")
    first, last = min(s.begin for s in segments), max(s.end for s in segments)
    moved = [dataclasses.replace(s, begin=s.begin - first, end=s.end - first, waited=s.end - first) for s in segments]

    def length(*lanes: str) -> float:
        return _length((s.begin, s.end) for s in moved if s.lane in lanes)

    compute, copying, busy = length(COMPUTE), length(LOAD, STORE), length(COMPUTE, LOAD, STORE)
    all_of_it = length(COMPUTE, LOAD, STORE, COLLECTIVES)
    both: dict[str, Any] = {
        "step": last - first,
        "compute": compute,
        "exposed": busy - compute,
        "collectives": length(COLLECTIVES),
        "exposed_collectives": all_of_it - busy,
    }
    own = {"loading": length(LOAD), "storing": length(STORE), "overlap": copying + compute - busy}
    own["idle"] = last - first - all_of_it
    loaded, stored = (sum(s.nbytes for s in moved if s.lane == lane) for lane in (LOAD, STORE))
    link = max(own["loading"], own["storing"])
    timeline = Timeline(link=link, loaded=loaded, stored=stored, segments=tuple(moved), **both)
    each = {name: seconds / steps for name, seconds in (both | own).items()}
    return Profile(**each, steps=steps, simulated=simulated, timeline=timeline)


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def profile(step: Any, *args: Any, steps: int = 3, chip: str | Path | Chip | None = None) -> Profile:
    """Run a step several times under jax's profiler, and say where its time went and how far the simulation is off.

    The step must return its donated arguments: a result with the structure, shapes and dtypes of one takes its place
    in the next run. It runs once before measuring, to compile. Donated arguments are gone afterwards. Profile a step of
    ``jax_offload.pipelined`` with its carry: ``profile(train, carry, batch)``, after a first call.

    On jax 0.10 the profiler crashes in a process that has compiled for a ``target``. It has read the traces of an
    H100, but of a TPU only traces made by hand.

    Args:
      step: a training step, jitted.
      *args: its arguments, on the devices.
      steps: how many runs to measure.
      chip: the chip whose speeds to simulate with, as ``jax_offload.chip`` takes it; found by the device's name if left
        out.

    Returns:
      A ``Profile``.

    Raises:
      ValueError: ``steps`` is below 1, a donated argument is not returned, or the trace is empty or a TPU's that does
        not say how long copies were in flight.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> step = jax.jit(lambda w, x: w - 0.1 * x.T @ (x @ w), donate_argnums=0)
      >>> seen = jo.profile(step, jnp.ones((256, 256)), jnp.ones((64, 256)), steps=2)
      >>> seen.steps, seen.step > 0, abs(seen.step - seen.compute - seen.exposed - seen.idle) < 1e-9
      (2, True, True)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(): steps={steps!r}; expected a whole number from 1 on.")
    step = step if hasattr(step, "lower") else jax.jit(step)
    program = compiled(step, args, {}, None)
    checked = inspected(program, chip)
    simulated = None if checked.program else checked.timeline  # of several programs one is no measure
    args = _following(args, jax.block_until_ready(step(*args)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                args = _following(args, jax.block_until_ready(step(*args)))
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0])) if files else None
        return measured([] if data is None else segments_of(data, program.module), steps, simulated)


def _following(args: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
    """Return the arguments of the next step: results in place of donated arguments, else the same ones."""
    gone = [any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arg)) for arg in args]
    found = replaced([arg if is_gone else None for arg, is_gone in zip(args, gone, strict=True)], results)
    if lost := [k for k, is_gone in enumerate(gone) if is_gone and k not in found]:
        raise ValueError(
            f"profile(): argument {lost[0]} is donated, and no result has its structure and types. Return it."
        )
    return tuple(found.get(k, arg) for k, arg in enumerate(args))


# The names of XLA's collectives and of NCCL's kernels.
_COLLECTIVE = re.compile(
    "(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-)|.*nccl", re.IGNORECASE
)
# The lines of a TPU's plane hold operations in sequence, and asynchronous ones while they are in flight.
_OPS, _BESIDE = "XLA Ops", "Async XLA Ops"


def segments_of(data: Any, module: Module | None = None) -> list[Segment]:
    """Return the segments of the first GPU or TPU of a ``jax.profiler.ProfileData``, else of the CPU's threads.

    ``module``: the compiled module, which says the direction of a TPU's copies, as the trace does not.

    Raises:
      ValueError: a TPU's trace has copies between host and device, and not how long they were in flight.
    """
    planes = sorted(data.planes, key=lambda plane: plane.name)
    if tpu := next((plane for plane in planes if re.fullmatch(r"/device:TPU:\d+", plane.name)), None):
        return sorted(_of_a_tpu(tpu, module), key=lambda s: s.begin)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found: list[Segment] = []
    for plane in devices[:1] or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # the same again, as modules, steps, scopes
            for event in line.events:
                if event.duration_ns and (devices or any(key == "hlo_op" for key, _ in event.stats)):
                    lane = _lane(event.name)
                    if lane:
                        found.append(_segment(lane, event, event.name, _bytes(event)))
    return sorted(found, key=lambda s: s.begin)


def _of_a_tpu(plane: Any, module: Module | None) -> Iterator[Segment]:
    """Yield the segments of arithmetic, of collectives, and of copies between host and device."""
    copies = _copies(module) if module else {}
    lines = {line.name: [event for event in line.events if event.duration_ns] for line in plane.lines}
    used = {_plain(event.name) for event in lines.get(_OPS, [])}
    if _BESIDE not in lines and not used.isdisjoint(copies):
        raise ValueError(
            f"profile(): the trace of {plane.name} has no line {_BESIDE!r}, so it does not say how long copies between "
            f"host and device were in flight; it has {', '.join(sorted(lines)) or 'none'}. Look at the trace itself "
            "(jax.profiler.trace; transfers have their leaves' names), and at jax_offload.inspect."
        )
    for event in lines.get(_OPS, []):
        name = _plain(event.name)
        if _COLLECTIVE.match(name) and not re.search(r"-(start|done)\b", name):
            yield _segment(COLLECTIVES, event, name)
        elif not re.search(r"-(start|done|update)\b", name) and not re.match("(while|conditional|call)\\b", name):
            yield _segment(COMPUTE, event, name)
    for event in lines.get(_BESIDE, []):
        name = _plain(event.name)
        if (copy := copies.get(name)) is not None:
            yield _segment(LOAD if copy[0] else STORE, event, name, copy[1])
        elif _COLLECTIVE.match(name):
            yield _segment(COLLECTIVES, event, name)


def _plain(name: str) -> str:
    """Return the name of ``%copy-start.3 = (f32[8]{0}, ...) copy-start(...)``, as a TPU's traces write it."""
    return name.lstrip("%").partition(" ")[0]


def _copies(module: Module) -> dict[str, tuple[bool, int]]:
    """Copies between host and device, by the names of the operations that start them and that wait for them."""
    found = dict[str, tuple[bool, int]]()
    for op in (op for at in module.computations.values() for op in at.ops):
        if copy := (op.begun if op.opcode.endswith(("-done", "-update")) else op).copy:
            found[op.name] = copy
    return found


def _segment(lane: str, event: Any, name: str, nbytes: int = 0) -> Segment:
    begin = event.start_ns / 1e9
    end = begin + event.duration_ns / 1e9
    return Segment(lane, begin, end, name, nbytes, end)


def _lane(name: str) -> str:
    plain = name.replace(" ", "").lower()
    if plain.startswith("memcpy"):
        return LOAD if "h2d" in plain or "htod" in plain else STORE if "d2h" in plain or "dtoh" in plain else ""
    return COLLECTIVES if _COLLECTIVE.match(name) else COMPUTE


def _bytes(event: Any) -> int:
    """The bytes of a copy in a GPU's trace, which says: kind_src:... size:1048576 ..."""
    details = next((str(value) for key, value in event.stats if key == "memcpy_details"), "")
    size = next((word.removeprefix("size:") for word in details.split() if word.startswith("size:")), "0")
    return int(size) if size.isdigit() else 0
