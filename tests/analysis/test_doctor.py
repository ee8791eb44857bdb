"""The doctor: what each of its checks says, and how far it goes; its exit code and what to do next."""

import json
import platform
from types import SimpleNamespace

import jax
import jaxlib
import optax
import pytest

import jax_offload as jo
from jax_offload._analysis import chips
from jax_offload._analysis import cli as doctor
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
    assert found["next_step"] == "run it where the accelerator is"
    expected = [f"Python {platform.python_version()}", f"jax_offload {jo.__version__}"]
    expected += [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, optax)]
    assert found["checks"][0] == {"name": "versions", "kind": "ok", "says": ", ".join(expected), "next": ""}
    assert found["ok"] and [check["name"] for check in found["checks"]][-1] == "self-test"
    assert "no accelerator" in found["checks"][1]["says"]
    assert "of the host's memory for each device" in found["checks"][-2]["says"]
    assert "verdict: this machine can offload; mind: devices" in run("doctor").stdout


def device(kinds=("device", "pinned_host"), platform="gpu", limit=60 * GIB):
    """What the doctor asks of one."""
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    stats = {"bytes_limit": limit} if limit else None
    return SimpleNamespace(
        addressable_memories=lambda: memories, platform=platform, device_kind="X", memory_stats=lambda: stats
    )


def said(check):
    return check.name, check.kind, check.says, check.next


def test_the_doctor_s_devices(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert said(doctor._devices(device())) == ("devices", "ok", "2 × X, platform gpu, 60.0 GiB each for jax", "")
    assert doctor._devices(device(limit=None)).says == "2 × X, platform gpu"


def test_the_doctor_s_memories():
    """A device without pinned host memory is what nothing helps with but another jax."""
    assert said(doctor._kinds(device())) == ("memories", "ok", "device, pinned_host", "")
    assert said(doctor._kinds(device(("device", "unpinned_host")))) == (
        "memories", "bad", "device, unpinned_host: no pinned_host", "use a jax with pinned_host memory: 0.10 on"
    )  # fmt: skip


@pytest.fixture
def files(monkeypatch, tmp_path):
    """Writes the kernel's files, which the doctor reads: what is available, and what the cgroup has and uses."""

    def write(available=None, limit=None, used=0, cache=0):
        group = tmp_path / "sys/fs/cgroup/job"
        for folder in (tmp_path / "proc/self", group):
            folder.mkdir(parents=True, exist_ok=True)
        kernel = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n" if available else ""
        (tmp_path / "proc/meminfo").write_text(kernel)
        (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
        (group / "memory.max").write_text("max" if limit is None else str(limit))
        (group / "memory.current").write_text(str(used))
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")

    real = chips.host_memory
    monkeypatch.setattr(doctor, "host_memory", lambda: real(tmp_path))
    return write


def test_the_doctor_s_host_memory(files):
    """What the kernel has, and what the cgroup leaves of it: what caches files is given back."""
    files(200 * GIB, 64 * GIB, used=50 * GIB, cache=16 * GIB)
    assert said(doctor._host_memory()) == ("host memory", "ok", "200 GiB available, 30.0 GiB left by the cgroup", "")
    files(200 * GIB)
    assert doctor._host_memory().says == "200 GiB available"
    files()
    assert said(doctor._host_memory()) == ("host memory", "note", "not known", "")


def test_the_doctor_s_pool(files):
    """On a GPU XLA pins no more than the pool has; more than twice of it are there, and are not used."""
    files(200 * GIB)
    variable, small = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", doctor._pool(device())
    assert said(small) == (
        "pinned pool", "note", f"64.0 GiB in a process ({variable}), of 200 GiB that are there",
        f"set {variable} to what the state needs and a third more, before jax starts",
    )  # fmt: skip
    report = doctor.Report((doctor._kinds(device()), small)).to_dict()
    assert (report["verdict"], report["next_step"]) == ("this machine can offload; mind: pinned pool", small.next)
    assert "no limit of XLA's on this platform" in doctor._pool(device(platform="tpu")).says
    files(200 * GIB, 128 * GIB)  # the cgroup leaves no more
    assert doctor._pool(device()).kind == "ok"


def test_the_doctor_goes_no_further_where_nothing_can_work(monkeypatch):
    """No device; one without pinned host memory; a pool that is no number: an exit code, and nothing runs."""
    ran = []
    monkeypatch.setattr(doctor, "_link", ran.append)
    monkeypatch.setattr(doctor, "_self_test", ran.append)
    monkeypatch.setattr(jax, "local_devices", lambda: [device(("device",))])
    done = run("doctor")
    assert done.exit_code == 7 and "cannot offload yet: memories\nnext: use a jax with pinned_host" in done.stdout
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "much")
    done = run("doctor")
    assert done.exit_code == 7 and "pinned pool\nnext: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to a number" in done.stdout

    def none():
        raise RuntimeError("Unknown backend: 'tpu'")

    monkeypatch.setattr(jax, "local_devices", none)
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["ok"], found["next_step"]) == (7, False, "install jax for this machine")
    assert found["checks"][-1]["says"] == "jax finds none: Unknown backend: 'tpu'" and not ran


@pytest.mark.long("starts processes")
@pytest.mark.usefixtures("quick_to_measure")
def test_the_doctor_tells_what_does_not_work(monkeypatch):
    """A state that stays on the device; numbers that differ; an error."""
    monkeypatch.setattr(doctor, "offload", lambda inner: inner)
    assert "the state ended in" in doctor.examine().checks[-1].says
    monkeypatch.setattr(doctor, "offload", lambda inner: jo.offload(optax.adamw(2e-3)))
    assert "differ from the resident ones" in doctor.examine().checks[-1].says
    monkeypatch.setattr(doctor, "offload", lambda inner: 1 / 0)
    assert "ZeroDivisionError" in doctor.examine().checks[-1].says
    assert run("doctor").exit_code == 7


def test_numbers_that_are_nan_do_not_pass_the_doctor(monkeypatch):
    broken = optax.chain(optax.adamw(1e-3), optax.scale(float("nan")))
    monkeypatch.setattr(doctor, "offload", lambda inner: jo.offload(broken))
    monkeypatch.setattr(doctor, "STEPS", 1)
    check = doctor._self_test(jax.devices()[0])
    assert check.kind == "bad" and "differ from the resident ones by nan" in check.says
