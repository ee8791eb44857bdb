"""Test and measure on an accelerator: values, random steps, reports, the link, steps, driven steps.

    python -m benchmarks.run                        # make gpu: 9 minutes a part, 40 in all; again: it continues
    python -m benchmarks.run --parts steps --only "1.3b, one scan, 16384 tokens; "
    python -m benchmarks.run --parts compiled       # without a GPU: the steps, compiled for an H200
    python -m benchmarks.run --toy                  # anywhere: that it runs, nothing else

Results go to benchmarks/results/<date>-<chip>-gpu.json, after every case, and as Markdown beside it. Exits with 1 if a
value was wrong, else with 3 if a case failed, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform as python_platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import workers
from benchmarks.report import GIB, failed, markdown, wrong

PARTS = ("values", "random", "reports", "link", "steps", "driven")
COMPILED = "compiled"  # needs no device
TOTAL_MINUTES = 40
WRONG, NO_GPU, FAILED = 1, 2, 3
FOLDER = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "optax", "numpy")


def said(*command: str) -> str | None:
    """Return what a command prints, or ``None`` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=FOLDER)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | {"driver": driver.splitlines()[0] if driver else None}


def path_for(chip: str, kind: str) -> Path:
    """Return the newest file of results of this chip and kind, or one with today's date."""
    name = f"{re.sub('[^a-z0-9]+', '-', chip.lower()).strip('-')}-{kind}"
    found = sorted(FOLDER.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-{name}.json"))
    return found[-1] if found else FOLDER / f"{datetime.date.today().isoformat()}-{name}.json"


class Record:
    """The file of results and its Markdown, both whole at any moment, so that a run that is killed can continue.

    ``data["cases"]``: {"part", "case", "result", "commit", "date", "versions"} each; ``data["left"]``: part -> cases
    that have not run.
    """

    def __init__(self, path: Path, device: str):
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": [], "left": {}}
        self.made = {
            "commit": said("git", "rev-parse", "--short", "HEAD"),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
        }
        self.data["about"] = self.made | {
            "device": device,
            "command": " ".join(["python -m benchmarks.run", *sys.argv[1:]]),
            "machine": f"{os.cpu_count()} cores of {python_platform.machine()}, "
            f"{workers.host_memory() / GIB:.0f} GiB of host memory",
            "python": python_platform.python_version(),
        }

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {self.path: json.dumps(self.data, indent=1) + "\n", self.path.with_suffix(".md"): markdown(self.data)}
        for path, text in texts.items():
            new = path.with_name(path.name + ".new")
            new.write_text(text)
            new.replace(path)

    def result(self, part: str, name: str) -> dict[str, Any] | None:
        found = (e["result"] for e in self.data["cases"] if (e["part"], e["case"]) == (part, name))
        return next(found, None)

    def set_result(self, part: str, name: str, result: dict[str, Any]) -> None:
        others = [e for e in self.data["cases"] if (e["part"], e["case"]) != (part, name)]
        self.data["cases"] = [*others, {"part": part, "case": name, "result": result, **self.made}]
        self.save()

    def set_left(self, part: str, names: list[str]) -> None:
        self.data["left"] = {k: v for k, v in self.data["left"].items() if k != part} | ({part: names} if names else {})
        self.save()


def parse(argv: list[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [part for part in found if part not in (*PARTS, COMPILED)]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join((*PARTS, COMPILED))}")
        if COMPILED in found and len(found) > 1:
            raise argparse.ArgumentTypeError(f"{COMPILED} needs no device; call it without other parts")
        return found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--parts", type=parts, default=list(PARTS), metavar=",".join(PARTS), help=f"or {COMPILED}, alone")
    add("--only", metavar="REGEX", help="cases whose names match")
    add("--minutes", type=float, default=9, help="for each part; what runs then is stopped, and left for another call")
    add("--case-seconds", type=float, default=480, help="give up on a case after that long")
    add("--jobs", type=int, default=1, help="workers at a time, in the parts that do not measure time")
    add("--toy", action="store_true")
    add("--again", action="store_true", help="also what has a result already")
    add("--out", type=Path, help="the file of results")
    return parser.parse_args(argv)


def run_part(part: str, args: argparse.Namespace, record: Record, platform: str, ends: float) -> None:
    """Run all cases of a part that have no result yet, as far as its minutes go."""
    # For the names of its cases. Nothing here opens the device, which the workers need to themselves.
    module = importlib.import_module(f"benchmarks.parts.{part}")
    chosen = [name for name in module.cases(args.toy) if not args.only or re.search(args.only, name)]
    waiting = [name for name in chosen if args.again or record.result(part, name) is None]
    for name, result in workers.side_by_side(
        1 if module.TIMED else args.jobs,
        part,
        list(waiting),
        ends=ends,
        case_seconds=args.case_seconds,
        alone=module.ALONE,
        toy=args.toy,
        platform=platform,
    ):
        waiting.remove(name)
        record.set_result(part, name, result)
        outcome = result.get("error") or "; ".join(result.get("wrong", [])) or result.get("left_out") or "done"
        print(f"{part}, {name}: {outcome}", flush=True)
    record.set_left(part, waiting)
    if waiting:
        print(f"{part}: no time left for {len(waiting)} of {len(chosen)} cases: {'; '.join(waiting)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    if args.parts == [COMPILED]:
        platform, chip, kind = "cpu", "h200", "compiled-steps"
    else:
        platform, chip = workers.device()
        kind = "gpu"
    if platform != "cuda" and args.parts != [COMPILED] and not args.toy:
        print(
            f"There is no NVIDIA GPU here, jax finds a {platform}. ARGS=--toy (or --toy) shows that everything runs; "
            "--parts compiled compiles the steps for an H200."
        )
        return NO_GPU
    record = Record(args.out or path_for(chip, f"{kind}-toy" if args.toy else kind), chip)
    for part in args.parts:
        ends = time.monotonic() + 60 * args.minutes
        ends = min(ends, began + 60 * TOTAL_MINUTES) if len(args.parts) > 1 else ends
        run_part(part, args, record, platform, ends)
    record.save()
    print(markdown(record.data))
    return WRONG if wrong(record.data) else FAILED if failed(record.data) else 0


if __name__ == "__main__":
    sys.exit(main())
