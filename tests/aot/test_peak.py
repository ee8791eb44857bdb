"""The peak inside the step, compiled for an H200 (MiB), of what tests/aot/compiled.py has no row for."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from benchmarks.in_jax.recipe import usual_recipe
from tests.aot.cases import device_sharding, measure_step, measure_update
from tests.aot.harness import H200, MIB, V5E, measure, mesh_for, require
from tests.support.trees import shardings_in

LONG = pytest.mark.long("compiles steps for an H200")
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SKIPPING = optax.MultiSteps(CLIPPED, 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()


@LONG
@pytest.mark.parametrize(
    ("tx", "at_most", "state"),
    [
        pytest.param(optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW)), 3450, 3072, id="clipping outside"),
        pytest.param(jo.offload(optax.MultiSteps(ADAMW, 2)), 2600, 4608, id="MultiSteps"),
        pytest.param(jo.offload(optax.apply_if_finite(ADAMW, 3)), 3500, 3072, id="apply_if_finite"),
        pytest.param(jo.offload(optax.lion(1e-3)), 2100, 1536, id="lion"),
    ],
)
def test_unrolled_step_peaks_near_its_parameters(tx, at_most, state):
    require(H200)
    m = measure_step(H200, tx)
    assert m.peak <= at_most
    assert (m.loaded, m.stored) == pytest.approx((state, state), abs=1)  # each byte once in, once out
    assert m.host_arguments == pytest.approx(state, abs=1)
    assert m.host_temp == 0  # the host holds the state once


@pytest.mark.oldest("what that jax's XLA makes of loops")
@pytest.mark.parametrize(
    ("tx", "at_most", "passes"),
    [
        pytest.param(optax.lamb(1e-3), 3500, 3, id="lamb"),  # 6496 resident
        pytest.param(optax.lion(1e-3), 3500, 1, id="lion", marks=LONG),  # 4960
        pytest.param(optax.MultiSteps(CLIPPED, 2), 3700, 2, id="MultiSteps of clipping", marks=LONG),  # 9224
        pytest.param(optax.apply_if_finite(CLIPPED, 3), 3500, 1, id="apply_if_finite of clip", marks=LONG),  # 6496
        pytest.param(SKIPPING, 5200, 2, id="MultiSteps that skips", marks=LONG),  # 9224
        pytest.param(optax.contrib.prodigy(1.0), 5000, 2, id="prodigy", marks=LONG),  # 9568
    ],
)
def test_reductions_over_a_stacked_leaf_are_put_together_from_its_chunks(tx, at_most, passes):
    require(H200)
    m = measure_step(H200, jo.offload(tx), stacked=True)
    assert m.peak <= at_most
    assert m.loaded <= passes * m.host_arguments + 1
    assert m.stored <= m.host_arguments + 1
    assert m.host_temp == 0


@pytest.mark.long("compiles more of the same for a chip")
def test_the_usual_recipe_does_not_lower_the_peak():
    """The comparison that everything here rests on; fails when XLA learns to bound it."""
    require(H200)
    assert measure_step(H200, usual_recipe(ADAMW)).peak > 5000


@pytest.mark.long("compiles more of the same for a chip")
def test_window_bounds_what_is_on_the_device():
    require(H200)
    layer = 2 * 64 * MIB  # mu and nu
    one, two, four, eight = (measure_step(H200, jo.offload(ADAMW, window=k * layer)).peak for k in (1, 2, 4, 8))
    assert one <= two < four < eight
    # twice the window is at most the window more: no gradient waits for its state
    assert four - two <= 2 * 128 + 16
    assert eight - four <= 4 * 128 + 16


@pytest.mark.long("compiles more of the same for a chip")
def test_the_trace_tells_the_order_where_names_do_not():
    require(H200)
    sharding = device_sharding(H200)
    names = [f"w{(7 * i) % 24:02d}" for i in range(24)]
    params = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=sharding) for name in names}

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        for name in names:
            x = layer(x, params[name])
        return (x**2).mean()

    x = jax.ShapeDtypeStruct((512, 4096), jnp.float32, sharding=sharding)
    right, wrong = (jo.offload(ADAMW, order=order) for order in (None, sorted(names)))
    assert measure_update(H200, right, params, loss, x).peak <= 2300
    assert measure_update(H200, wrong, params, loss, x).peak > measure_update(H200, right, params, loss, x).peak


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_init_peak_is_two_leaves(name, jitted, monkeypatch):
    """Leaves of different shapes, or XLA would merge their zeros into one."""
    require(H200)
    inner = {"adamw": ADAMW, "schedule_free_adamw": optax.contrib.schedule_free_adamw(1e-3)}[name]
    tx = jo.offload(inner)
    device = NamedSharding(mesh_for(H200), PartitionSpec(), memory_kind="device")
    params = {f"w{i}": jax.ShapeDtypeStruct((4096 + 8 * i, 4096), jnp.float32, sharding=device) for i in range(24)}
    init = tx.init
    if not jitted:  # what eager init compiles
        small = {k: jnp.zeros((1024, 32)) for k in params}
        compiled = []
        monkeypatch.setattr(jax, "jit", lambda f, **kw: compiled.append(f) or (lambda p: None))
        tx.init(jax.device_put(small, jax.devices()[0]))
        monkeypatch.undo()
        (init,) = compiled
    m = measure(H200, init, (params,), out_shardings=shardings_in(jo.abstract_state(tx, params)))
    assert m.stored >= 24 * 64
    leaves = 2 if jax.__version_info__ >= (0, 11) else 3  # the XLA of jax 0.10 keeps one more
    assert m.temp <= leaves * (4096 + 8 * 23) * 4096 * 4 / MIB


@pytest.mark.long("compiles more of the same for a chip")
def test_a_tail_of_rows_on_a_tpu():
    """588 rows, 12 of them behind the last whole chunk: libtpu 0.0.52 refuses to write 12."""
    require(V5E)
    put = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device_sharding(V5E))  # noqa: E731
    params, loss = {"w": put(588, 1280)}, lambda params, x: ((x @ params["w"]) ** 2).mean()
    m = measure_update(V5E, jo.offload(ADAMW, window=2**20), params, loss, put(64, 588))
    assert m.host_temp == 0 and m.loaded == m.stored == pytest.approx(m.host_arguments, rel=0.01)
