"""Where a step runs, and what a way to run it costs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_offload._analysis import exposure
from jax_offload._analysis.advice import changes, chosen
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.drives import DAY, DEFAULT, Drive
from jax_offload._analysis.drives import drive as drive_of
from jax_offload._analysis.exposure import BACKWARD, Link
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.host import HostMemory
from jax_offload._analysis.on_cores import NONE, Share
from jax_offload._analysis.on_disk import NO_FILES, Files
from jax_offload._analysis.option import Option, smallest
from jax_offload._analysis.programs import ONE, Programs
from jax_offload._analysis.units import in_bytes, in_seconds
from jax_offload._drive.cores import has_numba


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of the machine and of the work.

    Attributes:
      memory: bytes of one device; a ``budget`` where they were given: then the window may have what is left of them.
      devices: how many, and how many on a host.
      dtype: of the parameters, in which the matmuls compute; on a TPU these round it.
      seconds: of a step's arithmetic where it is known otherwise than by tokens.
      drive: that a state on disk is on; ``drives``: how many of them it is spread over.
      commit_every: of how many steps one is committed; 1: nobody knows.
    """

    chip: Chip | None
    tokens: int | None
    flops_per_token: float | None
    memory: int | None
    host: HostMemory
    budget: bool = False
    devices: tuple[int, int] = (1, 1)
    dtype: str = "bfloat16"
    seconds: float | None = None
    drive: Drive = dataclasses.field(default_factory=lambda: drive_of(DEFAULT))
    drives: int = 1
    commit_every: int = 1

    @property
    def rounds(self) -> bool:
        """Whether the chip's matmuls round float32 to bfloat16, unless a step asks for more."""
        return self.chip is not None and self.chip.platform == "tpu"

    @property
    def seconds_per_token(self) -> float | None:
        """Of arithmetic, with all devices at work."""
        if self.chip is None or self.flops_per_token is None:
            return None
        dtype = exposure.multiplied(self.chip, self.dtype)
        return self.flops_per_token / self.devices[0] / exposure.speed(self.chip, dtype)

    @property
    def compute(self) -> float | None:
        """Seconds of a step's arithmetic."""
        if self.seconds is not None:
            return self.seconds
        each = self.seconds_per_token
        return None if each is None or self.tokens is None else each * self.tokens

    def forecast(self, options: Sequence[Option], **rest: Any) -> Forecast:
        best = chosen(options, self.memory)
        return Forecast(
            options=tuple(options),
            recommended=best,
            device_memory=self.memory,
            devices=self.devices,
            host=self.host,
            chip=self.chip.name if self.chip else "",
            chip_host=self.chip.dram_bytes if self.chip else None,
            platform=self.chip.platform if self.chip else "",
            drive=self.drive if any(option.disk for option in options) else None,
            drives=self.drives,
            tokens_per_step=self.tokens,
            flops_per_token=self.flops_per_token,
            compute=self.compute,
            changes=changes(options, best or smallest(options, self.memory), self.compute, self.memory),
            **rest,
        )


def priced(
    option: Option, setting: Setting, share: float, cores: Share = NONE, files: Files = NO_FILES, cut: Programs = ONE
) -> Option:  # fmt: skip
    """With what it costs. ``share``: of the step's arithmetic, beside which it streams. ``cores``: what these do.
    ``files``: what is read and written. ``cut``: the programs of the pass before these."""
    fits, why = _fits(option, setting.memory)
    if fits is not False and option.host and (said := setting.host.why_not(option.host * setting.devices[1])):
        why = f"{why} {option.name}: {said}.".lstrip()  # said, not decided: the host on which this runs may be another
    if cores.unlooped and setting.devices[0] > setting.devices[1]:
        fits = False
        why = f"{option.name}: the update is no loop over elements, and takes leaves whole, on one host alone."
    if files.groups and not option.commit:  # of a step: as if all of it were divided like what is on disk
        beside = option.parameters + option.state + option.host - option.buffers
        option = dataclasses.replace(option, commit=int(beside * files.per_host))
    room, taken = setting.drive.capacity * setting.drives, 2 * option.disk * files.per_host + 2 * option.commit
    if files.groups and fits is not False and taken > room:
        why = f"{option.name}: the files take {in_bytes(taken)}, and there is room for {in_bytes(room)}."
    cores = cores if setting.chip is None else cores.on(setting.chip.platform)
    option = dataclasses.replace(option, fits=fits, why_not=why, dram=cores.dram)
    if files.groups:
        return _from_disk(option, setting, files, cut)
    if setting.chip is None:
        return option
    link = exposure.link_of(setting.chip)
    both = link.seconds(option.loaded, option.stored)
    if cores.dram:
        return _beside_the_cores(option, setting, setting.chip, cores, share, link, cut)
    exposed = None if setting.compute is None else exposure.exposed(both, setting.compute, share)
    each = setting.seconds_per_token
    return dataclasses.replace(
        option,
        link=both,
        link_serial=link.one_after_the_other(option.loaded, option.stored),
        exposed=exposed,
        overhead=None if exposed is None or not setting.compute else exposed / setting.compute,
        hidden=None if exposed is None or not both else 1 - exposed / both,
        hidden_from=None if each is None else exposure.tokens_to_hide(both, share, each),
    )


def _fits(option: Option, memory: int | None) -> tuple[bool | None, str]:
    """Whether it does, by the estimate's ends: ``None`` where these do not tell. And why not."""
    least, most = option.peak_range
    if memory is None or most <= memory:
        return (None if memory is None else True), ""
    if least > memory:
        at_least = "at least " if least < most else ""
        return False, f"{option.name} is {at_least}{in_bytes(least - memory)} short of memory on each device."
    said = f"{in_bytes(least)} to {in_bytes(most)} of {in_bytes(memory)} by the estimate; target= settles it."
    return None, f"{option.name} may fit: {said}"


def _beside_the_cores(
    option: Option, setting: Setting, chip: Chip, cores: Share, share: float, link: Link, cut: Programs
) -> Option:  # fmt: skip
    moved = option.loaded, option.stored
    both, dram, compute = link.seconds(*moved), chip.dram_bandwidth, setting.compute
    option = dataclasses.replace(option, link=both, link_serial=link.one_after_the_other(*moved))
    if dram is None:
        return option
    option = dataclasses.replace(option, cores=cores.dram / dram)
    if not compute:
        return option
    beside = cut.beside(cores.dram / dram, compute)
    exposed, waits = cores.exposed(link, dram, share * compute, *moved, beside)
    hidden = 1 - min(waits, both) / both
    return dataclasses.replace(option, exposed=exposed, overhead=exposed / compute, hidden=hidden, beside=beside)


def _from_disk(option: Option, setting: Setting, files: Files, cut: Programs) -> Option:
    """Groups are updated one after the other once gradients are there: link and drives are busy at the same time, and
    what goes up is not beside what comes down. A host's devices share its drives, and have a link each."""
    compute, drive, n = setting.compute, setting.drive, setting.drives
    io = files.seconds(drive, n)
    link = None if setting.chip is None else exposure.link_of(setting.chip)
    serial = None if link is None else link.one_after_the_other(option.loaded, option.stored)
    waits = max(io - files.hidden(drive, n, compute or 0.0, cut), serial or 0.0)
    hidden = 1 - waits / max(io, serial or 0.0)
    commits = 1 / setting.commit_every if setting.commit_every > 1 else 0.0  # in a step, where they are known
    waits += drive.seconds(0, commits * option.commit) / n
    steps = DAY / ((compute or 0.0) + waits)
    per_day = (files.per_host * option.written + commits * option.commit) / n * steps
    option = dataclasses.replace(option, io=io, per_day=per_day, commits_per_day=commits * steps or None)
    if link is None:
        return option
    option = dataclasses.replace(option, link=link.seconds(option.loaded, option.stored), link_serial=serial)
    if not compute:
        return option
    return dataclasses.replace(option, exposed=waits, overhead=waits / compute, hidden=hidden, hidden_from=None)


def of_the_disk(options: Sequence[Option], setting: Setting) -> list[str]:
    """What the first way with a disk has its drives write, and whether they stand it."""
    found: list[str] = []
    drive, n = setting.drive, setting.drives
    for option, per_day in [(option, option.per_day) for option in options if option.per_day is not None][:1]:
        how = "" if setting.compute else "at most "
        each = " by each device" if setting.devices[0] > 1 else ""
        said = (f"{option.name}: {in_bytes(option.written)} written in a step{each}, {how}{in_bytes(per_day)} a day "
                f"{'on each drive' if n > 1 else 'on the drive'}")  # fmt: skip
        times = per_day / drive.per_day
        found.append(f"{said}, of {in_bytes(drive.per_day)} that it is rated for" if times <= 1 else
                     f"warning: {said}, {times:.1f} times the {in_bytes(drive.per_day)} that it is rated for: five "
                     f"years' worth in {5 * 365 / times:,.0f} days")  # fmt: skip
        found.append(_of_commits(option, setting))
    if found:
        rates = f"reads {drive.read / 1e9:g} and writes {drive.write / 1e9:g} GB/s, one or the other"
        many = f"{n} drives, each" if n > 1 else "a drive"
        found.append(f"{many} as {drive.name}: {rates}; another: drive=")
    return found


def _of_commits(option: Option, setting: Setting) -> str:
    """What they write beside the groups."""
    drive, n, every = setting.drive, setting.drives, setting.commit_every
    how = "in none of these figures, as jo.disk(..., commit_every=n) does not say when"
    if option.commits_per_day is not None:
        per_day = in_bytes(option.commit * option.commits_per_day / n)
        how = f"one in {every} steps, {per_day} a day{' on each drive' if n > 1 else ''}, is in these figures"
    writes = f"{in_bytes(option.commit)} more, parameters and what of the state is not on disk"
    takes = in_seconds(drive.seconds(0, option.commit) / n)
    return f"a commit writes {writes}, in {takes}: {how}; the files take twice that, and twice the state on disk"


def of_the_cores(options: Sequence[Option], setting: Setting, uncut: bool = False) -> list[str]:
    """What the host's cores take, and what of it is hidden; or, of a step whose pass is one program that could be
    several (``uncut``), how much would be at most."""
    found: list[str] = []
    dram = None if setting.chip is None else setting.chip.dram_bandwidth
    for option in options:
        if option.dram:
            said = f"{option.name}: {in_bytes(option.dram)} through the host's memory, as it is built today"
            said += "" if has_numba() else " (jax_offload[cores] is not installed: several passes)"
            if dram is None or option.cores is None:
                known = "give a chip" if setting.chip is None else "the chip has no dram_bandwidth"
                found.append(f"{said}; {known}, and its time is told")
                continue
            hidden = f"{in_seconds(option.beside)} of it beside the pass" if option.beside else "hidden behind nothing"
            if uncut and setting.compute:
                most = min(option.cores, BACKWARD * setting.compute)
                hidden += f", of which a pass in several programs would hide {in_seconds(most)} at most"
            found.append(f"{said}: {in_seconds(option.cores)} at the chip's {dram / 1e9:.0f} GB/s, {hidden}")
    return found
