"""Cases of a part in worker processes: whatever one of them does, the others run."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.workers import LATE, Late, Worker

LEAST_SECONDS = 5  # nothing begins with less time left


def one(worker: Worker, ends: float, seconds: float) -> tuple[dict[str, Any] | None, bool]:
    """The result of the case that a worker is at, ``None`` if the part ends first; and whether the worker lives on."""
    limit = min(ends, time.monotonic() + seconds)
    try:
        said = worker.said(limit)
    except Late:
        return (None if limit == ends else {"error": f"{LATE} {seconds:.0f} s"}), False
    return (said, True) if said else ({"error": f"the process ended: {worker.error() or 'without a word'}"}, False)


def results(
    part: str,
    names: list[str],
    *,
    ends: float,
    case_seconds: float,
    alone: bool = False,
    toy: bool = False,
    platform: str | None = None,
    programs: Path | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case and its result as soon as it ends.

    A worker runs one case after the other: opening a device and importing takes as long as a case. One that ends, or
    is stopped, in a case is followed by another one for the rest. A case that the part's end cuts short gives nothing.

    Args:
      ends: of the part, by ``time.monotonic()``.
      alone: a process for each case, because the allocator's peak is a process's.
      programs: where a case may leave its compiled program.
    """
    waiting = list(names)
    options = [*(["--toy"] if toy else []), *(["--programs", str(programs)] if programs else [])]
    while waiting and ends - time.monotonic() > LEAST_SECONDS:
        batch = waiting[:1] if alone else list(waiting)
        with Worker("gpu.worker", part, json.dumps(batch), *options, platform=platform) as worker:
            for name in batch:
                result, lives = one(worker, ends, case_seconds)
                if result is None:
                    return
                waiting.remove(name)
                yield name, result
                if not lives or ends - time.monotonic() <= LEAST_SECONDS:
                    break


def side_by_side(jobs: int, part: str, names: list[str], **how: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """``results`` of several workers at a time, for parts that do not measure time; each has its share of the cases."""
    found: queue.Queue[tuple[str, dict[str, Any]] | Exception | None] = queue.Queue()

    def work(share: list[str]) -> None:
        try:
            for each in results(part, share, **how):
                found.put(each)
            found.put(None)
        except Exception as error:
            found.put(error)

    threads = [threading.Thread(target=work, args=(names[k::jobs],), daemon=True) for k in range(jobs)]
    for thread in threads:
        thread.start()
    left = jobs
    while left:
        each = found.get()
        if isinstance(each, Exception):
            raise each
        left -= each is None
        if each is not None:
            yield each
