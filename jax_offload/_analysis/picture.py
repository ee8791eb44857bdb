"""A timeline as a picture for people, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_offload._analysis.timeline import COLLECTIVES, COMPUTE, LOAD, STORE, WITHIN, Timeline
from jax_offload._analysis.units import in_seconds

_LANES = {
    COMPUTE: ("compute", "#4c6a92"),
    LOAD: ("host to device", "#3f8f6b"),
    STORE: ("device to host", "#c9862c"),
    COLLECTIVES: ("collectives", "#7d5ba6"),
    WITHIN: ("within device", "#8a8a8a"),
}
_WAIT = "#c0392b"
_LABELLED = 0.03  # of the time a segment needs, to have its name written in it
_HEIGHT = 0.72  # of a lane's bars


def lanes_of(timeline: Timeline) -> list[str]:
    """The lanes of a picture, from the top: the first three always."""
    used = {segment.lane for segment in timeline.segments}
    return [lane for lane in _LANES if lane in used or lane in (COMPUTE, LOAD, STORE)]


def waits(timeline: Timeline) -> list[tuple[float, float]]:
    """When nothing is computed, as arithmetic waits for a copy or a collective: pairs of seconds."""
    return sorted((s.waited, s.end) for s in timeline.segments if s.lane not in (COMPUTE, WITHIN) and s.waited < s.end)


def draw(timeline: Timeline, path: Path) -> None:
    """Lanes, with the curve of device memory under them, as a ``.png`` or ``.svg``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "save(): a picture needs matplotlib: pip install 'jax_offload[plot]'; a .json needs nothing."
        ) from error
    lanes, end, curve = lanes_of(timeline), timeline.step or 1e-9, bool(timeline.memory)
    figure = Figure(figsize=(13, 0.62 * len(lanes) + 1.6 + 2.2 * curve), layout="constrained")
    ratios: Any = {"height_ratios": [0.62 * len(lanes) + 0.3, 2.0]} if curve else {}
    axes: Any = figure.subplots(2 if curve else 1, 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for row, lane in enumerate(lanes):
        segments = [s for s in timeline.segments if s.lane == lane]
        _bars(axes[0], row, [(s.begin, s.end) for s in segments], _LANES[lane][1])
        for s in segments:
            if (share := (s.end - s.begin) / end) >= _LABELLED and s.name:
                letters = int(share * 150)
                text = s.name if len(s.name) <= letters else "…" + s.name[1 - letters :] if letters > 4 else ""
                axes[0].text(1e3 * (s.begin + s.end) / 2, row, text, ha="center", va="center", fontsize=7,
                             color="white", clip_on=True)  # fmt: skip
    _bars(axes[0], 0, waits(timeline), _WAIT)
    moved = [sum(s.nbytes for s in timeline.segments if s.lane == lane) for lane in lanes]
    names = [_LANES[lane][0] + (f"\n{n / 2**20:.0f} MiB" if n else "") for lane, n in zip(lanes, moved, strict=True)]
    axes[0].set_yticks(range(len(lanes)), names)
    axes[0].set_ylim(len(lanes) - 0.4, -0.6)
    axes[0].set_xlim(0, end * 1e3)
    axes[0].set_title(_title(timeline), loc="left", fontsize=10)
    if curve:
        _memory(axes[1], timeline, end * 1e3)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, row: int, spans: list[tuple[float, float]], color: str) -> None:
    bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]
    many = len(bars) > 200  # as one image, even in an .svg
    axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), color=color, linewidth=0, rasterized=many)


def _title(t: Timeline) -> str:
    step, compute, exposed = map(in_seconds, (t.step, t.compute, t.exposed))
    if not t.chip:
        return f"measured: {step}, of which {compute} of compute, {exposed} of transfers alone"
    how = f"simulated on {t.chip}, not measured"
    return f"one step, {how}: {step} = {compute} of compute + {exposed} of waits for transfers (red)" + (
        f" + {in_seconds(t.exposed_collectives)} for collectives" if t.collectives else ""
    )


def _memory(axes: Any, timeline: Timeline, end: float) -> None:
    times = [1e3 * seconds for seconds, _ in timeline.memory] + [end]
    unit, name = (2**30, "GiB") if max(n for _, n in timeline.memory) > 4 * 2**30 else (2**20, "MiB")
    values = [nbytes / unit for _, nbytes in timeline.memory]
    most = max(values)
    axes.stairs(values, times, fill=True, color="#d5dde8")
    axes.stairs(values, times, color="#4c6a92", linewidth=1.0)
    axes.axhline(most, color="#8a8a8a", linewidth=0.7, linestyle=":")
    parts = (f"{kind} {n / unit:.4g}" for kind, n in timeline.peak.items() if n / unit > 0.01 * most)
    axes.text(0.005 * end, most, f"{most:.4g} {name}: {', '.join(parts)}", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.18 * most)
    axes.set_ylabel(f"device memory, {name}")


def trace(timeline: Timeline) -> dict[str, Any]:
    """In Chrome's trace format, which Perfetto opens: a thread for each lane, and a counter for device memory."""
    lanes = lanes_of(timeline)
    events: list[Mapping[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": k, "name": name, "args": args}
        for k, lane in enumerate(lanes)
        for name, args in (("thread_name", {"name": _LANES[lane][0]}), ("thread_sort_index", {"sort_index": k}))
    ]
    for s in timeline.segments:
        args = {"bytes": s.nbytes, "waited_us": 1e6 * max(s.end - s.waited, 0)} if s.lane != COMPUTE else {}
        times = {"ts": 1e6 * s.begin, "dur": 1e6 * (s.end - s.begin)}
        events.append({"ph": "X", "pid": 1, "tid": lanes.index(s.lane), "name": s.name, "args": args} | times)
    for seconds, nbytes in timeline.memory:
        events.append({"ph": "C", "pid": 1, "name": "device memory", "ts": 1e6 * seconds, "args": {"bytes": nbytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"what": _title(timeline)}}


def save(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as the kind of file that the path's ending names."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(timeline)))
    elif path.suffix in (".png", ".svg"):
        draw(timeline, path)
    else:
        raise ValueError(f"save(): path {str(path)!r} ends with {path.suffix!r}; expected .png, .svg or .json.")
