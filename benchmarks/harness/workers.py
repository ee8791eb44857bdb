"""Processes that run one case each, and what they say."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import Case
from benchmarks.harness.machine import MARK, meminfo

ROOT = Path(__file__).parents[2]
LATE = "not done after"  # begins the error of a worker that was stopped, before the seconds


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


class Late(Exception):
    """The time that a worker had is over."""


class Worker:
    """A process that reports as it goes (see ``machine.say``).

    Its whole process group ends with it: a compiler or a child that holds the device would disturb the next one.
    """

    def __init__(self, module: str, *args: str, platform: str | None = None):
        # beside an accelerator jax's CPU backend updates what is on the host
        platforms = {"JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu"} if platform else {}
        environment = dict(os.environ, **platforms)
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the worker)
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *args],
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.queue: queue.Queue[str | None] = queue.Queue()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.queue.put(line)
        self.queue.put(None)

    def said(self, ends: float) -> Any:
        """What it reports next; ``None``: it has ended.

        Raises:
          Late: it said nothing until ``ends``, by ``time.monotonic()``.
        """
        while True:
            try:
                line = self.queue.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise Late from None
            if line is None:
                return None
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])

    def error(self) -> str | None:
        """Why it ended before it was done, if it did."""
        if not self.process.wait():
            return None
        self.stderr.seek(0)
        return f"exit status {self.process.returncode}: {_last(self.stderr.read())}"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stderr.close()


def lines(module: str, *args: str, seconds: float, platform: str | None = None) -> tuple[list[Any], str | None]:
    """All that a worker reports, and why it ended before it was done, if it did."""
    found, ends = [], time.monotonic() + seconds
    with Worker(module, *args, platform=platform) as worker:
        try:
            while (what := worker.said(ends)) is not None:
                found.append(what)
            return found, worker.error()
        except Late:
            return found, f"{LATE} {seconds:.1f} s"


def stopped_after(result: dict[str, Any]) -> float | None:
    """The seconds after which a worker was stopped, if it was: with more, it may be done."""
    error = result.get("error", "")
    return float(error.removeprefix(LATE).split()[0]) if error.startswith(LATE) else None


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["nothing said"])[-1][:160]


def result(module: str, *args: str, seconds: float, platform: str | None = None) -> dict[str, Any]:
    """The one thing that a worker reports, or ``{"error": why there is none}``."""
    said, error = lines(module, *args, seconds=seconds, platform=platform)
    return said[-1] if said else {"error": error or "nothing reported"}


def run_case(case: Case, compiled: str | None, seconds: float, platform: str | None = None) -> dict[str, Any]:
    if compiled:
        return result("compiled.figures", compiled, case.to_json(), seconds=seconds)
    with Watch() as watch:
        found = result("in_jax.system", case.to_json(), seconds=seconds, platform=platform)
    return found if "error" in found else {**found, "host_taken_bytes": watch.taken}


def device() -> tuple[str, str]:
    """The platform's name and the device's. Asked in another process: one that has seen a device keeps memory of it."""
    code = "import jax; d = jax.devices()[0]; print('\\n' + d.platform + '|' + d.device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"jax finds no device: {_last(done.stderr)}")
    platform, name = done.stdout.strip().splitlines()[-1].split("|")
    return {"gpu": "cuda"}.get(platform, platform), "cpu" if platform == "cpu" else name
