"""Flax's ways to hold parameters and state: ``TrainState``, ``nnx.Optimizer``, boxes that say how to shard."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.support.trees import assert_close, kinds, shardings_in

pytestmark = pytest.mark.oldest("boxes and nnx, for which jax's shardings changed")

P = PartitionSpec
X = jax.random.normal(jax.random.key(1), (16, 128))
WINDOW = 2**16  # a leaf's moments do not fit: they stream in chunks where they can
ADAMW = optax.adamw(1e-2)
INNER = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def offloaded(**options):
    return jo.offload(INNER, window=WINDOW, **options)


def assert_like_params(state, params):
    """Every moment of 64 KiB is on the host and sharded as its parameter; nothing else is on the host."""
    for moment in (optax.tree.get(state, "mu"), optax.tree.get(state, "nu")):
        for x, p in zip(jax.tree.leaves(moment), jax.tree.leaves(params), strict=True):
            assert x.sharding.memory_kind == ("pinned_host" if x.nbytes >= 2**16 else "device")
            assert x.nbytes < 2**16 or x.sharding.is_equivalent_to(p.sharding.with_memory_kind("pinned_host"), x.ndim)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim == 0} == {"device"}


class Linen(nn.Module):
    """Its kernels are ``nn.Partitioned``."""

    @nn.compact
    def __call__(self, x):
        def kernel(*names):
            return nn.with_partitioning(nn.initializers.lecun_normal(), names)

        x = nn.relu(nn.Dense(256, kernel_init=kernel(None, "model"), name="up")(x))
        return nn.Dense(128, kernel_init=kernel("model", None), name="down")(x)


def test_linen_boxes_survive(mesh):
    def init():
        return Linen().init(jax.random.key(0), X)["params"]

    params = jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), mesh))()
    tx = offloaded()
    state, plain = tx.init(params), INNER.init(params)
    updates, new_state = jax.jit(tx.update)(params, state, params)
    applied, newer_state = jax.jit(lambda *args: jo.update_params(tx, *args))(params, state, params)
    for tree in (state, new_state, newer_state):
        assert jax.tree.structure(tree) == jax.tree.structure(plain)
        assert nn.get_partition_spec(tree) == nn.get_partition_spec(plain)
        assert nn.get_sharding(tree, mesh) == nn.get_sharding(plain, mesh)
        assert_like_params(tree, params)
    for tree in (updates, applied):
        assert jax.tree.structure(tree) == jax.tree.structure(params)
    box = new_state[1][0].mu["up"]["kernel"]
    assert isinstance(box, nn.Partitioned) and box.names == (None, "model")
    assert jax.tree.structure(jo.abstract_state(tx, params)) == jax.tree.structure(plain)
    # What flax's users write: shardings of the state from its annotations, in device memory. Theirs with our memories:
    annotated = nn.get_sharding(jax.eval_shape(tx.init, params), mesh)
    ours = shardings_in(jo.abstract_state(tx, params))
    for a, b in zip(jax.tree.leaves(annotated), jax.tree.leaves(nn.unbox(ours)), strict=True):
        assert a.with_memory_kind(b.memory_kind).spec == b.spec


def boxed_and_bare():
    """The same parameters in linen's boxes, in nnx's, and bare."""
    shapes = {"down": (256, 128), "up": (128, 256)}
    arrays = {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()}
    return {
        "linen": jax.tree.map(lambda x: nn.Partitioned(x, (None, None)), arrays),
        "nnx": nnx.State(jax.tree.map(nnx.Param, arrays)),
        "bare": arrays,
    }


@pytest.mark.parametrize("kind", ["linen", "nnx", "bare"])
def test_rules_mean_the_same_in_a_box(kind):
    params = jax.device_put(boxed_and_bare()[kind], jax.devices()[0])
    for select, names in {"down/kernel$": {"down/kernel"}, "^up": {"up/kernel"}}.items():
        table = jo.placement(jo.offload(optax.adamw(1e-3), select=select), params)
        assert {leaf.param for leaf in table.leaves if leaf.host} == names
    table = jo.placement(jo.offload(optax.adamw(1e-3), fraction=0.5), params)
    assert {leaf.param for leaf in table.leaves if leaf.host} == {"up/kernel"}
    with pytest.raises(ValueError, match=r"no parameter's path matches \['value'\].* down/kernel, up/kernel"):
        jo.placement(jo.offload(optax.adamw(1e-3), select="value"), params)
    attention = nnx.State({name: nnx.Param(jnp.ones((8, 8))) for name in ("query", "value")})  # no box: it has siblings
    table = jo.placement(jo.offload(optax.sgd(1e-3, momentum=0.9), min_bytes=0), attention)
    assert [leaf.param for leaf in table.leaves] == ["query", "value"]


class NNX(nnx.Module):
    """Annotated in both of nnx's ways."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(128, 256, rngs=rngs, kernel_init=nnx.with_partitioning(init, (None, "model")))
        self.down = nnx.Param(init(rngs.params(), (256, 128)), out_sharding=("model", None))

    def __call__(self, x):
        return nnx.relu(self.up(x)) @ self.down


def nnx_train(tx, build, steps=1):
    model = nnx.jit(lambda: NNX(nnx.Rngs(0)))()
    optimizer = build(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    born = nnx.state(optimizer)
    losses = [float(step(model, optimizer, X)) for _ in range(steps)]
    return model, optimizer, born, losses


def test_nnx_annotations_survive(mesh):
    with jax.set_mesh(mesh):
        model, optimizer, born, losses = nnx_train(offloaded(), nnx.jit, steps=5)
        _, plain, plain_born, expected = nnx_train(INNER, nnx.jit, steps=5)
        params = nnx.state(model, nnx.Param)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        # The annotations of the state are those of the parameters, as in plain optax.
        assert nnx.get_partition_spec(born) == nnx.get_partition_spec(plain_born)
        assert nnx.get_partition_spec(nnx.state(optimizer)) == nnx.get_partition_spec(nnx.state(plain))
        for state in (born["opt_state"], optimizer.opt_state):
            mu = nnx.state(state)[1][0]["mu"]
            assert (mu["up"]["kernel"].out_sharding, mu["down"].out_sharding) == ((None, "model"), ("model", None))
            assert isinstance(mu["down"], nnx.OptState)
    assert kinds(nnx.state(optimizer)).count("pinned_host") == 4
    for tree in (born, nnx.state(optimizer)):
        state = nnx.as_pure(tree)["opt_state"][1][0]
        for moment in (state["mu"], state["nu"]):
            for x, p in ((moment["up"]["kernel"], params["up"]["kernel"]), (moment["down"], params["down"])):
                assert x.sharding.is_equivalent_to(p.get_value().sharding.with_memory_kind("pinned_host"), 2)


@pytest.mark.long("trains two models")
@pytest.mark.parametrize("storage", ["bfloat16", {"mu": "int8", "nu": "uint8"}])
def test_nnx_boxes_what_is_stored_in_fewer_bits(storage, mesh):
    """It makes dicts of what is in the boxes."""
    with jax.set_mesh(mesh):
        _, optimizer, _, losses = nnx_train(jo.offload(INNER, min_bytes=0, storage=storage), nnx.jit, steps=3)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(optimizer.opt_state)) if x.ndim > 1} == {
        "pinned_host"
    }
    assert losses[-1] < losses[0] and int(optimizer.step[...]) == 3


def test_a_state_that_flax_moved_is_on_the_host_after_a_step(mesh):
    """Outside jit flax applies an annotation to the new state's variables, with device memory (docs/frameworks.md)."""
    with jax.set_mesh(mesh):
        _, optimizer, _, _ = nnx_train(offloaded(), lambda build: build)
    large = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.nbytes >= 2**16]
    assert {*kinds(large)} == {"pinned_host"}


def test_nnx_optimizer_does_not_cut_a_leaf_along_a_sharded_axis(mesh):
    """It gives init parameters in boxes, and update bare ones: what init saw of their shardings must be found."""
    sharding = NamedSharding(mesh, P("data", "model"))
    params = nnx.State({"w": nnx.Param(jax.device_put(jnp.ones((256, 256)), sharding))})
    tx = jo.offload(optax.adamw(1e-3), window=WINDOW)
    state = tx.init(params)
    bare, bare_state = nnx.as_pure(params), nnx.as_pure(state)
    compiled = (
        jax.jit(tx.update, out_shardings=shardings_in((bare, bare_state))).lower(bare, bare_state, bare).compile()
    )
    assert "all-gather" not in compiled.as_text()


# ---- parameters of scanned layers in host memory


class LinenLayer(nn.Module):
    """``loads``: whether it loads its own parameters, as MaxText's layers do."""

    loads: bool

    @nn.compact
    def __call__(self, x, _):
        def loaded(tree):
            return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)

        dense = nn.map_variables(nn.Dense, "params", loaded, mutable=False) if self.loads else nn.Dense
        return x + nn.relu(dense(128, name="dense")(x)), None


class LinenLayers(nn.Module):
    loads: bool = False

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(8, name="head")(scanned(self.loads, name="up")(x, None)[0])


class NnxLayers(nnx.Module):
    def __init__(self, rngs, recomputed):
        make = nnx.vmap(lambda rngs: nnx.Linear(128, 128, rngs=rngs), in_axes=(0,), out_axes=0)
        self.up, self.head = nnx.split_rngs(splits=4)(make)(rngs), nnx.Linear(128, 8, rngs=rngs)
        self.recomputed = recomputed

    def __call__(self, x):
        layer = lambda x, layer: x + nnx.relu(layer(x))  # noqa: E731
        layer = nnx.remat(layer) if self.recomputed else layer
        return self.head(nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.up))


def step_of(kind, tx, moved):
    """A step, and what it carries: parameters and state, or an ``nnx.Model`` with its ``nnx.Optimizer``."""
    model = LinenLayers(moved and "loads" in kind) if "linen" in kind else NnxLayers(nnx.Rngs(0), "recomputed" in kind)
    params = nnx.state(model) if "nnx" in kind else LinenLayers().init(jax.random.key(0), X)["params"]
    params = jax.device_put(params, jax.devices()[0])
    params = jo.to_host(params, select="up") if moved else params
    if "nnx.Optimizer" in kind:
        nnx.update(model, params)
        graph, arrays = nnx.split((model, nnx.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))(model)))

        def of_arrays(arrays, x):
            model, optimizer = both = nnx.merge(graph, arrays)
            value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return nnx.state(both), value

        return of_arrays, arrays
    graph = nnx.graphdef(model) if kind == "nnx" else None

    def loss(params, x):
        y = nnx.merge(graph, params)(x) if kind == "nnx" else model.apply({"params": params}, x)
        return (y**2).mean()

    def step(carried, x):
        params, state = carried
        value, grads = jax.value_and_grad(loss)(params, x)
        return jo.update_params(tx, grads, state, params), value

    return step, (params, tx.init(params))


RECOMPUTED = "nnx.Optimizer, recomputed"  # a scan over nnx.remat returns the parameters, too
DAILY = pytest.mark.daily("each library")
KINDS = [(kind, jo.jit) for kind in ("linen", "linen that loads", "nnx", "nnx.Optimizer")] + [
    (RECOMPUTED, jo.pipelined)
]


@pytest.mark.parametrize(("kind", "way"), [*(pytest.param(*each, marks=DAILY) for each in KINDS), (RECOMPUTED, jo.jit)])
def test_parameters_of_scanned_layers_in_host_memory(kind, way):
    """``jo.to_host`` moves them, and the scans load their rows; values are those of plain optax."""
    inner = optax.chain(optax.clip_by_global_norm(0.01), ADAMW) if kind == RECOMPUTED else ADAMW
    plain, want = step_of(kind, inner, moved=False)
    step, got = step_of(kind, jo.offload(inner), moved=True)
    plain, step, where = jax.jit(plain), way(step, donate_argnums=0), shardings_in(got)
    table, x = jo.placement(step, got, X), jax.device_put(X, jax.devices()[0])
    said = "then" if kind == RECOMPUTED else "scan that reads"
    (row,) = (leaf.streams for leaf in table.leaves if leaf.nbytes == 4 * 128 * 128 * 4 and said in leaf.streams)
    assert "device_put" not in row, table
    for _ in range(3):
        want, value = plain(want, x)
        got, found = step(got, x)
        np.testing.assert_allclose(found.now if way is jo.pipelined else found, value, rtol=1e-5)
    got = step.finish(got) if way is jo.pipelined else got
    assert shardings_in(got) == where
    assert_close(got, want, 1e-4)
