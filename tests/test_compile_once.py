"""One compile for committed inputs, however the state came to be."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_offload as jo

pytestmark = pytest.mark.oldest("committed arguments and weak types")

TX = jo.offload(optax.adamw(1e-3), fraction=0.5, min_bytes=0)


def parameters():
    return {"w": jnp.ones((16, 16)), "v": jnp.ones((16, 4)), "b": jnp.zeros(4)}


def committed():
    return jax.device_put(parameters(), jax.devices()[0])


def loss(params, x):
    return ((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"]) ** 2).mean()


def run(step, state, n=3):
    x = jax.device_put(jnp.ones((2, 16)), jax.devices()[0])
    for _ in range(n):
        state = step(state, x)
    assert step._cache_size() == 1
    return state


def test_compile_once_train_state():
    state = TrainState.create(apply_fn=None, params=committed(), tx=TX)
    state = state.replace(step=jax.device_put(jnp.int32(0), jax.devices()[0]))  # plain optax needs it too
    step = jax.jit(lambda s, x: s.apply_gradients(grads=jax.grad(loss)(s.params, x)), donate_argnums=0)
    assert int(run(step, state).step) == 3


def test_compile_once_under_a_mesh_without_commitment():
    with jax.set_mesh(jax.make_mesh((1,), ("x",))), warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters()
        step = jax.jit(lambda c, x: _step(c, x))
        run(step, (params, TX.init(params)))


def _step(carry, x):
    params, state = carry
    updates, state = TX.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def test_eager_init_commits_what_it_keeps_and_warns_of_uncommitted_parameters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = TX.init(committed())
    assert all(x.committed for x in jax.tree.leaves(state))
    with pytest.warns(UserWarning, match=r"not committed.*the first is \['b'\]\).*device_put\(params"):
        TX.init(parameters())


def test_eager_init_warns_of_numpy_parameters():
    """They are no more committed than other new arrays: the second step would compile again."""
    given = jax.tree.map(np.asarray, parameters())
    with pytest.warns(UserWarning, match=r"not committed.*the first is \['b'\], a NumPy array.*device_put\(params"):
        TX.init(given)
    with pytest.warns(UserWarning, match=r"not committed.*the first is \['w'\]\)"):
        TX.init(committed() | {"w": jnp.ones((16, 16))})


@pytest.mark.parametrize("donate", [{"donate_argnums": (0, 1)}, {"donate_argnames": ("params", "state")}])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_the_first_step_of_jo_jit_warns_of_parameters_that_a_traced_init_could_not_tell(donate, kind):
    def new_step():
        """Another function each time: what is compiled of a function is found again."""

        def step(params, state, x):
            return jo.update_params(TX, jax.grad(loss)(params, x), state, params)

        return jo.jit(step, **donate)

    x = jnp.ones((2, 16))  # a batch is as uncommitted in each step
    loose = {**committed(), "w": kind(parameters()["w"])}
    states = [jax.jit(TX.init)(given) for given in (loose, committed())]
    with pytest.warns(UserWarning, match=r"jo.jit: params\['w'\] is not committed.*params = jax.device_put\(params"):
        loose, state = (first := new_step())(loose, states[0], x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(loose, state, x)
        assert first._cache_size() == 2
        second = new_step()
        second(*second(committed(), states[1], x), x)
        assert second._cache_size() == 1


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 2}])
def test_what_a_step_does_not_carry_may_be_uncommitted(options):
    step = jo.jit(lambda params, state, x: x + optax.tree.get(state, "count"), **options)
    state = TX.init(committed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(parameters(), state, jnp.ones(3))
