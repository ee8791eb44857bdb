"""What a file of results says: entries of the form ``{"case": ..., "result": ...}``, and how they compare."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness.cases import SHAPES, Shape
from benchmarks.harness.systems import RESIDENT

Entry = dict[str, Any]


def seconds(entry: Entry | None) -> float | None:
    """The median step."""
    found = entry["result"].get("step_seconds") if entry else None
    return statistics.median(found) if found else None


def model_of(case: dict[str, Any]) -> tuple[str, int]:
    shape = Shape(**case["shape"])
    name = next((name for name, known in SHAPES.items() if known == shape), f"{shape.parameters / 1e9:.2f}b")
    return name, case["batch"] * shape.context


def find(entries: list[Entry], like: dict[str, Any], system: str) -> Entry | None:
    """The run of another system on the same model, tokens and clipping."""
    same = ("shape", "batch", "clip", "scans")
    for entry in entries:
        case = entry["case"]
        if case["system"] == system and all(case[k] == like[k] for k in same):
            return entry
    return None


def added(entries: list[Entry], entry: Entry | None) -> float | None:
    """Seconds per step more than with the state on the device."""
    if entry is None:
        return None
    base = seconds(find(entries, entry["case"], RESIDENT.name))
    own = seconds(entry)
    return None if base is None or own is None else own - base


def overhead(entries: list[Entry], entry: Entry) -> float | None:
    """``added`` as a share of the step with the state on the device."""
    more, own = added(entries, entry), seconds(entry)
    return None if more is None or own is None else more / (own - more)


def rate_while_copying(result: dict[str, Any]) -> tuple[float, float] | None:
    """Bytes per second each way in the time in which anything is copied, by the profiler."""
    time = result.get("copying_seconds")
    if not time or not result.get("loaded_bytes"):
        return None
    return result["loaded_bytes"] / time, result["stored_bytes"] / time
