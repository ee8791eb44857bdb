"""The benchmarks run, resume and report, on a toy. Speed and memory are for hardware to tell."""

import dataclasses
import fcntl
import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import run
from benchmarks.compiled import figures as compiled
from benchmarks.harness import link, systems, workers
from benchmarks.harness.cases import SHAPES, Case
from benchmarks.harness.store import Store
from benchmarks.in_jax import gpt
from benchmarks.in_jax import system as jax_system
from tests.aot.harness import H200, require

TOY = SHAPES["toy"]


def on_toy(system, scans=1, clip=True, **kwargs):
    return systems.case(systems.SYSTEMS[system], TOY, 64, scans=scans, clip=clip, warmup=1, steps=3, **kwargs)


@pytest.fixture(scope="module")
def resident():
    return jax_system.run(on_toy("optax"))


@pytest.mark.long("trains each system")
@pytest.mark.parametrize(
    ("system", "tolerance"),
    [
        ("usual recipe", 1e-6),
        ("jax_offload, fraction 0.5", 1e-6),
        ("jax_offload, int8 state", 1e-3),
        ("jax_offload, jo.jit", 1e-6),
        ("jax_offload, jo.pipelined, gradients on the host", 1e-6),
    ],
)
def test_systems_train_as_resident_does(system, tolerance, resident):
    result = jax_system.run(on_toy(system))
    assert result["losses"] == pytest.approx(resident["losses"], rel=tolerance)
    assert len(result["step_seconds"]) == 3
    assert result["host_state_bytes"] > 0 == resident["host_state_bytes"]


@pytest.mark.parametrize("scans", [1, 3])
def test_scanned_and_unrolled_are_one_model(scans):
    stacked, unrolled = gpt.init(TOY, scans), gpt.init(TOY, 0)
    each = TOY.layers // scans
    for layer in range(TOY.layers):
        for name, leaf in unrolled[f"block_{layer:03d}"].items():
            np.testing.assert_array_equal(leaf, stacked[f"blocks_{layer // each:03d}"][name][layer % each])
    assert sum(p.size for p in jax.tree.leaves(stacked)) == TOY.parameters
    tokens = jnp.arange(2 * (TOY.context + 1)).reshape(2, -1) % 256
    losses = [float(gpt.loss(TOY, None, jnp.float32, params, tokens)) for params in (stacked, unrolled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_groups_are_equal():
    with pytest.raises(ValueError, match="3 layers do not make 2"):
        gpt.init(TOY, 2)


def test_first_parameters_have_the_deviation_that_they_should():
    leaves = [p for p in jax.tree.leaves(gpt.init(TOY, 1)) if p.ndim > 1 and p.shape[-1] > TOY.layers]
    for p in leaves:
        if p.min() < 1:  # not a norm's
            assert float(p.std()) == pytest.approx(0.02, rel=0.05)
            assert abs(float(p.mean())) < 5 * 0.02 / p.size**0.5


def test_the_plan_is_the_whole_matrix_once():
    plan = [c.to_json() for c in systems.plan()]
    assert len(plan) == len(set(plan))
    for system in systems.SYSTEMS.values():
        for name, scans in systems.MODELS:
            for tokens in systems.TOKENS:
                for clip in (False, True):
                    each = systems.case(system, SHAPES[name], tokens, scans=scans, clip=clip)
                    assert each.tokens == tokens
                    assert each.to_json() in plan
    assert Case.from_json(plan[0]).to_json() == plan[0]


@pytest.mark.long("starts processes")
def test_one_command_runs_resumes_and_lists_what_cannot_run(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    arguments = ["--toy", "--parts", "cases", "--clip", "no", "--scans", "0", "--out", str(out)]
    only = ["--only", "^optax$", "--only", "^bitsandbytes PagedAdamW$"]
    run.main([*arguments, *only])
    entries = json.loads(out.read_text())["cases"]
    assert [e["case"]["system"] for e in entries] == ["optax", "bitsandbytes PagedAdamW"]
    assert len(entries[0]["result"]["losses"]) == 5
    assert "host_taken_bytes" in entries[0]["result"]
    assert entries[1]["result"]["error"]
    text = out.with_suffix(".md").read_text()
    assert f"did not run: {entries[1]['result']['error']}" in text
    ran = []
    late = {"error": f"{workers.LATE} 1 s"}
    monkeypatch.setattr(workers, "run_case", lambda case, *_: ran.append(case.system) or late)
    run.main([*arguments, *only])
    assert json.loads(out.read_text())["cases"] == entries and not ran
    run.main([*arguments, *only, "--retry"])  # what failed, and now is late
    run.main([*arguments, *only])  # late: again, without being told
    assert ran == ["bitsandbytes PagedAdamW"] * 2


def test_a_worker_that_dies_is_a_reason(tmp_path):
    assert "exit status" in workers.result("nothing_of_this_name", seconds=60)["error"]
    assert "not done after" in workers.result("in_jax.system", on_toy("optax").to_json(), seconds=0.01)["error"]


@pytest.mark.long("starts processes")
def test_a_worker_is_heard_among_what_others_print(tmp_path, monkeypatch):
    """Also what it said before it was stopped; and its children end with it."""
    folder, alive = tmp_path / "benchmarks", tmp_path / "alive"
    (folder / "harness").mkdir(parents=True)
    shutil.copy(workers.ROOT / "benchmarks/harness/machine.py", folder / "harness")
    (folder / "harness/cases.py").write_text("Case = None")
    (folder / "loud.py").write_text(
        "import fcntl, os, subprocess, sys, time\n"
        "from benchmarks.harness.machine import say\n"
        "print('[2026-01-01] [INFO] a log', flush=True)\n"
        f"lock = open({str(alive)!r}, 'w')\n"  # unlocked when both have ended
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "os.set_inheritable(lock.fileno(), True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], close_fds=False)\n"
        "say({'rate': 1})\n"
        "print('{not json', flush=True)\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(workers, "ROOT", tmp_path)
    began = time.monotonic()
    assert workers.lines("loud", seconds=15) == ([{"rate": 1}], "not done after 15.0 s")
    with alive.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert time.monotonic() - began < 1800  # the child, which had the pipe open, would have kept both for an hour


@pytest.mark.parametrize(
    ("stopped", "expected"), [(5.0, ["optax", "usual recipe"]), (900.0, ["usual recipe", "optax"])]
)
def test_what_was_stopped_waits_where_there_is_no_more_time_now(stopped, expected, tmp_path, monkeypatch):
    toy = {c.system: c for c in systems.toy() if c.scans == 0 and not c.clip}
    Store(tmp_path / "x.json", "cpu").put(toy["optax"], {"error": f"{workers.LATE} {stopped} s"})
    ran = []
    monkeypatch.setattr(workers, "run_case", lambda case, *_: ran.append(case.system) or {"error": "no"})
    arguments = ["--toy", "--parts", "cases", "--clip", "no", "--scans", "0", "--case-seconds", "600"]
    run.main([*arguments, "--only", "^optax$", "--only", "^usual", "--out", str(tmp_path / "x.json")])
    assert ran == expected


def test_a_cpu_is_not_taken_for_an_accelerator(tmp_path):
    with pytest.raises(SystemExit, match="--toy"):
        run.main(["--out", str(tmp_path / "x.json")])


def test_results_are_whole_whenever_the_run_ends(tmp_path, monkeypatch):
    store = Store(tmp_path / "x.json", "a device")
    store.put(on_toy("optax"), {"error": "no"})
    before = store.path.read_text()
    monkeypatch.setattr("benchmarks.harness.store.markdown", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.put(on_toy("optax"), {"error": "yes"})
    assert store.path.read_text() == before
    assert Store(store.path, "a device").entry(on_toy("optax"))["result"] == {"error": "no"}


def test_a_case_that_fails_says_why():
    bad = dataclasses.replace(on_toy("jax_offload"), options={"offload": True, "fraction": 2.0})
    assert "fraction" in workers.result("in_jax.system", bad.to_json(), seconds=120)["error"]


@pytest.mark.long("compiles for an H200")
def test_compiled_figures():
    require(H200)
    names = ("jax_offload", "optax", "jax_offload, jo.jit", "jax_offload, jo.pipelined, gradients on the host")
    ours, plain, jitted, turned = (compiled.run(H200, on_toy(system)) for system in names)
    assert ours["host_bytes"] >= ours["host_state_bytes"] > 0 == plain["host_bytes"]
    assert ours["loaded_bytes"] == ours["stored_bytes"] == ours["host_state_bytes"]
    assert jitted["host_state_bytes"] == turned["host_state_bytes"] == ours["host_state_bytes"]
    assert ours["host_state_bytes"] <= jitted["loaded_bytes"] <= 1.5 * ours["host_state_bytes"]  # a row or two twice
    assert turned["loaded_bytes"] > jitted["loaded_bytes"]  # gradients too
    assert ours["compiled"] and "not run" in ours["device"]


def test_the_link_is_measured_each_way():
    rows = [*link.run()]
    assert [r["direction"] for r in rows if r["by"] == "jax"] == ["load", "store", "both"]
    assert all(r["bytes_per_second"] > 0 for r in rows)
    assert link.best(rows, "both") == max(r["bytes_per_second"] for r in rows if r["direction"] == "both")


def test_the_most_host_memory_that_is_taken_at_once(monkeypatch):
    available, through = [10, 8, 3, 7], threading.Event()

    def meminfo(name):
        assert name == "MemAvailable"
        left = available.pop(0) if len(available) > 1 else available[0]
        through.set() if left == 7 else None
        return left

    monkeypatch.setattr(workers, "meminfo", meminfo)
    with workers.Watch() as watch:
        assert through.wait(300)
    assert watch.taken == 10 - 3
