"""What stands around an update whose state is on disk: ``skip=``, ``jo.pipelined``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.disk.faulty import Faulty
from tests.support.trees import assert_close, assert_equal, handles, read

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
STORED = {"mu": "int8", "nu": "uint8"}


def model(place=None, dtype=jnp.float32, width=64):
    w = {f"layer_{k}": jax.random.normal(jax.random.key(k), (width, width)) / 8 for k in range(3)}
    tree = {name: {"w": x.astype(dtype), "b": jnp.full(width, 0.1, dtype)} for name, x in w.items()}
    return jax.device_put(tree, place or jax.devices()[0])


def loss(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x.astype(jnp.float32) ** 2).mean()


def run(step, params, state, skips, x=X):
    step = jo.jit(step, donate_argnums=(0, 1))
    for k, skip in enumerate(skips):
        params, state = step(params, state, x * (k + 1), np.asarray(skip))
    return params, state


# ---- branches --------------------------------------------------------------------------------------------------------


def test_apply_if_finite_around(disk):
    """An update that is not applied writes nothing, and changes no bit; the state goes on, and is committed."""
    inner = optax.apply_if_finite(CLIPPED, 2)
    tx = optax.apply_if_finite(jo.offload(CLIPPED, min_bytes=1024, disk=disk), 2)

    def step_with(tx):
        def step(params, state, x):
            updates, state = tx.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        return step

    step, plain = jo.jit(step_with(tx), donate_argnums=(0, 1)), jax.jit(step_with(inner))
    params = model()
    state, files = tx.init(params), Faulty(disk.directory)
    for x, written in (X, 6), (X * np.nan, 0), (2 * X, 6):
        files.calls.clear()
        want = plain(params, jo.to_device(state), x)
        before = read((params, state.inner_state))
        params, state = step(params, state, x)
        disk.wait()
        assert [name for name, _ in files.calls].count("pwritev") == written
        assert_close(read((params, state)), want, 1e-5)
        if not written:
            assert_equal(read((params, state.inner_state)), before)
    disk.commit(3, {"params": params, "state": state})
    assert int(state.total_notfinite) == 1 and len(handles(state)) == 6


# ---- skip= -----------------------------------------------------------------------------------------------------------


def skipping(tx, form="update_params"):
    def step(params, state, x, skip):
        grads = jax.grad(loss)(params, x)
        if form == "update_params":
            return jo.update_params(tx, grads, state, params, skip=skip)
        updates, state = tx.update(grads, state, params, skip=skip)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize(
    ("form", "place", "options"),
    [
        ("update_params", AxisType.Auto, {"shard_over": "data"}),
        ("update", None, {}),
        ("update_params", None, {}),
        ("update_params", None, {"storage": STORED}),
        ("update_params", AxisType.Explicit, {}),
    ],
    ids=str,
)
def test_an_update_that_is_skipped_changes_no_bit(form, place, options, disk):
    """What is updated is as in host memory."""
    mesh = None if place is None else jax.make_mesh((4,), ("data",), axis_types=(place,))
    params = model(mesh and NamedSharding(mesh, P()))
    skips = [False, True, True, False]
    tx = jo.offload(CLIPPED, min_bytes=1024, disk=disk, **options)
    state = tx.init(params)
    got = run(skipping(tx, form), jax.tree.map(jnp.copy, params), state, skips)
    assert len(handles(got[1])) >= 6
    host = jo.offload(CLIPPED, min_bytes=1024, **options)
    want = run(skipping(host, form), jax.tree.map(jnp.copy, params), host.init(params), skips)
    assert_close(read(got[0]), read(want[0]), 1e-5)

    params, state = read(got[0]), read(got[1])
    after = run(skipping(tx, form), *got, [True] * 3)
    assert_equal(read(after), (params, state))
    assert_equal(read(jo.jit(lambda p, s: skipping(tx, form)(p, s, X, True))(*after)), (params, state))  # always


# ---- pipelined -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_pipelined(gradients, disk, tmp_path):
    """As the plain loop on disk."""
    other = jo.disk(tmp_path / "other")
    plain, tx = (jo.offload(CLIPPED, min_bytes=1024, disk=files) for files in (other, disk))

    def step(tx):
        return lambda params, state, x, skip: jo.update_params(tx, jax.grad(loss)(params, x), state, params)

    params, batch = model(width=128), np.concatenate([X, X], 1)  # gradients of 64 KiB can wait on the host
    want = run(step(plain), jax.tree.map(jnp.copy, params), plain.init(params), [False] * 4, batch)

    def turned(params, state, x):
        return step(tx)(params, state, x, False)

    train = jo.pipelined(turned, donate_argnames=("params", "state"), gradients=gradients)
    carry, _ = train((params, tx.init(params)), batch)
    for k in range(1, 4):
        carry, _ = train(carry, batch * (k + 1))
    look = read(train.params(carry))
    params, state = train.finish(carry)
    assert len(handles(state)) == 6
    assert_close(look, read(params), 1e-6)
    assert_close(read((params, state)), read(want), 1e-5)
    disk.commit(4, (params, state))
    shown = jo.placement(train, params, state, batch)
    assert shown.disk_bytes == 6 * 128 * 128 * 4
    other.close()
