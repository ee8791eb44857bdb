"""The doctor: what each of its checks says, and how far it goes; its exit code and what to do next."""

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
    assert found["next_step"] == "run it on the machine with the accelerator"
    expected = [f"Python {platform.python_version()}", f"jax_offload {jo.__version__}"]
    expected += [f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, optax)]
    assert found["checks"][0] == {"name": "versions", "kind": "ok", "says": ", ".join(expected), "next": ""}
    assert found["ok"] and [check["name"] for check in found["checks"]][-1] == "self-test"
    assert "no accelerator" in found["checks"][1]["says"]
    assert "of the host's memory for each device" in found["checks"][-2]["says"]
    assert "verdict: this machine can offload; note: devices" in run("doctor").stdout


def device(kinds=("device",), platform="gpu", limit=60 * GIB):
    """What the doctor asks of one; by default it has no pinned host memory, so that the doctor goes no further."""
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    stats = {"bytes_limit": limit} if limit else None
    return SimpleNamespace(
        addressable_memories=lambda: memories, platform=platform, device_kind="X", memory_stats=lambda: stats
    )


def kernel(root, available=None, limit=None, used=0, cache=0):
    """Write the kernel's files, which the doctor reads: what is available, and what the cgroup has and uses."""
    group = root / "sys/fs/cgroup/job"
    for folder in (root / "proc/self", group):
        folder.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n" if available else "")
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text("max" if limit is None else str(limit))
    (group / "memory.current").write_text(str(used))
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


POOL = "64.0 GiB in a process (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB)"
MORE = "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to 1.4 times what the state needs, before jax starts"


@pytest.mark.parametrize(
    ("given", "files", "devices", "host", "pool"),
    [
        (  # what caches files is given back, and the pool has more than the cgroup leaves
            {}, {"available": 200 * GIB, "limit": 64 * GIB, "used": 50 * GIB, "cache": 16 * GIB},
            "2 × X, platform gpu, 60.0 GiB each for jax", ("ok", "200 GiB available, 30.0 GiB left by the cgroup"),
            ("ok", POOL, ""),
        ),
        (  # on a GPU XLA pins no more than the pool has; more than twice of it are there, and are not used
            {"limit": None}, {"available": 200 * GIB}, "2 × X, platform gpu", ("ok", "200 GiB available"),
            ("note", f"{POOL}, of 200 GiB available", MORE),
        ),
        (
            {"platform": "tpu"}, {}, "2 × X, platform tpu, 60.0 GiB each for jax", ("note", "not known"),
            ("ok", f"XLA sets no limit on this platform; on a GPU {POOL}", ""),
        ),
    ],
    ids=["gpu", "more memory than the pool", "tpu"],
)  # fmt: skip
def test_what_the_doctor_says_of_a_machine(given, files, devices, host, pool, monkeypatch, tmp_path):
    """A device without pinned host memory is what nothing helps with but another jax."""
    kernel(tmp_path, **files)
    real = chips.host_memory
    monkeypatch.setattr(doctor, "host_memory", lambda: real(tmp_path))
    monkeypatch.setattr(jax, "local_devices", lambda: [device(("device", "unpinned_host"), **given)])
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    done = run("doctor", "--json")
    checks = {
        check["name"]: (check["kind"], check["says"], check["next"]) for check in json.loads(done.stdout)["checks"]
    }
    del checks["versions"]
    assert done.exit_code == 7 and checks == {
        "devices": ("ok", devices, ""),
        "memories": ("bad", "device, unpinned_host: no pinned_host", "use a jax with pinned_host memory: 0.10 on"),
        "host memory": (*host, ""),
        "pinned pool": pool,
    }


def test_the_doctor_goes_no_further_where_nothing_can_work(monkeypatch):
    """No device; one without pinned host memory; a pool that is no number: an exit code, and nothing runs."""
    ran = []
    monkeypatch.setattr(doctor, "_link", ran.append)
    monkeypatch.setattr(doctor, "_self_test", ran.append)
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    done = run("doctor")
    assert done.exit_code == 7 and "cannot offload yet: memories\nnext: use a jax with pinned_host" in done.stdout
    monkeypatch.setattr(jax, "local_devices", lambda: [device(("device", "pinned_host"))])
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


BROKEN = optax.chain(optax.adamw(1e-3), optax.scale(float("nan")))
FAULTS = {
    "the state ended in": lambda inner: inner,
    "differ from the resident ones": lambda inner: jo.offload(optax.adamw(2e-3)),
    "differ from the resident ones by nan": lambda inner: jo.offload(BROKEN),
    "ZeroDivisionError": lambda inner: 1 / 0,
}


@pytest.mark.usefixtures("quick_to_measure")
@pytest.mark.parametrize("says", FAULTS)
def test_the_doctor_tells_what_does_not_work(says, monkeypatch):
    monkeypatch.setattr(doctor, "offload", FAULTS[says])
    done = run("doctor", "--json")
    check = json.loads(done.stdout)["checks"][-1]
    assert (done.exit_code, check["kind"]) == (7, "bad") and says in check["says"]
