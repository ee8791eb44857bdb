"""``jo.pipelined`` on a mesh: values, shardings, and what the programs gather."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.pipelined import (
    ADAMW,
    HOST,
    LAYERS,
    WIDTH,
    advance,
    assert_close,
    batch,
    gathered,
    loop,
    loss_of,
    new_params,
    now,
    offloaded,
    parameters,
    pipelined,
    step_of,
)
from tests.support.rows import rows
from tests.support.trees import shardings_in

FSDP = {"layers": P(None, "data"), "head": P("data"), "bias": P()}
TWO_AXES = {"layers": P(None, "data", "model"), "head": P("model"), "bias": P()}


@pytest.mark.long("more shardings", but=["AxisType.Auto-specs0-device"])
@pytest.mark.oldest("the turned step on a mesh")
@pytest.mark.parametrize(
    ("axis_type", "specs", "gradients"),
    rows(
        [
            (AxisType.Auto, FSDP, "device"),
            (AxisType.Explicit, FSDP, "device"),
            (AxisType.Auto, TWO_AXES, "device"),
            (AxisType.Explicit, TWO_AXES, "host"),
            (AxisType.Auto, TWO_AXES, "host"),
        ],
        "trains on eight devices",
        daily=[(AxisType.Auto, FSDP, "device"), (AxisType.Explicit, TWO_AXES, "host")],
    ),
)
def test_fully_sharded(axis_type, specs, gradients):
    """The numbers of one device; every leaf of parameters and state stays divided as it was, over all steps."""
    shape, names = ((8,), ("data",)) if specs is FSDP else ((4, 2), ("data", "model"))
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in parameters().items()}
    tx = offloaded()
    plain_tx = ADAMW

    def step_on(tx, form):
        def step(params, state, batch):
            def loss(params):
                full = jax.tree.map(lambda p: gathered(p, mesh, axis_type), params)
                return loss_of(full, batch)

            value, grads = jax.value_and_grad(loss)(params)
            return *new_params(tx, form, grads, state, params), value

        return step

    batches = [jax.device_put(batch(k), NamedSharding(mesh, P("data"))) for k in range(5)]
    wanted, losses = loop(step_of(plain_tx, "update"), (parameters(), ADAMW.init(parameters())), map(batch, range(5)))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init, out_shardings=shardings_in(jo.abstract_state(tx, params)))(params)
        train = pipelined(step_on(tx, "update_params"), gradients=gradients)
        carry, returned = advance(train, (params, state), batches[:3])
        for each in batches[3:]:
            before = jax.tree.map(lambda x: x.sharding, carry.kept)
            carry, aux = train(carry, each)
            returned.append(aux)
            assert jax.tree.map(lambda x: x.sharding, carry.kept) == before
        got, after = train.finish(carry)
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, wanted[-1][0]), 1e-3)
    like = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    assert all(got[k].sharding.is_equivalent_to(like[k], got[k].ndim) for k in like)
    moments = optax.tree.get(after, "mu")
    for k in ("layers", "head"):
        assert moments[k].sharding.memory_kind == HOST
        assert moments[k].sharding.is_equivalent_to(like[k].with_memory_kind(HOST), moments[k].ndim)


@pytest.mark.long("more shardings", but=["AxisType.Auto-update-0.25"])
@pytest.mark.parametrize(
    ("axis_type", "form", "fraction"),
    rows(
        [
            (AxisType.Explicit, "update", 1.0),
            (AxisType.Auto, "update", 0.25),
            (AxisType.Explicit, "update_params", 0.25),
            (AxisType.Auto, "update_params", 0.25),
        ],
        "trains on eight devices",
        daily=[(AxisType.Explicit, "update", 1.0), (AxisType.Auto, "update", 0.25)],
    ),
)
def test_a_state_divided_further_than_its_parameters(axis_type, form, fraction):
    """New parameters are whole on every device, as the old ones, and what is made of them: also what ``params`` shows.

    A row of the new ones is not written into a gradient that is divided. They are not left divided as their state,
    where XLA would gather all layers in each iteration.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = offloaded(shard_over="data", fraction=fraction)

    def step_on(tx, form):
        def step(params, state, batch):
            old, average = params
            value, grads = jax.value_and_grad(loss_of)(old, batch)
            new, state = new_params(tx, form, grads, state, old)
            return (new, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, new)), state, value

        return step

    def begun(place):
        return jax.device_put((parameters(), jax.tree.map(jnp.ones_like, parameters())), place)

    start = begun(jax.devices()[0]), ADAMW.init(parameters())
    wanted, losses = loop(step_on(ADAMW, "update"), start, map(batch, range(3)))
    batches = [jax.device_put(batch(k), NamedSharding(mesh, P("data"))) for k in range(3)]
    with jax.set_mesh(mesh):
        params = begun(NamedSharding(mesh, P()))
        carried = params, tx.init(params[0])
        places = jax.tree.map(lambda x: x.sharding, carried)
        train = pipelined(step_on(tx, form))
        turned, args, _ = train.turned(*carried, batches[0])
        text = turned.lower(*args).compile().as_text()
        assert " all-gather" in text and not re.findall(rf"\[{LAYERS},{WIDTH},{WIDTH}\]\S* all-gather", text)
        carry, returned = advance(train, carried, batches)
        assert turned._cache_size() == 1
        for name, x in carry.kept[1].items():  # what waits lies as it was said to, where arguments are abstract say
            assert x.nbytes < 2**16 or args[1][name].sharding.is_equivalent_to(x.sharding, x.ndim), name
        assert_sharded(train.params(carry), places[0])
        got = train.finish(carry)
    assert_sharded(got, places)
    assert HOST in {x.sharding.memory_kind for x in jax.tree.leaves(got[1])}
    np.testing.assert_allclose(now(returned), losses, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, got[0]), jax.tree.map(np.asarray, wanted[-1][0]), 1e-3)


def assert_sharded(got, places):
    for place, x in zip(jax.tree.leaves(places), jax.tree.leaves(got), strict=True):
        assert place.memory_kind == x.sharding.memory_kind and place.is_equivalent_to(x.sharding, x.ndim)
