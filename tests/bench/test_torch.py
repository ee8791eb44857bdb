"""The PyTorch side of the benchmark trains the model that the JAX side trains. Speed and memory: on a GPU only."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.harness.cases import ADAMW, MATRICES, SHAPES, Case
from benchmarks.in_jax import gpt
from benchmarks.in_torch import system as torch_system
from examples import _data

torch = pytest.importorskip("torch", reason="the benchmark's rivals: pip install torch")

from benchmarks.in_torch import gpt as gpt_torch  # noqa: E402
from benchmarks.in_torch import rivals as torch_rivals  # noqa: E402

SHAPE = SHAPES["toy"]
CPU = torch.device("cpu")
CASE = Case("torch resident", SHAPE, batch=4, warmup=2, steps=3)
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no CUDA")


@pytest.fixture(scope="module")
def data():
    return _data.load()


def leaf_of(tree, name):
    """The array of the JAX model that is PyTorch's parameter ``name``, as PyTorch has it."""
    if not name.startswith("blocks."):
        return np.asarray(tree[name])
    _, layer, leaf = name.removesuffix(".weight").split(".")
    value = np.asarray(tree[f"block_{int(layer):03d}"][leaf])
    return value.T if leaf in MATRICES else value


def test_first_parameters(monkeypatch):
    """Bit for bit, in pieces that do not divide the rows."""
    monkeypatch.setattr(gpt_torch, "PIECE", 500)
    ours = dict(gpt_torch.build(SHAPE, CPU).named_parameters())
    theirs = gpt.init(SHAPE, scans=0)
    assert len(ours) == len(jax.tree.leaves(theirs))
    assert sum(p.numel() for p in ours.values()) == SHAPE.parameters
    for name, parameter in ours.items():
        value, expected = (np.ascontiguousarray(a) for a in (parameter.detach().numpy(), leaf_of(theirs, name)))
        np.testing.assert_array_equal(value.view(np.uint32), expected.view(np.uint32), err_msg=name)


def test_large_places_and_leaves():
    """Where uint32 arithmetic wraps."""
    places, leaf = np.array([0, 1, 2**28 - 1, 2**28 + 12345]), 130
    x = (places + leaf * 0x9E3779B9).astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    unit = ((x ^ (x >> np.uint32(16))) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)
    expected = unit * np.float32(0.02 * 12**0.5)
    np.testing.assert_array_equal(gpt_torch.uniform(torch.from_numpy(places), leaf).numpy(), expected)


def losses_of_jax(data, clip):
    tx = optax.adamw(**ADAMW)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    params = gpt.init(SHAPE, scans=0)
    state = tx.init(params)
    loss = jax.jit(jax.value_and_grad(partial(gpt.loss, SHAPE, None, jnp.float32)))
    update = jax.jit(tx.update)
    losses = []
    for i in range(CASE.warmup + CASE.steps):
        tokens = jnp.asarray(_data.batch(data, i, CASE.batch, SHAPE.context), jnp.int32)
        value, grads = loss(params, tokens)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("scale", [1, 5])
def test_first_loss_and_gradients(data, scale):
    """Also with larger parameters: at the first ones, whatever bends is still straight."""
    tokens = _data.batch(data, 0, CASE.batch, SHAPE.context)
    model = gpt_torch.build(SHAPE, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1)
    params = jax.tree.map(lambda p: p * scale if p.ndim > 1 else p, gpt.init(SHAPE, scans=0))
    ours = model.loss(torch.from_numpy(tokens.astype(np.int64)))
    ours.backward()
    theirs, grads = jax.value_and_grad(partial(gpt.loss, SHAPE, None, jnp.float32))(
        params, jnp.asarray(tokens, jnp.int32)
    )
    assert ours.item() == pytest.approx(float(theirs), rel=1e-5)
    for name, parameter in model.named_parameters():
        expected = leaf_of(grads, name)
        assert np.linalg.norm(parameter.grad.numpy() - expected) < 1e-5 * np.linalg.norm(expected), name


def test_bfloat16_computes_in_bfloat16(data):
    """Under autocast, and with parameters of that type: near float32, not equal to it."""
    tokens = torch.from_numpy(_data.batch(data, 0, CASE.batch, SHAPE.context).astype(np.int64))
    model = gpt_torch.build(SHAPE, CPU)
    exact = model.loss(tokens).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens)
    loss.backward()
    assert model.embed.grad.dtype == torch.float32
    low = gpt_torch.build(SHAPE, CPU, torch.bfloat16).loss(tokens)
    for value in (loss, low):
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(exact, rel=2e-3)
        assert value.item() != exact


@pytest.mark.parametrize("clip", [False, True])
def test_resident_trains_as_optax_does(data, clip):
    result = torch_system.run(dataclasses.replace(CASE, clip=clip))
    np.testing.assert_allclose(result["losses"], losses_of_jax(data, clip), rtol=1e-4)
    assert len(result["step_seconds"]) == CASE.steps and min(result["step_seconds"]) > 0
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]


def worker(case):
    command = [sys.executable, "-m", "benchmarks.in_torch.system", case.to_json()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


ON_CPU = {
    "FSDP2 CPUOffloadPolicy": pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    # builds its optimizer when it is first used: minutes
    "DeepSpeed ZeRO-Offload": pytest.mark.exhaustive("compiles its optimizer in C++"),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("system", [pytest.param(name, marks=mark) for name, mark in ON_CPU.items()])
def test_rivals_train_as_resident_does(system, clip):
    if system.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed", reason="pip install deepspeed")
    case = dataclasses.replace(CASE, clip=clip)
    # Tolerance: clipping divides by a norm that each adds up in its own order.
    expected = torch_system.run(case)["losses"]
    np.testing.assert_allclose(worker(dataclasses.replace(case, system=system))["losses"], expected, rtol=1e-5)


@WITHOUT_CUDA
@pytest.mark.parametrize("system", sorted(torch_rivals.SYSTEMS.keys() - ON_CPU.keys() - {"torch resident"}))
def test_what_does_not_run_says_why(system):
    module = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "Megatron": "megatron"}[system.split()[0]]
    result = worker(dataclasses.replace(CASE, system=system))
    if importlib.util.find_spec(module) is None:
        package = {"megatron": "megatron-core"}.get(module, module)
        assert result == {"error": f"{module} is missing: pip install {package}"}
    else:
        assert result == {"error": "needs CUDA"}
