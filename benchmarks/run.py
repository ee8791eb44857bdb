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
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import systems, workers
from benchmarks.harness.cases import Case
from benchmarks.harness.report import markdown
from benchmarks.harness.store import Store, path_for

PARTS = ["link", "cases", "machinery"]
LEAST_SECONDS = 5  # nothing begins with less time left


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


@dataclasses.dataclass(frozen=True)
class Call:
    """What the parts share: what was asked for, the file of results, and the time."""

    args: argparse.Namespace
    store: Store
    platform: str | None
    ends: float

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left < LEAST_SECONDS

    @property
    def seconds(self) -> float:
        """How long what begins now may take."""
        return max(1.0, min(self.args.case_seconds, self.left))

    def run(self, case: Case) -> dict[str, Any]:
        return workers.run_case(case, self.args.compiled, self.seconds, self.platform)


def run_link(call: Call) -> None:
    results = call.store.data
    if not call.args.again and "link" in results and "link_error" not in results:
        return
    rows, error = workers.lines("harness.link", seconds=call.seconds, platform=call.platform)
    results.pop("link_error", None)
    if len(rows) >= len(results.get("link", [])):
        results["link"] = rows
    if error:
        results["link_error"] = error
    call.store.save()


def run_cases(call: Call) -> None:
    args, store = call.args, call.store
    available = call.seconds

    def hopeless(case: Case) -> bool:
        """Stopped before, with as much time as there is now: after all others."""
        entry = store.entry(case)
        return entry is not None and (workers.stopped_after(entry["result"]) or 0) >= 0.9 * available

    for case in sorted(selected(systems.toy() if args.toy else systems.plan(), args), key=hopeless):
        before = (store.entry(case) or {}).get("result", {})
        stopped = workers.stopped_after(before) is not None
        if before and not stopped and not args.again and not (args.retry and "error" in before):
            continue
        if call.over:
            break
        result = call.run(case)
        store.put(case, result)
        said = result.get("error") or {k: v for k, v in result.items() if k.endswith(("seconds", "peak_bytes"))}
        print(f"{case.system}, {case.tokens} tokens, {case.scans=}, {case.clip=}: {said}", flush=True)


def run_machinery(call: Call) -> None:
    if not call.args.again and "machinery" in call.store.data:
        return
    file = call.store.path.with_suffix(".machinery.json")
    extra = ["--leaves", "20", "--repeats", "1"] if call.args.toy else []
    seconds = max(call.seconds, min(1800, call.left))
    _, error = workers.lines("in_jax.machinery", "--json", str(file), *extra, seconds=seconds, platform="cpu")
    if file.exists():
        call.store.data["machinery"] = json.loads(file.read_text())["rows"]
        file.unlink()
    else:
        print(f"machinery: {error}", flush=True)


def main(argv: list[str] | None = None) -> Path:
    args = parse(argv)
    ends = time.monotonic() + 60 * args.minutes
    platform, chip = (None, args.compiled) if args.compiled else workers.device()
    if platform == "cpu" and not args.toy:
        raise SystemExit("jax finds a CPU and nothing else. --toy: that everything runs; --compiled h200: peaks.")
    path = args.out or path_for(chip, "compiled" if args.compiled else "toy" if args.toy else "")
    store = Store(path, f"{chip}, compiled for, not run" if args.compiled else chip)
    call = Call(args, store, platform, ends)
    parts = {"link": run_link, "cases": run_cases, "machinery": run_machinery}
    for name in PARTS:
        needs_to_run = args.compiled and name in ("link", "machinery")
        if name in args.parts and not needs_to_run and not call.over:
            parts[name](call)
    store.save()
    print(markdown(store.data))
    return store.path


if __name__ == "__main__":
    main()
