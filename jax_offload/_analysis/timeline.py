"""A scheduled program as a timeline: how long a step takes, and how much of its transfers nothing hides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.picture import save
from jax_offload._analysis.schedule import COLLECTIVES, LOAD, STORE, WITHIN, Clock, Program, Segment


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """The timeline of one step, in seconds and bytes: ``step`` is ``compute + exposed + exposed_collectives``.

    ``jax_offload.inspect`` and ``jax_offload.profile`` hold one. A simulated timeline is a model, not a measurement: it
    knows no latency, no launch and no contention.

    Attributes:
      step: the whole step.
      compute: arithmetic, including waits for copies within the device.
      link: the time of the busier direction between host and device alone.
      collectives: all collectives, also those that are not asynchronous.
      exposed: waits for copies between host and device.
      exposed_collectives: waits for collectives.
      loaded: bytes from the host.
      stored: bytes to the host.
      chip: the chip whose speeds the simulation uses; empty if measured.
      segments: what took time, each with ``lane``, ``begin``, ``end``, ``name``, ``nbytes``.
      memory: pairs of seconds and bytes in device memory, one for each change; empty if measured.
      peak: the peak of ``memory``, by kind.
      window: the most bytes of the state, and of its new values, in device memory at a time.

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
        """0 where all copies are hidden, 1 where arithmetic hides none; more where both directions wait in turn."""
        return self.exposed / self.link if self.link else 0.0

    def save(self, path: str | Path) -> None:
        """Writes a picture, ``.png`` or ``.svg``, or with ``.json`` a trace that https://ui.perfetto.dev opens.

        The picture has a lane for compute and one for each direction of the link, waits in red, and under them the
        device memory that is held. It needs matplotlib (the extra ``plot``).

        Args:
          path: of the file.

        Raises:
          ValueError: the path ends otherwise, or matplotlib is not installed.
        """
        save(self, path)

    def to_dict(self) -> dict[str, Any]:
        """The sums, without what they are sums of."""
        left_out = ("segments", "memory", "peak")
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}


def timeline(text: str, chip: str | Path | Chip, roles: Mapping[int, str] | None = None) -> Timeline:
    """Of a module's text, on a chip. ``roles``: what the arguments are, by number, of ``buffers.KINDS``."""
    return played(Program(text, chip_of(chip), roles))


def played(program: Program) -> Timeline:
    """Of a program with its chip."""
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
