"""Updates inside of a scan, on a mesh of 8 devices: the numbers of one device, and no leaf is gathered whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIPPED,
    LAYERS,
    WIDTH,
    all_moved,
    assert_placed,
    batch,
    finished,
    loop,
    loss_of,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import assert_close, shardings_in

FSDP = {"layers": P(None, "data", None), "head": P("data"), "bias": P()}
COLUMNS = {"layers": P(None, None, "data"), "head": P("data"), "bias": P()}
TWO_AXES = {"layers": P(None, "data", "model"), "head": P("model"), "bias": P()}
WHOLE = {"layers": P(), "head": P(), "bias": P()}
ZERO = {"shard_over": "data"}
CASES = [  # the step, how it is divided, its axes, and options of jo.offload
    ("jo.jit", FSDP, AxisType.Auto, {}),
    ("jo.jit", TWO_AXES, AxisType.Explicit, {}),
    ("jo.jit", WHOLE, AxisType.Auto, ZERO),
    ("pipelined", FSDP, AxisType.Auto, {}),
    ("pipelined, host", TWO_AXES, AxisType.Explicit, {}),
    ("pipelined", WHOLE, AxisType.Auto, ZERO | {"fraction": 0.25}),
    ("jo.jit", COLUMNS, AxisType.Auto, {}),
]


def gathered(p, axes):
    """Under explicit axes jax wants that said."""
    mesh = jax.sharding.get_abstract_mesh()
    if axes == AxisType.Explicit:
        return jax.sharding.reshard(p, P(*[None] * p.ndim))
    return jax.lax.with_sharding_constraint(p, NamedSharding(mesh, P()))


@pytest.mark.oldest("the whole step on a mesh")
@pytest.mark.parametrize(("way", "specs", "axes", "options"), CASES)
def test_sharded(way, specs, axes, options):
    """Each layer gathers its weights where it runs; every leaf of parameters and state stays divided as it was."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)
    inner = ADAMW if way == "jo.jit" else CLIPPED
    tx = offloaded(inner, **options)

    def layer(x, w):
        return x + jnp.tanh(x @ gathered(w, axes))

    def loss(params, batch):
        rest = {name: gathered(params[name], axes) for name in ("head", "bias")}
        return loss_of(params | rest, batch, layer=layer)

    wanted, others = loop(step_of(inner, "update"), (parameters(), inner.init(parameters())), map(batch, range(4)))
    with jax.set_mesh(mesh):
        params = {k: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[k])) for k, x in parameters().items()}
        given = [jax.tree.map(np.asarray, batch(k)) for k in range(4)]
        batches = jax.device_put(given, NamedSharding(mesh, P("data")))
        state = jax.jit(tx.init, out_shardings=shardings_in(jo.abstract_state(tx, params)))(params)
        home, step = shardings_in((params, state)), step_of(tx, loss=loss)
        if way == "jo.jit":
            jitted = jo.jit(step, donate_argnums=(0, 1), out_shardings=(*home, None))
            assert all_moved(jo.placement(jitted, params, state, batches[0]))
            compiled, results = jitted.lower(params, state, batches[0]).compile(), []
            text = compiled.as_text()
            for each in batches:
                params, state, value = compiled(params, state, each)
                results.append(value)
        else:
            gradients = "host" if "host" in way else "device"
            train = jo.pipelined(step, donate_argnames=("params", "state"), gradients=gradients)
            turned, args, _ = train.turned(params, state, batches[0])
            text = turned.lower(*args).compile().as_text()
            carry, aux = train((params, state), batches[0])
            returned = [aux]
            for k, each in enumerate(batches[1:]):
                before = shardings_in(carry.kept)
                carry, aux = train(carry, each)
                returned.append(aux)
                assert k == 0 or shardings_in(carry.kept) == before
            assert turned._cache_size() == 1 or not options  # else XLA divides what start returns as it likes
            for name, x in carry.kept[1].items():  # what waits lies as it was said to, where arguments are abstract say
                assert x.nbytes < 2**16 or args[1][name].sharding.is_equivalent_to(x.sharding, x.ndim), name
            (params, state), results = finished(train, carry, returned)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), (params, state), home)
    assert_placed((params, state), like)
    np.testing.assert_allclose(results, others, rtol=0, atol=1e-4)
    assert_close(jax.tree.map(np.asarray, params), wanted[-1][0], 1e-3)
    moments = optax.tree.get(state, "mu")["layers"]
    assert moments.sharding.memory_kind == (
        "pinned_host" if "fraction" not in options else moments.sharding.memory_kind
    )
    assert " all-gather" in text and not re.findall(rf"\[{LAYERS},{WIDTH},{WIDTH}\]\S* all-gather", text)
