"""Runs every system on the same work, each in a process of its own, and writes results and a table of them.

    python -m benchmarks.run                        # all of it, on the accelerator that is here; hours
    python -m benchmarks.run --minutes 9            # what says most, first; another call goes on where this one ended
    python -m benchmarks.run --only "jax_offload$" --only optax$ --parts cases
    python -m benchmarks.run --compiled h200        # no accelerator: peaks and bytes of programs compiled for one
    python -m benchmarks.run --toy                  # every system on a toy, anywhere: that it runs, nothing else

Results go to benchmarks/results/<date>-<chip>.json, and as Markdown beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import capacity, systems, workers
from benchmarks.cases import Case
from benchmarks.machine import host_memory
from benchmarks.report import markdown
from benchmarks.store import Store, path_for, was_late
from benchmarks.workers import LATE

PARTS = ["link", "cases", "capacity", "machinery"]
LEAST_SECONDS = 5  # nothing begins with less time left
# What XLA may take of an H200 in jax_system.py, for programs that are only compiled; and a host of the usual size.
COMPILED_LIMITS = {"h200": {"device": int(0.95 * 143771 * 2**20), "host": 2**37}}


def selected(cases: Iterator[Case], args: argparse.Namespace) -> Iterator[Case]:
    def wanted(case: Case) -> bool:
        named = not args.only or any(re.search(pattern, case.system) for pattern in args.only)
        shaped = not args.model or any(case.shape == systems.SHAPES[name] for name in args.model)
        laid_out = not args.scans or case.scans in args.scans
        clipped = not args.clip or case.clip == (args.clip == "yes")
        return named and shaped and laid_out and clipped and (not args.tokens or case.tokens in args.tokens)

    return filter(wanted, cases)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--only", action="append", metavar="REGEX", help="systems; may be given again")
    add("--model", action="append", choices=list(systems.SHAPES))
    add("--scans", type=int, action="append", help="layers in so many scans; 0: unrolled")
    add("--tokens", type=int, action="append")
    add("--clip", choices=["yes", "no"])
    add("--minutes", type=float, default=float("inf"), help="end after that long; what runs then is stopped")
    add("--case-seconds", type=float, default=900, help="give up on a case after that long")
    add("--compiled", choices=["h200"], help="compile for it instead of running")
    add("--toy", action="store_true")
    add("--again", action="store_true", help="also what has a result already")
    add("--retry", action="store_true", help="also what failed")
    add("--out", type=Path, help="the file of results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    args = parse(argv)
    began = time.monotonic()
    platform, chip = (None, args.compiled) if args.compiled else workers.device()
    if platform == "cpu" and not args.toy:
        raise SystemExit("jax finds a CPU and nothing else. --toy: that everything runs; --compiled h200: peaks.")
    kind = "compiled" if args.compiled else "toy" if args.toy else ""
    store = Store(args.out or path_for(chip, kind), f"{chip}, compiled for, not run" if args.compiled else chip)
    results = store.data

    def left() -> float:
        return 60 * args.minutes - (time.monotonic() - began)

    def seconds() -> float:
        """How long what begins now may take."""
        return max(1.0, min(args.case_seconds, left()))

    def run(case: Case) -> dict[str, Any]:
        return workers.run_case(case, args.compiled, seconds(), platform)

    parts = [p for p in PARTS if p in args.parts]
    if args.compiled:
        parts = [p for p in parts if p in ("cases", "capacity")]  # the others need to run
    if "link" in parts and (args.again or "link" not in results or "link_error" in results) and left() > 0:
        rows, error = workers.lines("link", seconds=seconds(), platform=platform)
        results.pop("link_error", None)
        if len(rows) >= len(results.get("link", [])):
            results["link"] = rows
        if error:
            results["link_error"] = error
        store.save()
    if "cases" in parts:
        cases = [*selected(systems.toy() if args.toy else systems.plan(), args)]
        for case in sorted(cases, key=lambda c: was_late(store.entry(c))):  # those that were stopped, again, at the end
            entry = store.entry(case)
            if left() < LEAST_SECONDS:
                break
            if entry is None or args.again or was_late(entry) or (args.retry and "error" in entry["result"]):
                result = run(case)
                store.put(case, result)
                said = result.get("error") or {k: v for k, v in result.items() if k.endswith(("seconds", "peak_bytes"))}
                print(f"{case.system}, {case.tokens} tokens, {case.scans=}, {case.clip=}: {said}", flush=True)
    if "capacity" in parts and not args.toy and left() >= LEAST_SECONDS:
        limits = COMPILED_LIMITS[args.compiled] if args.compiled else {"device": None, "host": None}
        results["capacity_limits"] = limits if args.compiled else {"device": None, "host": host_memory()}
        found = {c["system"]: c for c in results.get("capacity", [])}
        everyone = [*systems.MAIN, systems.MASTERS, systems.MASTERS_INT8, systems.TORCH_RESIDENT, *systems.TORCH]
        for system in everyone:
            named = not args.only or any(re.search(pattern, system.name) for pattern in args.only)
            old = found.get(system.name, {"unfinished": True})
            if not named or left() < LEAST_SECONDS or not (old.get("unfinished") or args.again):
                continue
            probes = {} if args.again else {p.pop("layers"): p for p in map(dict, old.get("probes", []))}

            def probe(case: Case) -> dict[str, Any]:
                result = run(case) if left() >= LEAST_SECONDS else {"error": LATE}
                if result.get("error", "").startswith(LATE) and left() < LEAST_SECONDS:
                    raise capacity.OutOfTime
                return result

            found[system.name] = capacity.search(system, probe, limits["device"], limits["host"], known=probes)
            print(f"{system.name}: {found[system.name]}", flush=True)
            results["capacity"] = list(found.values())
            store.save()
    if "machinery" in parts and (args.again or "machinery" not in results) and left() >= LEAST_SECONDS:
        extra = ["--leaves", "20", "--repeats", "1", "--steps", "3"] if args.toy else []
        file = store.path.with_suffix(".machinery.json")
        longer = min(max(args.case_seconds, 1800), max(1.0, left()))
        _, error = workers.lines("machinery", "--json", str(file), *extra, seconds=longer, platform="cpu")
        if file.exists():
            results["machinery"] = json.loads(file.read_text())["rows"]
            file.unlink()
        else:
            print(f"machinery: {error}", flush=True)
    store.save()
    print(markdown(results))
    return store.path


if __name__ == "__main__":
    main()
