"""The worker of the PyTorch systems: runs one case in this process and prints a line of JSON.

python -m benchmarks.in_torch.system "$CASE"
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import timeline
from benchmarks.harness.cases import Case
from benchmarks.harness.machine import peak_rss, report
from examples import _data

if TYPE_CHECKING:
    import torch

    from benchmarks.in_torch.rivals import Rival

# Where the name of a package is not that of the module.
PIP = {"megatron": "megatron-core", "cpuinfo": "py-cpuinfo"}


text = functools.cache(_data.load)


def tokens(case: Case, i: int, device: torch.device) -> torch.Tensor:
    import torch

    batch = _data.batch(text(), i, case.batch, case.shape.context)
    return torch.from_numpy(batch.astype(np.int64)).to(device)


def train(case: Case, rival: Rival, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds from the end of each timed step's predecessor to its own end, and the losses of all steps."""
    import torch

    batches = [tokens(case, i, device) for i in range(case.warmup + case.steps)]
    clock, losses = [time.perf_counter()], []
    for batch in batches:
        loss = rival.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        losses.append(loss.item())
        clock.append(time.perf_counter())
    return np.diff(clock)[case.warmup :].tolist(), losses


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """What the link does during a step, as far as the profiler works here."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            return timeline.summary(Path(folder) / "trace.json", 1)
    except Exception as error:  # the times that were measured without it stand
        return {"profiler_error": f"{type(error).__name__}: {error}"[:200]}


def device_bytes(device: torch.device) -> dict[str, int | None]:
    """What the device and the allocator of pinned memory have held.

    ``device_used_bytes`` is what everything on the device holds at the end: managed memory and the context too.
    """
    import torch

    if device.type != "cuda":
        return {"device_peak_bytes": None, "device_reserved_bytes": None}
    free, total = torch.cuda.mem_get_info()
    return {
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
        "host_pinned_peak_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak"),
    }


def measure(case: Case) -> dict[str, Any]:
    import torch

    from benchmarks.in_torch.rivals import SYSTEMS

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rival = SYSTEMS[case.system](case, device)
    seconds, losses = train(case, rival, device)
    held = device_bytes(device)
    on_link = profiled(lambda: rival.step(tokens(case, 0, device))) if device.type == "cuda" else {}
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {
        "step_seconds": seconds,
        "losses": losses,
        **held,
        **on_link,
        "host_peak_rss_bytes": peak_rss(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", rival.package)},
        "notes": [*rival.notes, f"{torch.get_num_threads()} threads"],
    }


def reason(error: Exception) -> str | None:
    """Why a case did not run, if that is known: by names, for what raises may be missing."""
    text = str(error)
    kind = type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or text).split(".")[0]
        return f"{name} is missing: pip install {PIP.get(name, name)}"
    if kind == "Unavailable":
        return text
    if kind == "OutOfMemoryError":
        return "out of device memory"
    if kind == "MemoryError" or "can't allocate memory" in text:
        return "out of host memory"
    if "out of memory" in text:  # CUDA's own, not the allocator's: pinned memory, as a rule
        return f"out of pinned host memory, or the driver's: {text.splitlines()[0][:120]}"
    return None


def run(case: Case) -> dict[str, Any]:
    """Trains for some steps. Returns seconds and losses of each, and peaks; or why it could not."""
    try:
        return measure(case)
    except Exception as error:
        if known := reason(error):
            traceback.print_exc()
            return {"error": known}
        raise


if __name__ == "__main__":
    report(run, Case.from_json(sys.argv[1]))
