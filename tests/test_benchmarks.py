"""Each benchmark's command runs on a toy, and says what it found. Speed and memory are for hardware to tell."""

import dataclasses
import importlib.util
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from benchmarks import run
from benchmarks.compiled import figures
from benchmarks.disk import __main__ as disk
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import conduct, donation, summary, values, where
from benchmarks.harness import systems, workers
from benchmarks.harness.cases import SHAPES, Shape
from benchmarks.harness.report import markdown
from benchmarks.in_jax import paired, rewriting
from benchmarks.in_jax import system as jax_system

TOY = SHAPES["toy"]


def on_toy(system, scans=1, **kwargs):
    return systems.case(systems.SYSTEMS[system], TOY, 64, scans=scans, clip=True, warmup=1, steps=3, **kwargs)


@pytest.mark.long("starts processes")
def test_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    arguments = ["--toy", "--parts", "cases", "--clip", "no", "--scans", "0", "--out", str(out)]
    arguments += ["--only", "^optax$"]
    run.main(arguments)
    entries = json.loads(out.read_text())["cases"]
    assert [e["case"]["system"] for e in entries] == ["optax"] and len(entries[0]["result"]["losses"]) == 5
    monkeypatch.setattr(workers, "run_case", lambda case, *_: pytest.fail(f"{case.system} is run again"))
    run.main(arguments)
    assert json.loads(out.read_text())["cases"] == entries
    with pytest.raises(SystemExit, match="--toy"):  # a CPU is not taken for an accelerator
        run.main(["--out", str(out)])


@pytest.mark.long("trains each system")
def test_every_system_of_jax_trains_as_the_resident_one():
    resident = jax_system.run(on_toy("optax"))
    for system in ("usual recipe", "jax_offload, fraction 0.5", "jax_offload, jo.jit", "jax_offload, int8 state"):
        result = jax_system.run(on_toy(system))
        np.testing.assert_allclose(result["losses"], resident["losses"], rtol=1e-3 if "int8" in system else 1e-6)
        assert result["host_state_bytes"] > 0 == resident["host_state_bytes"]


@pytest.mark.long("compiles for an H200")
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax-cuda13-plugin")
def test_compiled_figures():
    ours, plain = (figures.run("h200", on_toy(system)) for system in ("jax_offload", "optax"))
    assert ours["host_bytes"] >= ours["host_state_bytes"] > 0 == plain["host_bytes"]
    assert ours["loaded_bytes"] == ours["stored_bytes"] == ours["host_state_bytes"]
    assert ours["compiled"] and "not run" in ours["device"]


def test_the_table_says_what_was_compiled_and_what_was_slower():
    def entry(system, seconds, **result):
        case = systems.case(systems.SYSTEMS[system], SHAPES["1.3b"], 16384, scans=0, clip=True)
        return {"case": dataclasses.asdict(case), "result": {"step_seconds": [seconds], **result}}

    moved = {"loaded_bytes": 10**10, "stored_bytes": 10**10}
    only_compiled = {"compiled": True, "device_peak_bytes": 3 << 30, "hidden": 0.5, "duplex": 0.9, **moved}
    about = {"device": "a GPU", "date": "a day", "command": "a command", "machine": "a machine"}
    measured = [entry("optax", 1.0), entry("jax_offload", 1.22, copying_seconds=0.21, **moved)]
    text = markdown({"about": about, "link": [], "cases": measured})
    assert "| jax_offload | 1,220 (1,220–1,220) | +22.0% |" in text
    text = markdown({"about": about, "link": [], "cases": [{**measured[1], "result": only_compiled}]})
    failed = {**measured[1], "result": {"error": "no reason"}}
    assert "| jax_offload | did not run: no reason |" in markdown({"about": about, "link": [], "cases": [failed]})
    assert "| jax_offload |  |  | 3.0 |" in text and "10.0 + 10.0; 50%, 90%" in text


@pytest.mark.parametrize("by_fio", [False, True])
def test_disk(by_fio, tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"a file here cannot be opened with O_DIRECT: {error}")
    (tmp_path / "direct").unlink()
    monkeypatch.setattr(disk, "has_fio", lambda: by_fio)
    monkeypatch.setattr(disk, "fio", disk.ours)
    options = ["--mib", "64", "--group", "16", "--leaf", "8", "--pairs", "2", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["disk", "--directory", str(tmp_path), *options])
    disk.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["kind"] for row in found["rows"]] == ["both", "read", "write", "device longer"]
    ways = {"store", "plain", "fio"} if by_fio else {"store", "plain"}
    for row in found["rows"][:3]:
        assert {name: len(rates) for name, rates in row["bytes_per_second"].items()} == dict.fromkeys(ways, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.long("starts processes")
def test_steps_in_turn(monkeypatch):
    for name, n in {"LAYERS": 3, "WIDTH": 128, "TOKENS": 8}.items():
        monkeypatch.setattr(paired, name, n)
    found = paired.rounds(paired.systems(True, True), 2)
    assert len(found) == 2 and len(found[0]) == 5
    assert paired.summary(found, "resident", "resident")["median"] == 1
    monkeypatch.setattr(rewriting, "SHAPE", Shape(1, 16, 1, vocab=16, context=4))
    found = rewriting.row("toy", rewriting.in_turn(1, optax.sgd(1e-3), 1))
    assert found["ratio"] > 0 and set(found["seconds"]) == {"jax.jit", "jo.jit"}


# ---- make gpu


@pytest.fixture
def no_other_device(monkeypatch):
    monkeypatch.setattr(workers, "device", lambda: ("cpu", "cpu"))


@pytest.mark.long("each part of make gpu, on a toy")
def test_gpu_runs_each_part_and_goes_on(tmp_path, monkeypatch, no_other_device):
    out = tmp_path / "results.json"
    only = "^AdamW; (unrolled; default|host)$|^TrainState -> grads, TrainState; fraction 0.5$|^1 MiB$|^seed 1$"
    only += r"|^placement; jo.jit$|^stacked layers \(lax.scan\); (offloaded|resident)$"
    arguments = ["--toy", "--only", only, "--out", str(out)]
    assert gpu.main(arguments) == 0
    data = json.loads(out.read_text())
    found = summary.by_part(data)
    assert {part: len(cases) for part, cases in found.items()} == {**dict.fromkeys(gpu.PARTS, 1), "steps": 2}
    assert not summary.wrong(data) and not summary.failed(data) and not data["left"]
    text = out.with_suffix(".md").read_text()
    assert "Wrong: nothing." in text and all(f"## {part.capitalize()}" in text for part in gpu.PARTS)
    monkeypatch.setattr(conduct, "Worker", None)  # nothing is run again
    assert gpu.main(arguments) == 0
    assert json.loads(out.read_text())["cases"] == data["cases"]


@pytest.mark.parametrize(("result", "code"), [({"wrong": ["x is 2"]}, 1), ({"error": "no"}, 3), ({"apart": 0.0}, 0)])
def test_gpus_exit_code_says_what_was_wrong(result, code, tmp_path, monkeypatch, no_other_device):
    monkeypatch.setattr(conduct, "results", lambda part, names, **_: [(names[0], result)])
    out = tmp_path / "results.json"
    assert gpu.main(["--toy", "--parts", "donation", "--out", str(out)]) == code
    assert json.loads(out.read_text())["left"]["donation"] == donation.cases(True)[1:]


def test_gpu_notices_wrong_numbers_and_places(monkeypatch):
    nan = float("nan")
    assert values.judged({"w": 1e-7}, [1.0, 1e-6], [], values.LEAF) == []
    for first, losses, misplaced in (
        ({"w": 1e-3}, [0.0], []),
        ({"w": nan}, [0.0], []),
        ({}, [nan], []),
        ({}, [0], ["w"]),
    ):
        assert len(values.judged(first, losses, misplaced, values.LEAF)) == 1
    step, n = optax.apply_updates, []  # the donated step takes a larger step than the one without donation

    def apply_updates(params, updates):
        n.append(())
        return step(params, jax.tree.map(lambda u: u * len(n), updates))

    monkeypatch.setattr(donation.optax, "apply_updates", apply_updates)
    assert "apart" in donation.run("state -> params, state; fraction 1.0", True)["wrong"][0]
    host = jax.device_put(jnp.ones(4), jax.memory.Space.Host)
    assert where.misplaced({"a": host}, {"a": jnp.ones(4)}) == ["a: pinned_host"]
    monkeypatch.setattr(where, "by_driver", lambda _: "device")
    assert where.misplaced({"a": host}, {"a": host}) == ["a: pinned_host, in device by the driver"]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the XLA of jax 0.10 copies them still")
@pytest.mark.parametrize("turned", [False, True])
def test_no_stack_is_copied_on_a_cpu(turned, monkeypatch):
    """Each would be, in every iteration: in a step of 8 layers a seventh of its time."""
    for name, n in {"LAYERS": 3, "WIDTH": 128, "TOKENS": 8}.items():
        monkeypatch.setattr(paired, name, n)
    tx = jo.offload(paired.CLIPPED if turned else paired.ADAMW)
    params, x = paired.parameters(True), jnp.ones((paired.TOKENS, paired.WIDTH))
    step, args = jo.jit(paired.step_of(tx), donate_argnums=(0, 1)), (params, tx.init(params), x)
    if turned:
        train = jo.pipelined(paired.step_of(tx), donate_argnames=("params", "state"))
        carry, _ = train(args[:-1], args[-1])
        step, args, _ = train.turned(carry, x)
    text = step.lower(*args).compile().as_text()
    stack = rf"f32\[{paired.LAYERS},{paired.WIDTH},{paired.WIDTH}\]"
    bodies = [part for part in re.split(r"\n(?=\S)", text) if not part.startswith("ENTRY")]
    assert any(re.search(stack, body) for body in bodies)
    assert not [line for body in bodies for line in body.splitlines() if re.search(rf"= {stack}\S* copy\(", line)]
