"""Parameters and gradients in pinned host memory: streamed as the state is, and returned to where they were."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.aot.harness import H200, require
from tests.support.steps import assert_as_plain, step_of
from tests.support.trees import assert_close, kinds

OLDEST = pytest.mark.oldest("types of memory in a trace")

HOST, DEVICE = "pinned_host", "device"
SPECS = {"layers": PartitionSpec(None, None, "data"), "w": PartitionSpec("data"), "b": PartitionSpec()}
SHAPES = {"layers": (6, 32, 64), "w": (64, 32), "b": (32,)}
ADAMW = optax.adamw(1e-2)
CLIP_ADAMW = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def tree(seed: int, mesh: Any, dtype: Any = jnp.float32, divided: bool = False) -> Any:
    rng = np.random.default_rng(seed)
    sharding = {k: NamedSharding(mesh, spec if divided else PartitionSpec()) for k, spec in SPECS.items()}
    return {k: jax.device_put(jnp.asarray(rng.normal(size=s), dtype), sharding[k]) for k, s in SHAPES.items()}


def to_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(HOST)), tree)


OPTIMIZERS: dict[str, Any] = {  # the optimizer, options, the parameters' dtype, and the tolerance
    "adamw": (ADAMW, {"shard_over": "data"}, jnp.float32, 1e-6),
    "clipped": (CLIP_ADAMW, {"fraction": 0.5}, jnp.float32, 1e-5),
    "low bits": (jo.with_master_params(ADAMW, low_bits=True), {}, jnp.bfloat16, 4e-3),
    "no state": (optax.sgd(1e-2), {}, jnp.float32, 1e-6),
    "resident": (ADAMW, {"fraction": 0}, jnp.float32, 1e-6),
}
RUNS = {"eager": lambda step: step, "jit": jax.jit, "jo.jit": lambda step: jo.jit(step, donate_argnums=(1, 2))}


@OLDEST
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["update", "update_params"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_from_the_host(name, form, run):
    """Updates come back to host memory; by ``update_params`` the parameters are there too. Parameters alone, with any
    optimizer: tests/test_equivalence.py."""
    inner, options, dtype, tolerance = OPTIMIZERS[name]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tx = jo.offload(inner, min_bytes=0, window=2**14, **options)
    params, grads = (tree(seed, mesh, dtype, divided=name == "clipped") for seed in (0, 1))
    there = to_host(params) if form == "update_params" else params
    update = tx.update if form == "update" else functools.partial(jo.update_params, tx)
    with jax.set_mesh(mesh):
        want, got = (None, tx.init(params)), (None, tx.init(there))
        for _ in range(2):
            want = jax.jit(update)(grads, want[1], params)
            got = RUNS[run](update)(to_host(grads), got[1], jax.tree.map(jnp.copy, there))
            assert_close(got, want, tolerance)
            assert {*kinds(got[0])} == {HOST} and kinds(got[1]) == kinds(want[1])
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert x.sharding.with_memory_kind(DEVICE).is_equivalent_to(y.sharding.with_memory_kind(DEVICE), x.ndim)


@OLDEST
@pytest.mark.parametrize("options", ["update_on", "disk"])
@pytest.mark.parametrize("argument", ["params", "updates"])
def test_where_they_have_to_be_on_the_device(options, argument, disk):
    """The error names the argument, the leaf and the cure."""
    params = tree(0, jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)))
    there = to_host(params)
    given = {"update_on": "host"} if options == "update_on" else {"disk": disk}
    tx = jo.offload(ADAMW, min_bytes=0, **given)
    args = there if argument == "updates" else params, tx.init(params), there if argument == "params" else params
    for update in tx.update, lambda *args: jo.update_params(tx, *args):
        with pytest.raises(ValueError, match=rf"{argument}: \['b'\] is in pinned host memory.*jo\.to_device"):
            jo.jit(update)(*args)


WRAPS = {"jit": jax.jit, "jo.jit": jo.jit, "eager": lambda step: step}


@OLDEST
@pytest.mark.parametrize("wrap", WRAPS)
def test_whatever_else_is_in_host_memory_is_loaded(wrap):
    """``skip``, a state that nothing offloads any more, and the parameters of masters without an ``offload``."""
    params = {"w": jax.device_put(jnp.ones((32, 32), jnp.bfloat16), jax.devices()[0])}
    grads, skip = jax.tree.map(lambda p: p / 8, params), to_host(jax.device_put(jnp.bool_(False), jax.devices()[0]))
    streamed, resident = jo.offload(ADAMW, min_bytes=0), jo.offload(ADAMW, fraction=0)
    want = WRAPS[wrap](ADAMW.update)(grads, ADAMW.init(params), params)
    for tx in (streamed, resident):
        update = WRAPS[wrap](lambda skip, *args, tx=tx: tx.update(*args, skip=skip))
        got = update(skip, grads, streamed.init(params), params)
        assert_close(got, want, 4e-3)
        assert kinds(got) == kinds((grads, tx.init(params)))
        got, _ = WRAPS[wrap](lambda skip, *args, tx=tx: jo.update_params(tx, *args, skip=skip))(
            skip, grads, tx.init(params), params
        )
        assert_close(got, optax.apply_updates(params, want[0]), 4e-3)
    masters = WRAPS[wrap](jo.with_master_params(ADAMW).init)(to_host(params))
    assert {*kinds(masters)} == {DEVICE}
    assert_close(masters, jo.with_master_params(ADAMW).init(params), 0)


@OLDEST
@pytest.mark.parametrize("low_bits", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_no_offload_loads_is_an_error_of_ours(wrap, low_bits):
    """It names the argument and the cure, and is not the one that jax raises."""
    params = {"w": jax.device_put(jnp.ones((32, 32), jnp.bfloat16), jax.devices()[0])}
    tx = jo.with_master_params(ADAMW, low_bits=low_bits)
    state, there = tx.init(params), to_host(params)
    moved = jax.tree.map(lambda x: to_host(x) if x.ndim else x, state)
    for name, args in {
        "updates": (there, state, params), "params": (params, state, there), "state": (params, moved, params)
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}: \['w'\] is in pinned host memory.*jo\.to_device"):
            WRAPS[wrap](tx.update)(*args)
    for tx in (ADAMW, optax.chain(optax.ema(0.9), jo.offload(ADAMW, min_bytes=0))):
        moved = jax.tree.map(lambda x: to_host(x) if x.ndim else x, jo.to_device(tx.init(params)))
        with pytest.raises(ValueError, match=r"state: .* no offload\(\.\.\.\) in tx .*jo\.to_host\(tx, state\)"):
            WRAPS[wrap](lambda *args, tx=tx: jo.update_params(tx, *args))(params, moved, params)
        WRAPS[wrap](lambda *args, tx=tx: jo.update_params(tx, *args))(params, jo.to_host(tx, moved, params), params)


# ---- a model that computes with them: its scans load their rows

ON_DEVICE = jax.memory.Space.Device


def to_load(w: Any) -> Any:
    return jax.device_put(w, ON_DEVICE)


def plain(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss_of(layer: Any, params: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    return ((x @ params["head"]) ** 2).mean()


def unrolled(layer: Any, params: Any, x: Any) -> Any:
    for k in range(6):
        x = layer(x, params[f"w{k}"])
    return ((x @ params["head"]) ** 2).mean()


def in_microbatches(tx: Any, loss: Any, *, unroll: int = 1, mean_of_losses: bool = False) -> Any:
    """Sum the gradients of two sequences at a time; or let the loss be a mean over a scan of checkpointed losses."""

    def step(params: Any, state: Any, x: Any) -> Any:
        parts = x.reshape(4, -1, x.shape[-1])

        def sums(grads: Any, x: Any) -> Any:
            value, new = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, grads, new), value

        def mean(params: Any) -> Any:
            body = jax.checkpoint(lambda total, x: (total + loss(params, x), None))
            return jax.lax.scan(body, 0.0, parts)[0] / len(parts)

        if mean_of_losses:
            value, grads = jax.value_and_grad(mean)(params)
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
            grads, value = jax.lax.scan(sums, zeros, parts, unroll=unroll)
            value, grads = value.mean(), jax.tree.map(lambda x: x / len(parts), grads)
        return *jo.update_params(tx, grads, state, params), value

    return step


SHARDED = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}


def in_shard_maps(loss: Any, params: Any, x: Any) -> Any:
    """The loss is a ``shard_map``; its gradient has two, and the first makes the activations."""
    return jax.shard_map(lambda *args: jax.lax.pmean(loss(*args), "data"), **SHARDED)(params, x)


def behind_a_shard_map(tx: Any, loss: Any) -> Any:
    """Make the gradients in a ``shard_map``, and update after it."""

    def step(params: Any, state: Any, x: Any) -> Any:
        made = lambda *args: jax.lax.pmean(jax.value_and_grad(loss)(*args), "data")  # noqa: E731
        value, grads = jax.shard_map(made, **SHARDED)(params, x)
        return *jo.update_params(tx, grads, state, params), value

    return step


def in_one_shard_map(tx: Any, loss: Any) -> Any:
    """Run the whole step in one."""
    return lambda *args: jax.shard_map(step_of(tx, loss=loss), **SHARDED)(*args)


def in_groups(params: Any, x: Any, recomputed: Any = lambda group: group) -> Any:
    """Scan over groups of two layers."""

    @recomputed
    def group(x: Any, layers: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jax.checkpoint(plain)(x, w), None), x, layers)[0]

    groups = params["layers"].reshape(-1, 2, *params["layers"].shape[1:])
    x, _ = jax.lax.scan(lambda x, layers: (group(x, layers), None), x, groups)
    return ((x @ params["head"]) ** 2).mean()


def cast(x: Any, w: Any) -> Any:
    return plain(x, w.astype(jnp.bfloat16).astype(x.dtype))


def begun(sharding: Any, scans: bool = True) -> Any:
    """Parameters and a batch."""
    rng = np.random.default_rng(0)
    shapes = {"layers": (4, 128, 128)} if scans else {f"w{k}": (128, 128) for k in range(6)}
    params = {name: jnp.float32(rng.normal(size=shape) / 16) for name, shape in shapes.items()}
    params["head"] = jnp.float32(rng.normal(size=(128, 8)))
    return jax.device_put((params, jnp.float32(rng.normal(size=(8 if scans else 64, 128)))), sharding)


ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), ADAMW)
layered = functools.partial(loss_of, jax.checkpoint(plain))
recomputed = functools.partial(in_groups, recomputed=jax.checkpoint)
through_checkpoint = jax.checkpoint(layered)
LAYERS: dict[str, Any] = {  # a layer in the model, and the same layer with parameters on the device
    "no load": (jax.checkpoint(plain), jax.checkpoint(plain)),
    "no load, not checkpointed": (plain, plain),
    "a load": (lambda x, w: plain(x, to_load(w)), plain),
    "a load, checkpointed": (jax.checkpoint(lambda x, w: plain(x, to_load(w))), jax.checkpoint(plain)),
    "a load outside of the checkpoint": (lambda x, w: jax.checkpoint(plain)(x, to_load(w)), jax.checkpoint(plain)),
    "a cast": (cast, cast),
    "a load and a cast": (jax.checkpoint(lambda x, w: cast(x, to_load(w))), jax.checkpoint(cast)),
}  # fmt: skip
PASSES: dict[str, Any] = {  # the step, and its optimizer
    "a checkpoint around the loss": (lambda tx: step_of(tx, loss=through_checkpoint), ADAMW),
    "a checkpoint around the loss, clipped": (lambda tx: step_of(tx, loss=through_checkpoint), CLIPPED),
    "microbatches": (lambda tx: in_microbatches(tx, layered), ADAMW),
    "microbatches of a checkpointed loss": (lambda tx: in_microbatches(tx, through_checkpoint), ADAMW),
    "microbatches, clipped": (lambda tx: in_microbatches(tx, layered), CLIPPED),
    "microbatches, unrolled": (lambda tx: in_microbatches(tx, layered, unroll=2), ADAMW),
    "groups of layers": (lambda tx: step_of(tx, loss=in_groups), ADAMW),
    "groups that are recomputed": (lambda tx: step_of(tx, loss=recomputed), ADAMW),
    "a shard_map": (lambda tx: behind_a_shard_map(tx, layered), ADAMW),
    "a loss in a shard_map": (
        lambda tx: step_of(tx, loss=functools.partial(in_shard_maps, layered)), ADAMW),
    "a step in a shard_map": (lambda tx: in_one_shard_map(tx, layered), ADAMW),
    "a mean of losses": (lambda tx: in_microbatches(tx, layered, mean_of_losses=True), ADAMW),
}  # fmt: skip
READ = "rows, in the scan that reads the parameters"
BOTH = f"4 {READ}; then 4 rows, in the scan that makes"
WHERE_READ = "whole: where a pass reads it"


def of_layers(loss: Any, layers: Any, form: str, inner: Any = ADAMW) -> Any:
    own, resident = (functools.partial(loss, layer) for layer in layers)
    return lambda tx: step_of(tx, form, own), lambda tx: step_of(tx, "update", resident), inner


STEPS: dict[str, Any] = {  # our step, the plain one, the optimizer, and what the table says of a leaf
    **{f"{name}, {form}": (*of_layers(loss_of, layers, form), BOTH)
       for name, layers in LAYERS.items() for form in ("update", "update_params")},
    **{f"unrolled: {name}, {form}": (*of_layers(unrolled, layers, form), WHERE_READ)
       for name, layers in LAYERS.items() for form in ("update", "update_params")},
    "unrolled: clipped": (*of_layers(unrolled, [jax.checkpoint(plain)] * 2, "update", CLIPPED), WHERE_READ),
    "another load of the whole": (
        lambda tx: step_of(tx, loss=lambda params, x: loss_of(plain, jo.to_device(params), x)),
        lambda tx: step_of(tx, "update", functools.partial(loss_of, plain)), ADAMW, BOTH),
    **{name: (make, make, inner, READ) for name, (make, inner) in PASSES.items()},
    **{f"clipped, {form}": (*of_layers(loss_of, [jax.checkpoint(plain)] * 2, form, CLIPPED), READ)
       for form in ("update", "update_params")},
}  # fmt: skip
DAILY = pytest.mark.daily("each kind of step once")
FIRST_OF_ITS_KIND = "unrolled: no load, update", "a checkpoint around the loss", "clipped, update"


@pytest.mark.parametrize("name", [pytest.param(k, marks=[DAILY] if k in FIRST_OF_ITS_KIND else []) for k in STEPS])
def test_passes_load_what_they_read(name):
    """Scans load the layers by rows, and the scan that makes the gradients stores them. No step loads a whole stack,
    however often it goes through the layers. Unrolled layers are loaded where a pass reads them."""
    ours, plain_step, inner, said = STEPS[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    params, x = begun(NamedSharding(mesh, PartitionSpec()) if name in PASSES else ONE, said is not WHERE_READ)
    there, make = jo.to_host(params, select="layers|w"), lambda tx: (plain_step if tx is inner else ours)(tx)
    with jax.set_mesh(mesh) if name in PASSES else contextlib.nullcontext():
        table = assert_as_plain(make, jo.offload(inner), inner, params=params, there=there, batches=[x] * 2, rtol=1e-5)
    rows = [leaf.streams for leaf in table.leaves if leaf.path.startswith("[0]") and leaf.host]
    assert len(rows) == len(params) - 1 and all(said in row and "device_put" not in row for row in rows), table


@pytest.mark.parametrize("where", ["device", "host"])
def test_beside_activations_in_host_memory(where):
    """A policy of ``jax.checkpoint`` sends activations there; they stay there, and the rows of parameters stream."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["inside"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w), "inside"))

    (params, x), tx = begun(ONE), jo.offload(ADAMW)
    there, losses = jo.to_host(params) if where == "host" else params, {ADAMW: jax.checkpoint(layer)}
    losses[tx] = jax.checkpoint(layer, policy=policy)
    make = lambda tx: step_of(tx, loss=functools.partial(loss_of, losses[tx]))  # noqa: E731
    lowered = jo.jit(make(tx)).lower(there, tx.init(there), x).as_text()
    assert "8x128xf32> {mhlo" in lowered or lowered.count("annotate_device_placement") > 4
    table = assert_as_plain(make, tx, ADAMW, params=params, there=there, batches=[x] * 2, rtol=1e-5)
    assert not table.stays and all("in the scan that makes" in leaf.streams for leaf in table.leaves)


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("form", ["update", "update_params", "microbatches"])
def test_clipped_and_pipelined(form, gradients):
    """The forward scan updates the rows, and the backward scan loads the new ones from host memory."""
    params, x = begun(ONE)
    given = {"params": params, "there": jo.to_host(params), "batches": [x] * 3, "gradients": gradients}
    make = lambda tx: in_microbatches(tx, layered) if form == "microbatches" else step_of(tx, form, layered)  # noqa: E731
    table = assert_as_plain(make, jo.offload(CLIPPED), CLIPPED, jo.pipelined, rtol=1e-5, **given)
    (row,) = (leaf for leaf in table.leaves if leaf.path == "[0]['layers']")
    assert "4 rows, in the scan that reads the parameters" in row.streams, table
    assert not any("whole" in how for how in [row.streams, *table.elsewhere]), table


@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("model", ["scanned", "in a shard_map", "unrolled"])
def test_an_evaluation_loads_layer_by_layer(model, differentiates):
    """A function without an update does so under ``jo.jit``."""
    mesh, scans = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), model != "unrolled"
    params, x = begun(NamedSharding(mesh, PartitionSpec()), scans)
    there, loss = jo.to_host(params), layered if scans else functools.partial(unrolled, jax.checkpoint(plain))
    loss = jax.shard_map(loss, mesh=mesh, **SHARDED) if model == "in a shard_map" else loss
    fun = jax.value_and_grad(loss) if differentiates else loss
    evaluate = jo.jit(fun)
    rows = [leaf for leaf in jo.placement(evaluate, there, x).leaves if leaf.host]
    how = "4 rows, in the scan that reads the parameters" if scans else "whole: where a pass reads it"
    assert len(rows) == len(params) - 1 and all(leaf.streams.startswith(how) for leaf in rows), rows
    assert_close(evaluate(there, x), jax.jit(fun)(params, x), 1e-5)
    problems = jo.verify(evaluate, there, x).problems  # it need not return what it reads; gradients look like a step's
    assert (problems != ()) == differentiates


MODELS = {
    "scanned": (layered, {"layers"}),
    "unrolled": (functools.partial(unrolled, plain), {f"w{k}" for k in range(6)}),
}


def of_model(name: str, width: int) -> tuple[Any, ...]:
    """The loss and the layers of a model, with abstract parameters and a batch."""
    at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loss, layers = MODELS[name]
    shapes = {k: (8, width, width) if name == "scanned" else (width, width) for k in layers}
    params = {k: jax.ShapeDtypeStruct(s, "float32", sharding=at) for k, s in {**shapes, "head": (width, 256)}.items()}
    return loss, layers, params, jax.ShapeDtypeStruct((64, width), "float32", sharding=at)


@pytest.mark.parametrize("given", ["loss", "step"])
@pytest.mark.parametrize("name", MODELS)
def test_what_would_load_whole_stays(name, given):
    """A trace of the loss or of the step tells, and ``placement`` lists it: a head behind a scan, say."""
    loss, layers, shapes, x = of_model(name, 128)
    tx, params = jo.offload(ADAMW), jax.tree.map(lambda x: jnp.ones(x.shape, device=x.sharding), shapes)
    step, state = jo.jit(step_of(tx, loss=loss)), jo.abstract_state(tx, shapes)
    args = (loss, x) if given == "loss" else (step, state, x)
    expected = [HOST if k in layers or name == "unrolled" else DEVICE for k in sorted(params)]
    for found in (
        jo.to_host(shapes, *args),
        jo.to_host(params, *args),
        jo.to_host(jo.to_host(params), *args),
        jo.to_host(jo.to_host(shapes), *args),
        jax.jit(lambda p: jo.to_host(p, *args))(params),
        jax.jit(lambda p: jo.to_host(p, *args))(jo.to_host(params)),
        # parameters that can be called, as a module of flax or equinox can
        jo.to_host(jax.tree_util.Partial(loss, params), lambda model, x: model(x), x).args,
    ):
        assert kinds(found) == expected
    assert {*kinds(jo.to_host(jax.eval_shape(lambda: params)))} == {HOST}  # where jax would place them
    assert {*kinds(jo.to_host(params, *args, select=sorted(layers)[0]))} == {HOST, DEVICE}
    there = jo.to_host(shapes, *args)
    stays = [leaf.path for leaf in jo.placement(step, there, state, x).leaves if "stays on the device" in leaf.streams]
    assert stays == ([] if name == "unrolled" else ["[0]['head']"])
    with pytest.raises(ValueError, match=r"loads no parameter layer by layer.*Fix: scan over stacked layers"):
        jo.to_host(shapes, lambda p, x: sum(jnp.sum(w @ w.mT) for w in p.values()) * x.sum(), x)


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_with_what_would_load_whole_on_the_device(name):
    require(H200)
    loss, _, params, x = of_model(name, 1024)
    tx = jo.offload(ADAMW)
    step, state = jo.jit(step_of(tx, loss=loss), donate_argnums=(0, 1)), jo.abstract_state(tx, params)
    ways = params, jo.to_host(params), jo.to_host(params, loss, x)
    resident, everything, layers = (jo.verify(step, p, state, x, target=H200) for p in ways)
    assert layers.peak < 0.8 * resident.peak and layers.peak <= 1.03 * everything.peak
    assert layers.problems == () and layers.loaded <= everything.loaded


def test_groups_that_are_recomputed_do_not_outlive_each_other():
    """With XLA's concurrent graphs all of them would be alive at once."""
    require(H200)
    _, _, params, _ = of_model("scanned", 512)
    tx, x = jo.offload(ADAMW), jax.ShapeDtypeStruct((8192, 512), "float32", sharding=params["head"].sharding)
    state, peaks = jo.abstract_state(tx, params), list[int]()
    for given in (params, jo.to_host(params, recomputed, x)):
        step = jo.jit(step_of(tx, loss=recomputed), donate_argnums=(0, 1))
        peaks.append(jo.inspect(step, given, state, x, target=H200).peak)
    on_device, on_host = peaks
    assert on_host <= on_device


def test_verify_names_the_parameter_and_the_fix():
    """Loaded as a whole though ``jo.jit`` loads it by layers, not returned, forced to the device, or not loaded."""
    require(H200)
    loss, _, params, x = of_model("scanned", 1536)
    tx = jo.offload(ADAMW)
    state, there = jo.abstract_state(tx, params), jo.to_host(params, loss, x)
    train = step_of(tx, loss=loss)
    on_device, in_state = (jax.tree.map(lambda x: x.sharding, tree) for tree in (params, state))

    def whole(params: Any, *args: Any) -> Any:
        return step_of(tx, loss=lambda p, x: loss(jo.to_device(p), x))(params, *args)

    def dropped(*args: Any) -> Any:
        return train(*args)[1:]

    named = r"params\['layers'\]"
    for step, says in [
        (jax.jit(whole), rf"{named}: is loaded as a whole, 72.00 MiB: jax_offload.jit\(step\) loads it layer by layer"),
        (jo.jit(train, out_shardings=(on_device, in_state, None)), rf"{named}: 1 of 3 .* not returned.*out_shardings"),
        (jo.jit(lambda params, *args: dropped(params, *args)), rf"{named}: 1 of 3 leaves .* are not returned there"),
        (jo.jit(train, in_shardings=(on_device, None, None)), r"\[0\]\['layers'\].*in_shardings, if any"),
        (jax.jit(train), r"Fix: jax_offload.jit, which loads what is in host memory \(\[0\]\['layers'\] and"),
    ]:  # fmt: skip
        with (
            pytest.warns() if "out_shardings" in says else contextlib.nullcontext(),
            pytest.raises(ValueError, match=says),
        ):
            jo.verify(step, there, state, x, target=H200)
    assert "Fix: jax_offload.jit" in jo.placement(jax.jit(train), there, state, x).unknown
    head = {**params, "head": jax.ShapeDtypeStruct((1536, 16384), "float32", sharding=x.sharding)}
    step, there = jo.jit(train, donate_argnums=(0, 1)), jo.to_host(head)
    (warning,) = jo.verify(step, there, jo.abstract_state(tx, head), x, target=H200).problems
    assert warning.leaf == "params['head']" and "jax_offload.to_host(params, loss, batch)" in warning.what


def test_gradients_that_a_load_of_the_step_itself_sends_to_the_host():
    """The report names them, since the transpose of a load is a store; every transfer has a name."""
    require(H200)
    _, _, params, x = of_model("scanned", 512)
    params, tx = jo.to_host({"layers": params["layers"]}), jo.offload(CLIP_ADAMW)

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ jo.to_device(w)), None), x, params["layers"])
        return (x**2).mean()

    step = jax.jit(step_of(tx, loss=loss), donate_argnums=(0, 1))
    seen = jo.inspect(step, params, jo.abstract_state(tx, params), x, target=H200)
    moved, nbytes = {(t.leaf, t.loads): t.nbytes for t in seen.transfers}, 8 * 512**2 * 4
    assert {leaf.partition("[")[0] for leaf, _ in moved} == {"params", "state", "gradients"}, moved
    assert moved["gradients", False] == nbytes and moved["gradients", True] == 2 * nbytes  # for the norm and the update


def test_a_state_that_is_loaded_as_a_whole_has_a_fix_of_its_own():
    """A pipelined step updates the embedding ahead of the pass; the fix by ``to_host`` is for parameters only."""
    require(H200)
    _, _, layers, x = of_model("scanned", 1024)
    table = jax.ShapeDtypeStruct((16384, 1024), "float32", sharding=x.sharding)
    params, tokens = (
        {"embed": table, "layers": layers["layers"]},
        jax.ShapeDtypeStruct((8,), "int32", sharding=x.sharding),
    )
    params, tx = jo.to_host(params), jo.offload(CLIP_ADAMW)

    def loss(params: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"])
        return (x**2).mean()

    train = jo.pipelined(step_of(tx, loss=loss), donate_argnums=(0, 1))
    args, fix = (params, jo.abstract_state(tx, params), tokens), "params, loss, batch)"
    placed = {leaf.path: leaf.streams for leaf in jo.placement(train, *args).leaves if "embed" in leaf.path}
    warned = {p.leaf: p.what for p in jo.verify(train, *args, target=H200).problems}
    for said in (placed, warned):
        assert len(said) == 3
        for leaf, how in said.items():
            assert (fix in how) == ("mu" not in leaf and "nu" not in leaf) != ("offload(select=)" in how), (leaf, how)


def test_arithmetic_with_a_state_is_an_error_of_ours():
    loss, _, shapes, x = of_model("scanned", 128)
    params, x = jax.tree.map(lambda x: jnp.ones(x.shape, device=x.sharding), (shapes, x))
    tx = jo.offload(ADAMW)
    there, state = jo.to_host(params, loss, x), tx.init(params)
    with pytest.raises(ValueError, match=r"jo\.jit: memory_space .* no state of an optimizer.*Fix: jax_offload\."):
        jo.jit(lambda p, s: p["head"] + s[0].mu["head"])(there, state)
    with jax.disable_jit(), pytest.raises(ValueError, match=r"jo\.jit: memory_space .* unless jit is disabled"):
        jo.jit(loss)(there, x)
    evaluate = jo.jit(lambda params, x: loss(params, x), in_shardings=(jax.tree.map(lambda p: p.sharding, there), None))
    assert evaluate(there, x) == jo.jit(loss)(there, x)
    for call in (evaluate, evaluate.lower):
        with pytest.raises(ValueError, match=r"in_shardings: params\['layers'\] .* 'device', and they say 'pinned_h"):
            call(params, x)


def test_a_type_that_says_the_device():
    """A jit whose ``out_shardings`` put an array into host memory types it as on the device: that warns."""
    there = jax.jit(lambda: jnp.full((4, 128, 128), 0.01), out_shardings=ONE.with_memory_kind(HOST))
    params = {"layers": there(), "head": jax.device_put(jnp.ones((128, 8)), ONE)}
    x, tx = jax.device_put(jnp.ones((8, 128)), ONE), jo.offload(ADAMW)
    old, step = (step_of(tx, loss=functools.partial(loss_of, plain)) for _ in range(2))
    with pytest.warns(UserWarning, match=r"params\['layers'\] is in host memory, and jax types it.*jo\.to_host"):
        jo.jit(old, donate_argnums=(0, 1))(params, tx.init(params), x)
    params = jo.to_host({"layers": there(), "head": jax.device_put(jnp.ones((128, 8)), ONE)})
    assert kinds(jo.jit(step, donate_argnums=(0, 1))(params, tx.init(params), x)[0]) == [DEVICE, HOST]


@pytest.mark.parametrize("form", ["update", "update_params"])
def test_a_copy_of_the_new_parameters_stays_on_the_device(form):
    """A target network that is returned in front of the parameters: the first of the two that is made goes back."""
    (params, x), tx = begun(ONE), jo.offload(ADAMW)
    train = step_of(tx, form, functools.partial(loss_of, plain))

    @jo.jit
    def step(params, state, x):
        new, state, _ = train(params, state, x)
        return jax.tree.map(jnp.copy, new), new, state

    there = jo.to_host(params)
    target, new, _ = step(there, tx.init(there), x)
    assert kinds(target) == [DEVICE, DEVICE] and kinds(new) == [DEVICE, HOST]
    np.testing.assert_array_equal(target["layers"], new["layers"])


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_an_average_of_the_parameters_streams_with_the_update(fraction):
    """Also if the optimizer itself has no leaf in host memory."""
    (params, x), tx = begun(ONE), jo.offload(ADAMW, fraction=fraction)
    train = step_of(tx, loss=functools.partial(loss_of, plain))

    def step(params, state, average, x):
        params, state, _ = train(params, state, x)
        return params, state, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)

    average, state = jo.to_host(params), tx.init(params)
    (row, *_) = [leaf for leaf in jo.placement(jo.jit(step), params, state, average, x).leaves if "[2]" in leaf.path]
    assert row.streams.startswith("4 rows, in the scan that makes their gradients"), row
    new, _, after = jo.jit(step)(params, state, average, x)
    assert kinds(after) == kinds(average) and kinds(new) == kinds(params)
    assert_close(after, jax.jit(step)(params, state, params, x)[2], 1e-6)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_step_that_is_jitted_twice(where):
    """A step may call another step that ``jo.jit`` has made."""
    (params, x), tx = begun(ONE), jo.offload(ADAMW)
    step = jo.jit(step_of(tx, loss=layered))
    args = jo.to_host(params) if where == "host" else params, tx.init(params), x
    assert_close(jo.jit(lambda *args: step(*args))(*args), step(*args), 0)


def test_an_abstract_parameter_says_where_it_is():
    there = jo.to_host(jax.ShapeDtypeStruct((4, 128, 128), "float32", sharding=ONE))
    (aval,) = jax.jit(lambda x: x).trace(there).jaxpr.in_avals
    assert there.sharding.memory_kind == HOST and "<host>" in aval.str_short()


@pytest.mark.parametrize("abstract", [False, True])
def test_which_parameters_move(abstract):
    """``select`` and ``fraction`` mean what they mean for a state, and raise the same errors."""
    shapes = {"embed": (512, 64), "layers": {"up": (4, 64, 64), "down": (4, 64, 64), "bias": (4, 64)}}
    params = jax.tree.map(lambda s: jnp.ones(s, device=ONE), shapes, is_leaf=lambda s: isinstance(s, tuple))
    if abstract:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE), params)
    down, up = "layers/down", "layers/up"
    for said, moves in [
        ({}, {"embed", down, up}),
        ({"select": "layers"}, {down, up}),
        ({"select": lambda path, leaf: "embed" in path and leaf.ndim == 2}, {"embed"}),
        ({"select": "layers", "fraction": 0.5}, {up}),
        ({"fraction": 0}, set()),
    ]:
        there = jo.to_host(params, **said)
        found = jax.tree_util.tree_flatten_with_path(there)[0]
        on_host = {"/".join(k.key for k in path) for path, x in found if x.sharding.memory_kind == HOST}
        assert on_host == moves, said
        assert [(x.shape, x.dtype) for _, x in found] == [(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    with pytest.raises(ValueError, match=r"select.*blocks.*layers/down"):  # other errors: tests/test_errors.py
        jo.to_host(params, select="blocks")
    tx = jo.offload(ADAMW)
    with pytest.raises(TypeError, match=r"select, fraction: .*Fix: leave them out"):
        jo.to_host(tx, tx.init(params) if not abstract else jo.abstract_state(tx, params), select="layers")


def test_a_table_of_the_optimizer_takes_gradients_from_the_device():
    params = jo.to_host({"w": jnp.ones((128, 128), device=ONE)})
    (mu, nu) = (leaf for leaf in jo.placement(jo.offload(ADAMW), params).leaves if leaf.host)
    assert mu.streams == nu.streams == "whole, 3 leaves together"  # with the parameter
