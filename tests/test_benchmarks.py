"""Each benchmark's command runs on a toy, and says what it found. Speed and memory are for hardware to tell."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import run, workers
from benchmarks.disk import __main__ as disk
from benchmarks.parts import random, values, where
from benchmarks.report import by_part, markdown


@pytest.fixture
def no_other_device(monkeypatch):
    monkeypatch.setattr(workers, "device", lambda: ("cpu", "cpu"))


@pytest.mark.long("each part of make gpu, on a toy, in processes")
def test_each_part_runs_and_the_next_call_continues(tmp_path, monkeypatch, no_other_device):
    out = tmp_path / "results.json"
    only = "^AdamW; (unrolled; default|host)$|^1 MiB$|^seed 1$"
    only += r"|^placement; jo.jit$|^toy, one scan, 64 tokens; (optax|jax_offload, jo.jit)$"
    arguments = ["--toy", "--only", only, "--out", str(out)]
    assert run.main(arguments) == 0
    data = json.loads(out.read_text())
    found = by_part(data)
    assert {part: len(cases) for part, cases in found.items()} == {**dict.fromkeys(run.PARTS, 1), "steps": 2}
    assert not data["left"]
    text = out.with_suffix(".md").read_text()
    assert "Wrong: nothing.\n\nFailed: nothing." in text and all(
        f"## {part.capitalize()}" in text for part in run.PARTS
    )
    monkeypatch.setattr(workers, "Worker", None)  # nothing is run again
    assert run.main(arguments) == 0
    assert json.loads(out.read_text())["cases"] == data["cases"]


@pytest.mark.parametrize(("result", "code"), [({"wrong": ["x is 2"]}, 1), ({"error": "no"}, 3), ({"apart": 0.0}, 0)])
def test_the_exit_code_says_what_was_wrong(result, code, tmp_path, monkeypatch, no_other_device):
    monkeypatch.setattr(workers, "results", lambda part, names, **_: [(names[0], result)])
    out = tmp_path / "results.json"
    assert run.main(["--toy", "--parts", "random", "--out", str(out)]) == code
    assert json.loads(out.read_text())["left"]["random"] == random.cases(True)[1:]
    assert run.main(["--out", str(out)]) == run.NO_GPU  # a CPU is not taken for an accelerator


def test_the_table_says_what_was_compiled_what_was_slower_and_what_failed():
    seen = {"peak_bytes": 3 << 30, "host_bytes": 5 << 30, "loaded_bytes": 10**10, "stored_bytes": 10**10}
    seen |= {"hidden": 0.5, "step_seconds": 1.1, "exposed_seconds": 0.2}
    measured = {"predicted": seen, "step_seconds": [1.0, 1.2], "median_step_seconds": 1.0, "losses": [7.5]}
    measured |= {"device_peak_bytes": 3 << 30, "profile": {"exposed": 0.25}}
    cases = [("steps", "jo.jit", measured), ("steps", "recipe", {"error": "no reason"})]
    cases += [("compiled", "jo.jit", {"predicted": seen})]
    about = {"device": "a GPU", "date": "a day", "command": "c", "machine": "m", "python": "3", "commit": "1"}
    entries = [{"part": part, "case": case, "result": result} for part, case, result in cases]
    text = markdown({"about": about | {"versions": {}}, "cases": entries, "left": {"steps": ["optax"]}})
    assert "| jo.jit | 1,000.0 (1,000.0–1,200.0) | 1,100.0 (+10%) | 3.00 | 3.00 (+0.0%) | 250.0 | 7.5000 |" in text
    assert "| jo.jit | 3.00 | 5.00 | 10.0 + 10.0 | 50% | 1,100.0 | 200.0 |" in text
    assert "Failed: 1.\n\n- steps, recipe: no reason" in text and "of `steps`: optax." in text


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


def test_wrong_numbers_and_places_are_noticed(monkeypatch):
    nan = float("nan")
    assert values.judged({"w": 1e-7}, [1.0, 1e-6], [], values.LEAF) == []
    for first, losses, misplaced in (
        ({"w": 1e-3}, [0.0], []),
        ({"w": nan}, [0.0], []),
        ({}, [nan], []),
        ({}, [0], ["w"]),
    ):
        assert len(values.judged(first, losses, misplaced, values.LEAF)) == 1
    host = jax.device_put(jnp.ones(4), jax.memory.Space.Host)
    assert where.misplaced({"a": host}, {"a": jnp.ones(4)}) == ["a: pinned_host"]
    monkeypatch.setattr(where, "by_driver", lambda _: "device")
    assert where.misplaced({"a": host}, {"a": host}) == ["a: pinned_host, in device by the driver"]
