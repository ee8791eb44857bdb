"""Processes that run one case each, and what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.machine import MARK, meminfo
from benchmarks.systems import SYSTEMS

ROOT = Path(__file__).parents[1]
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


def lines(module: str, *args: str, seconds: float, platform: str | None = None) -> tuple[list[Any], str | None]:
    """What a worker reports (see ``machine.say``), and why it ended before it was done, if it did.

    Its whole process group ends with it: a compiler or a child that holds the device would disturb the next one.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *args]
    environment = dict(os.environ, **({"JAX_PLATFORMS": platform} if platform else {}))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
        error = f"exit status {process.returncode}: {_last(err)}" if process.returncode else None
    except subprocess.TimeoutExpired:
        error = f"{LATE} {seconds:.1f} s"
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    return [json.loads(line[len(MARK) :]) for line in out.splitlines() if line.startswith(MARK)], error


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
    framework = SYSTEMS[case.system].framework
    if compiled:
        if framework != "jax":
            return {"error": "needs a GPU: only programs of XLA can be compiled for a chip that is not there"}
        return result("compiled", compiled, case.to_json(), seconds=seconds)
    with Watch() as watch:
        found = result(f"{framework}_system", case.to_json(), seconds=seconds, platform=platform)
    return found if "error" in found else {**found, "host_taken_bytes": watch.taken}


def device() -> tuple[str, str]:
    """The platform's name and the device's. Asked in another process: one that has seen a device keeps memory of it."""
    code = "import jax; d = jax.devices()[0]; print('\\n' + d.platform + '|' + d.device_kind)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"jax finds no device: {_last(done.stderr)}")
    platform, name = done.stdout.strip().splitlines()[-1].split("|")
    return {"gpu": "cuda"}.get(platform, platform), "cpu" if platform == "cpu" else name
