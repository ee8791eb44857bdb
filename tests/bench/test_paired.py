"""Steps in turn on this CPU: that every system runs, and that the rewritten one copies no stack of rows."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_offload as jo
from benchmarks.harness.cases import Shape
from benchmarks.in_jax import paired, rewriting


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, n in {"LAYERS": 3, "WIDTH": 128, "TOKENS": 8}.items():
        monkeypatch.setattr(paired, name, n)


@pytest.mark.long("starts processes")
@pytest.mark.parametrize("stacked", [True, False])
def test_every_system_runs(stacked):
    found = paired.rounds(paired.systems(stacked, True), 2)
    assert len(found) == 2 and len(found[0]) == 5
    one = paired.summary(found, "jo.pipelined", "resident")
    assert 0 < one["tenth"] <= one["median"] <= one["nine_tenths"]
    assert paired.summary(found, "resident", "resident")["median"] == 1


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the XLA of jax 0.10 copies them still")
@pytest.mark.parametrize("turned", [False, True])
def test_no_stack_is_copied_on_a_cpu(turned):
    """Each would be, in every iteration: in a step of 8 layers a seventh of its time."""
    tx = jo.offload(paired.CLIPPED if turned else paired.ADAMW)
    params, x = paired.parameters(True), jnp.ones((paired.TOKENS, paired.WIDTH))
    step, args = jo.jit(paired.step_of(tx), donate_argnums=(0, 1)), (params, tx.init(params), x)
    if turned:
        train = jo.pipelined(paired.step_of(tx), donate_argnames=("params", "state"))
        carry, _ = train.start(*args)
        step, args, _ = train.turned(carry, x)
    text = step.lower(*args).compile().as_text()
    stack = rf"f32\[{paired.LAYERS},{paired.WIDTH},{paired.WIDTH}\]"
    bodies = [part for part in re.split(r"\n(?=\S)", text) if not part.startswith("ENTRY")]
    assert any(re.search(stack, body) for body in bodies)
    assert not [line for body in bodies for line in body.splitlines() if re.search(rf"= {stack}\S* copy\(", line)]


@pytest.mark.long("compiles a GPT four times")
def test_what_rewriting_costs_is_measured(monkeypatch):
    monkeypatch.setattr(rewriting, "SHAPE", Shape(1, 16, 1, vocab=16, context=4))
    found = rewriting.row("toy", rewriting.in_turn(1, optax.sgd(1e-3), 1))
    assert found["ratio"] > 0 and set(found["seconds"]) == {"jax.jit", "jo.jit"}
