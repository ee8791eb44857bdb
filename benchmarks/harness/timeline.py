"""What the link did during some steps, from a profiler's trace in Chrome's format, which both frameworks write."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in merged(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """The time that is in both."""
    a, b = list(a), list(b)
    return length(a) + length(b) - length([*a, *b])


def direction(name: str) -> str | None:
    """``load`` or ``store`` for a copy between host and device, else ``None``; jax and torch name them differently."""
    name = name.replace(" ", "").lower()
    if not name.startswith("memcpy"):
        return None
    return "load" if "htod" in name or "h2d" in name else "store" if "dtoh" in name or "d2h" in name else None


def events(trace: Path) -> list[dict[str, Any]]:
    """Complete events of the device: what ran on one of its streams."""
    text = trace.read_bytes()
    found = json.loads(gzip.decompress(text) if trace.suffix == ".gz" else text)["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e.get("name") == "thread_name"}

    def on_stream(e: dict[str, Any]) -> bool:
        if e.get("ph") != "X":
            return False
        thread = names.get((e.get("pid"), e.get("tid")), "").lower()
        return e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") or (
            "cat" not in e and thread.startswith("stream")
        )

    return [e for e in found if on_stream(e)]


def summary(trace: Path, steps: int) -> dict[str, float]:
    """Seconds per step in which the device loads, stores, does either, both, and computes; and copies alone.

    With the bytes loaded and stored per step where the trace tells them, as PyTorch's does.

    Raises:
      ValueError: nothing ran on a device, as far as the trace tells.
    """
    ways: dict[str | None, list[Interval]] = {"load": [], "store": [], None: []}
    moved: dict[str | None, int] = {}
    found_events = events(trace)
    if not found_events:
        raise ValueError("the trace has nothing of a device: may this user profile it?")
    for e in found_events:
        way = direction(e["name"])
        ways[way].append((e["ts"], e["ts"] + e["dur"]))
        if way and "bytes" in e.get("args", {}):
            moved[way] = moved.get(way, 0) + int(e["args"]["bytes"])
    loads, stores, kernels = ways["load"], ways["store"], ways[None]
    copies = [*loads, *stores]
    seconds = {
        "loading_seconds": length(loads),
        "storing_seconds": length(stores),
        "copying_seconds": length(copies),
        "both_ways_seconds": overlap(loads, stores),
        "computing_seconds": length(kernels),
        "exposed_seconds": length(copies) - overlap(copies, kernels),
    }
    found = {name: value / 1e6 / steps for name, value in seconds.items()}
    if moved:
        found |= {"loaded_bytes": moved.get("load", 0) / steps, "stored_bytes": moved.get("store", 0) / steps}
    return found
