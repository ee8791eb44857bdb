"""On a CPU nothing orders transfers, so that XLA compiles a step of many leaves as fast as the plain one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.aot import model

LAYERS, WIDTH = 6, 192


def adamw():
    return optax.adamw(1e-2)


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def parameters():
    rng = np.random.default_rng(0)
    made = {f"layer_{k}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 16, jnp.float32) for k in range(LAYERS)}
    return jax.device_put(made, jax.devices()[0])


def loss(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def step_of(tx):
    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        return jo.update_params(tx, grads, state, params)

    return step


def steps(tx, update, params):
    state = tx.init(params)
    for k in range(3):
        params, state = update(params, state, jnp.full((8, WIDTH), 0.1 * (k + 1)))
    return params, state


@pytest.mark.parametrize("inner", [adamw, clipped])
def test_the_program_has_no_more_loops_and_barriers_than_the_plain_one(inner):
    params, x = parameters(), jnp.ones((8, WIDTH))
    programs = {}
    for name, tx in (("plain", inner()), ("offloaded", jo.offload(inner()))):
        programs[name] = step_of(tx).lower(params, tx.init(params), x).compile().as_text()
    count = {name: [text.count(what) for what in (" while(", " call(", " fusion(")] for name, text in programs.items()}
    assert count["offloaded"] == count["plain"] and count["plain"][:2] == [0, 0]


@pytest.mark.parametrize("inner", [adamw, clipped])
def test_what_is_lowered_for_a_gpu_computes_the_same(inner):
    """Small leaves are updated in a loop there that runs once and overwrites them. Its program runs on a CPU too."""
    tx, params = jo.offload(inner()), parameters()
    step = step_of(tx)
    given = (params, tx.init(params), jnp.ones((8, WIDTH)))
    checks = [jax.export.DisabledSafetyCheck.platform(), *map(jax.export.DisabledSafetyCheck.custom_call, CALLS)]
    exported = jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(*given)
    assert exported.mlir_module().count("stablehlo.while") == 1
    for got, want in zip(
        jax.tree.leaves(steps(tx, jax.jit(exported.call), params)),
        jax.tree.leaves(steps(inner(), step_of(inner()), params)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


CALLS = ("annotate_device_placement",)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the XLA of jax 0.10 copies them still")
@pytest.mark.parametrize("whole", ["jo.jit", "jo.pipelined"])
def test_no_stack_is_copied_in_an_iteration(whole):
    """Copies of whole stacks would take a seventh of a step of 8 layers."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tx = jo.offload(clipped() if whole == "jo.pipelined" else adamw())
    params = model.parameters(3, 128, True, here)
    args = params, jo.abstract_state(tx, params), jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=here)
    step = jo.jit(model.step_of(tx, model.loss), donate_argnums=(0, 1))
    if whole == "jo.pipelined":
        train = jo.pipelined(model.step_of(tx, model.loss), donate_argnames=("params", "state"))
        step, args, _ = train.turned(*args)
    text = step.lower(*args).compile().as_text()
    bodies = [part for part in re.split(r"\n(?=\S)", text) if not part.startswith("ENTRY")]
    assert any("f32[3,128,128]" in body for body in bodies)
    copies = re.compile(r"= f32\[3,128,128\]\S* copy\(")
    assert not [line for body in bodies for line in body.splitlines() if copies.search(line)]
