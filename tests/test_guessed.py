"""What no trace tells is marked in the table: an order that is guessed, shardings that are remembered or not known."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.words import words

NAMES = ["first", "zebra", "apple"]


def test_the_table_marks_an_order_that_it_guesses():
    guess = "order: guessed from the parameters' paths; "
    params = {name: jnp.ones((32, 32)) for name in NAMES}
    free, said = (jo.offload(optax.adam(1e-3), min_bytes=0, order=order) for order in (None, NAMES))
    table = jo.placement(free, params)
    assert table.guessed == (guess + "placement(step, *args) reads it from the step",)
    assert table.guessed[0] in words(table) and table.to_dict()["guessed"] == list(table.guessed)
    state = jo.abstract_state(free, params)
    handed_in = jo.placement(lambda grads, state, params: free.update(grads, state, params), params, state, params)
    assert handed_in.guessed == (guess + "the step does not tell it, offload(order=) does",)
    made = lambda state, params: free.update(jax.grad(lambda p: sum(map(jnp.sum, p.values())))(params), state, params)  # noqa: E731
    for shown in (
        jo.placement(made, state, params),
        jo.placement(said, params),
        jo.placement(free, {"one": params["apple"]}),
    ):
        assert not shown.guessed


def test_the_table_marks_shardings_that_the_trace_does_not_tell():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    divided = jax.device_put({"w": jnp.ones((64, 64))}, NamedSharding(mesh, P("d")))
    alone = jax.device_put({"w": jnp.ones((64, 64))}, jax.devices()[0])
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, window=2**14)
    state = jo.abstract_state(jo.offload(optax.adam(1e-3), min_bytes=0), divided)  # by another, so that tx knows none

    def of_step(params=divided):
        table = jo.placement(lambda state, params: tx.update(params, state, params), state, params)
        return table.leaves[0].streams.split(",")[0], table.guessed

    assert of_step()[0] == "2 chunks of axis 0" and "not known of ['w'], counted as on one device" in of_step()[1][0]
    jo.state_shardings(tx, divided)
    assert of_step() == (
        "whole",
        ("shardings: remembered from init, or from where they were asked for: P('d') of ['w']",),
    )
    assert not jo.placement(tx, divided).guessed  # they tell
    assert jo.placement(tx, {"v": jax.ShapeDtypeStruct((64, 64), jnp.float32)}).guessed == (
        "shardings: 1 of the parameters have none, counted as on one device",
    )
    jo.state_shardings(tx, alone)  # two now: which of them is it?
    assert of_step()[0] == "2 chunks of axis 0" and "not known of ['w']" in of_step()[1][0]
    on_one = jo.offload(optax.adam(1e-3), min_bytes=0)
    shown = jo.placement(lambda state, params: on_one.update(params, state, params), on_one.init(alone), alone)
    assert not shown.guessed
