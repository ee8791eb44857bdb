"""The plugin that compiles for a GPU that is not there: also where jax has given it up, and where it cannot."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jax_offload as jo
from tests.aot.harness import H200, V5E, require


def look(target):
    return jo.inspect(lambda x: x + 1, jnp.ones(4), target=target)


@pytest.mark.daily("a plugin that is asked once more, and one that is not")
@pytest.mark.parametrize("target", ["a100", "v5p:2x2x1"])  # for which no other test compiles
def test_a_plugin_that_cannot_says_what_to_do(target, monkeypatch):
    """It knows no topologies, also where it has been initialized once more, as only a GPU's is."""
    require(H200 if target == "a100" else V5E)
    jax.devices()  # initializes jax's own plugins
    calls = []

    def describe(platform, **kwargs):
        calls.append(platform)
        raise NotImplementedError(f"topology not implemented for {platform}")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    module = types.SimpleNamespace(initialize=lambda: calls.append("initialized"))
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", module)
    with pytest.raises(ValueError, match=rf"target: .* for {target} .*not implemented for .*pip install .*jax=="):
        look(target)
    assert calls == (["cuda", "initialized", "cuda"] if target == "a100" else ["tpu"])


def test_a_topology_that_is_none_names_those_that_are(monkeypatch):
    """libtpu's own words are those of an error of the runtime."""
    require(V5E)

    def describe(**kwargs):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not divisible by 2x2x1\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with pytest.raises(ValueError, match=r"target: v5e has no topology '9x9': .*2x2x1\. Known: 1x1, 2x2,"):
        look("v5e:9x9")


def test_a_process_in_which_jax_had_started():
    """Without CUDA's libraries jax gives the plugin up at its start, loudly, and takes the CPU."""
    require(H200)
    code = "import jax; jax.devices(); import jax_offload as jo;"
    code += "print(jo.inspect(lambda x: x + 1, jax.numpy.ones(4), target='h200').target)"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_PLATFORMS", "JAX_SKIP_CUDA", "TPU_"))}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == H200, ran.stderr[-2000:]


def test_every_gpu_to_compile_for_is_described():
    """With the memory that its figures say. Of one that is not the known ones are named."""
    described = {path.stem: path.read_text() for path in Path(jo.__file__).parent.glob("*/*.txtpb")}
    assert {*described} == {"a100", "h100", "h200"}
    for name, text in described.items():
        assert f"device_memory_size: {int(jo.chip(name).hbm_bytes)}" in text
    with pytest.raises(ValueError, match=r"cannot compile for 'b200'. Known: a100, h100, h200"):
        look("b200")
