"""Updates inside of a scan, on a mesh of 8 devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.in_scan import ADAMW, STEPS, assert_close, assert_moved
from tests.support.rows import rows
from tests.support.steps import FAST, L, batch, normal, training_step


def sharded_loss(params, x):
    """Layers as with FSDP: each gathers its weights where it runs. Under explicit axes jax wants that said."""
    mesh = jax.sharding.get_abstract_mesh()

    def gathered(w):
        explicit = AxisType.Explicit in mesh.axis_types
        return jax.sharding.reshard(w, P(*[None] * w.ndim)) if explicit else w

    def body(x, p):
        w, b = jax.tree.map(gathered, p)
        return x + jnp.tanh(x @ w + b), None

    return (jax.lax.scan(body, x, (params["layers_w"], params["layers_b"]))[0] ** 2).mean()


SHARDED = {
    "fsdp": ({"layers_w": P(None, "data", None), "layers_b": P(None, "data")}, {}),
    "fsdp of columns": ({"layers_w": P(None, None, "data"), "layers_b": P(None, "data")}, {}),
    "zero": ({"layers_w": P(), "layers_b": P()}, {"shard_over": "data"}),
    "two axes": ({"layers_w": P(None, "data", "model"), "layers_b": P(None, "model")}, {}),
    "fsdp and zero": ({"layers_w": P(None, "model", None), "layers_b": P()}, {"shard_over": "data"}),
}


AXES = [AxisType.Auto, AxisType.Explicit]
ON_MESHES = [(name, bool(k & 1), axes) for k, (name, axes) in enumerate(itertools.product(SHARDED, AXES))]
ON_MESHES += [(name, not update, axes) for name, update, axes in ON_MESHES]


@pytest.mark.oldest("the whole step on a mesh")
@pytest.mark.parametrize(
    ("name", "update", "axes"),
    rows(
        ON_MESHES,
        "trains on eight devices",
        daily=[("zero", False, AxisType.Auto), ("two axes", True, AxisType.Explicit)],
        never=[case for k, case in enumerate(ON_MESHES) if k not in (0, 3, 4, 7, 9, 12)],
    ),
)
def test_sharded(name, update, axes):
    specs, options = SHARDED[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)
    plain_params = {"layers_w": normal("w", L, 16, 16), "layers_b": normal("b", L, 16)}
    tx = jo.offload(ADAMW, min_bytes=0, **options)
    with jax.set_mesh(mesh):
        params = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in plain_params.items()}
        state, x = tx.init(params), jax.device_put(batch(), NamedSharding(mesh, P("data")))
        places = jax.tree.map(lambda x: x.sharding, (params, state))
        step = training_step(tx, sharded_loss, update=update)
        results = (*places, None, None)
        step = jo.jit(step, donate_argnums=(0, 1), out_shardings=results, compiler_options=FAST)
        assert_moved(step, params, state, x)
        copy, found = jax.tree.map(jnp.copy, (params, state)), []
        step = step.lower(params, state, x).compile()
        gathers = [line.split(" all-gather")[0] for line in step.as_text().splitlines() if " all-gather" in line]
        assert gathers and not [line for line in gathers if "[3,16,16]" in line], gathers  # of a whole leaf
        for _ in range(STEPS):
            params, state, value, _ = step(params, state, x)
            found.append(value)
        assert jax.tree.map(lambda x: x.sharding, (params, state)) == places
        usual = jax.jit(training_step(tx, sharded_loss, update=update), out_shardings=results, compiler_options=FAST)
        for _ in range(STEPS):
            copy = usual(*copy, x)[:2]
        assert_close((params, state), copy, 1e-5)
    plain = jax.jit(training_step(ADAMW, sharded_loss), compiler_options=FAST)
    want, resident = plain_params, ADAMW.init(plain_params)
    for value in found:
        want, resident, expected, _ = plain(want, resident, batch())
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close((params, state), (want, resident), 1e-4)
