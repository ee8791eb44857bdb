"""Which of the ways to take, and what would change what it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_offload._analysis.option import ON_DISK, Option, added
from jax_offload._analysis.units import in_bytes

# A lossy way is recommended where it spares more of a step than this, and nothing exact fits as well.
WORTH_ROUNDING = 0.1
# The host's cores are recommended where they spare more than this: their time is that of the memory's published peak.
WORTH_THE_CORES = 0.1


def chosen(options: Sequence[Option], memory: int | None) -> Option | None:
    """The way to take: of those that fit the one that adds least, a lossy one only for a good deal. Where none is known
    to fit, of those that may.

    Where nothing is known of the memory the question is not whether it fits: the first that offloads. A disk is for who
    has asked for one: then what this host has no memory for is none of the ways.
    """
    possible = [option for option in options if option.fits is not False and option.name != ON_DISK]
    if memory is None:
        return next((option for option in possible if option.host and not option.dram), next(iter(possible), None))
    fitting = [option for option in possible if option.fits] or possible
    if any(option.disk and option.name != ON_DISK for option in options):
        fitting = [o for o in fitting if not o.why_not] or [o for o in fitting if o.disk] or fitting
    if not fitting:
        return None

    def rank(option: Option) -> tuple[float, int, int]:
        moved = option.loaded + option.stored
        cost = option.overhead if option.overhead is not None else math.inf if option.dram else 0.0
        rounded, cores = 0 if option.same_numbers else WORTH_ROUNDING, WORTH_THE_CORES if option.dram else 0
        return cost + rounded + cores, moved, option.peak

    return min(fitting, key=rank)


def changes(
    options: Sequence[Option], base: Option, compute: float | None, memory: int | None
) -> tuple[str, ...]:  # fmt: skip
    """What would change the cost of ``base`` most, best first: device memory where that lacks, seconds that a step
    would be shorter by, then bytes."""
    others = [option for option in options if option.fits is not False]
    if base.fits is False:
        return () if memory is None else tuple(_saving(base, memory))
    if base.overhead:
        return tuple(_shortening(others, base, base.overhead, compute, memory))

    def dearer(other: Option) -> bool:
        return (other.overhead or 0.0) > (base.overhead or 0.0)

    if not base.host:
        least = min(others, key=lambda o: (dearer(o), o.peak_range))
        spares = least.peak_range[0] < base.peak_range[0]
        said = f"{least.name}: a peak of {in_bytes(least.peak)} instead of {in_bytes(base.peak)}{_at(least, base)}"
        return (said,) if spares else ()
    smaller = [option for option in others if 0 < option.host < base.host]
    return tuple(
        f"{o.name}: {in_bytes(o.host)} of host memory instead of {in_bytes(base.host)}{_at(o, base)}"
        for o in sorted(smaller, key=lambda o: (dearer(o), o.host))
    )


def _at(option: Option, base: Option) -> str:
    """What it costs beside that."""
    return "" if added(option) == added(base) else f", and adds {added(option)} instead of {added(base)}"


def _shortening(
    others: Sequence[Option], base: Option, overhead: float, compute: float | None, memory: int | None
) -> list[str]:  # fmt: skip
    found: list[tuple[float, str]] = []
    for other in others:
        if other.overhead is not None and other.overhead < overhead:
            found.append((other.overhead, f"{other.name}: {added(base)} becomes {added(other)}"))
    # the sum of gradients is as large as the parameters
    if compute and (memory is None or base.peak_range[1] + base.parameters <= memory):
        low, high = base.overhead_range or (overhead, overhead)
        half = dataclasses.replace(base, overhead=overhead / 2, overhead_range=(low / 2, high / 2))
        said = f"accumulating 2 micro-batches: {added(base)} becomes {added(half)}"
        found.append((overhead / 2, f"{said}, and their sum takes {in_bytes(base.parameters)}"))
    return [said for _, said in sorted(found, key=lambda each: each[0])]


def _saving(base: Option, memory: int) -> list[str]:
    """Where nothing fits: of the smallest way what would make it fit, and by how much."""
    least = base.peak_range[0]
    short, held = least - memory, base.parameters + base.gradients + base.state
    found: list[str] = []
    if short > 0 and (base.activations or 0) >= short:
        found.append(f"activations of {in_bytes(base.activations or 0)}: {in_bytes(short)} less of them fit, by "
                     "jax.checkpoint or fewer tokens at a time")  # fmt: skip
    room = memory - max(0, least - held)
    if short > 0 and room > 0:
        n = math.ceil(held / room)
        found.append(f"{n} times as many devices, which divide parameters, gradients and state (FSDP): on each "
                     f"{in_bytes(held // n)} of them instead of {in_bytes(held)}")  # fmt: skip
    return found
