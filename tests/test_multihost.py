"""Several processes on this machine, each with a part of the devices, train as one process with all of them does."""

import json

import numpy as np
import pytest

from tests.support import processes

SMALL = "--model test --batch 8 --context 32 --steps 3 --fsdp 2 --window 65536".split()


def by_arguments(port, many, i):
    """How to start process ``i`` where jax does not know the cluster: arguments, environment."""
    return ["--coordinator", f"localhost:{port}", "--processes", str(many), "--process-id", str(i)], {}


def by_slurm(port, many, i):
    """How SLURM's ``srun`` does: by variables of the environment, which jax reads."""
    step = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "STEP_NUM_NODES": 1, "NTASKS": many, "PROCID": i, "LOCALID": i}
    return ["--cluster", "auto"], {f"SLURM_{k}": str(v) for k, v in step.items()} | {"JAX_COORDINATOR_PORT": str(port)}


def start(folder, many, launcher, *args):
    """Return what each of ``many`` processes of tests/support/multihost.py reports."""
    reports = [folder / f"{i}-of-{many}.json" for i in range(many)]

    def arguments(i, port):
        joining, env = launcher(port, many, i) if many > 1 else ([], {})
        return [reports[i], *args, *joining], env

    processes.ended(folder, processes.start(folder, many, "multihost", arguments))
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("zero1", [False, True], ids=["fsdp", "zero1"])
def test_processes_train_as_one(tmp_path, zero1):
    """Losses, the table, and every leaf's memory, sharding and bytes on a device are the same."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(1000)))
    args = [*SMALL, "--data", text, "--losses", tmp_path / "losses.json"]
    args += ["--zero1", "--window", "32768"] * zero1  # smaller shards: a smaller window, for them to stream in chunks
    [alone] = start(tmp_path, 1, None, *args)
    losses = alone.pop("losses")
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.2
    assert "chunks" in alone["placement"] and alone["compiled again"] == 0
    assert alone["eager init"] == alone["back on the host"] == alone["state"]
    assert {kind for kind, *_ in alone["params"].values()} == {"device"}
    moments = {path: row for path, row in alone["state"].items() if row[0] == "pinned_host"}
    assert len(moments) == 10  # mu and nu of the five parameters that have 64 KiB
    assert moments.keys() == {path for path, (_, _, nbytes, _) in alone["state"].items() if nbytes >= 2**16}
    for path, (_, axes, nbytes, held) in moments.items():
        [param] = [p for name, p in alone["params"].items() if path.endswith(name)]
        assert 2 * param[3] == nbytes == (4 if zero1 else 2) * held and (zero1 or axes == param[1])
    for many, launcher in [(2, by_slurm)] if zero1 else [(2, by_slurm), (4, by_arguments)]:
        reports = start(tmp_path, many, launcher, *args)
        assert json.loads((tmp_path / "losses.json").read_text()) == reports[0]["losses"]
        for i, outcome in enumerate(reports):
            np.testing.assert_allclose(outcome.pop("losses"), losses, rtol=1e-6)
            assert outcome == alone | {"process": i, "processes": many, "devices": [4, 4 // many]}
