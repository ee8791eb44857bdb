"""What an update's equation knows of its leaves: their next values, their order, how they are divided."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._emit.find import updates_in
from tests.support.trees import assert_close

ADAMW = optax.adamw(1e-2)


def update_of(step, *args):
    """The one in a step; and for each of its operands the path of the argument that it is."""
    trace = jax.jit(step).trace(*args)
    (found,) = updates_in(trace.jaxpr)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    of_step = dict(zip(trace.jaxpr.jaxpr.invars, paths, strict=True))
    return found.update, {v: of_step.get(x, "") for v, x in found.origins.items()}


class Grown(NamedTuple):
    adam: optax.OptState
    last: jax.Array | None = None


@pytest.mark.parametrize("new", ["on the device", "on the host"])
def test_a_state_whose_tree_changes_keeps_the_next_values_of_its_leaves(new):
    """Its moments stream in chunks as those of other states; before, they were loaded whole, as if they had come from
    the device."""

    def update(grads, state, params=None):
        updates, adam = ADAMW.update(grads, state.adam, params)
        return updates, Grown(adam, jnp.float32(1.0) if new == "on the device" else grads)

    inner = optax.GradientTransformation(lambda params: Grown(ADAMW.init(params)), update)
    tx = jo.offload(inner, min_bytes=1024, window=2**14)
    params = jax.device_put({"w": jnp.linspace(-1.0, 1.0, 64 * 512).reshape(64, 512)}, jax.devices()[0])
    state = tx.init(params)

    def step(params, state, grads):
        return tx.update(grads, state, params)

    table = jo.placement(step, params, state, params)
    assert [leaf.streams.split(",")[0] for leaf in table.leaves] == ["2 chunks of axis 0"] * 2, table
    got, want = jax.jit(step)(params, state, params), jax.jit(inner.update)(params, inner.init(params), params)
    assert_close(got, want, 1e-6)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(got[1])]
    assert kinds == ["device", "pinned_host", "pinned_host", "device" if new == "on the device" else "pinned_host"]


def test_a_leaf_that_is_new_in_the_state_is_the_reason():
    """It is made of leaves on the host, and has no buffer there yet."""

    def update(grads, state, params=None):
        updates, adam = ADAMW.update(grads, state.adam, params)
        return updates, Grown(adam, state.adam[0].mu)

    inner = optax.GradientTransformation(lambda params: Grown(ADAMW.init(params)), update)
    tx = jo.offload(inner, min_bytes=1024, window=2**14)
    params = jax.device_put({"w": jnp.ones((64, 512))}, jax.devices()[0])

    def step(params, state, grads):
        return tx.update(jax.tree.map(jnp.sin, grads), state, params)

    table = str(jo.placement(step, params, tx.init(params), params))
    assert "it moves to the host in this step" not in table
    got, want = jax.jit(step)(params, tx.init(params), params), inner.update(params, inner.init(params), params)
    assert jax.tree.structure(got) == jax.tree.structure(want)


NAMES = ("read_1", "read_2", "read_3", "rest_1", "rest_2", "rest_3")


@pytest.mark.parametrize("orders", [(["read_2"], None), (None, ["rest_2"]), (["read_2"], ["rest_2"]), (None, None)])
def test_an_order_is_that_of_the_gradients_of_its_own_offload(orders):
    """Of two offloads the first with an order ordered the gradients of both, whatever the trace told of them."""
    labels = {name: name.split("_")[0] for name in NAMES}
    tx = optax.partition(
        {k: jo.offload(ADAMW, min_bytes=0, order=o) for k, o in zip(("read", "rest"), orders, strict=True)}, labels
    )
    params = jax.device_put({name: jnp.ones((8, 8)) for name in NAMES}, jax.devices()[0])
    # the last gradient of the backward pass is that of what is used first
    used = ("rest_3", "read_1", "rest_1", "read_3", "rest_2", "read_2")

    def loss(params, x):
        for name in used:
            x = jnp.tanh(x @ params[name])
        return x.sum()

    def step(params, state):
        grads = jax.grad(loss)(params, jnp.ones((2, 8)))
        params, state = jo.update_params(tx, grads, state, params)
        return params, state

    found = updates_in(jax.jit(step).trace(params, tx.init(params)).jaxpr)[0].update
    arguments = found.program.inputs[len(found.program.consts) :]
    assert len(found.gradients) == len(NAMES) and all(arguments[i].aval.shape == (8, 8) for i in found.gradients)
    got = [sorted(NAMES)[i - min(found.gradients)] for i in found.gradients]
    want = list(reversed(used))
    for kind, order in zip(("read", "rest"), orders, strict=True):
        if order:  # its rules, then by name, in its own places
            own = order + sorted((n for n in NAMES if n.startswith(kind) and n not in order), reverse=True)
            places = [k for k, name in enumerate(want) if name.startswith(kind)]
            for k, name in zip(places, own, strict=True):
                want[k] = name
    assert got == want


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_how_leaves_are_divided_is_how_they_are(axes):
    """Also scales of blocks, of which there may be too few to divide."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axes,))
    specs = {"a": P("data"), "b": P(None, "data"), "c": P()}
    with jax.set_mesh(mesh):
        params = {k: jax.device_put(jnp.ones((16, 384)), NamedSharding(mesh, spec)) for k, spec in specs.items()}
        tx = jo.offload(ADAMW, min_bytes=0, storage={"mu": "int8"})
        state = tx.init(params)
        update, paths = update_of(lambda p, s: tx.update(p, s, p), params, state)
        leaves = jax.tree_util.tree_leaves_with_path((params, state))
        actual = {jax.tree_util.keystr(path): x for path, x in leaves}
        compared = 0
        for v, shards in update.program.shards.items():
            x = actual[paths[v]] if paths.get(v) else None
            if x is not None and x.ndim:
                shard = x.sharding.shard_shape(x.shape)
                assert tuple(np.array(x.shape) // shards) == shard, (paths[v], shards, shard)
                compared += 1
        scales = [x for path, x in actual.items() if "scale" in path and x.ndim]
        assert compared >= 9 and any(x.shape[-1] % 4 for x in scales)
