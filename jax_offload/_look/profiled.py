"""A step as it ran: the profiler's trace as a timeline, beside the simulated one."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.callables import replaced
from jax_offload._look.chips import Chip
from jax_offload._look.compiled import compiled
from jax_offload._look.hlo import Module
from jax_offload._look.inspection import inspected
from jax_offload._look.text import aligned
from jax_offload._look.timeline import COLLECTIVES, COMPUTE, LOAD, SECONDS, STORE, Segment, Timeline


@dataclasses.dataclass(frozen=True, eq=False)
class Profile(Timeline):
    """Where the time of a step went, measured: a ``Timeline`` per step, to ``print`` or ``save``.

    ``jax_offload.profile`` returns it. ``step`` is from the beginning of the first operation to the end of the last,
    divided by the number of steps. A picture or a trace shows all measured steps.

    Attributes:
      segments: all that ran, each with ``lane``, ``begin``, ``end``, ``name`` and ``nbytes``.
      chip: empty, as nothing is simulated.
      link: seconds in which the busier direction of the link is in use.
      window: 0, as a profile does not show it.
      steps: the number of measured steps.
      simulated: the simulated timeline; ``None`` if the chip's figures are unknown or the step is several programs.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> seen = jo.profile(jax.jit(lambda x: jnp.tanh(x @ x)), jnp.ones((256, 256)))
      >>> isinstance(seen, jo.types.Profile), seen.exposed  # a CPU has no link
      (True, 0.0)
    """

    simulated: Timeline | None = None

    @property
    def off(self) -> float | None:
        """The simulation's error: 0.1 if its step is 10 % longer than the measured one; ``None`` without one."""
        return None if self.simulated is None or not self.step else self.simulated.step / self.step - 1

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, without the segments."""
        return super().to_dict() | {"simulated": self.simulated and self.simulated.to_dict(), "off": self.off}

    def __str__(self) -> str:
        known = [self] if self.simulated is None else [self, self.simulated]
        names = [name for name in SECONDS if self.collectives or "collectives" not in name]
        rows = [(name, *(f"{1e3 * getattr(t, name):.3f}" for t in known)) for name in names]
        head = (f"ms per step, of {self.steps}", "measured", "simulated")[: 1 + len(known)]
        off = [] if self.off is None else [f"the simulation is off by {self.off:+.0%}"]
        return "\n".join([*aligned([head, *rows], (1, 2)), *off])


def measured(segments: Sequence[Segment], steps: int, simulated: Timeline | None = None) -> Profile:
    """Return the profile of the segments of some steps.

    Raises:
      ValueError: nothing ran.
    """
    if not segments:
        raise ValueError("profile(): the trace has nothing of a device or of XLA: may this user profile it?")
    first = min(s.begin for s in segments)
    moved = [dataclasses.replace(s, begin=s.begin - first, end=s.end - first) for s in segments]
    found = Profile(tuple(moved), steps=steps, simulated=simulated)
    return dataclasses.replace(found, link=max(found.loading, found.storing))


def profile(step: Any, *args: Any, steps: int = 3, chip: str | Path | Chip | None = None) -> Profile:
    """Run a step several times under jax's profiler, and say where its time went and how far the simulation is off.

    The step must return its donated arguments: a result with the structure, shapes and dtypes of one takes its place
    in the next run. It runs once before measuring, to compile. Donated arguments are gone afterwards. Profile a step of
    ``jax_offload.pipelined`` with its carry: ``profile(train, carry, batch)``, after a first call.

    On jax 0.10 the profiler crashes in a process that has compiled for a ``target``. This function has read traces of
    an H100; the traces of a TPU were written by hand.

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
_STARTS_OR_ENDS, _RUNS = re.compile(r".*-(start|done|update)\b"), re.compile(r"(while|conditional|call)\b")


def segments_of(data: Any, module: Module | None = None) -> list[Segment]:
    """Return the segments of the first GPU or TPU of a ``jax.profiler.ProfileData``, else of the CPU's threads.

    ``module``: the compiled module, which says the direction of a TPU's copies, as the trace does not.

    Raises:
      ValueError: a TPU's trace has copies between host and device, and not how long they were in flight.
    """
    planes = sorted(data.planes, key=lambda plane: plane.name)
    for kind, wanted in {"/device:TPU:": (_OPS, _BESIDE), "/device:GPU:": ("Stream",), "/host:CPU": ("",)}.items():
        if plane := next((plane for plane in planes if plane.name.startswith(kind)), None):
            events = [
                (line.name, event) for line in plane.lines if line.name.startswith(wanted) for event in line.events
            ]
            copies = _copies(module) if module and kind == "/device:TPU:" else {}
            lines = {line.name for line in plane.lines}
            if _BESIDE not in lines and any(_plain(event.name) in copies for _, event in events):
                raise ValueError(
                    f"profile(): the trace of {plane.name} has no line {_BESIDE!r}, so it does not say how long copies "
                    f"between host and device were in flight; it has {', '.join(sorted(lines))}. Look at the trace "
                    "itself (jax.profiler.trace; transfers have their leaves' names), and at jax_offload.inspect."
                )
            if kind == "/host:CPU":
                events = [(line, event) for line, event in events if any(key == "hlo_op" for key, _ in event.stats)]
            found = [_segment(line, event, copies) for line, event in events if event.duration_ns]
            return sorted(filter(None, found), key=lambda s: s.begin)
    return []


def _segment(line: str, event: Any, copies: Mapping[str, tuple[bool, int]]) -> Segment | None:
    """Return the segment of an event; ``None`` if it starts, ends or contains others that count themselves."""
    name, begin, lane, nbytes = _plain(event.name), event.start_ns / 1e9, COMPUTE, 0
    plain = name.replace(" ", "").lower()
    if line == _BESIDE and name in copies:
        loads, nbytes = copies[name]
        lane = LOAD if loads else STORE
    elif plain.startswith("memcpy"):
        lane = LOAD if "h2d" in plain or "htod" in plain else STORE if "d2h" in plain or "dtoh" in plain else ""
        nbytes = _bytes(event)
    elif line in (_OPS, _BESIDE) and (_RUNS.match(name) or (line == _OPS and _STARTS_OR_ENDS.match(name))):
        lane = ""
    elif _COLLECTIVE.match(name):
        lane = COLLECTIVES
    elif line == _BESIDE:
        lane = ""
    return Segment(lane, begin, begin + event.duration_ns / 1e9, name, nbytes) if lane else None


def _plain(name: str) -> str:
    """Return the name of ``%copy-start.3 = (f32[8]{0}, ...) copy-start(...)``, as a TPU's traces write it."""
    return name[1:].partition(" ")[0] if name.startswith("%") else name


def _copies(module: Module) -> dict[str, tuple[bool, int]]:
    """Copies between host and device, by the names of the operations that start them and that wait for them."""
    found = dict[str, tuple[bool, int]]()
    for op in (op for at in module.computations.values() for op in at.ops):
        if copy := (op.begun if op.opcode.endswith(("-done", "-update")) else op).copy:
            found[op.name] = copy
    return found


def _bytes(event: Any) -> int:
    """The bytes of a copy in a GPU's trace, which says: kind_src:... size:1048576 ..."""
    details = next((str(value) for key, value in event.stats if key == "memcpy_details"), "")
    size = next((word.removeprefix("size:") for word in details.split() if word.startswith("size:")), "0")
    return int(size) if size.isdigit() else 0
