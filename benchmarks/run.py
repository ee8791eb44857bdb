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
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import capacity, systems
from benchmarks.cases import Case
from benchmarks.machine import host_memory, meminfo
from benchmarks.report import GIB, markdown
from benchmarks.systems import SYSTEMS

PARTS = ["link", "cases", "capacity", "machinery"]
RESULTS = Path(__file__).parent / "results"
# What XLA may take of an H200 in jax_system.py, for programs that are only compiled; and a host of the usual size.
COMPILED_LIMITS = {"h200": {"device": int(0.95 * 143771 * 2**20), "host": 2**37}}


class Watch:
    """The most host memory taken, by everything on the machine, while a process runs."""

    def __enter__(self) -> Watch:
        self.before = self.least = meminfo("MemAvailable")
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.done.wait(0.1):
            self.least = min(self.least, meminfo("MemAvailable"))

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.thread.join()

    @property
    def taken(self) -> int:
        return self.before - self.least


def worker(module: str, *args: str, seconds: float) -> Any:
    """The last line that a worker prints, or why there is none."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=RESULTS.parents[1])
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(("{", "[")):
            return json.loads(line)
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return {"error": f"exit status {done.returncode}: {last[:160]}"}


def run_case(case: Case, compiled: str | None, seconds: float) -> dict[str, Any]:
    framework = SYSTEMS[case.system].framework
    if compiled:
        if framework != "jax":
            return {"error": "needs a GPU: only programs of XLA can be compiled for a chip that is not there"}
        return worker("compiled", compiled, case.to_json(), seconds=seconds)
    with Watch() as watch:
        result = worker(f"{framework}_system", case.to_json(), seconds=seconds)
    return result if "error" in result else {**result, "host_taken_bytes": watch.taken}


def device_name() -> str:
    """Asked in another process: one that has seen the device keeps memory of it."""
    code = "import jax; d = jax.devices()[0]; print('\\n' + d.platform + '|' + d.device_kind)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    kind, name = done.stdout.strip().splitlines()[-1].split("|")
    return "cpu" if kind == "cpu" else name


def about(device: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.run", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}, {host_memory() / GIB:.0f} GiB of host memory",
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


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
    add("--minutes", type=float, default=float("inf"), help="begin nothing after that long")
    add("--case-seconds", type=float, default=900, help="give up on a case after that long")
    add("--compiled", choices=["h200"], help="compile for it instead of running")
    add("--toy", action="store_true")
    add("--again", action="store_true", help="also what has a result already")
    add("--out", type=Path, help="the file of results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    args = parse(argv)
    began = time.monotonic()
    chip = args.compiled or device_name()
    name = f"{datetime.date.today().isoformat()}-{re.sub('[^a-z0-9]+', '-', chip.lower()).strip('-')}"
    name += "-compiled" if args.compiled else "-toy" if args.toy else ""
    out = args.out or RESULTS / f"{name}.json"
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"cases": []}
    results["about"] = about(f"{chip}, compiled for, not run" if args.compiled else chip)

    def left() -> bool:
        return time.monotonic() - began < 60 * args.minutes

    def save() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(results))

    parts = [p for p in PARTS if p in args.parts]
    if args.compiled:
        parts = [p for p in parts if p in ("cases", "capacity")]  # the others need to run
    if "link" in parts and (args.again or "link" not in results) and left():
        found = worker("link", seconds=args.case_seconds)
        results["link" if isinstance(found, list) else "link_error"] = found
        save()
    if "cases" in parts:
        done = {json.dumps(e["case"], sort_keys=True) for e in results["cases"]}
        cases = list(selected(systems.toy() if args.toy else systems.plan(), args))
        for case in cases:
            if not left():
                break
            if case.to_json() in done and not args.again:
                continue
            result = run_case(case, args.compiled, args.case_seconds)
            entry = {"case": dataclasses.asdict(case), "result": result}
            results["cases"] = [e for e in results["cases"] if json.dumps(e["case"], sort_keys=True) != case.to_json()]
            results["cases"].append(entry)
            said = result.get("error") or {k: v for k, v in result.items() if k.endswith(("seconds", "peak_bytes"))}
            print(f"{case.system}, {case.tokens} tokens, {case.scans=}, {case.clip=}: {said}", flush=True)
            save()
    if "capacity" in parts and not args.toy and left():
        limits = COMPILED_LIMITS[args.compiled] if args.compiled else {"device": None, "host": None}
        results["capacity_limits"] = limits if args.compiled else {"device": None, "host": host_memory()}
        found = {c["system"]: c for c in results.get("capacity", [])}
        everyone = [*systems.MAIN, systems.MASTERS, systems.MASTERS_INT8, systems.TORCH_RESIDENT, *systems.TORCH]
        for system in everyone:
            named = not args.only or any(re.search(pattern, system.name) for pattern in args.only)
            if not named or not left() or (system.name in found and not args.again):
                continue
            found[system.name] = capacity.search(
                system, lambda c: run_case(c, args.compiled, args.case_seconds), limits["device"], limits["host"]
            )
            print(f"{system.name}: {found[system.name]}", flush=True)
            results["capacity"] = list(found.values())
            save()
    if "machinery" in parts and (args.again or "machinery" not in results) and left():
        extra = ["--leaves", "20", "--repeats", "1", "--steps", "3"] if args.toy else []
        file = out.with_suffix(".machinery.json")
        worker("machinery", "--json", str(file), *extra, seconds=max(args.case_seconds, 1800))
        if file.exists():
            results["machinery"] = json.loads(file.read_text())["rows"]
            file.unlink()
    save()
    print(markdown(results))
    return out


if __name__ == "__main__":
    main()
