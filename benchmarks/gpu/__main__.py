"""All that a GPU has to tell first: values, donation, random steps, reports, link, steps, driven ones.

It takes 9 minutes a part and 40 in all, at most.

    python -m benchmarks.gpu                        # make gpu; again: goes on with what it left
    python -m benchmarks.gpu --parts values --only "AdamW; stacked"
    python -m benchmarks.gpu --toy                  # anywhere: that it runs, nothing else

Results go to benchmarks/results/<date>-<chip>-gpu.json, after every case, and as Markdown beside it. Exits with 1 if a
value was wrong, else with 3 if a case failed, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from pathlib import Path

from benchmarks.gpu import conduct
from benchmarks.gpu.record import Record
from benchmarks.gpu.summary import failed, markdown, wrong
from benchmarks.harness import workers
from benchmarks.harness.store import path_for

PARTS = ("values", "donation", "random", "reports", "link", "steps", "driven")
TOTAL_MINUTES = 40
WRONG, NO_GPU, FAILED = 1, 2, 3


def parse(argv: list[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [part for part in found if part not in PARTS]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(PARTS)}")
        return found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--parts", type=parts, default=list(PARTS), metavar=",".join(PARTS))
    add("--only", metavar="REGEX", help="cases whose names match")
    add("--minutes", type=float, default=9, help="for each part; what runs then is stopped, and left for another call")
    add("--case-seconds", type=float, default=240, help="give up on a case after that long")
    add("--jobs", type=int, default=1, help="workers at a time, in the parts that do not measure time")
    add("--toy", action="store_true")
    add("--again", action="store_true", help="also what has a result already")
    add("--out", type=Path, help="the file of results")
    return parser.parse_args(argv)


def run_part(part: str, args: argparse.Namespace, record: Record, platform: str, ends: float) -> None:
    """All cases of a part that have no result yet, as far as its minutes go."""
    # For the names of its cases. Nothing here opens the device, which the workers need to themselves.
    module = importlib.import_module(f"benchmarks.gpu.{part}")
    chosen = [name for name in module.cases(args.toy) if not args.only or re.search(args.only, name)]
    waiting = [name for name in chosen if args.again or record.result(part, name) is None]
    programs = record.path.with_name(f"{record.path.stem}-programs")
    for name, result in conduct.side_by_side(
        1 if module.TIMED else args.jobs,
        part,
        list(waiting),
        ends=ends,
        case_seconds=args.case_seconds,
        alone=module.ALONE,
        toy=args.toy,
        platform=platform,
        programs=None if args.toy else programs,
    ):
        waiting.remove(name)
        record.set_result(part, name, result)
        said = result.get("error") or "; ".join(result.get("wrong", [])) or result.get("left_out") or "done"
        print(f"{part}, {name}: {said}", flush=True)
    record.set_left(part, waiting)
    if waiting:
        print(f"{part}: no time left for {len(waiting)} of {len(chosen)} cases: {'; '.join(waiting)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    platform, chip = workers.device()
    if platform != "cuda" and not args.toy:
        print(f"There is no NVIDIA GPU here, jax finds a {platform}; ARGS=--toy (or --toy) shows that everything runs.")
        return NO_GPU
    record = Record(args.out or path_for(chip, "gpu-toy" if args.toy else "gpu"), chip)
    for part in args.parts:
        ends = min(time.monotonic() + 60 * args.minutes, began + 60 * TOTAL_MINUTES)
        run_part(part, args, record, platform, ends)
    record.save()
    print(markdown(record.data))
    return WRONG if wrong(record.data) else FAILED if failed(record.data) else 0


if __name__ == "__main__":
    sys.exit(main())
