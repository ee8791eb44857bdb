"""One compile for committed inputs, however the state came to be."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo

pytestmark = pytest.mark.oldest("committed arguments and weak types")

TX = jo.offload(optax.adamw(1e-3), fraction=0.5, min_bytes=0)


def parameters():
    return {"w": jnp.ones((16, 16)), "v": jnp.ones((16, 4)), "b": jnp.zeros(4)}


def committed():
    return jax.device_put(parameters(), jax.devices()[0])


def loss(params, x):
    return ((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"]) ** 2).mean()


def new_step():
    """Return a new function each time, because jax finds the compiled program of an old one again."""
    return lambda params, state, x: jo.update_params(TX, jax.grad(loss)(params, x), state, params)


def test_under_a_mesh_without_commitment():
    step = jax.jit(new_step())
    with jax.set_mesh(jax.make_mesh((1,), ("x",))), warnings.catch_warnings():
        warnings.simplefilter("error")
        carried = parameters(), TX.init(parameters())
        for _ in range(3):
            carried = step(*carried, jax.device_put(jnp.ones((2, 16)), jax.devices()[0]))
    assert step._cache_size() == 1


def test_eager_init_commits_what_it_keeps_and_warns_of_uncommitted_parameters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = TX.init(committed())
    assert all(x.committed for x in jax.tree.leaves(state))
    loose = {"b": parameters(), "b'\\], a NumPy array": jax.tree.map(np.asarray, parameters())}
    loose["w"] = committed() | {"w": jnp.ones((16, 16))}
    for first, given in loose.items():
        with pytest.warns(UserWarning, match=rf"not committed.*the first is \['{first}.*device_put\(params"):
            TX.init(given)


@pytest.mark.parametrize("donate", [{"donate_argnums": (0, 1)}, {"donate_argnames": ("params", "state")}])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_the_first_step_of_jo_jit_warns_of_parameters_that_a_traced_init_could_not_tell(donate, kind):
    first, second = (jo.jit(new_step(), **donate) for _ in range(2))
    x = jnp.ones((2, 16))  # a batch is as uncommitted in each step
    loose = {**committed(), "w": kind(parameters()["w"])}
    states = [jax.jit(TX.init)(given) for given in (loose, committed())]
    with pytest.warns(UserWarning, match=r"jo.jit: params\['w'\] is not committed.*params = jax.device_put\(params"):
        loose, state = first(loose, states[0], x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(loose, state, x)
        assert first._cache_size() == 2
        second(*second(committed(), states[1], x), x)
        assert second._cache_size() == 1


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 2}])
def test_what_a_step_does_not_carry_may_be_uncommitted(options):
    step = jo.jit(lambda params, state, x: x + optax.tree.get(state, "count"), **options)
    state = TX.init(committed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(parameters(), state, jnp.ones(3))


def test_a_batch_may_be_donated_and_uncommitted():
    train, carry = jo.jit(new_step(), donate_argnums=(0, 1, 2)), (committed(), TX.init(committed()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for _ in range(2):
            carry = train(*carry, jnp.ones((2, 16)))
    assert train._cache_size() == 1


# ---- outside of any jit


def counted():
    """An optimizer in chunks that takes a number and a function, and how often it was traced."""
    inner, traced = optax.adam(1e-2), []

    def update(updates, state, params=None, *, value=None, value_fn=None, **_):
        traced.append(1)
        updates = updates if value_fn is None else jax.tree.map(lambda u: u * value_fn(value), updates)
        return inner.update(updates, state, params)

    tx = optax.GradientTransformationExtraArgs(inner.init, update)
    return jo.offload(tx, min_bytes=0, window=2**10), tx, traced


def params_of():
    return jax.device_put({"a": jnp.ones((32, 32)), "b": jnp.arange(64.0)}, jax.devices()[0])


def double(x):
    return 2 * x


def assert_close_to(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("through", ["update", "update_params"])
def test_it_is_compiled_once(through):
    """With another number each time; whether numbers are right, also tests/test_optimizers.py asks."""
    tx, plain, traced = counted()
    call = tx.update if through == "update" else functools.partial(jo.update_params, tx)
    wanted = plain.update if through == "update" else functools.partial(jo.update_params, plain)
    params = params_of()
    state, expected = tx.init(params), plain.init(params)
    for k in range(3):
        extra = {"value": 0.5 + k, "value_fn": double}
        want, expected = wanted(params, expected, params, **extra)
        traced.clear()
        got, state = call(params, state, params, **extra)
        assert k == 0 or not traced
        assert_close_to((got, state), (want, expected))
        assert state[0].mu["a"].sharding.memory_kind == "pinned_host"


def test_what_is_compiled_in_compiles_anew():
    tx, _, traced = counted()
    params = params_of()
    state = tx.init(params)
    for function in double, jnp.sin, double:
        tx.update(params, state, params, value=1.0, value_fn=function)
    assert len(traced) == 2


def test_without_jit_at_all():
    tx, plain, _ = counted()
    params = params_of()
    with jax.disable_jit():
        updates, _ = tx.update(params, tx.init(params), params)
    assert_close_to(updates, plain.update(params, plain.init(params), params)[0])
