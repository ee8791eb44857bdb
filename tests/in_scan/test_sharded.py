"""Updates inside of a scan, on a mesh of 8 devices, gather no leaf whole; their numbers: tests/test_equivalence.py."""

import re

import jax
import jax.numpy as jnp
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
    batch,
    loss_of,
    offloaded,
    parameters,
    step_of,
)
from tests.support.trees import shardings_in

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
    if axes == AxisType.Explicit:
        return jax.sharding.reshard(p, P(*[None] * p.ndim))
    return jax.lax.with_sharding_constraint(p, NamedSharding(jax.sharding.get_abstract_mesh(), P()))


@pytest.mark.oldest("the whole step on a mesh")
@pytest.mark.parametrize(("way", "specs", "axes", "options"), CASES)
def test_each_layer_gathers_its_weights_where_it_runs(way, specs, axes, options):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)
    tx = offloaded(ADAMW if way == "jo.jit" else CLIPPED, **options)

    def layer(x, w):
        return x + jnp.tanh(x @ gathered(w, axes))

    def loss(params, batch):
        rest = {name: gathered(params[name], axes) for name in ("head", "bias")}
        return loss_of(params | rest, batch, layer=layer)

    def abstract(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        params = {name: abstract(x, specs[name]) for name, x in parameters().items()}
        args = params, jo.abstract_state(tx, params), {name: abstract(x, P("data")) for name, x in batch(0).items()}
        if way == "jo.jit":
            home = shardings_in(args[:2])
            step = jo.jit(step_of(tx, loss=loss), donate_argnums=(0, 1), out_shardings=(*home, None))
            assert all_moved(jo.placement(step, *args))
        else:
            gradients = "host" if "host" in way else "device"
            train = jo.pipelined(step_of(tx, loss=loss), donate_argnames=("params", "state"), gradients=gradients)
            step, args, _ = train.turned(*args)
        text = step.lower(*args).compile().as_text()
    assert " all-gather" in text and not re.findall(rf"\[{LAYERS},{WIDTH},{WIDTH}\]\S* all-gather", text)
