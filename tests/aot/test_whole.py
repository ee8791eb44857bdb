"""Steps as ``jo.jit`` makes them, compiled (MiB): updates inside the scan that makes the gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._analysis.hlo import computations
from jax_offload._step.rewritten import rewritten as whole
from tests.aot.cases import device_sharding, measure_sharded, measure_step
from tests.aot.harness import H200, MIB, measure, require
from tests.aot.model import ADAMW, loss, parameters

MANY = 16384
LAYERS, WIDTH = 12, 4096
ROW = WIDTH**2 * 4 / MIB
OPTIONS = jo.compiler_options("cuda")


def moves_each_byte_once(m, layers=LAYERS):
    """One row may move twice: the first iteration has nothing to store, the last nothing to load."""
    assert m.host_temp == 0
    assert m.host_arguments <= m.loaded <= m.host_arguments * (1 + 1 / layers) + 0.1
    assert m.host_arguments <= m.stored <= m.host_arguments * (1 + 1 / layers) + 0.1
    return True


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.long("half a minute to compile")
def test_several_steps_in_a_scan():
    """Each is rewritten as a step of its own; before, nothing was hidden (1.12), and the stacked gradients existed."""
    require(H200)
    sharding, tx = device_sharding(H200), jo.offload(ADAMW)
    params = parameters(8, WIDTH, True, sharding)
    xs = jax.ShapeDtypeStruct((3, MANY, WIDTH), jnp.float32, sharding=sharding)

    def steps(params, state, xs):
        def one(carry, x):
            params, state = carry
            return jo.update_params(tx, jax.grad(loss)(params, x), state, params), None

        return jax.lax.scan(one, (params, state), xs)[0]

    args = params, jo.abstract_state(tx, params), xs
    m, plain = (measure(H200, step, args, (0, 1), options=OPTIONS) for step in (whole(steps), steps))
    assert m.peak < plain.peak and m.host_temp == 0
    assert m.timeline(H200).exposed_share <= 0.2 < 1 < plain.timeline(H200).exposed_share
    assert m.loaded <= 3 * m.host_arguments * 9 / 8 + 0.1


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize("update_params", [True, False])
def test_a_gradient_norm_that_is_logged_is_summed_up_in_the_scan(update_params):
    require(H200)
    tx, sharding = jo.offload(ADAMW), device_sharding(H200)
    params = parameters(LAYERS, WIDTH, True, sharding)
    x = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32, sharding=sharding)
    state = jo.abstract_state(tx, params)

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        norm = optax.global_norm(grads)
        if update_params:
            return *jo.update_params(tx, grads, state, params), norm
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, norm

    out = jax.tree.map(lambda a: a.sharding, (params, state, sharding_of_a_scalar(sharding)))
    m = measure(H200, whole(step), (params, state, x), (0, 1), out, OPTIONS)
    silent = measure_step(H200, tx, n_layers=LAYERS, width=WIDTH, stacked=True, whole=True, options=OPTIONS)
    assert m.peak <= silent.peak + 1 and moves_each_byte_once(m)


def sharding_of_a_scalar(sharding):
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)


FSDP, REPLICATED = P(None, "data"), P()


def gathered(m):
    """The largest result of a collective, in MiB."""
    ops = [op for ops in computations(m.text).values() for op in ops]
    found = [op.arrays for op in ops if op.opcode.removesuffix("-start") in ("all-gather", "all-reduce", "all-to-all")]
    return max(array.nbytes for arrays in found for array in arrays) / MIB


@pytest.mark.long("compiles for four devices")
@pytest.mark.parametrize(
    ("update_params", "spec", "tokens"), [(True, FSDP, MANY), (True, REPLICATED, 512), (False, REPLICATED, MANY)]
)
def test_on_four_devices(spec, update_params, tokens):
    """FSDP, and ZeRO-1 where parameters are replicated: a layer is scattered and gathered in its own iteration."""
    require(H200)

    def measured(tx, **kwargs):
        return measure_sharded(H200, tx, spec, stacked=True, batch=tokens, options=OPTIONS, **kwargs)

    def ours(whole):
        tx = jo.offload(ADAMW, shard_over=None if spec == FSDP else "data")
        return measured(tx, update_params=update_params, whole=whole)

    resident, before, m = measured(ADAMW), ours(False), ours(True)
    assert m.peak <= before.peak - 3.5 * ROW < resident.peak and moves_each_byte_once(m, 24)
    assert m.host_arguments == pytest.approx(768, abs=1) and gathered(m) <= ROW
    times = m.timeline(H200), resident.timeline(H200)
    assert times[0].collectives <= 1.001 * times[1].collectives
    if tokens == MANY:
        assert times[0].exposed_share <= 0.05 and times[0].step <= 1.03 * times[1].step


@pytest.mark.long("compiles more of the same for a chip")
def test_layers_on_different_devices_are_updated_after_the_scan():
    """Each iteration's layer is on one device: XLA gathers all of them ahead of the scan, and would the state too."""
    require(H200)
    before, m = (
        measure_sharded(H200, jo.offload(ADAMW), P("data"), stacked=True, n_layers=8, whole=whole)
        for whole in (False, True)
    )
    assert m.peak == before.peak and (m.host_temp, m.collectives) == (0, before.collectives)
