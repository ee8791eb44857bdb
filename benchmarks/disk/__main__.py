"""Compare a sweep over the store with the disk's own speed, and with the device's work if that takes longer.

    python -m benchmarks.disk [--directory DIR] [--mib 4096] [--pairs 7] [--json FILE]

A sweep calls the functions by which a driven step reads and writes: ``Disk.fetch``, ``put``, ``advance``, and a commit.
In each round the store, our plain benchmark and fio run one after the other, in alternating order, on the same
directory and with as many bytes, so that other users of the disk disturb all of them alike. Ratios compare neighboring
runs. Checksums are on, a sweep ends with a commit, and all of them sync their writes. Each has two files, as the store
has two slots: it reads the file written last, and writes the other one, because a virtual disk's cache would serve a
program that writes the same file again and again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk.plain import fio, has_fio, make, ours
from benchmarks.disk.sweeps import Sweeps, in_flight

Timed = Callable[[], float]
Program = Callable[[Path | None, Path | None, int], float]


def of_ways(
    sweeps: Sweeps, kind: str, slots: Sequence[Path], nbytes: int, under_way: list[dict[str, float]]
) -> dict[str, Timed]:
    """Return ways to move the same bytes. Each gives bytes per second; the store's adds the calls ``under_way``."""
    reads, writes = kind != "write", kind != "read"
    total = nbytes * (reads + writes)

    def store() -> float:
        taken, moved = sweeps.write() if kind == "write" else sweeps.sweep(writes=kind == "both")
        under_way.append(in_flight(sweeps.files.calls, taken))
        assert sum(moved.values()) == total, f"{moved} moved, not {total}"
        return total / taken

    def by(program: Program) -> Timed:
        turn = itertools.cycle([*slots, *slots[::-1]] if writes else [slots[0]] * 2)

        def timed() -> float:
            read, written = next(turn), next(turn)
            return total / program(read if reads else None, written if writes else None, nbytes)

        return timed

    return {"store": store, "plain": by(ours)} | ({"fio": by(fio)} if has_fio() else {})


def in_turn(ways: dict[str, Timed], pairs: int) -> dict[str, list[float]]:
    """Run each way ``pairs`` times, and reverse the order each time."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(pairs):
        for name in list(ways)[:: 1 if k % 2 else -1]:
            found[name].append(ways[name]())
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def row(kind: str, found: dict[str, list[float]], under_way: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the bytes per second of each way, and the store's share of the others' in neighboring runs."""
    shares = {
        f"store / {name}": spread([x / y for x, y in zip(found["store"], found[name], strict=True)])
        for name in found
        if name != "store"
    }
    return {
        "kind": kind,
        "bytes_per_second": found,
        "medians": {n: spread(v) for n, v in found.items()},
        "shares": shares,
        "in flight": {name: spread([each[name] for each in under_way]) for name in ("calls", "none")},
    }


def behind(sweeps: Sweeps, pairs: int, per_group: float) -> dict[str, Any]:
    """Run sweeps whose device work outlasts the disk; return the seconds of the sweeps and of the work alone."""
    delay = 2 * per_group
    alone = delay * (1 + sweeps.count)  # the gradients, and each group
    taken = [sweeps.sweep(delay=delay)[0] for _ in range(pairs)]
    return {"kind": "device longer", "delay": delay, "seconds": taken, "over": spread([t / alone for t in taken])}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=4096, help="bytes in a sweep, each way")
    parser.add_argument("--group", type=int, default=64, help="MiB of a group")
    parser.add_argument("--leaf", type=int, default=32, help="MiB of a leaf")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nbytes = options.mib * 2**20
    if not has_fio():
        print("fio is not on the path: left out, beside our plain program alone", flush=True)
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        slots = [make(folder / name, nbytes) for name in ("a", "b")]
        sweeps = Sweeps(folder / "store", nbytes, options.group * 2**20, options.leaf * 2**20)
        rows, load = [], [os.getloadavg()]
        for kind in ("both", "read", "write"):
            under_way: list[dict[str, float]] = []
            rows.append(row(kind, in_turn(of_ways(sweeps, kind, slots, nbytes, under_way), options.pairs), under_way))
            print(line(rows[-1]), flush=True)
        both = statistics.median(rows[0]["bytes_per_second"]["store"])
        rows.append(behind(sweeps, options.pairs, 2 * nbytes / both / sweeps.count))
        print(f"device longer: {said(rows[-1]['over'])} of the device's work alone", flush=True)
        sweeps.close()
        load.append(os.getloadavg())
    finally:
        shutil.rmtree(folder)
    about = (
        f"{options.mib} MiB each way, groups of {options.group} MiB, leaves of {options.leaf}; {os.cpu_count()} cores "
        f"of {platform.machine()}, {platform.system()} {platform.release()}, numpy {np.__version__}"
    )
    if options.json:
        result = {
            "about": about,
            "load": load,
            "nice": os.nice(0),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result) + "\n")


def line(found: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {values['median'] / 1e9:.2f}" for name, values in found["medians"].items())
    shares = "; ".join(f"{name} {said(values)}" for name, values in found["shares"].items())
    calls = (
        f"{found['in flight']['calls']['median']:.1f} calls in flight, none {found['in flight']['none']['median']:.1%}"
    )
    return f"{found['kind']}: {rates} GB/s; {shares}; {calls}"


def said(values: dict[str, float]) -> str:
    return f"{values['median']:.3f} ({values['least']:.3f} to {values['most']:.3f})"


if __name__ == "__main__":
    main()
