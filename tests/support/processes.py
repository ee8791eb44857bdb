"""Several processes of this machine, each with a part of the devices."""

import os
import socket
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES, SECONDS = 4, 600
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "TPU_", "MEGASCALE_", "JAX_", "XLA_FLAGS")


def start(folder, processes, module, arguments):
    """Processes of a module in tests/support, which say what they do in files.

    ``arguments(i, port)``: of process ``i``, its arguments and its own variables of the environment.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and "_proxy" not in k.lower()}
    # Compiling is most of the time, and every process compiles.
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes} --xla_backend_optimization_level=0"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    inherited |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "XLA_FLAGS": flags}
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    children = []
    for i in range(processes):
        own, env = arguments(i, port)
        command = [sys.executable, "-m", f"tests.support.{module}", *map(str, own)]
        with (folder / f"{i}.log").open("w") as log:
            children.append(subprocess.Popen(command, env=inherited | env, stdout=log, stderr=log, cwd=ROOT))
    return children


def ended(folder, children, *, killed=False):
    """Return what each process has said. If one fails, the others would wait for it, and are killed after a while."""
    with futures.ThreadPoolExecutor(len(children)) as pool:
        waits = [pool.submit(child.wait) for child in children]
        try:
            for done in futures.as_completed(waits, timeout=SECONDS):
                if done.result():
                    break
            futures.wait(waits, timeout=5)
            codes = [child.poll() for child in children]
        finally:
            for child in children:  # a pool waits for its threads, and they wait for the processes
                child.kill()
    said = [(folder / f"{i}.log").read_text() for i in range(len(children))]
    if not killed and any(code != 0 for code in codes):
        pytest.fail("\n".join(f"--- exit status {c}\n{text[-4000:]}" for c, text in zip(codes, said, strict=True)))
    return said
