"""Reading and moving the state outside ``update``."""

import pickle
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.steps import assert_placed
from tests.support.trees import assert_equal, kinds_of

pytestmark = pytest.mark.oldest("shardings and memory kinds of states")

DEVICE = "device"


def params():
    return jax.device_put({"w": jnp.arange(1024.0).reshape(32, 32) / 1024, "b": jnp.ones(32)}, jax.devices()[0])


def trained(tx, p, n=3):
    state, step = tx.init(p), jax.jit(tx.update)
    for _ in range(n):
        updates, state = step(jax.tree.map(jnp.sin, p), state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def test_a_resident_state_that_is_moved_is_committed():
    """Its count too, as every step returns it, so that the second step does not compile again."""
    p = params()
    tx, resident = jo.offload(optax.adamw(1e-3), min_bytes=0), optax.adamw(1e-3).init(p)
    assert not resident[0].count.committed
    state, step = jo.to_host(tx, resident, p), jax.jit(tx.update)
    assert all(x.committed for x in jax.tree.leaves(state))
    for _ in range(2):
        _, state = step(p, state, p)
    assert step._cache_size() == 1


def test_to_host_without_params_refuses_to_guess():
    """Moments of another dtype than the parameters tell the parameters' tree, and not their sizes."""
    params = jax.device_put({"w": jnp.ones((256, 512)), "v": jnp.ones((128, 160))}, jax.devices()[0])
    inner = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    tx, resident = jo.offload(inner), inner.init(params)
    with pytest.raises(ValueError, match=r"state: \[0\].nu.* float32, .* bfloat16.*pass params"):
        jo.to_host(tx, resident)
    moved = jo.to_host(tx, resident, params)
    assert kinds_of(moved) == kinds_of(tx.init(params))


@pytest.mark.daily("each way")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "through", [jo.to_device, lambda s: pickle.loads(pickle.dumps(s)), lambda s: jax.tree.map(np.asarray, s)]
)
def test_to_the_device_and_back(through, jitted):
    """A state returns from the device after ``to_device``, and after pickle or NumPy."""
    tx, p = jo.offload(optax.adamw(1e-3), fraction=0.5, min_bytes=0), params()
    _, state = trained(tx, p)
    given = through(state)
    assert through is not jo.to_device or set(jax.tree.leaves(kinds_of(given))) == {DEVICE}
    assert_equal(given, state)
    with pytest.warns(UserWarning, match=r"were in host memory .* pickle and NumPy do.*jax_offload.to_host\(tx, s"):
        tx.update(p, given, p)
    for args in ((given,), (given, p)):
        back = jax.jit(lambda s, *p: jo.to_host(tx, s, *p))(*args) if jitted else jo.to_host(tx, *args)
        assert kinds_of(back) == kinds_of(state)
        assert_equal(back, state)
    traced = jax.jit(lambda: jo.to_host(tx, given, jax.tree.map(jnp.ones_like, p)))()
    assert kinds_of(traced) == kinds_of(state)


def test_numpy_goes_to_host_memory_of_the_parameters_devices():
    devices = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:4])
    p = jax.device_put(params(), jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("x")))
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)
    state = tx.init(p)
    back = jo.to_host(tx, jax.tree.map(np.asarray, state), p)
    assert_placed(back, state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
    assert_placed(jo.to_host(tx, jo.to_device(state), shapes), state)  # an array keeps its sharding


def documented():
    """The rows of the table in docs/state.md: what is written, what jax says, what to write."""
    text = (Path(__file__).parent.parent / "docs" / "state.md").read_text().split("## JAX's errors")[1].split("##")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return [[re.findall(r"``(.+?)``|`([^`]+)`", cell) for cell in row] for row in rows]


@pytest.mark.parametrize("row", range(3))
def test_what_jax_says_of_host_leaves_is_what_is_documented(row):
    """If this fails because jax has learnt to do it, take the row out of docs/state.md."""
    tx, p = jo.offload(optax.adamw(1e-3), min_bytes=0), params()
    state, device = tx.init(p), jax.devices()[0]
    names = {"jax": jax, "jnp": jnp, "optax": optax, "jo": jo, "tx": tx, "params": p, "state": state, "device": device}
    written, said, instead = ([a or b for a, b in cell] for cell in documented()[row])
    for code in written:
        with pytest.raises(ValueError, match=re.escape(said[0]).replace("`mul`", "`(mul|add)`")):
            eval(code, names)
    for code in instead:
        part = state[0].mu["w"] if "* params" in code else state[0].mu
        eval(code, names | {"part": part})


@pytest.mark.parametrize("min_bytes", [0, 2**16])
def test_a_step_whose_shardings_put_all_of_the_state_on_the_host(min_bytes):
    """As MaxText's do (docs/migrate.md): counts and small leaves too, in the results and so in the next arguments."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    p = jax.device_put({"w": jnp.ones((256, 256)), "b": jnp.ones(4)}, at)
    inner = optax.adamw(1e-3)
    tx = jo.offload(inner, min_bytes=min_bytes)
    all_host = jax.tree.map(lambda _: at.with_memory_kind("pinned_host"), jax.eval_shape(tx.init, p))
    shardings = jax.tree.map(lambda _: at, p), all_host

    @partial(jax.jit, donate_argnums=(0, 1), in_shardings=shardings, out_shardings=shardings)
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    ours, state = jax.tree.map(jnp.copy, p), jax.jit(tx.init, out_shardings=all_host)(p)
    plain, plain_state = p, inner.init(p)
    for _ in range(3):
        ours, state = step(ours, state)
        updates, plain_state = inner.update(plain, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), ours, plain)
    assert step._cache_size() == 1
