"""A forecast as text of 80 columns, and as HTML."""

from __future__ import annotations

import html as _html
import textwrap
from collections.abc import Sequence

from jax_offload._analysis.host import POOL_VARIABLE, HostMemory
from jax_offload._analysis.option import Option, added, smallest
from jax_offload._analysis.units import in_bytes, in_seconds

WIDTH = 80
_HEADER = ("", "peak", "host", "disk", "each way", "hidden", "added", "fits")
_DISK = 3


class Printed:
    """A forecast, as far as it is printed."""

    options: tuple[Option, ...]
    recommended: Option | None
    device_memory: int | None
    devices: tuple[int, int]
    host: HostMemory
    chip: str
    chip_host: int | None
    platform: str
    compute: float | None
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]

    @property
    def missing(self) -> int:
        """Bytes of device memory that the smallest way lacks, at least; 0 where one may fit or no memory is known."""
        if self.recommended is not None or self.device_memory is None:
            return 0
        return max(0, smallest(self.options, self.device_memory).peak_range[0] - self.device_memory)

    @property
    def maybe(self) -> bool:
        """Whether what is recommended may fit, or not: the memory is between the ends of its estimate."""
        return self.device_memory is not None and self.recommended is not None and self.recommended.fits is None

    def per_host(self, option: Option) -> int:
        """Bytes of pinned memory on one host, for all of its devices."""
        return option.host * self.devices[1]

    def summary(self) -> str:
        """One line: what to do."""
        if self.recommended is None:
            lacking = f": short of {in_bytes(self.missing)} on each device" if self.missing else ""
            return f"nothing fits{lacking}"
        maybe = ", which may fit" if self.maybe else ""
        return f"{self.recommended.name}{maybe}: {self.recommended.code}"

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html(self)


def rows(forecast: Printed) -> list[tuple[str, ...]]:
    """A header and a row for every way; with what is on disk where something is."""
    found = [_HEADER, *(_row(option, forecast.device_memory) for option in forecast.options)]
    if any(option.disk for option in forecast.options):
        return found
    return [(*row[:_DISK], *row[_DISK + 1 :]) for row in found]


def tiers(forecast: Printed) -> list[tuple[str, ...]]:
    """Of the first way with a disk, memory by memory: bytes that are there, bytes that move in a step, and their time.
    Empty where there is none."""
    option = next((option for option in forecast.options if option.disk), None)
    if option is None:
        return []

    def time(seconds: float | None) -> str:
        return "?" if seconds is None else in_seconds(seconds)

    kept, held = option.peak - option.window, option.host - option.buffers
    moved, files = _both(option.loaded, option.stored), _both(option.read, option.written)
    return [
        (option.name, "keeps", "under way", "in a step", "time"),
        ("device", in_bytes(kept), in_bytes(option.window), "arithmetic", time(forecast.compute)),
        ("host", in_bytes(held) if held else "–", in_bytes(option.buffers), moved, time(option.link_serial)),
        ("disk", f"2 x {in_bytes(option.disk)}", "–", files, time(option.io)),
    ]


def _both(up: int, down: int) -> str:
    """Bytes to the device, and from it."""
    return f"{in_bytes(up)} each way" if up == down else f"{in_bytes(up)} up, {in_bytes(down)} down"


def _row(option: Option, memory: int | None) -> tuple[str, ...]:
    low, high = option.peak_range
    peak = in_bytes(option.peak) if low == high else f"{in_bytes(low).split()[0]}–{in_bytes(high)}"
    moved = in_bytes(max(option.loaded, option.stored)) if option.loaded or option.stored else "–"
    hidden = "–" if option.hidden is None or not option.link else f"{option.hidden:.0%}"
    return (
        option.name, peak, in_bytes(option.host) if option.host else "–", in_bytes(option.disk) if option.disk else "–",
        moved, hidden, added(option),
        "yes" if option.fits else "no" if option.fits is False else "?" if memory is None else "maybe",
    )  # fmt: skip


def text(forecast: Printed) -> str:
    lines = _aligned(rows(forecast))
    if by_tier := tiers(forecast):
        lines += ["", *_aligned(by_tier), ""]
    for sentence in sentences(forecast):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_long_words=False)
    if forecast.recommended is not None:
        lines += [heading(forecast), *(f"  {line}" for line in forecast.recommended.code.split("; "))]
    return "\n".join(lines)


def heading(forecast: Printed) -> str:
    """Of the line of code."""
    return "recommended, and may fit:" if forecast.maybe else "recommended:"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(
        zip(row, widths, strict=True))).rstrip() for row in table]  # fmt: skip
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def sentences(forecast: Printed) -> list[str]:
    """What stands under the table."""
    memory = forecast.device_memory
    chosen = forecast.recommended or smallest(forecast.options, memory)
    found = [_device(forecast, chosen), *_host(forecast, chosen), *_time(forecast, chosen)]
    if forecast.recommended is None:
        found.append(f"{forecast.summary()}. {chosen.why_not}".rstrip())
    if may := [option.name for option in forecast.options if option.fits is None and memory is not None]:
        found.append(f"{', '.join(may)} may fit: {in_bytes(memory or 0)} is between the ends of the estimate; "
                     "target= compiles, and settles it")  # fmt: skip
    found += [f"would change it: {change}" for change in forecast.changes]
    return [each for each in [*found, *forecast.notes, *_labels(forecast.labels)] if each]


def _device(forecast: Printed, option: Option) -> str:
    parts = [("parameters", option.parameters), ("gradients", option.gradients), ("state", option.state),
             ("window", option.window), ("activations", option.activations)]  # fmt: skip
    said = " + ".join(f"{name} {in_bytes(n)}" for name, n in parts if n)
    of = "" if forecast.device_memory is None else f" of {in_bytes(forecast.device_memory)}"
    return f"{option.name}, on each of {forecast.devices[0]} device(s){of}: {said}"


def _host(forecast: Printed, option: Option) -> list[str]:
    if not option.host:
        return []
    total, host = forecast.per_host(option), forecast.host
    named = ("available", host.available), ("left by the cgroup", host.cgroup)
    limits = [f"{in_bytes(n)} {what}" for what, n in named if n is not None]
    found = [f"pinned on a host of {forecast.devices[1]} device(s): {in_bytes(total)}; this host: {', '.join(limits)}"]
    if forecast.chip_host is not None:  # which this host need not be
        there = forecast.chip_host * forecast.devices[1]
        enough = "suffices" if total <= there else f"is {in_bytes(total - there)} short"
        found.append(
            f"a host of {forecast.devices[1]} {forecast.chip} has {in_bytes(there)}, by its figures: it {enough}"
        )
    if why := host.why_not(total):
        found.append(f"not on this host: {why}")
    if advice := host.pool_advice(total, forecast.platform):
        found.append(
            f"set {advice} before jax starts: XLA's pool of pinned memory on a GPU is {in_bytes(host.pool)} unless "
            f"{POOL_VARIABLE} says otherwise, and fragments (a third of headroom)"
        )
    return found


def _time(forecast: Printed, option: Option) -> list[str]:
    if option.link is None or option.link_serial is None or not option.link:
        return []
    found = [f"link: {in_seconds(option.link_serial)} one way after the other, {in_seconds(option.link)} both at once"]
    if option.hidden_from is not None:
        found[0] += f"; hidden from {option.hidden_from:,} tokens per step on"
    if forecast.compute is not None and option.exposed is not None:
        adds = "it and the disk add" if option.disk else "it adds"
        low, high = option.exposed_range or (option.exposed, option.exposed)
        most = f" to {in_seconds(high)}" if in_seconds(high) != in_seconds(low) else ""
        found[0] += f"; of a step of {in_seconds(forecast.compute)} {adds} {in_seconds(low)}{most}"
    return found


def _labels(labels: Sequence[tuple[str, str]]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, kind in labels:
        kinds.setdefault(kind, []).append(name)
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items()]


def html(forecast: Printed) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    def table(lines: Sequence[Sequence[str]]) -> str:
        if not lines:
            return ""
        return f"<table>{row(lines[0], 'th')}{''.join(row(cells, 'td') for cells in lines[1:])}</table>"

    under = "".join(f"<p>{_html.escape(each)}</p>" for each in sentences(forecast))
    code = "" if forecast.recommended is None else f"<pre>{_html.escape(forecast.recommended.code)}</pre>"
    return f"{table(rows(forecast))}{table(tiers(forecast))}{under}{code}"
