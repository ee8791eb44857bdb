"""The processes that run cases, the facts that they report about their machine, and their time limits.

    python -m benchmarks.workers PART '["case", ...]' [--toy]

runs the cases of a part one after the other and reports each as it ends. A case that raises is a result too; one that
ends the process is noted by the process that waits.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = "benchmarks reports "  # marks the lines for the process that waits
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory", "MemoryError")
LEAST_SECONDS = 5  # nothing begins with less time left


def host_memory() -> int:
    """Return the bytes of the machine, or of the control group if it allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total


def device() -> tuple[str, str]:
    """Return the names of the platform and of the device.

    Another process asks jax for them, as a process that has seen a device keeps memory of it.
    """
    code = "import jax; d = jax.devices()[0]; print('\\n' + d.platform + '|' + d.device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"jax finds no device: {_last(done.stderr)}")
    platform, name = done.stdout.strip().splitlines()[-1].split("|")
    return {"gpu": "cuda"}.get(platform, platform), "cpu" if platform == "cpu" else name


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing said"])[-1][:160]


class Worker:
    """A process that reports as it goes.

    Its whole process group ends with it: a compiler or a child that holds the device would disturb the next one.
    """

    def __init__(self, *args: str, platform: str | None):
        # with an accelerator, jax's CPU backend updates leaves on the host
        platforms = {"JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu"} if platform else {}
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the worker)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workers", *args],
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            cwd=ROOT,
            env=os.environ | platforms,
            start_new_session=True,
        )
        self.queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.queue.put(line)
        self.queue.put(None)

    def said(self, ends: float) -> dict[str, Any]:
        """Return its next report; an error if it has ended.

        Raises:
          queue.Empty: it said nothing until ``ends``, by ``time.monotonic()``.
        """
        while (line := self.queue.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        status = self.process.wait()
        self.stderr.seek(0)
        return {"error": f"the process ended with {status}: {_last(self.stderr.read())}"}

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stderr.close()


def results(
    part: str, names: list[str], *, ends: float, case_seconds: float, alone: bool, toy: bool, platform: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case and its result as soon as it ends.

    A worker runs one case after the other, as opening a device and importing takes as long as a case. If a case ends
    its worker, another worker runs the remaining ones. A case that the part's end cuts short gives nothing.

    Args:
      part: the name of a module in ``benchmarks.parts``.
      names: its cases.
      ends: the part's end, by ``time.monotonic()``.
      case_seconds: the most that a case may take.
      alone: give each case a process of its own, because the allocator's peak belongs to a process.
      toy: run the cases on a toy.
      platform: jax's platform; ``None`` for its default.
    """
    waiting = list(names)
    while waiting and ends - time.monotonic() > LEAST_SECONDS:
        batch = waiting[:1] if alone else list(waiting)
        with Worker(part, json.dumps(batch), *["--toy"] * toy, platform=platform) as worker:
            for name in batch:
                limit = min(ends, time.monotonic() + case_seconds)
                late = False
                try:
                    result = worker.said(limit)
                except queue.Empty:
                    if limit == ends:
                        return
                    result, late = {"error": f"not done after {case_seconds:.0f} s"}, True
                waiting.remove(name)
                yield name, result
                if late or not worker.lives or ends - time.monotonic() <= LEAST_SECONDS:
                    break


def side_by_side(jobs: int, part: str, names: list[str], **how: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ``results`` of several workers at a time, each with its share of the cases."""
    found: queue.Queue[tuple[str, dict[str, Any]] | Exception | None] = queue.Queue()

    def work(share: list[str]) -> None:
        try:
            for each in results(part, share, **how):
                found.put(each)
            found.put(None)
        except Exception as error:
            found.put(error)

    for k in range(jobs):
        threading.Thread(target=work, args=(names[k::jobs],), daemon=True).start()
    left = jobs
    while left:
        each = found.get()
        if isinstance(each, Exception):
            raise each
        left -= each is None
        if each is not None:
            yield each


def reason(error: BaseException) -> str:
    """Say in a line why a case did not run."""
    text = f"{type(error).__name__}: {error}"
    if any(sign in text for sign in OUT_OF_MEMORY):
        return "out of memory: " + text.splitlines()[0][:160]
    return text.splitlines()[0][:240]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    # XLA may have nearly all of the device and of the host's memory: its pinned pool ends at 64 GB by default
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(int(0.9 * host_memory() / 1e9)))
    with contextlib.suppress(OSError):  # where the host's memory ends, this process should, not the one that waits
        Path("/proc/self/oom_score_adj").write_text("1000")
    module = importlib.import_module(f"benchmarks.parts.{args.part}")
    flags = f"{os.environ.get('XLA_FLAGS', '')} {getattr(module, 'XLA_FLAGS', '')}"
    os.environ["XLA_FLAGS"] = flags.strip()  # XLA reads it when the first program compiles
    for name in args.cases:
        try:
            result = module.run(name, args.toy)
        except Exception as error:
            traceback.print_exc()
            result = {"error": reason(error)}
        print(f"\n{MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
