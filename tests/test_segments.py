"""The pass before an update whose state is on disk, in several programs: first gradients first.

tests/aot/compiled.py has the peaks of these programs, and the peaks with updates on the cores.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support.sizes import set_sizes
from tests.support.trees import assert_same

pytestmark = [
    pytest.mark.usefixtures("small_groups"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
ADAMW = optax.adamw(1e-2)
N, WIDTH = 4, 256
PART = 2 * WIDTH * WIDTH  # bytes: a quarter of a layer's state
X = np.random.default_rng(0).normal(size=(512, WIDTH)).astype(np.float32)


def model():
    """On another device than the cores' own."""
    w = {f"layer_{k}": jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)) / 16 for k in range(N)}
    return jax.device_put({name: {"w": x, "b": jnp.zeros(WIDTH)} for name, x in w.items()}, jax.devices()[1])


def loss(params, x, first=lambda x: x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
        x = first(x) if name == "layer_0" else x
    return (x**2).mean()


def step_of(tx, loss=loss):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, value

    return step


@pytest.mark.parametrize(
    ("part", "group", "order"),
    [
        (None, 1, None),
        (PART // 2, 1, None),  # a layer's pieces follow each other, in the same parameter
        # order= has the layers against the order of their gradients, and a group has rows of two of them: the next
        # one, whose gradient is there before, reads what that one has made of its parameter
        (PART, 3 * PART, [f"layer_{k}" for k in range(N)]),
    ],
)
def test_values_on_disk(part, group, order, disk, monkeypatch):
    """Each step against plain optax from the same state. Small leaves on the device are updated beside the groups."""
    if part is not None:
        set_sizes(monkeypatch.setattr, part=part)
    set_sizes(monkeypatch.setattr, group=group)
    tx, params = jo.offload(ADAMW, min_bytes=2048, disk=disk, order=order), model()
    step, plain, state = jo.jit(step_of(tx), donate_argnums=(0, 1)), jax.jit(step_of(ADAMW)), tx.init(params)
    for _ in range(4):
        want = plain(params, jo.to_device(state), X)
        params, state, value = step(params, state, X)
        assert_same(jo.to_device((params, state, value)), want, "one update")
        assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}


def test_the_last_layer_is_updated_while_the_pass_goes_on(disk):
    """The derivative of the first layer waits until the last one's weights have their new value."""
    updated, log = threading.Event(), []

    def told(x):
        updated.set()
        return x

    def update(grads, state, params):
        new, state = ADAMW.update(grads, state, params)
        w = new["layer_3"]["w"]
        new["layer_3"]["w"] = jax.pure_callback(told, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
        return new, state

    def wait(g):
        log.append(updated.wait(300))
        return g

    first = jax.custom_vjp(lambda x: x)
    first.defvjp(
        lambda x: (x, None),
        lambda _, g: (jax.pure_callback(wait, jax.ShapeDtypeStruct(g.shape, g.dtype), g),),
    )
    tx = jo.offload(optax.GradientTransformation(ADAMW.init, update), min_bytes=2048, disk=disk)
    step, params = jo.jit(step_of(tx, lambda params, x: loss(params, x, first))), model()
    jax.block_until_ready(step(params, tx.init(params), X))
    assert log == [True]
