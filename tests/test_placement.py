"""Which leaves live where, and that every process and trace agrees."""

import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import assert_close, gradients, in_scope, kinds, kinds_of

HOST, DEVICE = "pinned_host", "device"


def layers(n=12):
    params = {f"layers_{i}": {"w": jnp.full((64, 64), i + 1.0, jnp.float32), "b": jnp.zeros(64)} for i in range(n)}
    return jax.device_put({"embed": jnp.ones((128, 64)), **params, "head": jnp.ones((64, 128))}, jax.devices()[0])


@pytest.mark.parametrize(("jitted", "window"), [(True, 500), (True, None), (False, None)])
def test_update_brings_every_leaf_home(jitted, window):
    """From a resident state, from others in part, and from one wholly on the host: all is where the table says."""
    tx, params = jo.offload(optax.adamw(1e-3), fraction=0.4, min_bytes=0, window=window), layers()
    wrap = jax.jit if jitted else lambda f: f
    expected = kinds_of(wrap(tx.init)(params))
    assert [k == HOST for k in jax.tree.leaves(expected)] == [leaf.host for leaf in jo.placement(tx, params).leaves]
    resident = jo.to_device(tx.init(params))
    all_host = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, resident)
    part = jo.offload(optax.adamw(1e-3), fraction=0.6, min_bytes=0).init(params)
    results = [wrap(tx.update)(params, state, params) for state in (tx.init(params), resident, part, all_host)]
    for updates, state in results:
        assert kinds_of(state) == expected
        assert set(jax.tree.leaves(kinds_of(updates))) == {DEVICE}
        jax.tree.map(np.testing.assert_array_equal, (updates, state), results[0])


def test_a_fraction_takes_the_last_layers_first():
    """Late layers' gradients appear first, so their state has the most work to hide behind."""
    params = layers()
    for fraction in (0.25, 0.5, 0.75):
        tx = jo.offload(optax.adamw(1e-3), fraction=fraction, min_bytes=1024)
        eligible = [leaf for leaf in jo.placement(tx, params).leaves if leaf.nbytes >= 1024]
        ranks = [leaf.rank for leaf in eligible if leaf.host], [leaf.rank for leaf in eligible if not leaf.host]
        assert max(ranks[0]) < min(ranks[1])
        moved, whole = sum(leaf.nbytes for leaf in eligible if leaf.host), sum(leaf.nbytes for leaf in eligible)
        assert abs(moved - fraction * whole) <= max(leaf.nbytes for leaf in eligible) / 2
    tx = jo.offload(optax.adamw(1), fraction=0.4, min_bytes=1024)
    names = {leaf.param for leaf in jo.placement(tx, params).leaves if leaf.host}
    assert "layers_10/w" in names and not names & {"layers_2/w", "embed", "head"}  # paths sort by their numbers


BOTH, SUBTREES = {"layers_0/w", "layers_1/w"}, {"layers_0/w", "layers_0/b", "head"}
WEIGHT = {"w": True, "b": False}


@pytest.mark.daily("each is a form of an option")
@pytest.mark.parametrize(
    ("option", "value", "names"),
    [
        ("select", r"layers_[01]/w$", BOTH),
        ("select", [r"layers_0/w", "layers_1/w"], BOTH),
        ("select", lambda path, leaf: leaf.ndim == 2 and path.startswith("layers"), BOTH),
        ("select", {"embed": False, "layers_0": WEIGHT, "layers_1": WEIGHT, "head": False}, BOTH),
        # a prefix tree decides for whole subtrees
        ("select", {"embed": False, "layers_0": True, "layers_1": False, "head": True}, SUBTREES),
        ("fraction", {"embed": 0.0, "layers_0": 1.0, "layers_1": 0.0, "head": 1.0}, SUBTREES),
    ],
)
def test_which_leaves_are_chosen(option, value, names):
    leaves = jo.placement(jo.offload(optax.adamw(1e-3), **{option: value}, min_bytes=0), layers(2)).leaves
    assert {leaf.param for leaf in leaves if leaf.host} == names
    assert option == "fraction" or {leaf.why for leaf in leaves if not leaf.host} == {"not selected", "rank 0"}


def test_keys_and_scalars_stay_whatever_the_options_say():
    inner = optax.GradientTransformation(
        lambda p: {"keys": jax.random.split(jax.random.key(0), 512), "count": jnp.zeros(()), "mu": p},
        lambda u, s, p=None: (u, s),
    )
    state = jo.offload(inner, min_bytes=0).init(layers(1))
    assert kinds_of({k: state[k] for k in ("keys", "count")}) == {"keys": DEVICE, "count": DEVICE}
    assert set(jax.tree.leaves(kinds_of(state["mu"]))) == {HOST}


def test_the_table_says_where_and_why():
    tx = optax.chain(optax.ema(0.9), jo.offload(optax.adamw(1e-3), select="embed", min_bytes=1024))
    text = str(jo.placement(tx, layers(1)))
    groups = re.split(r"\n(?=\w)", text)[1:]  # each begins at the margin, its rows do not
    group = {why: [g.splitlines()[1:] for g in groups if why in g.splitlines()[0]] for why in (
        f"{HOST}, 0.06 MiB: eligible; whole, 2 leaves together", "outside any offload", "not selected")}  # fmt: skip
    ((row,),) = group[f"{HOST}, 0.06 MiB: eligible; whole, 2 leaves together"]
    assert row.split() == ["0.06", "2", "128×64", "float32", "[1][0].{mu,nu}['embed']"]
    assert any(".ema['embed']" in row for g in group["outside any offload"] for row in g)
    assert any(".{mu,nu}['head']" in row for g in group["not selected"] for row in g)
    assert [g.split(":")[0] for g in groups[-2:]] == ["optimizer state", "window"]


@pytest.mark.long("starts two processes")
def test_placement_does_not_depend_on_the_process():
    program = (
        "import tests.conftest, jax_offload as jo, optax; from tests.test_placement import layers\n"
        "print(jo.placement(jo.offload(optax.adamw(1e-3), fraction=.37, min_bytes=0), layers()))"
    )
    env = dict(__import__("os").environ)
    prints = {
        subprocess.run(
            [sys.executable, "-c", program], env={**env, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_optax_tree_utilities():
    tx, params = jo.offload(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), min_bytes=0), layers(2)
    state = tx.init(params)
    moved = optax.tree.map_params(tx, lambda x: x, state)
    assert kinds_of(moved) == kinds_of(state)
    assert optax.tree.get(state, "mu")["embed"].sharding.memory_kind == HOST
    step = jax.jit(tx.update)
    _, state = step(params, state, params)
    lr = optax.tree.get(state, "learning_rate")
    smaller = optax.tree.set(state, learning_rate=lr / 10)
    a, _ = step(params, state, params)
    b, _ = step(params, smaller, params)
    assert step._cache_size() == 1  # a hyperparameter set between steps does not compile again
    np.testing.assert_allclose(b["embed"], a["embed"] / 10, rtol=1e-5)


def test_a_leaf_of_min_bytes_moves():
    params = jax.device_put({"w": jnp.ones((16, 16))}, jax.devices()[0])
    for min_bytes, kind in (1024, "pinned_host"), (1025, "device"):
        state = jo.abstract_state(jo.offload(optax.adam(1e-3), min_bytes=min_bytes), params)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim} == {kind}


# ---- states with other trees than init made, and the last rows of a leaf in chunks


ADAMW = optax.adamw(1e-2)


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


def test_a_state_whose_tree_changes_and_then_a_dtype():
    """Each update is compared with the state that it receives, not with the state that ``init`` makes."""

    def update(grads, state, params=None):
        wider = jnp.bfloat16 if state.last is None else jnp.float32
        return grads, Grown(jax.tree.map(lambda m, g: (m + g).astype(wider), state.adam, grads), jnp.float32(1.0))

    inner = optax.GradientTransformation(lambda p: Grown(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)), update)
    tx, params = jo.offload(inner, min_bytes=0), jax.device_put({"w": jnp.ones((16, 16))}, jax.devices()[0])
    state = tx.init(params)
    for dtype in jnp.bfloat16, jnp.float32:
        _, state = tx.update(params, state, params)
        assert state.adam["w"].dtype == dtype and state.adam["w"].sharding.memory_kind == HOST
