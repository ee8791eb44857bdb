"""The tables of README.md, from a file of results of compiled programs.

python -m benchmarks.harness.digest benchmarks/results/2026-11-22-h200-compiled.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.readings import Entry, model_of
from benchmarks.harness.report import GIB, table
from benchmarks.harness.systems import FRACTIONS, IN_GROUPS, MAIN, MASTERS, MASTERS_INT8, OURS, RECIPE, RESIDENT

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- compiled -->\n", "<!-- /compiled -->"
Result = dict[str, Any]


class Results:
    """The results of one file, by what was asked of them."""

    def __init__(self, entries: list[Entry]):
        self.of: dict[tuple[Any, ...], Result] = {}
        for e in entries:
            case = e["case"]
            if "error" not in e["result"]:
                self.of[(case["system"], *model_of(case), case["scans"], case["clip"])] = e["result"]

    def get(self, system: str, name: str, scans: int, tokens: int = 16384, clip: bool = False) -> Result:
        return self.of.get((system, name, tokens, scans, clip), {})

    def peak(self, *args: Any, **kwargs: Any) -> str:
        found = self.get(*args, **kwargs)
        return f"{found['device_peak_bytes'] / GIB:.1f}" if found else ""

    def link(self, *args: Any, **kwargs: Any) -> str:
        found = self.get(*args, **kwargs)
        return f"{found['hidden']:.0%}, {found['duplex']:.0%}" if found.get("loaded_bytes") else ""


def models(r: Results) -> str:
    columns = [("1.3b", 0, False), ("1.3b", 0, True), ("1.3b", 1, False), ("2.7b", 1, False), ("6.7b", 1, False)]
    rows = []
    for system in [*MAIN, MASTERS, MASTERS_INT8, *reversed(FRACTIONS)]:
        moved = r.get(system.name, "1.3b", 0).get("loaded_bytes")
        peaks = [r.peak(system.name, name, scans, clip=clip) for name, scans, clip in columns]
        link = [r.link(system.name, "1.3b", scans) for scans in (0, 1)]
        rows.append([system.name, *peaks, f"{moved / 1e9:.1f}" if moved else "", *link])
    head = " | 1.3b unrolled | … clipping | 1.3b, one scan | 2.7b, one scan | 6.7b, one scan | GB each way, 1.3b "
    return table(f"{head}| hidden, both ways: unrolled | one scan ", rows)


def tokens(r: Results) -> str:
    counts = sorted({key[2] for key in r.of if key[1] == "1.3b"})
    rows = []
    for scans, layout in ((0, "unrolled"), (1, "one scan")):
        for clip in (False, True):
            for system in (RESIDENT, RECIPE, OURS):
                name = f"{layout}{', clipping' if clip else ''}: {system.name}"
                rows.append([name, *(r.peak(system.name, "1.3b", scans, count, clip) for count in counts)])
        rows.append([f"{layout}: hidden, both ways", *(r.link(OURS.name, "1.3b", scans, count) for count in counts)])
    return table(" | " + " | ".join(f"{count:,}" for count in counts) + " ", rows)


def layouts(r: Results) -> str:
    shown = [(OURS.name, 0), (OURS.name, 1), (OURS.name, 6), (IN_GROUPS.name, 6)]
    names = {0: "unrolled", 1: "one scan", 6: "six scans"}
    rows = [
        [
            f"{names[n]}: {system}",
            r.peak(RESIDENT.name, "1.3b", n),
            r.peak(system, "1.3b", n),
            r.link(system, "1.3b", n),
        ]
        for system, n in shown
    ]
    return table(" | resident | offloaded | hidden, both ways ", rows)


def capacity(found: list[dict[str, Any]]) -> str:
    def row(c: dict[str, Any]) -> list[str]:
        at = c["at"]
        sizes = (at["device_peak_bytes"] / GIB, at["host_bytes"] / GIB)
        return [c["system"], f"{c['parameters'] / 1e9:.1f}", str(c["layers"]), *(f"{size:.1f}" for size in sizes)]

    rows = [row(c) for c in found if "error" not in c]
    return table(" | parameters, 1e9 | layers | device, GiB | host, GiB ", rows)


def text(results: dict[str, Any], name: str) -> str:
    r = Results(results["cases"])
    limits = {key: f"{n / GIB:.0f} GiB" for key, n in results["capacity_limits"].items()}
    return "\n\n".join(
        [
            "Peaks in GiB at 16384 tokens; bytes each way per step; the shares of them in flight across a matmul\n"
            "(hidden) and moving while the other direction moves (both ways). All that was compiled: "
            f"[the table](results/{name}.md).",
            models(r),
            "By tokens per step, 1.3b, peaks in GiB:",
            tokens(r),
            "By how the layers are scanned, 1.3b, 16384 tokens, no clipping (notes/results.md has more):",
            layouts(r),
            "The largest model of width 4096, in one scan, at 2048 tokens, within "
            f"{limits['device']} of the device (95 % of an\nH200) and {limits['host']} of host memory:",
            capacity(results["capacity"]),
        ]
    )


def main(path: Path) -> None:
    said = text(json.loads(path.read_text()), path.stem)
    readme = README.read_text()
    README.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{said}\n{END}", readme, flags=re.DOTALL))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
