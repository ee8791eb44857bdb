"""What a worker says of the machine that it runs on, and how it says that a case did not run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import Case

MARK = "benchmarks reports "  # begins the lines that are for run.py, among whatever else is printed
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory", "MemoryError")


def meminfo(field: str) -> int:
    """Bytes, from the kernel."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/meminfo says nothing of {field}")


def host_memory() -> int:
    """Bytes of the machine, or of the control group if it allows less."""
    total = meminfo("MemTotal")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total


def peak_rss() -> int:
    """The most bytes that this process has had in main memory. Whether pinned buffers count is the driver's choice."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def take_the_device() -> None:
    """Lets XLA have nearly all of the device, and of the host's memory. Before jax starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    # XLA's pool of pinned host memory ends at 64 GB unless told otherwise.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(int(0.9 * host_memory() / 1e9)))


def reason(error: BaseException) -> str:
    """Why a case did not run, in a line."""
    text = f"{type(error).__name__}: {error}"
    if any(sign in text for sign in OUT_OF_MEMORY):
        return "out of memory: " + text.splitlines()[0][:160]
    return text.splitlines()[0][:240]


def say(what: Any) -> None:
    sys.stdout.flush()
    print(f"\n{MARK}{json.dumps(what)}", flush=True)


def report(run: Callable[[Case], dict[str, Any]], case: Case) -> None:
    """Runs a case, and says its result, or why there is none."""
    with contextlib.suppress(OSError):  # where the host's memory ends, this process should, not the one that waits
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        result = run(case)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": reason(error)}
    say(result)
