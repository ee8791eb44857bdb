"""Of the programs compiled for an H200 and a TPU: no alias crosses memories, and every host leaf keeps its buffer."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.aot.harness import H200, V5E, measure, mesh_for, require
from tests.support.rows import rows

pytestmark = pytest.mark.oldest("aliases in compiled programs")

SHAPES = {"embed": (512, 256), "up": (256, 512), "square": (256, 256), "down": (512, 256), "stacked": (3, 256, 256)}
RETURNED = {
    "params, state": lambda params, state, grads: (params, state),
    "state, params": lambda params, state, grads: (state, params),
    "grads, params, state": lambda params, state, grads: (grads, params, state),
}
DONATED = {"params": (0,), "state": (1,), "both": (0, 1)}
DAILY = [("params", "grads, params, state"), ("state", "params, state"), ("both", "state, params")]
HOST_LEAVES = 2 * len(SHAPES)


def aliases(text):
    """(result, argument, whether they are in host memory) of each alias in the head of a compiled program."""
    head = text.splitlines()[0]
    arguments, results = (
        [("S(5)" in x) for x in re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", part)]
        for part in head.split("entry_computation_layout=")[1].split("->")
    )
    found = re.findall(r"\{(\d+)\}: \((\d+), \{\}", head.split("entry_computation_layout=")[0])
    return [(int(i), int(j), results[int(i)], arguments[int(j)]) for i, j in found]


def compiled(target, donated, returned):
    require(target)
    sharding = NamedSharding(mesh_for(target), P())
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for name, shape in SHAPES.items()}
    state = jo.abstract_state(tx, params)

    def step(params, state):
        grads = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(grads, state, params)
        return RETURNED[returned](optax.apply_updates(params, updates), state, grads)

    return measure(target, step, (params, state), DONATED[donated])


@pytest.mark.long("compiles more of the same for a chip", but=["h200"])
@pytest.mark.parametrize("target", [H200, V5E])
def test_the_order_of_results_costs_nothing(target):
    """Returned as given nothing crosses, and jax pairs by itself."""
    safe, crossing = (compiled(target, "both", returned) for returned in ("params, state", "state, params"))
    assert crossing.peak <= safe.peak and crossing.host_temp <= safe.host_temp


@pytest.mark.long("compiles more of the same for a chip", but=["params-grads, params, state-h200"])
@pytest.mark.parametrize("target", [H200, V5E])
@pytest.mark.parametrize(
    ("donated", "returned"), rows(itertools.product(DONATED, RETURNED), "compiles for two chips", daily=DAILY)
)
def test_every_host_leaf_keeps_its_buffer(target, donated, returned):
    found = aliases(compiled(target, donated, returned).text)
    assert all(to == of for _, _, to, of in found)
    kept = [(i, j) for i, j, host, _ in found if host]
    assert len(kept) == (0 if donated == "params" else HOST_LEAVES)
    assert len({j - i for i, j in kept}) <= 1  # in their order: nothing is copied from one buffer to another
    assert len(found) - len(kept) >= (0 if donated == "state" else len(SHAPES))
