"""A timeline as a picture for people, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jax_offload._analysis.schedule import COLLECTIVES, COMPUTE, LOAD, STORE, WITHIN, Segment
from jax_offload._analysis.units import in_seconds

_LANES = {
    COMPUTE: "compute",
    LOAD: "host to device",
    STORE: "device to host",
    COLLECTIVES: "collectives",
    WITHIN: "within device",
}
_COLORS = {COMPUTE: "#4c6a92", LOAD: "#3f8f6b", STORE: "#c9862c", COLLECTIVES: "#7d5ba6", WITHIN: "#8a8a8a"}
_WAIT = "#c0392b"
_FINE, _COARSE = 1600, 320  # columns of the picture: what is finer than one is drawn as the share of it that is busy
_LABELS = 0.03  # of the time a segment needs, to have its name written in it
_HEIGHT = 0.72  # of a lane's bars
_UPRIGHT = 0.01  # and to have the end of it, upright; only copies do, which are leaves


class Drawn(Protocol):
    """What a picture shows of a ``Timeline``, which says what these are."""

    @property
    def step(self) -> float: ...
    @property
    def compute(self) -> float: ...
    @property
    def collectives(self) -> float: ...
    @property
    def exposed(self) -> float: ...
    @property
    def exposed_collectives(self) -> float: ...
    @property
    def chip(self) -> str: ...
    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def memory(self) -> Sequence[tuple[float, int]]: ...
    @property
    def peak(self) -> Mapping[str, int]: ...


def lanes_of(timeline: Drawn) -> list[str]:
    """The lanes of a picture, from the top: the first three always."""
    used = {segment.lane for segment in timeline.segments}
    return [lane for lane in _LANES if lane in used or lane in (COMPUTE, LOAD, STORE)]


def waits(timeline: Drawn) -> list[tuple[float, float]]:
    """When nothing is computed, as arithmetic waits for a copy or a collective."""
    return sorted((s.waited, s.end) for s in timeline.segments if s.lane not in (COMPUTE, WITHIN) and s.waited < s.end)


def busy(spans: Sequence[tuple[float, float]], end: float, columns: int) -> list[float]:
    """Of each of so many equal parts of the time from 0 to ``end`` the share in which a span is."""
    found, width = [0.0] * columns, end / columns
    for begin, stop in spans:
        first, last = int(begin / width), min(int(stop / width), columns - 1)
        for k in range(min(first, columns - 1), last + 1):
            found[k] += max(0.0, min(stop, (k + 1) * width) - max(begin, k * width)) / width
    return [min(share, 1.0) for share in found]


def draw(timeline: Drawn, path: Path) -> None:
    """Lanes, with the curve of device memory under them, as a ``.png`` or ``.svg``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "save(): a picture needs matplotlib: pip install 'jax_offload[plot]'; a .json needs nothing."
        ) from error
    lanes, unit, end = lanes_of(timeline), 1e3, timeline.step or 1e-9
    curve = bool(timeline.memory)
    figure = Figure(figsize=(13, 0.62 * len(lanes) + 1.6 + 2.2 * curve), layout="constrained")
    ratios = {"height_ratios": [0.62 * len(lanes) + 0.3, 2.0]}
    axes: Any = figure.subplots(2 if curve else 1, 1, sharex=True, squeeze=False, gridspec_kw=ratios if curve else {})
    top = axes[0][0]
    for row, lane in enumerate(lanes):
        _lane(top, row, lane, timeline)
    computing = busy([(s.begin, s.end) for s in timeline.segments if s.lane == COMPUTE], end, _number(timeline))
    waiting = busy(waits(timeline), end, _number(timeline))
    _columns(top, 0, waiting, end, _WAIT, _HEIGHT, [min(a, 1 - b) for a, b in zip(computing, waiting, strict=True)])
    top.set_yticks(range(len(lanes)), [_named(timeline, lane) for lane in lanes])
    top.set_ylim(len(lanes) - 0.4, -0.6)
    top.set_xlim(0, end * unit)
    top.tick_params(axis="y", length=0)
    top.set_title(_title(timeline), loc="left", fontsize=10)
    _without_frame(top, "top", "right", "left")
    last = top
    if curve:
        last = axes[1][0]
        _memory(last, timeline, end * unit)
    last.set_xlabel("ms")
    figure.savefig(path, dpi=110)


def _title(t: Drawn) -> str:
    step, compute, exposed = map(in_seconds, (t.step, t.compute, t.exposed))
    if not t.chip:
        return f"measured: {step}, of which {compute} of compute, {exposed} of transfers alone"
    how = f"simulated on {t.chip}, not measured"
    return f"one step, {how}: {step} = {compute} of compute + {exposed} of waits for transfers (red)" + (
        f" + {in_seconds(t.exposed_collectives)} for collectives" if t.collectives else ""
    )


def _named(timeline: Drawn, lane: str) -> str:
    nbytes = sum(s.nbytes for s in timeline.segments if s.lane == lane)
    return f"{_LANES[lane]}\n{nbytes / 2**20:.0f} MiB" if nbytes else _LANES[lane]


def _number(timeline: Drawn) -> int:
    """Of columns: several pieces to one, where there are too many to be told apart."""
    return _FINE if len(timeline.segments) < _FINE else _COARSE


def _lane(axes: Any, row: int, lane: str, timeline: Drawn) -> None:
    segments, end = [s for s in timeline.segments if s.lane == lane], timeline.step or 1e-9
    _columns(axes, row, busy([(s.begin, s.end) for s in segments], end, _number(timeline)), end, _COLORS[lane], _HEIGHT)
    for s in segments:
        width = (s.end - s.begin) / end
        if width >= _LABELS and s.name:
            letters = int(width * 150)
            text = s.name if len(s.name) <= letters else "…" + s.name[1 - letters :] if letters > 4 else ""
            axes.text(1e3 * (s.begin + s.end) / 2, row, text, ha="center", va="center", fontsize=7, color="white",
                      clip_on=True)  # fmt: skip
        elif width >= _UPRIGHT and s.name and lane in (LOAD, STORE):
            text = s.name if len(s.name) <= 12 else "…" + s.name[-11:]
            axes.text(1e3 * (s.begin + s.end) / 2, row, text, ha="center", va="center", fontsize=5.5, color="white",
                      rotation="vertical", clip_on=True)  # fmt: skip
        if width >= 0.004:  # where one piece ends and the next begins
            axes.plot([1e3 * s.begin] * 2, [row - 0.36, row + 0.36], color="white", linewidth=0.5)


def _columns(
    axes: Any, row: int, shares: Sequence[float], end: float, color: str, height: float, on: Sequence[float] = ()
) -> None:
    """Bars as high as a column is busy, ``on`` others: so the picture of a thousand leaves is as heavy as that of
    thirty, and shows both where it computes and waits by turns."""
    bounds = [1e3 * end * k / len(shares) for k in range(len(shares) + 1)]
    low = [row + height / 2 - height * below for below in on or [0.0] * len(shares)]
    axes.stairs([bottom - height * share for bottom, share in zip(low, shares, strict=True)], bounds, baseline=low,
                fill=True, color=color, linewidth=0)  # fmt: skip


def _memory(axes: Any, timeline: Drawn, end: float) -> None:
    times = [1e3 * seconds for seconds, _ in timeline.memory] + [end]
    gib = 2**30 if max(n for _, n in timeline.memory) > 4 * 2**30 else 2**20
    values = [nbytes / gib for _, nbytes in timeline.memory]
    axes.stairs(values, times, fill=True, color="#d5dde8")
    axes.stairs(values, times, color="#4c6a92", linewidth=1.0)
    most = max(values)
    standing = [(kind, nbytes / gib) for kind, nbytes in timeline.peak.items() if nbytes / gib > 0.01 * most]
    parts = ", ".join(f"{kind} {amount:.4g}" for kind, amount in standing)
    axes.axhline(most, color="#8a8a8a", linewidth=0.7, linestyle=":")
    unit = "GiB" if gib == 2**30 else "MiB"
    axes.text(0.005 * end, most, f"{most:.4g} {unit}: {parts}", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.18 * most)
    axes.set_ylabel(f"device memory, {unit}")
    _without_frame(axes, "top", "right")


def _without_frame(axes: Any, *sides: str) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)


def trace(timeline: Drawn) -> dict[str, Any]:
    """In Chrome's trace format, which Perfetto opens: a thread for each lane, and a counter for device memory."""
    lanes = lanes_of(timeline)
    events: list[Mapping[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": k, "name": name, "args": args}
        for k, lane in enumerate(lanes)
        for name, args in (("thread_name", {"name": _LANES[lane]}), ("thread_sort_index", {"sort_index": k}))
    ]
    for s in timeline.segments:
        args = {"bytes": s.nbytes, "waited_us": 1e6 * max(s.end - s.waited, 0)} if s.lane != COMPUTE else {}
        times = {"ts": 1e6 * s.begin, "dur": 1e6 * (s.end - s.begin)}
        events.append({"ph": "X", "pid": 1, "tid": lanes.index(s.lane), "name": s.name, "args": args} | times)
    for seconds, nbytes in timeline.memory:
        events.append({"ph": "C", "pid": 1, "name": "device memory", "ts": 1e6 * seconds, "args": {"bytes": nbytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"what": _title(timeline)}}


def save(timeline: Drawn, path: str | Path) -> None:
    """By what the path ends with."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(timeline)))
    elif path.suffix in (".png", ".svg"):
        draw(timeline, path)
    else:
        raise ValueError(f"save(): path {str(path)!r} ends with {path.suffix!r}; expected .png, .svg or .json.")
