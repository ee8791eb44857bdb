"""The doctor: what it says of a machine, and how far it goes; its exit code."""

import json
import platform
from types import SimpleNamespace

import jax
import jaxlib
import optax
import pytest

import jax_offload as jo
from jax_offload._look import chips
from jax_offload._look import cli as doctor
from tests.analysis.test_cli import run

GIB = 2**30


@pytest.fixture
def quick_to_measure(monkeypatch):
    monkeypatch.setattr(chips, "ARRAY", 2**20)


@pytest.mark.usefixtures("quick_to_measure")
def test_the_doctor():
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    expected = [f"Python {platform.python_version()}", f"jax_offload {jo.__version__}"]
    expected += [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, optax)]
    assert [*found["checks"]] == ["versions", "devices", "host memory", "link", "self-test"]
    assert found["ok"] and found["checks"]["versions"] == ", ".join(expected)
    assert "no accelerator" in found["checks"]["devices"]
    assert "a process pins 64.0 GiB" in found["checks"]["host memory"]
    assert "none on a CPU; the cores reach" in found["checks"]["link"]
    assert "with the state in host memory" in found["checks"]["self-test"]
    assert "verdict: this machine can offload\n" in run("doctor").stdout


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {"available": 200 * GIB, "limit": 64 * GIB, "used": 50 * GIB, "cache": 16 * GIB},
            30 * GIB,
        ),  # caches are freed
        ({"available": 20 * GIB, "limit": 64 * GIB}, 20 * GIB),
        ({"available": 200 * GIB}, 200 * GIB),
        ({}, None),
    ],
)
def test_the_host_s_memory(tmp_path, files, left):
    """What the kernel has available, and what the cgroup leaves of its limit."""
    group = tmp_path / "sys/fs/cgroup/job"
    for folder in (tmp_path / "proc/self", group):
        folder.mkdir(parents=True)
    available = files.get("available")
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {(available or 0) // 1024} kB\n" * bool(files)
    )
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (group / "memory.max").write_text(str(files.get("limit", "max")))
    (group / "memory.current").write_text(str(files.get("used", 0)))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {files.get('cache', 0)}\n")
    assert chips.host_memory(tmp_path) == left


def test_the_doctor_goes_no_further_where_nothing_can_work(monkeypatch):
    """No device; one without pinned host memory; a pool that is no number: the reason and an exit code."""
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "much")
    done = run("doctor")
    assert done.exit_code == 7
    assert "cannot offload: ValueError: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB: expected a number of GiB" in done.stdout
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")

    def none():
        raise RuntimeError("Unknown backend: 'tpu'")

    monkeypatch.setattr(jax, "local_devices", none)
    found = json.loads(run("doctor", "--json").stdout)
    assert not found["ok"] and [*found["checks"]] == ["versions"]
    assert found["verdict"] == "this machine cannot offload: RuntimeError: Unknown backend: 'tpu'"
    card = SimpleNamespace(
        addressable_memories=lambda: [SimpleNamespace(kind="device")],
        platform="gpu",
        device_kind="X",
        memory_stats=lambda: {"bytes_limit": 60 * GIB},
    )
    monkeypatch.setattr(jax, "Device", SimpleNamespace)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["checks"]["devices"]) == (7, "2 × X, platform gpu, 60.0 GiB each for jax")
    assert "has no 'pinned_host' memory, only ['device']" in found["verdict"]


BROKEN = optax.chain(optax.adamw(1e-3), optax.scale(float("nan")))
FAULTS = {
    "nothing that this step is given is in host memory": lambda inner: inner,
    "differ from the resident ones": lambda inner: jo.offload(optax.adamw(2e-3)),
    "differ from the resident ones by nan": lambda inner: jo.offload(BROKEN),
    "ZeroDivisionError": lambda inner: 1 / 0,
}


@pytest.mark.usefixtures("quick_to_measure")
@pytest.mark.parametrize("says", FAULTS)
def test_the_doctor_tells_what_does_not_work(says, monkeypatch):
    monkeypatch.setattr(doctor, "offload", FAULTS[says])
    done = run("doctor", "--json")
    assert done.exit_code == 7 and says in json.loads(done.stdout)["verdict"]
