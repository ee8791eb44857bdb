"""The plugin that compiles for a GPU that is not there: also where jax has given it up, and where it cannot."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from jax_offload._look import compiled as targets

H200, V5E = targets.target_of("h200"), targets.target_of("v5e:2x2")


@pytest.mark.daily("a plugin that is asked once more, and one that is not")
@pytest.mark.parametrize("target", [H200, V5E])
def test_a_plugin_that_cannot_says_what_to_do(target, monkeypatch):
    """It knows no topologies, also where it has been initialized once more, as only a GPU's is."""
    calls = []

    def describe(platform, **kwargs):
        calls.append(platform)
        raise NotImplementedError(f"topology not implemented for {platform}")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", describe)
    module = types.SimpleNamespace(initialize=lambda: calls.append("initialized"))
    monkeypatch.setitem(sys.modules, targets._CUDA_PLUGIN, module)
    with pytest.raises(ValueError, match=rf"target: .* for {target.name} .*not implemented for .*pip install .*jax=="):
        targets._described(target, target.name)
    assert calls == (["cuda", "initialized", "cuda"] if target is H200 else ["tpu"])


def test_a_topology_that_is_none_names_those_that_are(monkeypatch):
    """libtpu's own words are those of an error of the runtime."""

    def describe(**kwargs):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not divisible by 2x2x1\nmore")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", describe)
    with pytest.raises(ValueError, match=r"target: v5e has no topology '9x9': .*2x2x1\. Known: 1x1, 2x2,"):
        targets._described(targets.target_of("v5e:9x9"), "v5e:9x9")


@pytest.mark.skipif(bool(H200.missing), reason=f"{H200.missing} is not installed: pip install 'jax_offload[aot]'")
def test_a_process_in_which_jax_had_started():
    """Without CUDA's libraries jax gives the plugin up at its start, loudly, and takes the CPU."""
    code = (
        "import jax; jax.devices(); from jax_offload._look.compiled import _devices, target_of;"
        "print(len(_devices(target_of('h200'), 1)))"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", *targets._ENVIRONMENT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "1", ran.stderr[-2000:]


def test_every_gpu_to_compile_for_is_described():
    """With the memory that its figures say. Of one that is not the known ones are named."""
    for name in targets._GPUS:
        text = (Path(targets.__file__).parent / f"{name}.txtpb").read_text()
        assert f"device_memory_size: {int(targets.target_of(name).chip.hbm_bytes)}" in text
    with pytest.raises(ValueError, match=r"cannot compile for 'b200'. Known: a100, h100, h200"):
        targets.target_of("b200")
