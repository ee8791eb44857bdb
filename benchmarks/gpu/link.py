"""The link alone, by ``harness/link.py``: each direction and both at once, a case for each size of a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import link

ALONE = False
TIMED = True
# What says most first: the sizes of real leaves.
SIZES = [64, 16, 256, 8, 32, 128, 4, 512, 2, 1]
DRIVER = "by the driver"


def cases(toy: bool) -> list[str]:
    return ["1 MiB"] if toy else [*(f"{mib} MiB" for mib in SIZES), DRIVER]


def run(name: str, toy: bool, programs: Path | None = None) -> dict[str, Any]:
    total, repeats = (4 * link.MIB, 1) if toy else (2 << 30, 5)
    if name == DRIVER:
        return {"rows": list(link.in_torch(total, sorted(SIZES), repeats))}
    return {"rows": list(link.in_jax(total, [int(name.split()[0])], repeats))}
