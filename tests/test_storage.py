"""offload(..., storage=): what is kept in fewer bits, where it lives, and what the optimizer sees of it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import gradients, kinds

HOST = "pinned_host"
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
ADAM_STORAGE = {
    "bfloat16": "bfloat16",
    "mixed": {"mu": "bfloat16", "nu": "float16"},
    "int8": {"mu": "int8", "nu": jo.Storage("uint8", block=64)},
    "float8": {"mu": "float8_e5m2", "nu": "float8_e4m3fn"},
}


def parameters(dtype=jnp.float32):
    shapes = {"layers": (6, 16, 256), "embed": (96, 300), "flat": (2051,), "norm": (16,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {name: jax.random.normal(k, shape, dtype) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return jax.device_put(params, jax.devices()[0])


def is_encoded(x):
    return hasattr(x, "values_scale")


def encoded(state):
    return list(filter(is_encoded, jax.tree.leaves(state, is_leaf=is_encoded)))


@pytest.mark.parametrize(("storage", "expected"), [("mixed", {"bfloat16", "float16"}), ("int8", {"int8", "uint8"})])
def test_where_it_lives(storage, expected):
    """Of layers, embed and flat, as the norm is smaller than min_bytes. Values: tests/test_equivalence.py."""
    tx, params = jo.offload(ADAMW, storage=ADAM_STORAGE[storage], min_bytes=1024, window=40_000), parameters()
    leaves = encoded(tx.init(params))
    assert len(leaves) == 6 and {x.values.dtype.name for x in leaves} == expected
    for x in leaves:
        assert x.values.sharding.memory_kind == HOST and x.dtype == "float32"
        large = x.values_scale is not None and x.values_scale.nbytes >= 1024
        assert x.values_scale is None or x.values_scale.sharding.memory_kind == (HOST if large else "device")
    how = {row.path: row.streams for row in jo.placement(tx, params).leaves if row.path.endswith("values")}
    stacked = [text for path, text in how.items() if "'layers'" in path]
    assert stacked and all("chunks of axis 0" in text for text in stacked), how


def test_leaves_that_pass_through_are_not_encoded_again():
    frozen = optax.masked(ADAMW, {"layers": True, "embed": False, "flat": False, "norm": False})
    inner = optax.chain(
        frozen, optax.GradientTransformation(lambda p: {"kept": p["embed"]}, lambda u, s, p=None: (u, s))
    )
    tx = jo.offload(inner, storage="int8", min_bytes=1024)
    params = parameters()
    kept = jo.placement(tx, params).leaves
    assert any("kept" in row.path and "not loaded" in row.streams for row in kept if row.host)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shard_over", [None, "data"])
def test_blocks_are_divided_as_their_parameters_are(axis_type, shard_over):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(axis_type,) * 3)
    params = {"w": jax.device_put(parameters()["layers"], NamedSharding(mesh, P(None, "fsdp", "tensor")))}
    tx = jo.offload(ADAMW, storage=ADAM_STORAGE["int8"], min_bytes=0, shard_over=shard_over)
    with jax.set_mesh(mesh):
        state, step = tx.init(params), jax.jit(lambda p, s: jo.update_params(tx, gradients(p), s, p))
        for x in (state, step(params, state)[1]):
            nu = x.inner_state[1][0].nu["w"]  # 256 columns are four blocks, over two devices
            assert nu.values.sharding.spec == nu.values_scale.sharding.spec == P(shard_over, "fsdp", "tensor")
            assert kinds(nu) == [HOST, HOST]
            jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim) or pytest.fail(str(x.sharding)),
                         x, jo.abstract_state(tx, params))  # fmt: skip


def test_what_a_string_leaves_alone():
    params = parameters(jnp.bfloat16)
    tx = jo.offload(jo.with_master_params(ADAMW), storage="int8", min_bytes=1024)
    rows = {row.path: row.dtype for row in jo.placement(tx, params).leaves}
    assert rows[".inner_state.master['layers']"] == jnp.float32
    assert rows[".inner_state.inner_state[1][0].mu['layers'].values"] == jnp.int8
    assert rows[".inner_state.inner_state[1][0].mu['norm']"] == jnp.float32
    tx = jo.offload(ADAMW, storage="bfloat16", min_bytes=1024)  # moments are bfloat16 as it is
    moments = [row.path for row in jo.placement(tx, params).leaves if "mu" in row.path]
    assert len(moments) == len(params) and all(path.endswith("]") for path in moments)
    tx = jo.offload(ADAMW, storage="bfloat16", min_bytes=1024, fraction=0)
    leaves = jo.placement(tx, parameters()).leaves
    assert not any(row.host for row in leaves) and any(row.dtype == jnp.bfloat16 for row in leaves)


def test_rules_match_whole_components_and_the_first_wins():
    params = {"nu": jnp.ones((64, 64)), "numbers": jnp.ones((64, 64))}
    tx = jo.offload(optax.adam(1e-3), storage={"0/nu": "uint8", "0/mu/num.*": "int8", ".*": "bfloat16"}, min_bytes=0)
    dtypes = {row.path: row.dtype for row in jo.placement(tx, params).leaves if row.path.endswith("values")}
    assert dtypes == {
        ".inner_state[0].mu['nu'].values": jnp.bfloat16,
        ".inner_state[0].mu['numbers'].values": jnp.int8,
        ".inner_state[0].nu['nu'].values": jnp.uint8,
        ".inner_state[0].nu['numbers'].values": jnp.uint8,
    }


def test_leaves_that_would_not_become_smaller_stay():
    params = {"column": jnp.ones((4096, 1)), "three": jnp.ones((4096, 3)), "scalar": jnp.ones(())}
    tx = jo.offload(optax.adafactor(1e-3, min_dim_size_to_factor=2), storage="int8", min_bytes=0)
    rows = {row.path: row.dtype for row in jo.placement(tx, params).leaves}
    assert not any("column" in path and path.endswith("values") for path in rows)
    update = jax.jit(tx.update)  # a scalar parameter has a leaf of one element, whose scale is no part of it
    update(params, tx.init(params), params)


@pytest.mark.parametrize("through", ["eagerly", "chunks"])
def test_a_block_with_negative_numbers_takes_the_map_of_int8(through):
    """Block by block: gradients have a negative number in every second block, and second moments in none."""
    params = jax.device_put({"w": jnp.ones((64, 512))}, jax.devices()[0])
    odd = jnp.arange(512) // 128 % 2 == 1
    states = []
    for mu in "uint8", "int8":
        window = 2**14 if through == "chunks" else None
        tx = jo.offload(optax.adamw(1e-2), storage={"mu": mu, "nu": "uint8"}, window=window, min_bytes=1024)
        state, update = tx.init(params), tx.update if through == "eagerly" else jax.jit(tx.update)
        for k in range(3):
            grads = jax.random.normal(jax.random.key(k), (64, 512))
            _, state = update({"w": jnp.where(odd, -jnp.abs(grads), jnp.abs(grads))}, state, params)
        states.append(jo.to_plain(tx, state)[0])
    got, want = ([np.asarray(x["w"]) for x in (state.mu, state.nu)] for state in states)
    # fusion may change a last bit, and with it, once in a while, which way a number is rounded
    assert (got[0][:, odd] != want[0][:, odd]).mean() < 1e-3 and (got[1] != want[1]).mean() < 1e-3
    assert (got[0][:, ~odd] > 0).all() and (got[0][:, odd] < 0).all()
    assert (got[0][:, ~odd] != want[0][:, ~odd]).mean() > 0.5


def stored(storage, inner=ADAMW, params=None):
    """An optimizer whose moments are stored, and its state."""
    tx = jo.offload(inner, storage=storage, min_bytes=1024)
    return tx, tx.init(parameters() if params is None else params)


def converted(state):
    return jo.from_plain(stored("int8")[0], state, parameters())


SGD, TRACE = optax.sgd(lambda _: 1.0), optax.sgd(lambda _: 1.0, momentum=0.9)
COUNTS = optax.GradientTransformation(lambda p: {"seen": jnp.zeros(4096, jnp.int32)}, lambda u, s, p=None: (u, s))
HALF = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
WRONG = {
    r"storage: expected one of float32, .* got 'int4'": lambda: stored({"mu": "int4"}),
    "storage: expected a dtype, or a mapping": lambda: stored(["int8"]),
    r"storage: 'mu\(' is not a regular expression": lambda: stored({"mu(": "int8"}),
    "storage: None is not a regular expression": lambda: stored({None: "int8"}),
    r"storage: \['mo'\] match no state leaf .*1/0/mu/embed": lambda: stored({"mo": "int8", "nu": "int8"}),
    r"storage: \['count'\] match no state leaf of rank 1": lambda: stored({"count": "int8"}),
    r"\['mu'\] match no state leaf .* keeps none.*: leave storage out\.": lambda: stored({"mu": "bfloat16"}, SGD),
    r"\['mu'\] match no state leaf .* leave storage out\.": lambda: stored({"mu": "bfloat16"}, optax.sgd(1.0)),
    # a count could not be matched, and is no suggestion
    r"\['nu'\] match (?!.*count).* these paths: 0/trace/\w+, 0/trace": lambda: stored({"nu": "bfloat16"}, TRACE),
    "'seen', for the state leaf seen: it is int32, and only floating": lambda: stored({"seen": "int8"}, COUNTS),
    "for the state leaf master/embed: it is a master parameter": lambda: stored(
        {"master/.*": "int8"}, jo.with_master_params(ADAMW), parameters(jnp.bfloat16)
    ),
    # bfloat16 cannot hold the scaled points of the map, so values would drift; it holds those of float8
    r"0/mu/embed: it is bfloat16, .* float32 ones: jo\.offload\(": lambda: stored({"mu": "int8"}, HALF),
    r"state: is a tuple, not one that .* keeps.*from_plain": lambda: stored("int8")[0].update(
        parameters(), ADAMW.init(parameters()), parameters()
    ),
    r"is stored as Storage\(dtype='bfloat16'.* says Storage\(dtype='int8'": lambda: stored("int8")[0].update(
        parameters(), stored("bfloat16")[1], parameters()
    ),
    "state: its tree is not the one that this optimizer's init gives": lambda: jo.offload(ADAMW).update(
        parameters(), stored("int8")[1], parameters()
    ),
    "state: is stored, not plain": lambda: converted(stored("int8")[1]),
    "state: not a plain state of tx": lambda: converted(SGD.init(parameters())),
    r"a leaf is bfloat16\[.*tx has float32": lambda: converted(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, ADAMW.init(parameters()))
    ),
}


@pytest.mark.daily("each is an error of its own")
@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong(words):
    with pytest.raises(ValueError, match=words):
        WRONG[words]()


def widening():
    """Momentum that becomes float32 in the first update, whatever the parameters are: as lars does it."""
    return optax.GradientTransformation(
        lambda p: {"m": jax.tree.map(jnp.zeros_like, p)},
        lambda u, s, p=None: (u, {"m": jax.tree.map(lambda m, u: 0.9 * m.astype(jnp.float32) + u, s["m"], u)}),
    )


@pytest.mark.parametrize("through", ["skip", "eagerly"])
def test_a_leaf_that_becomes_wider_in_its_first_update(through):
    params = {"wide": jnp.ones((4, 256)), "narrow": jnp.ones((4, 256), jnp.bfloat16)}
    params = jax.device_put(params, jax.devices()[0])
    inner = widening()
    tx = jo.offload(inner, storage="bfloat16", min_bytes=0)

    def update(grads, state, skip):
        return tx.update(grads, state, params, **({} if skip is None else {"skip": skip}))

    step = update if through == "eagerly" else jax.jit(update)
    state, want = tx.init(params), inner.init(params)
    assert state.inner_state["m"]["narrow"].dtype == jnp.bfloat16  # which would not become smaller
    for k in range(3):
        _, state = step(gradients(params, k), state, np.bool_(False) if through == "skip" else None)
        _, want = inner.update(gradients(params, k), want, params)
    kept = state.inner_state["m"]
    assert is_encoded(kept["wide"]) and kept["wide"].values.dtype == jnp.bfloat16
    assert kept["narrow"].dtype == jnp.float32 and kept["narrow"].sharding.memory_kind == HOST
    np.testing.assert_allclose(kept["narrow"], want["m"]["narrow"], rtol=1e-6)
    np.testing.assert_allclose(np.float32(kept["wide"].values), want["m"]["wide"], rtol=2**-6)
    if through == "skip":
        _, same = step(gradients(params), state, np.bool_(True))
        for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    other = jo.offload(inner, storage="float8_e4m3fn", min_bytes=0)
    with pytest.raises(ValueError, match=r"is stored as .*, and storage says .*float8_e4m3fn"):
        other.update(params, state, params)


def test_every_step_and_leaf_is_rounded_otherwise():
    """Leaves of the same numbers, and the same numbers step by step."""
    params = jax.device_put({f"layers_{k}": jnp.ones((16, 128)) for k in range(20)}, jax.devices()[0])
    grads = jax.tree.map(lambda p: jnp.linspace(0.5, 1, p.size).reshape(p.shape), params)
    inner = optax.GradientTransformation(optax.trace(0.0).init, optax.trace(0.0).update)
    tx = jo.offload(inner, storage="float8_e4m3fn", min_bytes=0)
    state, update, seen = tx.init(params), jax.jit(tx.update), set()
    for _ in range(20):
        _, state = update(grads, state)
        seen |= {np.asarray(x.values).tobytes() for x in encoded(state)}
    assert len(seen) == 400


@pytest.mark.parametrize(("name", "most"), [("bfloat16", 70), ("float8_e4m3fn", 220), ("int8", 220), ("uint8", 260)])
def test_encoders_are_small(name, most):
    """XLA's time for fusing a step grows with the operations of each leaf."""

    def operations(**options):
        tx = jo.offload(optax.trace(0.9), min_bytes=0, **options)
        params = jax.device_put({"w": jnp.ones((16, 256))}, jax.devices()[0])
        return jax.jit(tx.update).lower(params, tx.init(params)).as_text().count("stablehlo.")

    assert operations(storage=name) - operations() <= most


def test_under_vmap_and_shard_map():
    """As one by one; inside ``shard_map`` each device rounds by places of its own."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = jo.offload(optax.adamw(1e-2), storage=ADAM_STORAGE["int8"], min_bytes=0)
    params = jax.device_put({"w": jax.random.normal(jax.random.key(0), (8, 16, 256))}, jax.devices()[0])

    def steps(params):
        state = tx.init(params)
        for k in range(2):
            _, state = tx.update(gradients(params, k), state, params)
        return jo.to_plain(tx, state)[0]

    many, alone = jax.jit(jax.vmap(steps))(params), jax.jit(steps)({"w": params["w"][3]})
    mapped = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=P("x"), out_specs=jax.tree.map(
        lambda x: P("x") if x.ndim else P(), alone)))(jax.device_put(params, NamedSharding(mesh, P("x"))))  # fmt: skip
    one = jax.jit(steps)(params)
    for moment in "mu", "nu":
        got, want, divided, whole = (np.asarray(getattr(x, moment)["w"]) for x in (many, alone, mapped, one))
        assert (np.abs(got[3] - want) > 1e-6 * np.abs(want)).mean() < 1e-3
        assert np.linalg.norm(divided - whole) < 0.15 * np.linalg.norm(whole)
    assert kinds(many.mu) == [HOST]


def test_complex_leaves_are_not_left_out_in_silence():
    params = jax.device_put({"re": jnp.ones((8, 8)), "im": jnp.ones((8, 8), jnp.complex64)}, jax.devices()[0])
    tx = jo.offload(optax.adam(1e-3), storage="bfloat16", min_bytes=0)
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.warns(UserWarning, match=r"storage: 'bfloat16' leaves 2 complex leaves .* \[0\].mu\['im'\]"):
            state = init(params)
    assert [x.dtype.name for x in jax.tree.leaves(jo.to_plain(tx, state)[0].mu)] == ["complex64", "float32"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jo.offload(optax.adam(1e-3), storage={".*/re": "bfloat16"}, min_bytes=0).init(params)
        jo.placement(tx, params)


# To the state of plain optax and back, or to another format


@pytest.mark.parametrize(("storage", "given"), [("int8", False), *((name, True) for name in ADAM_STORAGE)])
def test_to_plain_and_back(storage, given):
    params = parameters()
    tx = jo.offload(ADAMW, storage=ADAM_STORAGE[storage], min_bytes=1024)
    state = jax.jit(tx.update)(gradients(params), tx.init(params), params)[1]
    bare = jo.to_plain(tx, state)
    like = ADAMW.init(params)
    assert jax.tree.structure(bare) == jax.tree.structure(like)
    for x, y in zip(jax.tree.leaves(bare), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert bare[1][0].mu["layers"].sharding.memory_kind == HOST
    part = jo.to_plain(tx, optax.tree.get(state, "mu"))  # a part of a state, too
    jax.tree.map(np.testing.assert_array_equal, part, bare[1][0].mu)
    again = jo.from_plain(tx, bare, params if given else None)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(again.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.sharding == y.sharding and x.sharding.memory_kind == y.sharding.memory_kind
    # and goes on, in plain optax and in another format
    updates, _ = jax.jit(ADAMW.update)(gradients(params), jo.to_device(bare), params)
    other = jo.offload(ADAMW, storage="bfloat16", min_bytes=1024)
    new = jo.from_plain(other, bare, params)
    got, _ = jax.jit(other.update)(gradients(params), new, params)
    assert float(optax.tree.norm(optax.tree.sub(got, updates))) < 0.01 * float(optax.tree.norm(updates))


def test_conversion_through_chains_under_jit_and_of_float32():
    params = parameters()
    tx = optax.chain(optax.clip_by_global_norm(1.0), jo.offload(optax.adamw(1e-2), storage="bfloat16", min_bytes=1024))
    state = tx.init(params)
    bare = jo.to_plain(tx, state)
    assert jax.tree.structure(bare) == jax.tree.structure(ADAMW.init(params))
    under = jax.jit(lambda s: jo.from_plain(tx, jo.to_plain(tx, s), params))(state)
    assert jax.tree.structure(under) == jax.tree.structure(state)
    assert all(x.values.sharding.memory_kind == HOST for x in encoded(under))
    same = jo.offload(ADAMW, min_bytes=1024)
    s = same.init(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(jo.to_plain(same, s)), jax.tree.leaves(s), strict=True))


def test_masters_want_the_parameters():
    params = parameters(jnp.bfloat16)
    tx = jo.offload(jo.with_master_params(ADAMW), storage="bfloat16", min_bytes=1024)
    bare = jo.to_plain(tx, tx.init(params))
    assert jax.tree.structure(bare) == jax.tree.structure(jo.with_master_params(ADAMW).init(params))
    with pytest.raises(ValueError, match=r"state: not a plain state of tx(.|\n)*masters(.|\n)*: pass params"):
        jo.from_plain(tx, bare)
    jo.from_plain(tx, bare, params)
