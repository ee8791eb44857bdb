"""What the library promises itself on an H200, and what a file of results says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness.link import best
from benchmarks.harness.readings import Entry, added, find, model_of, overhead, rate_while_copying
from benchmarks.harness.systems import BFLOAT16, IN_GROUPS, INT8_STATE, OURS

FREE_FROM = 16384  # tokens per step
CPU_STEP = ["torchao CPUOffloadOptimizer", "DeepSpeed ZeRO-Offload", "Megatron HybridDeviceOptimizer"]
Goal = tuple[str, str, bool | None]  # what, what was measured for it, whether it is met (None: not measured)


def goals(results: dict[str, Any]) -> list[Goal]:
    """Each goal, by the worst of the runs that it is about."""
    entries, rate = results.get("cases", []), best(results.get("link", []), "both")

    def runs(system: str, clip: bool) -> list[Entry]:
        of = [e for e in entries if e["case"]["system"] == system and e["case"]["clip"] == clip]
        return [e for e in of if "step_seconds" in e["result"]]

    def of_duplex(e: Entry) -> float | None:
        more, moved = added(entries, e), e["result"].get("loaded_bytes")
        return None if more is None or not moved or not rate else more / (moved / rate)

    def of_rate(e: Entry) -> float | None:
        found = rate_while_copying(e["result"])
        return None if found is None or not rate else min(found) / rate

    def on_the_cpu(e: Entry) -> float | None:
        own = added(entries, e)
        theirs = [t for name in CPU_STEP if (t := added(entries, find(entries, e["case"], name))) is not None]
        return min(theirs) / own if theirs and own and own > 0 else None

    def by_bytes(e: Entry) -> float | None:
        whole = find(entries, e["case"], OURS.name)
        more, all_of_it = added(entries, e), added(entries, whole)
        if whole is None or more is None or not all_of_it or not e["result"].get("loaded_bytes"):
            return None
        return (more / all_of_it) / (e["result"]["loaded_bytes"] / whole["result"]["loaded_bytes"])

    free = [e for e in runs(OURS.name, False) if model_of(e["case"])[1] >= FREE_FROM]
    unrolled, one_scan = ([e for e in free if e["case"]["scans"] == n] for n in (0, 1))
    groups = [e for e in runs(IN_GROUPS.name, False) if e["case"]["scans"] > 1 and model_of(e["case"])[1] >= FREE_FROM]
    clipped, fewer = runs(OURS.name, True), [*runs(BFLOAT16.name, True), *runs(INT8_STATE.name, True)]
    slow, tokens = lambda e: overhead(entries, e), f"no clipping, {FREE_FROM} tokens and more"
    return [
        at_most(0.05, f"unrolled, {tokens}: overhead", map(slow, unrolled)),
        at_most(0.05, f"one scan, {tokens}: overhead", map(slow, one_scan)),
        at_most(0.05, f"several scans, a window of two groups, {tokens}: overhead", map(slow, groups)),
        at_most(1.15, "clipping: added time, in times of the link both ways", map(of_duplex, clipped)),
        at_least(0.9, "rate while copying, in rates of the link both ways", map(of_rate, clipped)),
        at_least(3.5, "added time of an update on the host's cores, in times of ours", map(on_the_cpu, clipped)),
        at_most(1.15, "bfloat16 and int8: added time per byte, in times of float32's", map(by_bytes, fewer)),
    ]


def at_most(bound: float, what: str, values: Iterable[float | None]) -> Goal:
    return _worst(f"{what} ≤ {bound}", values, max, lambda x: x <= bound)


def at_least(bound: float, what: str, values: Iterable[float | None]) -> Goal:
    return _worst(f"{what} ≥ {bound}", values, min, lambda x: x >= bound)


def _worst(
    what: str, values: Iterable[float | None], worst: Callable[[list[float]], float], is_met: Callable[[float], bool]
) -> Goal:
    found = list(values)
    known = [v for v in found if v is not None]
    if not known:
        return what, "", None
    without = f"; {len(found) - len(known)} could not be compared" if len(known) < len(found) else ""
    return what, f"{worst(known):.2f} (the worst of {len(known)}{without})", is_met(worst(known))
