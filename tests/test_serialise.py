"""Gradients that take turns are the same gradients. What it does to the peak: tests/aot."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from jax_offload._base.memory import on_host
from jax_offload._ir.program import flat, without_round_trips
from jax_offload._ir.slices import slice_of
from jax_offload._plan.serialise import AllInTurn, InParts, Serialise, serial_of, serial_parts

pytestmark = pytest.mark.oldest("barriers")

SHAPE = (256, 260)  # large enough to wait for each other
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 1e30, 1e-40]


def produced(grads):
    """The same gradients, but made in the step, as those of a backward pass are: these wait for each other."""
    return jax.tree.map(lambda x: jnp.flip(jnp.flip(x, -1), -1), grads)


@pytest.fixture
def grads():
    """The first number of each, by which a gradient shows that it is there, is a special one."""
    keys = jax.random.split(jax.random.key(0), len(SPECIAL))
    produced = {f"w{i}": jax.random.normal(key, SHAPE) for i, key in enumerate(keys)}
    produced = {name: g.at[0, 0].set(first) for (name, g), first in zip(produced.items(), SPECIAL, strict=True)}
    return jax.device_put(produced | {"scale": jnp.ones(3)}, jax.devices()[0])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(optax.sgd(0.1, momentum=0.9), id="sgd"),
        pytest.param(optax.chain(optax.zero_nans(), optax.adam(1e-3)), id="zero_nans"),
        pytest.param(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), id="clipped"),
        pytest.param(optax.apply_if_finite(optax.adam(1e-3), 2), id="apply_if_finite"),
    ],
)
def test_special_numbers_change_nothing_else(inner, fraction, grads):
    params = jax.tree.map(jnp.ones_like, grads)
    tx = jo.offload(inner, fraction=fraction)
    state = tx.init(params)
    assert any(on_host(x) for x in jax.tree.leaves(state))
    updates, state = jax.jit(lambda g, s, p: tx.update(produced(g), s, p))(grads, state, params)
    expected, plain = jax.jit(inner.update)(grads, inner.init(params), params)
    for ours, theirs in zip(jax.tree.leaves((updates, state)), jax.tree.leaves((expected, plain)), strict=True):
        a, b = np.asarray(ours), np.asarray(theirs)
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_dtypes_of_gradients_that_wait(dtype):
    grads = jax.device_put({f"w{i}": jnp.full(SHAPE, i + 0.5, dtype) for i in range(4)}, jax.devices()[0])
    inner = optax.sgd(0.1, momentum=0.9)
    tx = jo.offload(inner, fraction=0.5)
    updates, _ = jax.jit(lambda g, s, p: tx.update(produced(g), s, p))(grads, tx.init(grads), grads)
    expected, _ = jax.jit(inner.update)(grads, inner.init(grads), grads)
    for ours, theirs in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def parts_of(fun, *args):
    program = without_round_trips(flat(jax.make_jaxpr(fun)(*args)))
    one_slice = slice_of(program.eqns, program.outputs, program.debug_info, {})
    return program, serial_parts(one_slice, program.inputs)


def test_the_plan_says_which_gradients_wait():
    """Those of a norm for a part of it; where leaves on the device are updated each for the one before, unless gates
    of the passes hold them."""
    gradients = [jnp.ones(SHAPE) for _ in range(3)]

    def planned(step, serialise, **how):
        program = without_round_trips(flat(jax.make_jaxpr(step)(*gradients)))
        one_slice = slice_of(program.eqns, program.outputs, program.debug_info, {})
        return program, serial_of(one_slice, program.inputs, {*program.outputs}, serialise, **how)

    def norm(*gs):
        return sum(jnp.sum(g**2) for g in gs)

    def update(*gs):
        return [2 * g for g in gs]

    program, found = planned(update, Serialise.ALL)
    assert found == AllInTurn(tuple(program.inputs), program.outputs[0])
    for step in norm, update:
        assert planned(step, Serialise.NONE)[1] is None
    for step, count, how in (norm, 1, {}), (update, 0, {"gated": True}):
        program, found = planned(step, Serialise.ALL, **how)
        assert isinstance(found, InParts)
        one, two, three, *_ = found.parts
        assert [part.gradient for part in (one, two, three)] == program.inputs
        assert [len(part.waits_for) for part in (one, two, three)] == [0, count, count]
        assert {*two.waits_for} <= {*one.slice.outputs} and {*three.waits_for} <= {*two.slice.outputs}


COLLECTIVES = ("all-reduce(", "all-reduce-start(", "all-gather", "collective-permute")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


@pytest.mark.parametrize(("inner", "fraction"), [(optax.adamw(1e-3), 0.5), (CLIPPED, 1.0)])
@pytest.mark.parametrize(
    ("spec", "constraint", "known"),
    [
        pytest.param(ROWS, None, True, id="divided parameters"),
        pytest.param(ROWS, None, False, id="parameters that init has not seen"),
        pytest.param(WHOLE, ROWS, True, id="divided gradients"),
    ],
)
def test_divided_gradients_do_not_wait_by_a_collective_each(spec, constraint, known, inner, fraction):
    """One for the norm of all; and one for all that wait for each other, where it is known how they are divided."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put({f"w{i}": jnp.ones(SHAPE) for i in range(4)}, jax.sharding.NamedSharding(mesh, spec))
    state = jo.offload(inner, fraction=fraction).init(params)
    tx = jo.offload(inner, fraction=fraction)
    if known:
        state = tx.init(params)

    def step(grads, state, params):
        grads = produced(grads)
        if constraint is not None:
            grads = jax.lax.with_sharding_constraint(grads, jax.sharding.NamedSharding(mesh, constraint))
        return tx.update(grads, state, params)

    text = jax.jit(step).lower(params, state, params).compile().as_text()
    found = sum(text.count(f" {kind}") for kind in COLLECTIVES)
    waits = known and constraint is None and fraction < 1
    assert found == (inner is CLIPPED or waits)
    assert ("stablehlo.slice" in jax.jit(step).lower(params, state, params).as_text()) == waits


@pytest.mark.parametrize(("how", "expected"), [(produced, len(SPECIAL)), (lambda grads: grads, 0)])
def test_gradients_of_leaves_that_stay_wait_where_they_are_made(how, expected, grads):
    params = jax.tree.map(jnp.ones_like, grads)
    tx = jo.offload(optax.adamw(1e-3), fraction=0.5)
    text = jax.jit(lambda g, s, p: tx.update(how(g), s, p)).lower(grads, tx.init(params), params).as_text()
    assert text.count("stablehlo.slice") == expected  # a number of each


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_state_that_is_only_stored(fraction, grads):
    """The last gradient: nothing of it is loaded, so its store is computed with what serves all slices."""
    inner = optax.optimistic_gradient_descent(0.1)
    tx = jo.offload(inner, fraction=fraction)
    updates, state = jax.jit(lambda g, s: tx.update(produced(g), s))(grads, tx.init(grads))
    expected, plain = jax.jit(inner.update)(grads, inner.init(grads))
    for ours, theirs in zip(jax.tree.leaves((updates, state)), jax.tree.leaves((expected, plain)), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)
    assert [on_host(x) for x in jax.tree.leaves(state)] == [on_host(x) for x in jax.tree.leaves(tx.init(grads))]


def test_a_branch_that_serves_several_gradients_comes_before_what_uses_it():
    args = [jnp.ones(SHAPE), jnp.full(SHAPE, 2.0)]
    program, parts = parts_of(_split, jnp.int32(1), *args)
    env = dict(zip(program.inputs, [jnp.int32(1), *args], strict=True))
    n = args[0].size
    for _, part in parts:
        env.update(zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True))
    assert [float(env[v]) for v in program.outputs] == pytest.approx([2 * n, 7 * n])


def _split(n, g, h):
    a, b = jax.lax.cond(n > 0, lambda: (jnp.sum(g) * 2, jnp.sum(h)), lambda: (jnp.sum(g), jnp.sum(h)))
    return a + 0.0, b + jnp.sum(h * h) + jnp.sum(g * g)


TRACED = """
import jax, jax.numpy as jnp, optax, jax_offload as jo
params = jax.device_put({f"w{i}": jnp.ones((256, 260)) for i in range(4)}, jax.devices()[0])
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
state = jo.offload(inner).init(params)
tx = jo.offload(inner)
def step(params, state):
    return tx.update(jax.tree.map(lambda x: jnp.flip(jnp.flip(x, -1), -1), params), state, params)
def barriers():
    traced = jax.jit(lambda *args: step(*args)).trace(params, state)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("optimization_barrier")
before = barriers()
tx.init(params)
print(jax.device_count(), before, barriers())
"""


def test_devices_that_the_step_does_not_use_change_nothing():
    flag = "--xla_force_host_platform_device_count="
    runs = [
        subprocess.run(
            [sys.executable, "-c", TRACED],
            env={**os.environ, "XLA_FLAGS": flag + str(n)},
            capture_output=True,
            text=True,
            check=True,
        )
        for n in (1, 8)
    ]
    (one, *alone), (eight, *beside) = ([int(x) for x in run.stdout.split()] for run in runs)
    assert (one, eight) == (1, 8)
    assert alone == beside and len({*alone}) == 1 and alone[0] > 0
