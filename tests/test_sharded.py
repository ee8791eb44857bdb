"""The state of sharded parameters: sharded like them, or over further axes too (ZeRO-1)."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import FAST, assert_close, shardings_in
from tests.support.words import words

HOST, DEVICE = "pinned_host", "device"
SPECS = {  # on a mesh of data, fsdp and tensor
    "embed": P("tensor", "fsdp"),
    "layers": {"w": P(None, "fsdp", "tensor"), "b": P(None, "tensor")},
    "head": P("fsdp", "tensor"),
    "odd": P(),
}
SHAPES = {"embed": (32, 16), "layers": {"w": (6, 16, 24), "b": (6, 24)}, "head": (16, 32), "odd": (7, 9)}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


def mesh_of(axes, shape=(2, 2, 2), names=("data", "fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(axes,) * len(names))


def network(mesh, specs=SPECS, seed=0):
    """Parameters on the mesh; with ``None`` on one device."""
    rng = np.random.default_rng(seed)
    values = jax.tree.map(lambda s: rng.standard_normal(s, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    if mesh is None:
        return jax.device_put(values, jax.devices()[0])
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, params, grads, n=3):
    """Parameters and state after ``n`` donated steps, in the shardings in which they came; compiled once."""
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(step_of(tx), donate_argnums=(0, 1), out_shardings=out, compiler_options=FAST)
    for _ in range(n):
        params, state = step(params, state, grads)
    assert step._cache_size() == 1
    return params, state


@functools.cache
def resident(inner, n=3):
    """The same on one device."""
    params, grads = network(None), network(None, seed=100)
    state, step = inner.init(params), jax.jit(step_of(inner), compiler_options=FAST)
    for _ in range(n):
        params, state = step(params, state, grads)
    return params, state


def spec_of(x):
    """Axis by axis, without what is not said at the end."""
    entries = [(e,) if isinstance(e, str) else e for e in x.sharding.spec]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def entries(*spec):
    sharding = NamedSharding(mesh_of(AxisType.Auto), P(*spec))
    return spec_of(jax.ShapeDtypeStruct((8,) * len(spec), jnp.float32, sharding=sharding))


def assert_state(state, expected, tx, params):
    """Every leaf's memory and sharding, here and as foretold by ``abstract_state``."""
    for (path, x), want, spec in zip(
        jax.tree_util.tree_flatten_with_path(state)[0],
        jax.tree.leaves(jo.abstract_state(tx, params)),
        jax.tree.leaves(expected, is_leaf=lambda s: isinstance(s, P)),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        assert x.sharding.memory_kind == want.sharding.memory_kind == (HOST if x.ndim else DEVICE), name
        assert spec_of(x) == spec_of(want) == entries(*spec), name


def test_factored_leaves_have_the_axes_that_are_left():
    """Of a square matrix both factors have the same shape; the specs tell them apart."""
    mesh = mesh_of(AxisType.Auto)
    params = {"w": jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P("fsdp", "tensor")))}
    params["v"] = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P(("data", "fsdp"), "tensor")))
    params["stacked"] = jax.device_put(jnp.ones((3, 16, 32)), NamedSharding(mesh, P(None, "fsdp", "tensor")))
    inner = OPTIMIZERS["adafactor"]
    tx = jo.offload(inner, min_bytes=0)
    state = tx.init(params)[0]
    # optax reduces row factors over the larger of the last two sorted dimensions
    assert state.v_row["v"].shape == (16,) and spec_of(state.v_row["v"]) == entries(("data", "fsdp"))
    assert state.v_col["v"].shape == (32,) and spec_of(state.v_col["v"]) == entries("tensor")
    assert {spec_of(state.v_row["w"]), spec_of(state.v_col["w"])} == {entries("fsdp"), entries("tensor")}
    assert spec_of(state.v_row["stacked"]) == entries(None, "fsdp")
    assert spec_of(state.v_col["stacked"]) == entries(None, "tensor")
    # what XLA finds on its own, for the resident optimizer, is the same
    grads = jax.tree.map(lambda p: p + 0.5, params)
    plain = jax.jit(lambda g, p: inner.update(g, inner.init(p), p)[1])(grads, params)[0]
    for factors, found in (state.v_row, plain.v_row), (state.v_col, plain.v_col):
        assert all(factors[k].sharding.is_equivalent_to(found[k].sharding.with_memory_kind(HOST), factors[k].ndim)
                   for k in params)  # fmt: skip
    after = run(tx, params, grads)[1][0]
    for k in params:
        assert spec_of(after.v_row[k]) == spec_of(state.v_row[k]) and spec_of(after.v_col[k]) == spec_of(state.v_col[k])


ZERO = {  # what is replicated over data is divided there: the first axis that is free and divides, the layers last
    "embed": P(("tensor", "data"), "fsdp"),
    "layers": {"w": P("data", "fsdp", "tensor"), "b": P("data", "tensor")},
    "head": P(("fsdp", "data"), "tensor"),
    "odd": P(),
}
REPLICATED = jax.tree.map(lambda _: P(), SPECS, is_leaf=lambda s: isinstance(s, P))


@pytest.mark.oldest("meshes with Auto and Explicit axes")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_zero_1(axes):
    """Beside axes of the parameters, which are abstract at first. Of replicated ones: tests/test_equivalence.py."""
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        params, grads = network(mesh), network(mesh, seed=100)
        tx = jo.offload(OPTIMIZERS["clip"], min_bytes=0, shard_over="data", window=1)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        state = jax.jit(tx.init, out_shardings=shardings_in(jo.abstract_state(tx, abstract)))(params)
        expected = optax.tree.map_params(tx, lambda x, spec: spec, state, ZERO, transform_non_params=lambda x: P())
        assert_state(state, expected, tx, params)
        params, state = run(tx, params, grads)
        assert_state(state, expected, tx, params)
    assert jax.tree.map(spec_of, params) == jax.tree.map(
        lambda s: entries(*s), SPECS, is_leaf=lambda s: isinstance(s, P)
    )
    assert_close((params, state), resident(OPTIMIZERS["clip"]), 2e-5)


SHAPE = (24, 16, 128)
ANOTHER = "its next value is of another type or sharding"


def on(shape, *spec, axes=AxisType.Explicit):
    return NamedSharding(mesh_of(axes, shape, ("a", "b")[: len(shape)]), P(*spec))


ONE, EIGHT, ROWS, COLUMNS = on((1,)), on((8,)), on((8,), "a"), on((8,), None, "a")
reshard = jax.sharding.reshard


def momentum(m, u):
    return 0.9 * m + u


def by_row(m, u):
    """Make each row of the next state depend on its number in the leaf."""
    return momentum(m, u * jax.lax.broadcasted_iota(jnp.float32, m.shape, 0))


def plus(made):
    """Make a divided array, gather it, and add it to the state."""
    return lambda m, u: momentum(m, u) + reshard(made(), EIGHT)


RESHARDED = {  # the state's sharding, its next value, the update made of that, and how it streams
    "onto a mesh": (None, lambda m, u: reshard(momentum(m, u), ONE), jnp.negative, f"whole: {ANOTHER}"),
    "onto another mesh": (ONE, lambda m, u: reshard(momentum(m, u), on((1, 1))), jnp.negative, f"whole: {ANOTHER}"),
    "only the update, onto a mesh": (None, momentum, lambda m: reshard(-m, ONE), "24 chunks"),
    "rows of the update divided": (
        EIGHT, momentum, lambda m: reshard(-m, ROWS), "whole: reshard divides its rows between devices"),
    "columns of the update divided": (EIGHT, momentum, lambda m: reshard(-m, COLUMNS), "24 chunks"),
    "the update gathered": (ROWS, momentum, lambda m: reshard(-m, EIGHT), "3 chunks"),
    "made divided, by a broadcast": (
        EIGHT, plus(lambda: jnp.full(SHAPE, 2.0, out_sharding=ROWS)), jnp.negative,
        "whole: broadcast_in_dim divides its rows between devices"),
    "made divided, by an iota": (
        EIGHT, plus(lambda: jax.lax.broadcasted_iota(jnp.float32, SHAPE, 1, out_sharding=ROWS)), jnp.negative,
        "whole: iota divides its rows between devices"),
    "by the place of a row": (on((8,), "a", axes=AxisType.Auto), by_row, jnp.negative, "3 chunks"),
}  # fmt: skip


@pytest.mark.daily("each divides otherwise")
@pytest.mark.parametrize("case", RESHARDED)
def test_an_optimizer_that_reshards(case):
    """On a mesh with Explicit axes, numbers and shardings equal the resident ones."""
    home, following, update_of, streams = RESHARDED[case]

    def update(updates, state, params=None):
        new = jax.tree.map(following, state, updates)
        return jax.tree.map(update_of, new), new

    inner = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    w = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    grads = jax.device_put({"w": w}, home or jax.devices()[0])
    tx = jo.offload(inner, min_bytes=0, window=1)
    with jax.set_mesh(EIGHT.mesh) if "made" in case else contextlib.nullcontext():
        (leaf,) = jo.placement(tx, grads).leaves
        assert leaf.streams.startswith(streams), leaf
        updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
        wanted = jax.jit(inner.update)(grads, inner.init(grads), grads)
    assert_close((updates, state), wanted, 1e-6)
    assert state["w"].sharding.is_equivalent_to(wanted[1]["w"].sharding.with_memory_kind(HOST), 3)
    assert updates["w"].sharding.is_equivalent_to(wanted[0]["w"].sharding, 3)


def test_the_table_says_which_axis_and_why_none():
    mesh = mesh_of(AxisType.Auto)
    params = network(mesh, REPLICATED)
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, shard_over="data")
    table = jo.placement(tx, params)
    shardings = {leaf.path: leaf.sharding for leaf in table.leaves}
    assert shardings["[0].mu['layers']['w']"] == "P(None, 'data')"
    assert shardings["[0].mu['odd']"] == "P() (no axis divides by 2)"
    state = tx.init(params)
    held = [x for x in jax.tree.leaves(state) if x.ndim]
    assert table.host_bytes_per_device == sum(x.addressable_shards[0].data.nbytes for x in held) < table.host_bytes
    assert f"for each device {table.host_bytes_per_device / 2**20:.2f} MiB in pinned_host" in words(table)
    assert "P(None, 'data')" in str(table) and "sharding" in str(table).splitlines()[0]
    assert "sharding" not in str(jo.placement(jo.offload(optax.adam(1e-3)), network(None))).splitlines()[0]
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, shard_over="data")
    divided = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P(None, "data")))}
    assert spec_of(tx.init(divided)[0].mu["w"]) == (None, ("data",))
    assert jo.placement(tx, divided).leaves[1].sharding == "P(None, 'data') (sharded over these axes already)"


@pytest.mark.parametrize(("axes", "skip"), [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, True)])
def test_what_is_too_small_to_be_divided_stays_as_it_was(axes, skip):
    """A scale beside numbers of 8 bits, made of a gradient that is divided: else the second step would be another."""
    params = {"w": jax.device_put(np.ones((128, 8), np.float32), NamedSharding(mesh_of(axes, (8,), ("data",)), P()))}
    tx = jo.offload(OPTIMIZERS["adamw"], min_bytes=1024, storage="int8", shard_over="data")

    def step(params, state, skip):
        grads = jax.tree.map(jnp.sin, params)
        return jo.update_params(tx, grads, state, params, **({"skip": skip} if given else {}))

    given, jitted = skip, jax.jit(step)
    with jax.set_mesh(params["w"].sharding.mesh):
        state, skips = tx.init(params), jnp.bool_(False)
        places = jax.tree.map(lambda x: x.sharding, state)
        after = jitted(params, state, skips)[1]
    mu = after.inner_state[0].mu["w"]
    assert spec_of(mu.values) == entries("data") and mu.values.sharding.memory_kind == HOST
    assert spec_of(mu.values_scale) == entries() and mu.values_scale.sharding.memory_kind == DEVICE
    for x, place in zip(jax.tree.leaves(after), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)


def test_a_resident_state_is_divided_in_its_first_step_or_by_to_host():
    mesh = mesh_of(AxisType.Auto)
    params, grads = network(mesh, REPLICATED), network(mesh, REPLICATED, seed=100)
    tx = jo.offload(OPTIMIZERS["adamw"], min_bytes=0, shard_over="data")
    shardings = shardings_in(jo.abstract_state(tx, params))
    plain = OPTIMIZERS["adamw"].init(params)
    moved = jo.to_host(tx, plain, params)
    for x, s in zip(jax.tree.leaves(moved), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == s or x.ndim == 0
    _, state = jax.jit(tx.update)(grads, plain, params)
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.memory_kind == s.memory_kind and (x.ndim == 0 or x.sharding.is_equivalent_to(s, x.ndim))
    assert_close(state, resident(OPTIMIZERS["adamw"], 1)[1], 2e-5)


MAPPED = {  # what varies over other axes must not be gated with the rest: types say so
    "one spec": ((8,), {"w": P("a")}),
    "two specs": ((2, 2), {"w": P("a"), "v": P("a", "b")}),
}


@pytest.mark.oldest("shard_map")
@pytest.mark.daily("each divides otherwise")
@pytest.mark.parametrize("case", MAPPED)
def test_under_shard_map(case):
    """Every device updates its own part of everything, in chunks: shapes there are local, and divided no further."""
    shape, specs = MAPPED[case]
    mesh, rng = mesh_of(AxisType.Auto, shape, ("a", "b")[: len(shape)]), np.random.default_rng(0)
    values = {name: rng.standard_normal((4 * shape[0], 32, 16), np.float32) for name in specs}
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in values.items()}
    plain = optax.adamw(1e-2)
    tx = jo.offload(plain, min_bytes=0, window=1)
    state = tx.init(params)
    of_state = jax.tree.map(lambda x: x.sharding.spec if x.ndim else P(), state)
    step = jax.jit(
        jax.shard_map(tx.update, mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)),
        out_shardings=shardings_in((params, state)),
    )
    streams = {leaf.streams for leaf in jo.placement(step, params, state, params).leaves if leaf.host}
    assert case == "two specs" or streams == {"4 chunks of axis 0, 2 leaves together"}
    got = step(params, state, params)
    assert_close(got, plain.update(values, plain.init(values), values), 2e-5)
    assert got[1][0].mu["w"].sharding.memory_kind == HOST


def test_looking_is_not_remembered_and_two_layouts_are_an_error():
    mesh = mesh_of(AxisType.Auto)
    a, b = (network(mesh, specs) for specs in (REPLICATED, SPECS))
    tx = jo.offload(OPTIMIZERS["adamw"], min_bytes=0, shard_over="data")
    state = tx.init(a)
    jo.placement(tx, b)
    with pytest.raises(ValueError, match=r"shard_over: .* parameter .*SingleDeviceSharding"):
        jo.placement(tx, network(None))
    _, state = jax.jit(tx.update)(a, state, a)
    assert spec_of(state[0].mu["head"]) == entries("data")
    tx.init(b)
    message = r"shard_over: parameter \['\w+'\].* seen in several shardings.* for each model"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda *args: tx.update(*args))(a, state, a)


@pytest.mark.oldest("both kinds of axes")
def test_a_mesh_of_mixed_axes():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data", "fsdp")))}
        state = jo.offload(optax.adam(1e-3), min_bytes=0).init(params)
        assert spec_of(state[0].mu["w"]) == (("data",), ("fsdp",))
        with pytest.raises(ValueError, match="shard_over: the parameters' mesh mixes types of axes"):
            jo.offload(optax.adam(1e-3), min_bytes=0, shard_over="data").init(params)


def test_what_shard_over_cannot_do_says_so():
    tx = jo.offload(optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9), min_bytes=0, shard_over="data")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("fsdp", "tensor")))}
        with pytest.raises(ValueError, match="shard_over: on a mesh with Explicit axes this optimizer cannot mix"):
            jax.jit(tx.update)(params, tx.init(params), params)
    mesh = mesh_of(AxisType.Auto)
    params = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P()))}
    tx = jo.offload(optax.adam(1e-2), min_bytes=0, shard_over="data")
    state = tx.init(params)
    specs = jax.tree.map(lambda x: P(), (params, state, params))
    with pytest.raises(ValueError, match=r"shard_over: update is traced inside shard_map"):
        jax.jit(jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs[:2]))(params, state, params)

    @optax.inject_hyperparams
    def anew(learning_rate):
        return jo.offload(optax.adam(learning_rate), min_bytes=0, shard_over="data")

    tx = anew(1e-3)
    with pytest.raises(ValueError, match=r"shard_over: .*inject_hyperparams.*around that"):
        jax.jit(tx.update)(params, tx.init(params), params)


BAD = {
    "twice": (("data", "data"), r"names an axis twice: \('data', 'data'\)"),
    "an axis that is not there": ("model", r"the parameters' mesh has no axes \['model'\], only"),
    "not a name": (3, r"expected the name of a mesh axis, or several; got 3"),
    "no names": ((), r"expected the name of a mesh axis, or several; got \(\)"),
    "no mesh": ("data", r".* axes of a mesh, but parameter .* is on SingleDeviceSharding"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shard_over(case):
    over, message = BAD[case]
    mesh = None if case == "no mesh" else mesh_of(AxisType.Auto)
    with pytest.raises(ValueError, match=f"shard_over: {message}"):
        jo.offload(optax.adam(1e-3), min_bytes=0, shard_over=over).init(network(mesh))


def test_an_update_that_cannot_know_the_shardings_says_so():
    params = network(mesh_of(AxisType.Auto))
    state = optax.adam(1e-3).init(params)
    tx = jo.offload(optax.adam(1e-3), min_bytes=0, shard_over="data")
    with pytest.raises(ValueError, match=r"shard_over: the sharding of parameter \['embed'\] is not known.*tx\.init"):
        jax.jit(tx.update)(params, state, params)
    jo.abstract_state(tx, params)
    jax.jit(tx.update)(params, state, params)


@pytest.mark.parametrize("jit", [jax.jit, jo.jit])
@pytest.mark.parametrize("where", ["a mesh", "another device"])
def test_a_state_that_a_program_makes_goes_to_the_devices_of_the_parameters(where, jit):
    """No ``out_shardings``, as in plain JAX, where zeros of another device go wherever the step is."""
    if where == "a mesh":
        params, grads = (network(mesh_of(AxisType.Auto), seed=seed) for seed in (0, 100))
    else:
        params, grads = jax.device_put((network(None), network(None, seed=100)), jax.devices()[1])
    inner = OPTIMIZERS["clip"]
    results = []
    for tx in inner, jo.offload(inner, min_bytes=0):
        carry, step = (params, jit(tx.init)(params)), jit(step_of(tx))
        for _ in range(3):
            carry = step(*carry, grads)
        results.append(carry)
    assert_close(results[1], results[0], 1e-5)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(results[1][1]) if x.ndim} == {HOST}
