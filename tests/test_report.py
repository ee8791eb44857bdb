"""The table says how each leaf streams and why; ``order`` and the trace decide the order."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import in_scope, shardings_in
from tests.support.words import words

S = jax.ShapeDtypeStruct
PARAMS = {
    "embed": S((4096, 64), jnp.float32),
    "layers": {"b": S((6, 64), jnp.float32), "w": S((6, 64, 64), jnp.float32)},
}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def streams(inner, params=PARAMS, **extra):
    table = jo.placement(jo.offload(inner, min_bytes=0, window=2**16), params, **extra)
    assert not table.unknown
    return {leaf.path: leaf.streams for leaf in table.leaves}


@pytest.mark.oldest("what is printed of them")
def test_chunks_and_whole_leaves():
    table = streams(CLIPPED)
    assert table["[1][0].mu['layers']['w']"] == "6 chunks of axis 0, 2 leaves together"
    assert table["[1][0].nu['embed']"] == "64 chunks of axis 0, 2 leaves together"
    assert table["[1][0].nu['layers']['b']"] == "whole, 2 leaves together"  # smaller than the window
    assert table["[1][0].count"] == ""  # it does not stream


def test_reasons_and_repeated_loads():
    # 2-d matrices are orthogonalised, for which all rows are needed
    assert streams(optax.contrib.muon(1e-3))[".inner_states['muon'].inner_state[0].mu['embed']"].startswith("whole: ")
    # the norms of LAMB are taken over all rows, so that they are a pass of their own
    assert streams(optax.lamb(1e-3))["[0].mu['embed']"] == "64 chunks of axis 0, 2 leaves together (3 times)"
    assert streams(optax.contrib.prodigy(1.0))[".params0['embed']"] == "32 chunks of axis 0"


def test_a_norm_inside_of_a_branch_keeps_no_leaf_whole():
    finite = optax.apply_if_finite(CLIPPED, 3)
    assert streams(finite)[".inner_state[1][0].mu['embed']"] == "64 chunks of axis 0, 2 leaves together"
    skip = optax.MultiSteps(CLIPPED, 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
    table = streams(skip)
    assert table[".inner_opt_state[1][0].mu['embed']"] == "128 chunks of axis 0, 3 leaves together"
    in_norm, in_update = "32 chunks of axis 0", "128 chunks of axis 0, 3 leaves together"
    assert table[".acc_grads['embed']"] == f"{in_norm}; then {in_update}"


def test_an_update_that_needs_arguments_says_so():
    tx = jo.offload(optax.contrib.momo(1e-2), min_bytes=0, window=2**16)
    table = jo.placement(tx, PARAMS)
    assert "value" in table.unknown and table.unknown in words(table)
    assert all(leaf.streams == "" for leaf in table.leaves)
    assert all(leaf.host for leaf in table.leaves if leaf.shape)
    assert all(leaf.streams for leaf in jo.placement(tx, PARAMS, value=1.0).leaves if leaf.host)


@pytest.mark.parametrize(
    ("names", "order", "taken"),
    [
        (["first", "zebra", "apple", "last"], ["apple", "first"], {"apple", "first"}),
        (["a1", "a2", "b1", "b2"], ["2", "a", "b"], {"a2", "b2"}),  # the first rule that matches counts
        (["embed", "layers_2", "layers_10", "head"], None, {"layers_10", "layers_2"}),  # numbers count as numbers
    ],
)
def test_order_decides_what_a_fraction_takes(names, order, taken):
    params = {name: S((32, 32), jnp.float32) for name in names}
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, fraction=0.5, order=order)
    assert {leaf.param for leaf in jo.placement(tx, params).leaves if leaf.host} == taken


AXES = jax.sharding.AxisType


@pytest.mark.oldest("what is printed of them")
@pytest.mark.parametrize(
    ("shape", "spec", "how", "axes"),
    [
        ((16, 64, 64), ("d",), "2 chunks of axis 0", AXES.Auto),
        ((16, 64, 64), (None, "d"), "4 chunks of axis 0", AXES.Explicit),
        ((1024, 64), ("d",), "4 chunks of axis 0", AXES.Explicit),
    ],
)
def test_chunks_of_a_sharded_leaf_need_no_collectives(axes, shape, spec, how):
    """Windows count bytes on one device, and a chunk of a sharded axis is the same rows of every shard."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axes,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    with jax.set_mesh(mesh):
        params = {"w": S(shape, jnp.float32, sharding=sharding)}
        tx = jo.offload(optax.adamw(1e-3), min_bytes=0, window=2**15)
        state = jo.abstract_state(tx, params)
        assert jo.placement(tx, params).leaves[1].streams == f"{how}, 2 leaves together"
        step = jax.jit(tx.update, out_shardings=shardings_in((params, state)))
        compiled = step.lower(params, state, params).compile().as_text()
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert collective not in compiled


@pytest.mark.parametrize("abstract", [False, True], ids=["mesh", "abstract mesh"])
def test_explicit_axes_stream_as_the_step_does(abstract):
    """Without a mesh set, jax 0.12 does not divide what a traced init makes; the state that a step is handed is
    divided, and the table of the transformation says what the step does."""
    axes = dict(axis_types=(AXES.Explicit,))
    mesh = jax.sharding.AbstractMesh((8,), ("d",), **axes) if abstract else jax.make_mesh((8,), ("d",), **axes)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    params = {"w": S((8, 64, 64), jnp.float32, sharding=sharding)}
    tx = jo.offload(optax.adamw(1e-3), window=2**14)
    table = jo.placement(tx, params)
    of_step = jo.placement(lambda p, s: jo.update_params(tx, p, s, p), params, jo.abstract_state(tx, params))
    assert table.leaves[1].streams == of_step.leaves[0].streams == "2 chunks of axis 1, 2 leaves together"


def test_functions_among_the_extra_arguments():
    params = {"w": jnp.ones((8, 8))}
    tx = jo.offload(optax.lbfgs(memory_size=2), min_bytes=0)
    table = jo.placement(tx, params, value=1.0, grad=params, value_fn=lambda p: (p["w"] ** 2).sum())
    assert not table.unknown
    streams = [leaf.streams for leaf in table.leaves if leaf.host]
    assert streams and all(streams)


def test_multi_steps_is_taken_as_it_is():
    wrapper = optax.MultiSteps(CLIPPED, 2)
    assert streams(wrapper) == streams(wrapper.gradient_transformation())


@pytest.mark.parametrize(
    "inner", [optax.lamb(1e-3), optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(0.1))], ids=["lamb", "rms"]
)
def test_an_embedding_larger_than_the_window_takes_no_second_pass(inner):
    """Its trust ratio needs all rows: loaded whole it is a little more memory, in two passes twice the transfer."""
    params = {f"w{i:02}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(24)}
    params |= {"embed": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    tx = jo.offload(inner)
    assert not [leaf for leaf in jo.placement(tx, params).leaves if "times" in leaf.streams or "then" in leaf.streams]


def test_the_window_and_why_it_is_that():
    """How large it is: tests/test_windows.py."""
    params, adam = {"w": S((12, 1536, 1536), jnp.float32)}, optax.adam(1e-3)
    table = jo.placement(optax.chain(jo.offload(optax.trace(0.9), window=2**21), jo.offload(adam)), params)
    assert [w.nbytes for w in table.windows] == [2**21, 12 * 1536**2]
    assert all(f"window: {w.nbytes / 2**20:.2f} MiB on each device: {w.why}" in words(table) for w in table.windows)
    assert "from [0].trace['w'] on" in words(table)
    assert not jo.placement(jo.offload(adam, fraction=0), params).windows


# Each offload keeps its own window and order, whoever emits.


def by_group(**options):
    """Two groups of parameters, each with an offload of its own."""
    return optax.partition(
        {name: jo.offload(optax.adam(1e-3), min_bytes=0, **given) for name, given in options.items()},
        lambda params: {name: name for name in params},
    )


GROUPS = {"small": jnp.zeros((128, 1024)), "large": jnp.zeros((128, 1024))}


@pytest.mark.oldest("windows and orders of several")
def test_each_offload_keeps_its_order():
    names = ["a", "b", "c", "d"]
    params = {kind: {name: S((32, 32), jnp.float32) for name in names} for kind in ("one", "two")}
    tx = by_group(one={"order": [f"one/{name}" for name in "bdac"]}, two={"order": [f"two/{name}" for name in "cadb"]})

    step = jax.jit(lambda grads, state, params: jo.update_params(tx, grads, state, params))
    loads = in_scope(step.trace(params, jo.abstract_state(tx, params), params), "prefetch")
    for kind, order in ("one", "bdac"), ("two", "cadb"):
        assert [leaf[-1] for leaf, _ in loads if f"mu/{kind}" in leaf] == [*order], loads


def test_a_step_that_is_none():
    with pytest.raises(TypeError, match=r"tx: expected an optax.GradientTransformation or a step"):
        jo.placement(None, GROUPS)
    assert "it raises" in jo.placement(lambda params: params.missing, GROUPS).unknown


def test_a_sharded_step_has_its_bytes_on_each_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {"w": S((512, 128), jnp.float32, sharding=NamedSharding(mesh, P("x")))}
    tx = jo.offload(optax.adam(1e-3))
    state = jo.abstract_state(tx, params)
    table = jo.placement(lambda s, p: tx.update(p, s, p), state, params)
    assert (table.host_bytes, table.host_bytes_per_device) == (2 * 4 * 512 * 128, 2 * 4 * 512 * 128 // 8)
    assert "P('x')" in str(table)
    assert "arguments that are, or arrive, in host memory: 0.50 MiB" in words(table)
    assert "optimizer state: 0.50 MiB" in words(jo.placement(tx, params))


def test_gradients_that_wait_for_each_other_are_in_the_table_of_a_step():
    """Their norm takes them as they are made."""
    params = {f"w{k}": S((512, 512), jnp.float32) for k in range(3)}
    tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), min_bytes=0)

    def loss(params):
        return sum(jnp.vdot(w, w) for w in params.values())

    def step(params, state):
        return tx.update(jax.grad(loss)(params), state, params)

    table = jo.placement(step, params, jo.abstract_state(tx, params))
    assert table.in_turn == ("uses gradients in turn, 2 of them once the one before has been",)
    assert f"before anything is loaded: {table.in_turn[0]}" in words(table)


def test_what_an_update_loads_that_is_no_argument_is_in_the_table_of_a_step():
    """Two updates, the second of what the first has made; a state that the step makes; and one update in a scan."""
    params = jax.device_put({"w": jnp.ones((320, 64))}, jax.devices()[0])
    small, default = (jo.offload(optax.adam(1e-3), min_bytes=0, window=window) for window in (8000, None))

    def twice(params, state):
        updates, state = small.update(params, state, params)
        return default.update(updates, state, params)

    table = jo.placement(twice, params, jo.abstract_state(small, params))
    first, second = table.leaves[0].streams, table.elsewhere
    assert first.endswith(" chunks of axis 0, 2 leaves together") and second == (
        "whole, 2 leaves together, through 0.39 MiB",
    )
    assert second[0] in words(table)
    created = jo.placement(lambda params: small.update(params, small.init(params), params), params)
    assert not created.leaves and created.elsewhere == (f"{first}, through 0.01 MiB",)

    def thrice(params, state):
        return jax.lax.scan(lambda state, _: (default.update(params, state, params)[1], None), state, length=3)[0]

    table = jo.placement(thrice, params, jo.abstract_state(default, params))
    assert [leaf.streams for leaf in table.leaves] == ["whole, 2 leaves together, in each of 3 iterations"] * 2
    assert not table.elsewhere


def test_a_leaf_that_is_updated_ahead_of_a_scan_is_seen():
    """Clipped, so that the first of two updates runs ahead of the second pass, which reads the embedding whole."""
    params = {"embed": S((512, 64), jnp.float32), "layers": S((4, 64, 64), jnp.float32)}
    params = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=SingleDeviceSharding(jax.devices()[0])), params)
    tx = jo.offload(CLIPPED, min_bytes=0)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][x], params["layers"])
        return (x**2).mean()

    def step(params, state, x):
        for _ in range(2):
            params, state = jo.update_params(tx, jax.grad(loss)(params, x), state, params)
        return params, state

    table = jo.placement(jo.jit(step), params, jo.abstract_state(tx, params), S((8,), jnp.int32))
    how = {leaf.path[-9:]: leaf.streams for leaf in table.leaves if leaf.shape}
    assert how["['embed']"].startswith("whole, by a device_put of the step itself, which no window limits; keep")
    assert how["'layers']"].startswith("4 rows, in the scan that reads the parameters")
    assert len({*table.stays}) == len(table.stays) > 0  # two updates with one reason
