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
    # a wrapper around an offload has no order: that of each leaf is the offload's, whose it is
    around = [jo.placement(optax.apply_if_finite(inner, 2), params) for inner in (free, said)]
    assert guess in around[0].guessed[0] and not around[1].guessed
    table = jo.placement(free, params)
    assert table.guessed == (guess + "placement(step, *args) reads it from the step",)
    assert table.guessed[0] in words(table)
    state = jo.abstract_state(free, params)
    handed_in = jo.placement(lambda grads, state, params: free.update(grads, state, params), params, state, params)
    assert handed_in.guessed == (guess + "the step does not tell it, offload(order=) does",)

    def step(state, params):
        return free.update(jax.grad(lambda p: sum(map(jnp.sum, p.values())))(params), state, params)

    for shown in (
        jo.placement(step, state, params),
        jo.placement(said, params),
        jo.placement(free, {"one": params["apple"]}),
    ):
        assert not shown.guessed


def test_the_table_marks_shardings_that_the_trace_does_not_tell():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put({"w": jnp.ones((64, 64))}, NamedSharding(mesh, P("d")))
    alone = jax.device_put({"w": jnp.ones((64, 64))}, jax.devices()[0])
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, window=2**14)
    state = jo.abstract_state(jo.offload(optax.adam(1e-3), min_bytes=0), sharded)  # by another, so that tx knows none

    def of_step(params=sharded):
        table = jo.placement(lambda state, params: tx.update(params, state, params), state, params)
        return table.leaves[0].streams.split(",")[0], table.guessed

    assert of_step()[0] == "2 chunks of axis 0" and "not known of ['w'], counted as on one device" in of_step()[1][0]
    jo.abstract_state(tx, sharded)
    assert of_step() == (
        "whole",
        ("shardings: remembered from init, or from where they were asked for: P('d') of ['w']",),
    )
    assert not jo.placement(tx, sharded).guessed  # they tell
    assert jo.placement(tx, {"v": jax.ShapeDtypeStruct((64, 64), jnp.float32)}).guessed == (
        "shardings: 1 of the parameters have none, counted as on one device",
    )
    jo.abstract_state(tx, alone)  # two now: which of them is it?
    assert of_step()[0] == "2 chunks of axis 0" and "not known of ['w']" in of_step()[1][0]
    on_one = jo.offload(optax.adam(1e-3), min_bytes=0)
    shown = jo.placement(lambda state, params: on_one.update(params, state, params), on_one.init(alone), alone)
    assert not shown.guessed


def test_what_one_offload_knows_of_a_parameter_is_known():
    """Of two in one update one was asked for its state's shardings, the other not: nothing is said to be unknown."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    params = jax.device_put({"w": jnp.ones((64, 64))}, NamedSharding(mesh, P("d")))

    def chain():
        return [jo.offload(optax.adam(1e-3), min_bytes=0) for _ in range(2)]

    state, (asked, other) = jo.abstract_state(optax.chain(*chain()), params), chain()
    jo.abstract_state(asked, params)
    table = jo.placement(lambda s, p: jo.update_params(optax.chain(asked, other), p, s, p), state, params)
    assert table.guessed == ("shardings: remembered from init, or from where they were asked for: P('d') of ['w']",)
