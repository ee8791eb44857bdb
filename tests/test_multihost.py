"""Several processes on this machine, each with a part of the devices, train as one process with all of them does."""

import json
import math

import numpy as np
import pytest

from tests.support import processes

SMALL = "--model test --batch 8 --context 32 --steps 3 --fsdp 2 --window 65536".split()


def by_arguments(port, many, i):
    """How to start process ``i`` where jax does not know the cluster: arguments, environment."""
    return ["--coordinator", f"localhost:{port}", "--processes", str(many), "--process-id", str(i)], {}


def by_slurm(port, many, i):
    """How SLURM's ``srun`` does: by variables of the environment, which jax reads."""
    step = {
        "JOB_ID": 1,
        "STEP_NODELIST": "localhost",
        "STEP_NUM_NODES": 1,
        "NTASKS": many,
        "PROCID": i,
        "LOCALID": i,
    }
    return ["--cluster", "auto"], {f"SLURM_{k}": str(v) for k, v in step.items()} | {"JAX_COORDINATOR_PORT": str(port)}


def start(folder, many, launcher, *args):
    """Return what each of ``many`` processes of tests/support/multihost.py reports."""

    def report(i):
        return folder / f"{i}-of-{many}.json"

    def arguments(i, port):
        joining, env = launcher(port, many, i) if many > 1 else ([], {})
        return [report(i), *args, *joining], env

    processes.ended(folder, processes.start(folder, many, "multihost", arguments))
    return [json.loads(report(i).read_text()) for i in range(many)]


def parts(row, mesh):
    """Into how many parts a leaf is cut, by its spec."""
    return math.prod(mesh[name] for names in row["spec"] for name in names)


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("zero1", [False, True], ids=["fsdp", "zero1"])
def test_processes_train_as_one(tmp_path, zero1):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(1000)))
    args = ["--data", text, "--losses", tmp_path / "losses.json"]
    args += ["--zero1", "--window", "32768"] * zero1  # smaller shards: a smaller window, for them to stream in chunks
    args = [*SMALL, *args]
    [alone] = start(tmp_path, 1, None, *args)
    assert len(alone["losses"]) == 3 and alone["losses"][-1] < alone["losses"][0] - 0.2
    assert alone["mesh"] == {"data": 2, "fsdp": 2}
    check_placement(alone, zero1)
    for many, launcher in [(2, by_slurm)] if zero1 else [(2, by_slurm), (4, by_arguments)]:
        reports = start(tmp_path, many, launcher, *args)
        assert json.loads((tmp_path / "losses.json").read_text()) == reports[0]["losses"]
        for i, outcome in enumerate(reports):
            assert (outcome["process"], outcome["processes"], outcome["devices"]) == (i, many, [4, 4 // many])
            np.testing.assert_allclose(outcome["losses"], alone["losses"], rtol=1e-6)
            assert outcome["placement"] == alone["placement"]
            for tree in ("params", "state", "eager init", "back on the host"):
                assert without_held(outcome[tree]) == without_held(alone[tree])
            check_placement(outcome, zero1)


def without_held(tree):
    return {path: {k: v for k, v in row.items() if k != "held"} for path, row in tree.items()}


def check_placement(outcome, zero1):
    """What one process sees: every leaf is in its memory, with its parameter's sharding, and is held in full."""
    assert outcome["compiled again"] == 0
    assert "chunks" in outcome["placement"]
    assert outcome["eager init"] == outcome["back on the host"] == outcome["state"]
    here = outcome["devices"][1]
    hosts = [path for path, row in outcome["state"].items() if row["kind"] == "pinned_host"]
    assert len(hosts) == 10  # mu and nu of the five parameters that have 64 KiB
    assert {row["kind"] for row in outcome["params"].values()} == {"device"}
    for path, row in [*outcome["params"].items(), *outcome["state"].items()]:
        assert (row["kind"] == "pinned_host") == (path in outcome["state"] and row["bytes"] >= 2**16)
        assert row["held"] * parts(row, outcome["mesh"]) == row["bytes"] * here
    for path in hosts:
        [param] = [p for name, p in outcome["params"].items() if path.endswith(name)]
        assert parts(param, outcome["mesh"]) == 2
        if zero1:
            assert parts(outcome["state"][path], outcome["mesh"]) == 4
        else:
            assert outcome["state"][path]["spec"] == param["spec"]
