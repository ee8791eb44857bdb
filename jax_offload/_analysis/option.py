"""One way to run a step, as a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_offload._analysis.units import in_seconds

ON_DISK = "on disk"  # the row that nobody has asked for
WORTH_A_RANGE = 0.01  # of a step: what is closer together prints as one number, the least


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a step, and what it costs: a row of a ``Forecast``. Bytes are those of one device.

    Attributes:
      name: of the way.
      code: the line that makes it.
      parameters: bytes on the device. Exact.
      gradients: bytes of all of them, in the parameters' dtype. Exact.
      state: bytes of the optimizer's state that stay on the device. Exact.
      window: bytes of state on the device at a time while the rest streams. Exact.
      activations: bytes of what else the step needs, estimated; ``None`` where no step was given.
      peak: bytes on the device at the step's peak, the sum of these.
      peak_range: the least and the most that the peak can be, where it is estimated of a step; else both are ``peak``.
      host: bytes of state in pinned host memory, and of gradients that wait there. Exact; with a disk also ``buffers``.
      loaded: bytes that a step copies from the host. Exact.
      stored: bytes that it copies to the host. Exact.
      link: seconds that the link needs for them, both ways at once; ``None`` without a chip.
      link_serial: the same, one way after the other.
      exposed: seconds of that which the step's own arithmetic does not hide; ``None`` where the tokens are not known.
      overhead: ``exposed`` beside the step without transfers: 0.05 is 5 % longer.
      exposed_range: the least and the most that ``exposed`` may be by XLA's schedule, where it is estimated of a step;
        ``None`` elsewhere.
      overhead_range: the same of ``overhead``.
      hidden: share of ``link`` that is hidden; where there is a disk, of the longer one of ``io`` and ``link_serial``.
      hidden_from: tokens per step from which all of it is hidden; ``None`` where a part never is, or what tells is not
        known: of a step that is given, of a pipelined one alone, whose first row is loaded before anything.
      disk: bytes of state on disk; the files take twice that. Exact.
      read: bytes that a step reads from it. Exact.
      written: bytes that it writes there. Exact.
      buffers: of ``host`` what is under way between disk and device, at most.
      commit: bytes that a commit writes beside the groups: parameters, and what of the state is not on disk. The files
        take twice that too. Of all devices of a host.
      io: seconds that a host's drives, which its devices share, need for what is read and written, by their data sheet.
      per_day: bytes that are written to each drive in 24 hours; the most, where a step's arithmetic is not known. With
        those of commits where the disk says how often, ``commit_every``.
      commits_per_day: how many of these there are then; ``None`` where it does not say.
      dram: bytes that the host's cores move through its memory to update what is there; 0 where they do not.
      cores: seconds that they take for it.
      beside: of those what goes on beside the forward and the backward pass, where that is cut into several programs.
      fits: whether the whole of ``peak_range`` fits the device; ``None`` where the device's memory is not known, or
        between the two ends, so that it may. Host memory does not decide it: what runs there may be another host.
      why_not: what is missing, or may be, on the device or on this host; empty where all fits.
      same_numbers: whether the numbers are those of the optimizer that was given: False for a lower precision.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> resident, offload, *_ = jo.plan(optax.adamw(1e-3), params).options
      >>> resident.name, resident.host, offload.host, offload.loaded
      ('resident', 0, 8388608, 8388608)
    """

    name: str
    code: str
    parameters: int
    gradients: int
    state: int
    window: int
    activations: int | None
    peak: int
    peak_range: tuple[int, int]
    host: int
    loaded: int
    stored: int
    link: float | None = None
    link_serial: float | None = None
    exposed: float | None = None
    overhead: float | None = None
    exposed_range: tuple[float, float] | None = None
    overhead_range: tuple[float, float] | None = None
    hidden: float | None = None
    hidden_from: int | None = None
    disk: int = 0
    read: int = 0
    written: int = 0
    buffers: int = 0
    commit: int = 0
    io: float | None = None
    per_day: float | None = None
    commits_per_day: float | None = None
    dram: int = 0
    cores: float | None = None
    beside: float = 0.0
    fits: bool | None = None
    why_not: str = ""
    same_numbers: bool = True


def smallest(options: Sequence[Option], lacking: int | None = None) -> Option:
    """The way that needs least of a device, by the low end of its estimate: the one rule where nothing fits.

    ``lacking``: a device's memory, where only what lacks some of that is asked for. A disk that nobody wants is none.
    """
    rows = [option for option in options if option.name != ON_DISK]
    short = [option for option in rows if lacking is not None and option.peak_range[0] > lacking]
    return min(short or rows, key=lambda option: option.peak_range)


def added(option: Option) -> str:
    """What it adds to a step, as it is printed: its share, or seconds, or a question mark."""
    if option.overhead is None and option.dram:
        return "?" if option.cores is None or option.link is None else in_seconds(max(option.cores, option.link))
    if option.overhead is not None:
        low, high = option.overhead_range or (option.overhead, option.overhead)
        least = f"+{low:.1%}" if low else "0"
        return least if high - low < WORTH_A_RANGE else f"{least.removesuffix('%')}–{high:.1%}"
    return "0" if not option.loaded and not option.stored else "?" if option.link is None else in_seconds(option.link)
