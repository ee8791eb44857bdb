"""A step as it ran: the profiler's trace as a timeline, beside the simulated one."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_offload._look.callables import replaced
from jax_offload._look.chips import Chip
from jax_offload._look.inspection import inspect
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

    def __str__(self) -> str:
        known = [self] if self.simulated is None else [self, self.simulated]
        names = [name for name in SECONDS if self.collectives or "collectives" not in name]
        rows = [(name, *(f"{1e3 * getattr(t, name):.3f}" for t in known)) for name in names]
        head = (f"ms per step, of {self.steps}", "measured", "simulated")[: 1 + len(known)]
        lines = aligned([head, *rows], (1, 2))
        if self.simulated is not None and self.step:
            lines.append(f"the simulation is off by {self.simulated.step / self.step - 1:+.0%}")
        return "\n".join(lines)


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


def profile(step: Any, *args: Any, steps: int = 3, chip: str | Chip | None = None) -> Profile:
    """Run a step several times under jax's profiler, and say where its time went and how far the simulation is off.

    The step must return its donated arguments: a result with the structure, shapes and dtypes of one takes its place
    in the next run. It runs once before measuring, to compile. Donated arguments are gone afterwards. Profile a step of
    ``jax_offload.pipelined`` with its carry: ``profile(train, carry, batch)``, after a first call.

    On jax 0.10 the profiler crashes in a process that has compiled for a ``target``. This function reads the traces of
    GPUs and CPUs. For a TPU, look at jax's own trace, ``jax.profiler.trace``; it names the leaf of each transfer.

    Args:
      step: a training step, jitted.
      *args: its arguments, on the devices.
      steps: how many runs to measure.
      chip: the chip whose speeds to simulate with, as ``jax_offload.chip`` takes it; found by the device's name if left
        out.

    Returns:
      A ``Profile``.

    Raises:
      ValueError: ``steps`` is below 1, a donated argument is not returned, the devices are TPUs, or the trace is empty.

    Example:
      >>> import jax, jax.numpy as jnp, jax_offload as jo
      >>> step = jax.jit(lambda w, x: w - 0.1 * x.T @ (x @ w), donate_argnums=0)
      >>> seen = jo.profile(step, jnp.ones((256, 256)), jnp.ones((64, 256)), steps=2)
      >>> seen.steps, seen.step > 0, abs(seen.step - seen.compute - seen.exposed - seen.idle) < 1e-9
      (2, True, True)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"profile(): steps={steps!r}; expected a whole number from 1 on.")
    if jax.default_backend() == "tpu":
        raise ValueError(
            "profile(): the traces of TPUs are not read. Look at the trace itself (jax.profiler.trace; transfers have "
            "their leaves' names), and at jax_offload.inspect."
        )
    step = step if hasattr(step, "lower") else jax.jit(step)
    checked = inspect(step, *args, chip=chip)
    simulated = None if checked.program else checked.timeline  # of several programs one is no measure
    args = _following(args, jax.block_until_ready(step(*args)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                args = _following(args, jax.block_until_ready(step(*args)))
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0])) if files else None
        return measured([] if data is None else segments_of(data), steps, simulated)


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


def segments_of(data: Any) -> list[Segment]:
    """Return the segments of the first GPU of a ``jax.profiler.ProfileData``, else of the CPU's threads."""
    planes = sorted(data.planes, key=lambda plane: plane.name)
    for kind, wanted in ("/device:GPU:", "Stream"), ("/host:CPU", ""):
        if plane := next((plane for plane in planes if plane.name.startswith(kind)), None):
            events = [e for line in plane.lines if line.name.startswith(wanted) for e in line.events if e.duration_ns]
            if not wanted:
                events = [event for event in events if any(key == "hlo_op" for key, _ in event.stats)]
            return sorted(filter(None, map(_segment, events)), key=lambda s: s.begin)
    return []


def _segment(event: Any) -> Segment | None:
    """Return the segment of an event; ``None`` if it is a copy within the device."""
    name, begin, lane, nbytes = event.name, event.start_ns / 1e9, COMPUTE, 0
    plain = name.replace(" ", "").lower()
    if plain.startswith("memcpy"):
        lane = LOAD if "h2d" in plain or "htod" in plain else STORE if "d2h" in plain or "dtoh" in plain else ""
        nbytes = _bytes(event)
    elif _COLLECTIVE.match(name):
        lane = COLLECTIVES
    return Segment(lane, begin, begin + event.duration_ns / 1e9, name, nbytes) if lane else None


def _bytes(event: Any) -> int:
    """The bytes of a copy in a GPU's trace, which says: kind_src:... size:1048576 ..."""
    details = next((str(value) for key, value in event.stats if key == "memcpy_details"), "")
    size = next((word.removeprefix("size:") for word in details.split() if word.startswith("size:")), "0")
    return int(size) if size.isdigit() else 0
