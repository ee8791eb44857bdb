"""How big can it get: the largest model that a system trains in a memory, by bisection over its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.harness.cases import Case, Shape
from benchmarks.harness.systems import System, case

WIDTH, HEADS = 4096, 32
KEEP = ("error", "device_peak_bytes", "device_limit_bytes", "host_bytes", "host_taken_bytes", "host_state_bytes")
Probe = Callable[[Case], dict[str, Any]]


def shape(layers: int) -> Shape:
    return Shape(layers, WIDTH, HEADS)


def fits(result: dict[str, Any], device_limit: int | None, host_limit: int | None) -> bool:
    """Whether a run ended well or, if it was only compiled, would by its numbers."""
    if "error" in result:
        return False
    within = device_limit is None or (result["device_peak_bytes"] or 0) <= device_limit
    return within and (host_limit is None or result.get("host_bytes", 0) <= host_limit)


def largest(ok: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number up to ``most`` that is ``ok``, by steps that double away from a guess, and bisection."""
    low, high, step = 0, most + 1, 1  # low is fine, high is not
    at = min(max(1, guess), most)
    while low < at < high:
        if ok(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ok(middle) else (low, middle)
    return low


class OutOfTime(Exception):
    """No more probes now; those that there are, are kept."""


def probes_of(found: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What an earlier search tried, by layers."""
    return {p["layers"]: {key: p[key] for key in p if key != "layers"} for p in found.get("probes", [])}


def search(
    system: System,
    probe: Probe,
    device_limit: int | None,
    host_limit: int | None,
    most: int = 256,
    known: dict[int, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Probes of one system, and the largest number of parameters among those that fit.

    Memory grows with every layer by the same amount, so two small models tell where to look. ``probe`` may raise
    ``OutOfTime``: what was found by then comes back as ``unfinished``, for ``known`` of the next call.
    """
    probes = dict(known or {})

    def at(layers: int) -> dict[str, Any]:
        if layers not in probes:
            each = case(system, shape(layers), 2048, scans=1, clip=False, warmup=1, steps=1)
            result = probe(each)
            probes[layers] = {key: result[key] for key in KEEP if key in result}
        return probes[layers]

    def found(layers: int, **more: Any) -> dict[str, Any]:
        above = min((n for n in probes if n > layers and "error" in probes[n]), default=None)
        return {
            "system": system.name,
            "layers": layers,
            "parameters": shape(layers).parameters if layers else 0,
            "at": probes.get(layers, {}),
            "ended_by": probes[above]["error"] if above else "",
            "probes": [{"layers": n, **result} for n, result in sorted(probes.items())],
            "shape": dataclasses.asdict(shape(layers)),
            **more,
        }

    try:
        small, larger = at(4), at(8)
        if "error" in small:
            return {"system": system.name, "error": small["error"]}
        guess = 16
        memory = device_limit or small.get("device_limit_bytes")
        if "error" not in larger and memory and small["device_peak_bytes"] is not None:
            per_layer = (larger["device_peak_bytes"] - small["device_peak_bytes"]) / 4
            guess = int(4 + (memory - small["device_peak_bytes"]) / max(per_layer, 1))
            if host_limit and (per_host := (larger.get("host_bytes", 0) - small.get("host_bytes", 0)) / 4) > 0:
                guess = min(guess, int(4 + (host_limit - small["host_bytes"]) / per_host))
        return found(largest(lambda n: fits(at(n), device_limit, host_limit), guess, most))
    except OutOfTime:
        return found(max((n for n in probes if fits(probes[n], device_limit, host_limit)), default=0), unfinished=True)
