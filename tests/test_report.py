"""The table says how each leaf streams and why, and in which order."""

import fnmatch
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import shardings_in
from tests.support.words import words

S = jax.ShapeDtypeStruct
PARAMS = {
    "embed": S((4096, 64), jnp.float32),
    "layers": {"b": S((6, 64), jnp.float32), "w": S((6, 64, 64), jnp.float32)},
}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@functools.cache
def streams(inner):
    table = jo.placement(jo.offload(inner, min_bytes=0, window=2**16), PARAMS)
    assert not table.unknown
    return {leaf.path: leaf.streams for leaf in table.leaves}


SKIPPING = optax.MultiSteps(CLIPPED, 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
TOGETHER = "chunks of axis 0, 2 leaves together"
STREAMS = [  # the optimizer, a leaf of its state, and how it streams
    (CLIPPED, "[1][0].mu['layers']['w']", f"6 {TOGETHER}"),
    (CLIPPED, "[1][0].nu['embed']", f"64 {TOGETHER}"),
    (CLIPPED, "[1][0].nu['layers']['b']", "whole, 2 leaves together"),  # smaller than the window
    (CLIPPED, "[1][0].count", ""),  # it does not stream
    # 2-d matrices are orthogonalised, for which all rows are needed
    (optax.contrib.muon(1e-3), ".inner_states['muon'].inner_state[0].mu['embed']", "whole: *"),
    # the norms of LAMB are taken over all rows, so that they are a pass of their own
    (optax.lamb(1e-3), "[0].mu['embed']", f"64 {TOGETHER} (3 times)"),
    (optax.contrib.prodigy(1.0), ".params0['embed']", "32 chunks of axis 0"),
    # a leaf runs in chunks despite a norm in a branch
    (optax.apply_if_finite(CLIPPED, 3), ".inner_state[1][0].mu['embed']", f"64 {TOGETHER}"),
    (SKIPPING, ".inner_opt_state[1][0].mu['embed']", "128 chunks of axis 0, 3 leaves together"),
    (SKIPPING, ".acc_grads['embed']", "32 chunks of axis 0; then 128 chunks of axis 0, 3 leaves together"),
]


@pytest.mark.oldest("what is printed of them")
def test_how_leaves_stream():
    for inner, path, how in STREAMS:
        assert fnmatch.fnmatchcase(streams(inner)[path], how), (path, streams(inner))


def test_an_update_that_needs_arguments_says_so():
    tx = jo.offload(optax.contrib.momo(1e-2), min_bytes=0, window=2**16)
    table = jo.placement(tx, PARAMS)
    assert "value" in table.unknown and table.unknown in words(table)
    assert all(leaf.streams == "" for leaf in table.leaves)
    assert all(leaf.host for leaf in table.leaves if leaf.shape)
    assert all(leaf.streams for leaf in jo.placement(tx, PARAMS, value=1.0).leaves if leaf.host)
    assert "it raises" in jo.placement(lambda params: params.missing, PARAMS).unknown


@pytest.mark.oldest("what is printed of them")
@pytest.mark.parametrize(
    ("shape", "spec", "how", "axes"),
    [
        ((16, 64, 64), ("d",), "2 chunks of axis 0", AxisType.Auto),
        ((16, 64, 64), (None, "d"), "4 chunks of axis 0", AxisType.Explicit),
        ((1024, 64), ("d",), "4 chunks of axis 0", AxisType.Explicit),
    ],
)
def test_chunks_of_a_sharded_leaf_need_no_collectives(axes, shape, spec, how):
    """Windows count bytes on one device, and a chunk of a sharded axis is the same rows of every shard."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axes,))
    sharding = NamedSharding(mesh, P(*spec))
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
    axes = dict(axis_types=(AxisType.Explicit,))
    mesh = jax.sharding.AbstractMesh((8,), ("d",), **axes) if abstract else jax.make_mesh((8,), ("d",), **axes)
    sharding = NamedSharding(mesh, P("d"))
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
    params = {f"w{i:02}": S((1024, 1024), jnp.float32) for i in range(24)}
    params |= {"embed": S((4096, 1024), jnp.float32)}
    tx = jo.offload(inner)
    assert not [leaf for leaf in jo.placement(tx, params).leaves if "times" in leaf.streams or "then" in leaf.streams]


def test_the_window_and_why_it_is_that():
    params, adam = {"w": S((12, 1536, 1536), jnp.float32)}, optax.adam(1e-3)
    table = jo.placement(optax.chain(jo.offload(optax.trace(0.9), window=2**21), jo.offload(adam)), params)
    assert [w.nbytes for w in table.windows] == [2**21, 12 * 1536**2]
    assert all(f"window: {w.nbytes / 2**20:.2f} MiB on each device: {w.why}" in words(table) for w in table.windows)
    assert "from [0].trace['w'] on" in words(table)
    assert not jo.placement(jo.offload(adam, fraction=0), params).windows


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

    slope = jax.grad(lambda params: sum(jnp.vdot(w, w) for w in params.values()))
    table = jo.placement(lambda p, s: tx.update(slope(p), s, p), params, jo.abstract_state(tx, params))
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
    assert how["['embed']"].startswith("whole, which no window limits: its update runs ahead of the pass")
    assert "offload(select=) keeps it on the device" in how["['embed']"]
    assert how["'layers']"].startswith("4 rows, in the scan that reads the parameters")
    in_scan = [window.nbytes for window in table.windows if window.why.startswith("the rows of an iteration")]
    assert in_scan == [3 * 2 * 4 * 64**2]  # three rows of both moments
    assert len({*table.stays}) == len(table.stays) > 0  # two updates with one reason


# ---- what no trace tells is marked


NAMES = ["first", "zebra", "apple"]


def test_the_table_marks_an_order_that_it_guesses():
    guess = "order: guessed from the parameters' paths; "
    params = {name: jnp.ones((32, 32)) for name in NAMES}
    free = jo.offload(optax.adam(1e-3), min_bytes=0)
    assert guess in jo.placement(optax.apply_if_finite(free, 2), params).guessed[0]
    table = jo.placement(free, params)
    assert table.guessed == (guess + "placement(step, *args) reads it from the step",)
    assert table.guessed[0] in words(table)
    state = jo.abstract_state(free, params)
    handed_in = jo.placement(lambda grads, state, params: free.update(grads, state, params), params, state, params)
    assert handed_in.guessed == (guess + "the step does not tell it",)

    def step(state, params):
        return free.update(jax.grad(lambda p: sum(map(jnp.sum, p.values())))(params), state, params)

    for shown in (jo.placement(step, state, params), jo.placement(free, {"one": params["apple"]})):
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
    assert jo.placement(tx, {"v": S((64, 64), jnp.float32)}).guessed == (
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


# ---- how large a window is, and what goes through it at once


KIB, MIB, GIB = 2**10, 2**20, 2**30
MOMENTUM = optax.sgd(1e-3, momentum=0.9)  # a leaf of the state for each parameter


def placed(shapes, inner=MOMENTUM, sharding=None, **options):
    """The placement for parameters of these shapes, or of so many rows of 4 KiB."""
    shapes = [(s, 1024) if isinstance(s, int) else s for s in shapes]
    params = {f"w{k}": S(s, jnp.float32, sharding=sharding) for k, s in enumerate(shapes)}
    return jo.placement(jo.offload(inner, min_bytes=0, **options), params)


EIGHTH, USUAL = "an eighth of the state", "two and a half of its usual pieces"
ON_8 = NamedSharding(jax.make_mesh((8,), ("d",)), P("d"))
WINDOWS = {  # shapes, options, the window's bytes, why, and whether small pieces run in a loop of their own
    "one piece of 8 MiB": ([2048], {}, MIB, "1 MiB, the least", False),
    "one piece of more": ([2304], {}, 9 * MIB // 8, EIGHTH, False),
    "2 GiB": ([2**19], {}, 256 * MIB, "256 MiB, less than its usual pieces", False),
    "8 GiB": ([2**21], {}, 256 * MIB, "256 MiB, less than its usual pieces", False),
    "16 GiB": ([2**22], {}, 512 * MIB, "a 32nd of the state, less than its usual pieces", False),
    "an embedding of less than a fifth does not count": ([2560] * 8 + [5120], {}, 25 * MIB, USUAL, False),
    "an embedding of more does": ([5376] + [2560] * 8, {}, 101 * MIB // 8, EIGHTH, False),
    "pieces of 8 MiB": ([2048] * 9, {}, 20 * MIB, USUAL, False),
    "smaller ones run in a loop of their own": ([2044] * 9, {}, 5 * 2044 * 4 * KIB // 2, USUAL, True),
    "given, small": ([256] * 4, {"window": MIB}, MIB, "as given", False),
    "given, large": ([256] * 4, {"window": GIB}, GIB, "as given", False),
    "two leaves that need each other are one piece": (
        [(256, 256)] * 4 + [(8, 8)], {"inner": optax.adam(1e-3)}, 5 * 512 * KIB // 2, USUAL, True
    ),
    "divided pieces count on one device, and do not run apart": (
        [(256, 256)] * 4, {"sharding": ON_8}, 5 * 32 * KIB // 2, USUAL, False
    ),
}  # fmt: skip


@pytest.mark.daily("each is a rule")
@pytest.mark.parametrize("case", WINDOWS)
def test_the_window(case):
    shapes, options, nbytes, why, apart = WINDOWS[case]
    (window,) = placed(shapes, **options).windows
    assert (window.nbytes, window.why, bool(window.own_loop)) == (nbytes, why, apart)


def normed():
    """Momentum scaled by the norm of all of it: the norm needs every leaf before any is updated."""
    trace = optax.trace(0.9)

    def update(updates, state, params=None):
        updates, state = trace.update(updates, state)
        norm = optax.global_norm(updates)
        return updates, state._replace(trace=jax.tree.map(lambda m: m / norm, state.trace))

    return optax.GradientTransformation(trace.init, update)


@pytest.mark.parametrize(("window", "twice"), [(MIB, False), (MIB - 4 * KIB, True)])
def test_a_second_pass_is_made_only_where_one_is_more_than_the_window(window, twice):
    found = [leaf.streams for leaf in placed([(256, 256)] * 4, normed(), window=window).leaves if leaf.host]
    assert all(("2 times" in way or "; then " in way) == twice for way in found)


# ---- leaves that are alike are one row, whose path can be read as theirs and as no other's


def rows_of(params, **options):
    """The paths in the rows of a printed table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "9999")
        lines = str(jo.placement(jo.offload(optax.trace(0.9), min_bytes=0, **options), params)).splitlines()
    return [line.split()[-1] for line in lines if re.match(r"  +[\d.]+ +\d+ ", line)]


def nested(*keys):
    """Parameters by their keys, all alike."""
    tree = {}
    for *outer, last in keys:
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = S((8, 8), jnp.float32)
    return tree


def paths_of(path):
    """All that a row's path can be read as."""

    def several(text):
        names = []
        for part in text.split(","):
            first, _, last = part.partition("..")
            names += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)] if last else [part]
        return names

    pieces = re.split(r"\{(.*?)\}", path)
    choices = [several(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
    return {"".join(chosen) for chosen in itertools.product(*choices)}


@pytest.mark.oldest("what is printed of them")
@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ([(f"layers_{i:02}", "w") for i in range(24)], ["['layers_{00..23}']['w']"]),
        ([("a0",), ("a1",), ("a3",), ("b0",)], ["['a{0,1,3}']", "['b0']"]),
        ([("a0", "q"), ("a0", "k")], ["['a0']['k']", "['a0']['q']"]),  # names are no numbers
        ([(f"a{i}", f"b{j}") for i in range(3) for j in range(4)], ["['a{0..2}']['b{0..3}']"]),
        ([("a0", "b0"), ("a0", "b1"), ("a1", "b0")], ["['a{0,1}']['b0']", "['a0']['b1']"]),
        ([("w",)], ["['w']"]),
    ],
)
def test_what_is_one_row(keys, rows):
    assert rows_of(nested(*keys)) == [f".trace{row}" for row in rows]


def test_a_state_that_is_one_array_and_none():
    assert (rows_of(S((8, 8), jnp.float32)), rows_of({})) == ([".trace"], [])


@settings(max_examples=20, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1))
def test_a_rows_path_is_read_as_its_leaves(chosen):
    found = rows_of(nested(*((f"layers_{i:02}", f"block{j}") for i, j in chosen)))
    leaves = [f".trace['layers_{i:02}']['block{j}']" for i, j in chosen]
    assert sorted(itertools.chain.from_iterable(map(paths_of, found))) == sorted(leaves)


def test_what_is_not_alike_stays_apart():
    """Another shape, type, sharding, memory: and the largest come first, then in order."""
    mesh = jax.make_mesh((8,), ("x",))
    one, other = (S((8, 8), jnp.float32, sharding=NamedSharding(mesh, P(*spec))) for spec in ((), ("x",)))
    alike = S((8, 8), jnp.float32)
    for second in S((4, 4), jnp.float32), S((8, 8), jnp.bfloat16):
        assert rows_of({"a0": alike, "a1": second}) == [".trace['a0']", ".trace['a1']"]
        assert rows_of({"a0": second, "a1": alike}) == [".trace['a1']", ".trace['a0']"]
    assert len(rows_of({"a0": one, "a1": other})) == 2 > len(rows_of({"a0": one, "a1": one}))
    assert len(rows_of({"a0": alike, "a1": alike}, select="a0")) == 2


@pytest.mark.parametrize("columns", [80, 132])
def test_a_deep_model_fits_a_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    layers = {f"layers_{i:02}": {"kernel_of_the_attention": S((512, 512), jnp.float32)} for i in range(100)}
    params = {"a_long_name_for_what_stands_around_all_of_it": {"and_another_inside_of_it": layers}}
    table = jo.placement(jo.offload(optax.adamw(1e-3), fraction=0.5), params)
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= columns and len(lines) < 20
    assert "[0].{mu,nu}['a_long_name" in "".join(line.strip() for line in lines)
    assert repr(table) == "Placement(201 leaves: 100.00 MiB in pinned_host, 100.00 MiB on the device)"
