"""``make gpu`` runs, resumes and notices what is wrong, on a toy: what a GPU says is for a GPU."""

import gzip
import json
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import conduct, donation, driven, link, record, steps, summary, values, where
from benchmarks.harness import workers
from benchmarks.in_jax import system

ONE_EACH = "^AdamW; (unrolled; default|host)$|^TrainState -> grads, TrainState; fraction 0.5$|^1 MiB$"
ONE_EACH += "|^seed 1$|^placement; jo.jit$"
TWO_WAYS = r"^stacked layers \(lax.scan\); (offloaded|resident)$"


@pytest.fixture(scope="module", autouse=True)
def no_other_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "device", lambda: ("cpu", "cpu"))
        yield


@pytest.mark.long("each part of make gpu, on a toy")
def test_one_command_runs_each_part_and_goes_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    arguments = ["--toy", "--only", f"{ONE_EACH}|{TWO_WAYS}", "--out", str(out)]
    assert gpu.main(arguments) == 0
    data = json.loads(out.read_text())
    found = summary.by_part(data)
    assert {part: len(cases) for part, cases in found.items()} == {
        "values": 1,
        "donation": 1,
        "random": 1,
        "reports": 1,
        "link": 1,
        "steps": 2,
        "driven": 1,
    }
    assert not summary.wrong(data) and not summary.failed(data) and not data["left"]
    (value,) = found["values"].values()
    assert len(value["losses"]) == values.TOY_STEPS and value["losses_apart"][-1] <= values.LOSS
    assert "pinned_host" in value["memory_kinds"].values() and "params/embed" in value["after_a_step"]
    (offloaded, resident) = found["steps"].values()
    assert offloaded["host_state_bytes"] > 0 == resident["host_state_bytes"]
    assert offloaded["predicted"]["argument_bytes"] > 0 and offloaded["predicted"]["step_seconds"] is None
    assert len(offloaded["step_seconds"]) == steps.TOY_STEPS
    assert data["about"]["command"].startswith("python -m benchmarks.gpu")
    assert data["about"]["versions"].keys() >= {"jax", "optax", "driver"}
    text = out.with_suffix(".md").read_text()
    assert "Wrong: nothing." in text and all(f"## {part.capitalize()}" in text for part in gpu.PARTS)

    monkeypatch.setattr(conduct, "Worker", None)  # nothing is run again
    assert gpu.main(arguments) == 0
    assert json.loads(out.read_text())["cases"] == data["cases"]
    with pytest.raises(TypeError):
        gpu.main([*arguments, "--again"])


@pytest.mark.parametrize(("result", "code"), [({"wrong": ["x is 2"]}, 1), ({"error": "no"}, 3), ({"apart": 0.0}, 0)])
def test_the_exit_code_says_what_was_wrong_and_what_was_left(result, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conduct, "results", lambda part, names, **_: [(names[0], result)])
    out = tmp_path / "results.json"
    assert gpu.main(["--toy", "--parts", "donation", "--out", str(out)]) == code
    left = json.loads(out.read_text())["left"]["donation"]
    assert left == donation.cases(True)[1:]
    said = capsys.readouterr().out
    assert f"no time left for {len(left)} of {len(left) + 1} cases: {left[0]}" in said


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().out.startswith("There is no NVIDIA GPU here") and not list(tmp_path.iterdir())


@pytest.mark.long("trains a toy twice")
def test_the_first_values_are_of_steps_seen_whole():
    first = values.cases(True)[0]
    assert first == "AdamW; stacked; jo.jit"
    result = values.run(first, True)
    assert result["wrong"] == [] and "pinned_host" in result["memory_kinds"].values()


@pytest.mark.exhaustive("more of what tests/pipelined runs", but=["clip*"])
@pytest.mark.long("trains toys, turned round and plain")
@pytest.mark.parametrize(
    "name",
    [
        "clip, AdamW; stacked; jo.pipelined",
        "MultiSteps; unrolled; jo.pipelined",
        "masters, bfloat16 parameters; unrolled; jo.pipelined, gradients on the host",
    ],
)
def test_the_values_of_steps_turned_round(name):
    assert name in values.cases(True) and not any("MultiSteps" in n and "on the host" in n for n in values.cases(True))
    result = values.run(name, True)
    assert result["wrong"] == [] and len(result["losses"]) == values.TOY_STEPS


@pytest.mark.parametrize("way", [steps.JITTED, steps.TURNED])
def test_the_times_of_steps_seen_whole(way):
    result = steps.run(f"stacked, clipping inside offload; {way}", True)
    assert len(result["step_seconds"]) == steps.TOY_STEPS and result["host_state_bytes"] > 0
    assert result["predicted"]["peak_bytes"] > 0


@pytest.mark.long("compiles a step in groups, and a plain one")
@pytest.mark.parametrize("name", ["AdamW; host", "clip, AdamW; host, 0.3", "AdamW; host, stacked", "AdamW; disk"])
def test_the_values_of_driven_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = driven.run(name, True)
    assert name in driven.cases(True) and result["wrong"] == []
    assert len(result["step_seconds"]) == driven.TOY_STEPS and not any(tmp_path.iterdir())
    assert ("disk" if "disk" in name else "pinned_host") in result["memory_kinds"].values()
    assert name != "AdamW; host" or result["leaves_that_stayed_in_their_memory"] == "6 of 6"


def test_a_difference_is_noticed():
    nan = float("nan")
    assert values.judged({"w": 1e-7}, [1.0, 1e-6], [], values.LEAF) == []
    for first, losses, misplaced in (
        ({"w": 1e-3}, [0.0], []),
        ({"w": nan}, [0.0], []),
        ({}, [nan], []),
        ({}, [0], ["w"]),
    ):
        assert len(values.judged(first, losses, misplaced, values.LEAF)) == 1
    assert donation.differences({"a": jnp.ones(2)}, {"a": jnp.array([1.0, 2.0])}) == {"a": 0.5}


def test_a_wrong_step_and_a_wrong_place_are_noticed(monkeypatch):
    """The donated step takes a larger step than the one without donation; a host leaf is called a device's."""
    step, n = donation.optax.apply_updates, []

    def apply_updates(params, updates):
        n.append(())
        return step(params, jax.tree.map(lambda u: u * len(n), updates))

    monkeypatch.setattr(donation.optax, "apply_updates", apply_updates)
    assert "apart" in donation.run("state -> params, state; fraction 1.0", True)["wrong"][0]
    host = jax.device_put(jnp.ones(4), jax.memory.Space.Host)
    assert where.misplaced({"a": host}, {"a": jnp.ones(4)}) == ["a: pinned_host"]
    monkeypatch.setattr(where, "by_driver", lambda _: "device")
    assert where.misplaced({"a": host}, {"a": host}) == ["a: pinned_host, in device by the driver"]


@pytest.mark.long("waits for processes that hang")
def test_what_ends_a_process_or_hangs_does_not_stop_the_rest(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    (folder / "gpu").mkdir(parents=True)
    (folder / "harness").mkdir()
    shutil.copy(workers.ROOT / "benchmarks/harness/machine.py", folder / "harness")
    shutil.copy(workers.ROOT / "benchmarks/gpu/worker.py", folder / "gpu")
    (folder / "harness/cases.py").write_text("Case = None")
    (folder / "gpu/part.py").write_text(
        "import os, time\n"
        "def run(name, toy, programs):\n"
        "    if name == 'dies': os._exit(3)\n"
        "    if name == 'hangs': time.sleep(3600)\n"
        "    if name == 'raises': raise ValueError(name)\n"
        "    return {'toy': toy}\n"
    )
    monkeypatch.setattr(workers, "ROOT", tmp_path)
    names = ["dies", "fine", "raises", "hangs", "last"]
    ends = time.monotonic() + 600
    found = dict(conduct.results("part", names, ends=ends, case_seconds=60, toy=True))
    assert list(found) == names
    assert found["fine"] == found["last"] == {"toy": True}
    assert "exit status 3" in found["dies"]["error"]
    assert found["raises"]["error"] == "ValueError: raises" and "not done after 60 s" in found["hangs"]["error"]
    ends = time.monotonic() + conduct.LEAST_SECONDS + 1
    assert list(conduct.results("part", ["hangs", "fine"], ends=ends, case_seconds=60, alone=True)) == []


def test_the_one_that_waits_opens_no_device_and_needs_no_test_tools():
    """A process that has opened a GPU keeps most of its memory; the environment on one has no pytest."""
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from benchmarks.gpu import __main__, donation, link, steps, values\n"
        "assert all(len(set(m.cases(False))) == len(m.cases(False)) > 0 for m in (donation, link, steps, values))\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=workers.ROOT)


@pytest.mark.parametrize(
    ("status", "kind", "found"), [(0, 1, "pinned_host"), (0, 2, "device"), (0, 4, None), (1, 2, None)]
)
def test_the_driver_is_asked(status, kind, found, monkeypatch):
    """As far as it can be without one: the types of its arguments, and what becomes of its answers."""
    given = []

    class Driver:
        def cuPointerGetAttribute(self, data, attribute, address):
            given.append((attribute, address.value))
            data._obj.value = kind
            return status

    monkeypatch.setattr(where, "driver", Driver)
    x = jnp.ones(4)
    assert where.by_driver(x) == found
    assert given == [(2, x.unsafe_buffer_pointer())]


def test_scheduled_programs_are_kept(tmp_path):
    name = steps.keep("HloModule", tmp_path / "programs", "stacked layers (lax.scan); usual recipe")
    assert name == "stacked-layers-lax-scan-usual-recipe.hlo.txt.gz"
    assert gzip.decompress((tmp_path / "programs" / name).read_bytes()) == b"HloModule"


def test_a_steps_time_is_predicted_where_the_model_knows_the_chip():
    text = "HloModule m\n\nENTRY %main (a: f32[1000,1000]) -> f32[1000,1000] {\n"
    text += "  %a = f32[1000,1000]{1,0} parameter(0)\n  %b = f32[1000,1000]{1,0} negate(%a)\n}\n"
    assert system.predicted_step_seconds(text, "NVIDIA H200") == pytest.approx(2e-6)  # 8 MB at 4 TB/s
    assert system.predicted_step_seconds(text, "NVIDIA GH200 480GB") == pytest.approx(8 / 3.3e6)
    assert system.predicted_step_seconds(text, "NVIDIA L40S") is None


def test_rows_differ_only_where_they_say():
    names = steps.cases(False)
    assert len([n for n in names if n.endswith("; offloaded")]) == len(steps.ROWS) == 5
    assert len([n for n in names if n.endswith("; resident")]) == 4  # where clipping stands is ours alone
    assert link.cases(False)[-1] == link.DRIVER and isinstance(record.versions()["jax"], str)
