"""What is made of results: rates from a profiler's trace, comparisons, tables."""

import dataclasses
import gzip
import json

import pytest

from benchmarks.harness import systems, timeline
from benchmarks.harness.cases import SHAPES
from benchmarks.harness.readings import added, overhead
from benchmarks.harness.report import markdown
from benchmarks.harness.systems import IN_GROUPS

GB = 10**9


def complete(name, ts, dur, **extra):
    return {"ph": "X", "pid": 1, "tid": 7, "name": name, "ts": ts, "dur": dur, **extra}


def test_a_trace_of_jax(tmp_path):
    """Copies at 0..4 and 8..10 to the device, 2..6 from it; a kernel at 1..3; and what is on no stream."""
    found = [
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7(MemcpyH2D)"}},
        {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "XLA Ops"}},
        complete("MemcpyH2D", 0, 4e6),
        complete("MemcpyH2D", 8e6, 2e6),
        complete("MemcpyD2H", 2e6, 4e6),
        complete("loop_fusion", 1e6, 2e6),
        complete("MemcpyH2D", 20e6, 9e6) | {"tid": 8},
    ]
    trace = tmp_path / "vm.trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": found}).encode()))
    assert timeline.summary(trace, steps=2) == {
        "loading_seconds": 3.0,
        "storing_seconds": 2.0,
        "copying_seconds": 4.0,
        "both_ways_seconds": 1.0,
        "computing_seconds": 1.0,
        "exposed_seconds": 3.0,
    }


def test_a_trace_of_torch(tmp_path):
    found = [
        complete("Memcpy HtoD (Pinned -> Device)", 0, 4e6, cat="gpu_memcpy", args={"stream": 7, "bytes": 100}),
        complete("Memcpy DtoH (Device -> Pinned)", 2e6, 4e6, cat="gpu_memcpy", args={"stream": 9, "bytes": 60}),
        complete("Memcpy DtoD (Device -> Device)", 9e6, 1e6, cat="gpu_memcpy", args={"stream": 7, "bytes": 5}),
        complete("cudaMemcpyAsync", 0, 9e6, cat="cuda_runtime", args={"stream": 7}),
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": found}))
    found = timeline.summary(trace, steps=1)
    assert (found["loaded_bytes"], found["stored_bytes"]) == (100, 60)
    assert (found["copying_seconds"], found["both_ways_seconds"], found["computing_seconds"]) == (6.0, 2.0, 1.0)


def entry(system, seconds, *, clip=True, tokens=16384, scans=0, **result):
    case = systems.case(systems.SYSTEMS[system], SHAPES["1.3b"], tokens, scans=scans, clip=clip)
    return {"case": dataclasses.asdict(case), "result": {"step_seconds": [seconds], **result}}


def moved(n, seconds):
    return {"loaded_bytes": n * GB, "stored_bytes": n * GB, "copying_seconds": seconds}


LINK = [
    {"by": "jax", "direction": way, "mib": 64, "in_flight": 4, "bytes_per_second": rate * GB}
    for way, rate in (("load", 55), ("store", 55), ("both", 50))
]


def results(*entries):
    about = {"device": "a GPU", "date": "a day", "command": "a command", "machine": "a machine"}
    return {"about": about, "link": LINK, "cases": list(entries)}


def test_comparisons_are_within_a_framework():
    entries = [entry("optax", 1.0), entry("torch resident", 2.0), entry("jax_offload", 1.5)]
    entries += [entry("Megatron HybridDeviceOptimizer", 5.0), entry("jax_offload", 9.0, tokens=2048)]
    assert added(entries, entries[2]) == pytest.approx(0.5)
    assert overhead(entries, entries[2]) == pytest.approx(0.5)
    assert added(entries, entries[3]) == pytest.approx(3.0)
    assert added(entries, entries[4]) is None  # nothing to compare it with


GOOD = [
    entry("optax", 1.0),
    entry("optax", 1.0, clip=False),
    entry("optax", 1.0, clip=False, scans=1),
    entry("jax_offload", 1.22, **moved(10, 0.21)),  # the link's time both ways is 0.2
    entry("jax_offload", 1.04, clip=False, **moved(10, 0.21)),
    entry("jax_offload", 1.04, clip=False, scans=1, **moved(10, 0.21)),
    entry("optax", 1.0, clip=False, scans=6),
    entry(IN_GROUPS.name, 1.04, clip=False, scans=6, **moved(10, 0.21)),
    entry("jax_offload", 9.00, clip=False, tokens=2048, **moved(10, 0.21)),  # too few tokens to count
    entry("jax_offload, int8 state", 1.06, **moved(2.6, 0.06)),
    entry("torch resident", 1.0),
    entry("DeepSpeed ZeRO-Offload", 2.0),
]


def test_the_table_says_what_is_compiled_and_what_did_not_run():
    compiled_for = {"compiled": True, "device_peak_bytes": 3 << 30, "hidden": 0.5, "duplex": 0.9, **moved(10, None)}
    compiled = entry("jax_offload", 0.0)
    compiled["result"] = compiled_for
    failed = entry("usual recipe", 0.0)
    failed["result"] = {"error": "out of memory"}
    text = markdown(results(compiled, failed))
    assert "Compiled, not run" in text and "compiled, not run\n" in text
    assert "| jax_offload |  |  | 3.0 |" in text and "10.0 + 10.0; 50%, 90%" in text
    assert "| usual recipe | did not run: out of memory |" in text


def test_the_table_of_a_run():
    text = markdown(results(*GOOD))
    assert "| jax_offload | 1,220 (1,220–1,220) | +22.0% |" in text
    assert "10.0 + 10.0, 48 + 48 GB/s" in text
    assert markdown(results(*GOOD, entry("optax", 0.5, clip=True))).count("### ") == text.count("### ")
