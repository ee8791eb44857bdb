"""States that arrive in other places or with other trees than ``init`` made, and the last rows of a leaf in chunks."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import assert_close, gradients, in_scope, kinds

ADAMW = optax.adamw(1e-2)
HOST = "pinned_host"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tail_is_written_in_whole_tiles_and_less_than_one(shards):
    """A TPU writes no other number of rows into host memory: 12 of 108 are left on each device."""
    params = {"w": jax.random.normal(jax.random.key(0), (shards * 108, 16))}
    mesh = jax.make_mesh((shards,), ("x",), axis_types=(AxisType.Auto,))
    params = jax.device_put(params, NamedSharding(mesh, P("x")))
    tx = jo.offload(optax.adam(1e-2), min_bytes=0, window=1)
    args = gradients(params), tx.init(params), params
    stores = "".join(text for _, text in in_scope(jax.jit(tx.update).trace(*args), "write-back", "tpu"))
    written = re.findall(r"dynamic_update_slice .*?: \(tensor<\w+>, tensor<(?:\d+x)?(\d+)x16xf32>", stores)
    assert {*map(int, written)} == {32, 8, 4}
    assert_close(jax.jit(tx.update)(*args), optax.adam(1e-2).update(args[0], jo.to_device(args[1]), params), 1e-6)


class Grown(NamedTuple):
    adam: optax.OptState
    last: jax.Array | None = None


@pytest.mark.parametrize("last", ["on the device", "a gradient", "a leaf on the host"])
def test_a_state_whose_tree_changes_streams_as_others_do(last):
    """Its moments go through the window in chunks; a new leaf that is made of one on the host has no buffer there."""

    def update(grads, state, params=None):
        updates, adam = ADAMW.update(grads, state.adam, params)
        new = {"on the device": jnp.float32(1.0), "a gradient": grads, "a leaf on the host": state.adam[0].mu}
        return updates, Grown(adam, new[last])

    inner = optax.GradientTransformation(lambda params: Grown(ADAMW.init(params)), update)
    tx = jo.offload(inner, min_bytes=1024, window=2**14)
    params = jax.device_put({"w": jnp.linspace(-1.0, 1.0, 64 * 512).reshape(64, 512)}, jax.devices()[0])
    state = tx.init(params)
    table = jo.placement(lambda *args: tx.update(*args), params, state, params)
    if last != "a leaf on the host":
        assert [leaf.streams.split(",")[0] for leaf in table.leaves] == ["2 chunks of axis 0"] * 2, table
    assert "it moves to the host in this step" not in str(table)
    got, want = jax.jit(tx.update)(params, state, params), jax.jit(inner.update)(params, inner.init(params), params)
    assert_close(got, want, 1e-6)
    assert kinds(got[1]) == ["device", HOST, HOST, "device" if last == "on the device" else HOST]
