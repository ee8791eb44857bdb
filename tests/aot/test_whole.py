"""Steps as ``jo.jit`` makes them, compiled (MiB): updates inside the scan that makes the gradients."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._analysis.hlo import computations
from jax_offload._step.rewritten import rewritten as whole
from tests.aot.cases import device_sharding, measure_sharded, measure_step, measure_update
from tests.aot.harness import H200, MIB, V5E, V5E_2X2, measure, require
from tests.aot.model import ADAMW, loss, parameters
from tests.support.rows import rows

LONG = pytest.mark.exhaustive("half a minute to compile")
MANY = 16384
INT8 = {"mu": "int8", "nu": "uint8"}
N, WIDTH = 12, 4096
ROW = WIDTH**2 * 4 / MIB
OPTIONS = jo.compiler_options("cuda")


def moves_each_byte_once(m, layers=N):
    """One row may move twice: the first iteration has nothing to store, the last nothing to load."""
    assert m.host_temp == 0
    assert m.host_arguments <= m.loaded <= m.host_arguments * (1 + 1 / layers) + 0.1
    assert m.host_arguments <= m.stored <= m.host_arguments * (1 + 1 / layers) + 0.1
    return True


def axis_1(params, x):
    return loss({"w": jnp.moveaxis(params["w"], 1, 0)}, x)


def cast(params, x):
    return loss({"w": params["w"].astype(jnp.bfloat16)}, x.astype(jnp.bfloat16))


MASTERS = jo.with_master_params(ADAMW)
LOW_BITS = jo.with_master_params(ADAMW, low_bits=True)
# name, optimizer, storage, loss, parameters' dtype, leaves of the state beside each parameter, exposed at most
ROWS = [
    ("float32", ADAMW, None, loss, jnp.float32, 2, 0.09),
    ("bfloat16 storage", ADAMW, "bfloat16", loss, jnp.float32, 2, 0.09),
    ("int8 storage", ADAMW, INT8, loss, jnp.float32, 2, 0.09),
    ("one moment", optax.lion(1e-3), None, loss, jnp.float32, 1, 0.1),  # is stored in one half and loaded in the other
    ("layers on axis 1", ADAMW, None, axis_1, jnp.float32, 2, 0.09),
    ("cast before the scan", ADAMW, None, cast, jnp.float32, 2, 0.27),  # matmuls as short as the copies
    ("masters", MASTERS, None, loss, jnp.bfloat16, 3, 0.38),  # the link takes longer than the matmuls
    ("masters, low bits", LOW_BITS, None, loss, jnp.bfloat16, 3, 0.45),
    ("masters, int8 storage", MASTERS, INT8, loss, jnp.bfloat16, 3, 0.32),
]


def sample(name, tokens, update_params):
    """Every day one of each."""
    return tokens == MANY and update_params == (name in ("int8 storage", "masters"))


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize(
    ("inner", "storage", "loss", "dtype", "leaves", "exposed", "tokens", "update_params"),
    [
        pytest.param(*row[1:], tokens, form, id=f"{row[0]}-{tokens}-{form}", marks=[] if daily else LONG)
        for row in ROWS
        for tokens, form in itertools.product((512, MANY), (True, False))
        for daily in [sample(row[0], tokens, form)]
    ],
)
def test_neither_stacked_gradients_nor_state_are_on_the_device(
    inner, storage, loss, dtype, leaves, exposed, tokens, update_params
):
    """Beside the parameters and what the passes need three rows of each leaf, and what of a layer is at hand."""
    require(H200)
    sharding = device_sharding(H200)
    params = parameters(N, WIDTH, True, sharding, dtype)
    if loss is axis_1:
        params = {"w": jax.ShapeDtypeStruct((WIDTH, N, WIDTH), dtype, sharding=sharding)}
    x = jax.ShapeDtypeStruct((tokens, WIDTH), dtype, sharding=sharding)
    resident = measure_update(H200, inner, params, loss, x, update_params=dtype != jnp.float32, options=OPTIONS)
    tx = jo.offload(inner, storage=storage)
    m = measure_update(H200, tx, params, loss, x, update_params=update_params, whole=True, options=OPTIONS)
    gradients = N * WIDTH**2 * jnp.dtype(dtype).itemsize / MIB
    state = resident.arguments - (params["w"].size * params["w"].dtype.itemsize + x.size * x.dtype.itemsize) / MIB
    assert state >= leaves * N * ROW * (5 / 6 if inner is LOW_BITS else 1) - 1
    assert m.peak <= resident.peak - state - gradients + (3 * leaves + 1.5) * ROW and moves_each_byte_once(m)
    if tokens == MANY:
        ours, theirs = m.timeline(H200), resident.timeline(H200)
        assert ours.exposed_share <= exposed and ours.compute <= 1.045 * theirs.compute


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize(("microbatches", "at_most"), rows([(2, 7500), (4, 8500)], "compiles twice", daily=[(2, 7500)]))
def test_the_last_of_several_microbatches_hosts_the_update(microbatches, at_most):
    """Of 16,384 tokens each, in a scan around that of the layers; without that 1.05 of the transfers are exposed."""
    require(H200)
    put = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device_sharding(H200))  # noqa: E731
    params, batches = {"w": put(N, WIDTH, WIDTH)}, put(microbatches, MANY, WIDTH)

    def step_of(tx):
        def step(params, state, batches):
            add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None)  # noqa: E731
            grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step

    tx = jo.offload(ADAMW)
    args = params, jo.abstract_state(tx, params), batches
    m = measure(H200, whole(step_of(tx)), args, (0, 1), options=OPTIONS)
    there = jax.tree.map(lambda x: put(*x.shape).update(dtype=x.dtype), jax.eval_shape(ADAMW.init, params))
    resident = measure(H200, step_of(ADAMW), (params, there, batches), (0, 1), options=OPTIONS)
    assert m.peak <= at_most < resident.peak and moves_each_byte_once(m)  # 8320, 8832
    ours, theirs = m.timeline(H200), resident.timeline(H200)
    assert ours.exposed_share <= 0.08 and ours.step <= 1.02 * theirs.step


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
    params = parameters(N, WIDTH, True, sharding)
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
    silent = measure_step(H200, tx, n_layers=N, width=WIDTH, stacked=True, whole=True, options=OPTIONS)
    assert m.peak <= silent.peak + 1 and moves_each_byte_once(m)


def sharding_of_a_scalar(sharding):
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.exhaustive("a TPU's compiler takes its time")
@pytest.mark.parametrize(
    ("layers", "tokens", "exposed"),
    [
        pytest.param(8, 2048, 0.95, marks=pytest.mark.long("a TPU's compiler takes its time")),
        pytest.param(12, MANY, 0.25, marks=LONG),
    ],
)
def test_a_tpu_copies_across_the_matmuls_of_an_iteration(layers, tokens, exposed):
    """It laid the stacks out like the gradient, and copied them; it put half of the loads off until the update."""
    require(V5E)
    before, m = (
        measure_step(V5E, jo.offload(ADAMW), stacked=True, n_layers=layers, batch=tokens, whole=whole)
        for whole in (False, True)
    )
    assert m.peak <= before.peak - 3.5 * ROW and moves_each_byte_once(m, layers)
    assert m.duplex >= 0.88 and m.timeline("v5e").exposed_share <= exposed


FSDP, REPLICATED = P(None, "data"), P()


def gathered(m):
    """The largest result of a collective, in MiB."""
    ops = [op for ops in computations(m.text).values() for op in ops]
    found = [op.arrays for op in ops if op.opcode.removesuffix("-start") in ("all-gather", "all-reduce", "all-to-all")]
    return max(array.nbytes for arrays in found for array in arrays) / MIB


@pytest.mark.long("compiles more of the same for a chip", but=["False-spec1*"])
@pytest.mark.exhaustive(
    "compiles more of the same for a chip", but=["True-spec0-16384", "True-spec1-16384", "False-spec1-16384"]
)
@pytest.mark.oldest("and of its collectives")
@pytest.mark.parametrize("tokens", rows([512, MANY], "compiles for four devices", daily=[MANY]))
@pytest.mark.parametrize("spec", [FSDP, REPLICATED])
@pytest.mark.parametrize("update_params", [True, False])
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
@pytest.mark.exhaustive("a TPU's compiler takes its time")
@pytest.mark.parametrize("spec", rows([FSDP, REPLICATED], "a TPU's compiler takes its time", daily=[REPLICATED]))
def test_on_four_tpus(spec):
    require(V5E_2X2)
    tx = jo.offload(ADAMW, shard_over=None if spec == FSDP else "data")
    before, m = (
        measure_sharded(V5E_2X2, tx, spec, stacked=True, n_layers=8, update_params=True, whole=whole)
        for whole in (False, True)
    )
    assert m.peak < before.peak and moves_each_byte_once(m, 8) and m.duplex >= 0.85 and gathered(m) <= 1.1 * ROW
    assert m.timeline("v5e").collectives <= 1.001 * before.timeline("v5e").collectives


@pytest.mark.long("compiles more of the same for a chip")
def test_layers_on_different_devices_are_updated_after_the_scan():
    """Each iteration's layer is on one device: XLA gathers all of them ahead of the scan, and would the state too."""
    require(H200)
    before, m = (
        measure_sharded(H200, jo.offload(ADAMW), P("data"), stacked=True, n_layers=8, whole=whole)
        for whole in (False, True)
    )
    assert m.peak == before.peak and (m.host_temp, m.collectives) == (0, before.collectives)
