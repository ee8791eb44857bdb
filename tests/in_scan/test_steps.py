"""Steps as people write them, under ``jo.jit``: the numbers of plain optax, and where the update runs.

Random steps have the rest; tests/test_random_steps.py says which of those move.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.steps import (
    ADAMW,
    CLIP,
    CLIPPED,
    IN_BACKWARD,
    IN_FORWARD,
    LAYERS,
    WIDTH,
    all_moved,
    assert_as_plain,
    assert_placed,
    batch,
    committed,
    layer,
    loss_of,
    moved,
    new_params,
    offloaded,
    parameters,
    placement,
    step_of,
)
from tests.support.trees import assert_close

OLDEST = pytest.mark.oldest("jaxprs as they are written")
DAILY = pytest.mark.daily("nothing else asks these questions")


def of_gradients(gradients, also=lambda grads: ()):
    """A step with gradients by a function of parameters and batch, which returns something of them too."""

    def make(tx):
        def step(params, state, batch):
            grads = gradients(params, batch)
            return *jo.update_params(tx, grads, state, params), also(grads)

        return step

    return make


def in_a_loop(tx):
    """Several steps in one."""

    def step(params, state, batch):
        def one(carry, each):
            params, state = carry
            return jo.update_params(tx, jax.grad(loss_of)(params, each), state, params), None

        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        return *jax.lax.scan(one, (params, state), halves)[0], ()

    return step


def chosen(good):
    """Make a step that chooses around the update: old parameters and state stay unless the new ones are good."""

    def make(tx):
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss_of)(params, batch)
            new = new_params(tx, "update", grads, state, params)
            return *jax.tree.map(functools.partial(jnp.where, good(value, new[0])), new, (params, state)), value

        return step

    return make


def summed_in_a_ref(params, batch):
    """Gradients of two microbatches, summed in a mutable array."""
    total = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def add(carry, each):
        for name, g in jax.grad(loss_of)(params, each).items():
            total[name][...] += g
        return carry, None

    jax.lax.scan(add, None, jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch))
    return jax.tree.map(lambda t: jax.freeze(t) / 2, total)


def of_network(network):
    """A step of a loss that runs the layers in words of its own."""

    def loss(params, batch):
        return ((network(params["layers"], batch["x"]) @ params["head"] + params["bias"] - batch["y"]) ** 2).mean()

    return lambda tx: step_of(tx, "update", loss)


def by_number(w, x, of=lambda k: k):
    return jax.lax.fori_loop(0, LAYERS, lambda k, x: layer(x, w[of(k)]), x)


def by_hand(params, batch):
    """A backward pass whose sum of gradients is a result of each iteration too."""
    w = params["layers"]
    x, xs = jax.lax.scan(lambda x, w: (layer(x, w), x), batch["x"], w)

    def one(carry, k):
        total, g = carry
        g, dw = jax.vjp(layer, xs[k], w[k])[1](g)
        total = total + jax.lax.dynamic_update_index_in_dim(jnp.zeros_like(total), dw, k, 0)
        return (total, g), total

    (total, _), seen = jax.lax.scan(one, (jnp.zeros_like(w), x), jnp.arange(LAYERS), reverse=True)
    return jax.tree.map(jnp.zeros_like, params) | {"layers": total + 0 * seen.sum(0)}


def beside_all(params, batch):
    """A backward pass in which each iteration reads the whole stack, whose layers lie along its second axis, again."""
    stack = params["layers"]
    w, (rows, _, columns) = jnp.swapaxes(stack, 0, 1), stack.shape
    x, xs = jax.lax.scan(lambda x, w: (layer(x, w), x), batch["x"], w)
    again = jax.lax.broadcast_in_dim(stack, (LAYERS, rows, LAYERS, columns), (1, 2, 3))

    def one(g, of_layer):
        x, w, whole = of_layer
        g, dw = jax.vjp(layer, x, w)[1](g)
        return g + whole.mean(), dw

    _, found = jax.lax.scan(one, x, (xs, w, again), reverse=True)
    return jax.tree.map(jnp.zeros_like, params) | {"layers": jnp.swapaxes(found, 0, 1)}


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def in_groups(w, x, remat=jax.checkpoint, scale=None):
    """The stack, reshaped in the step; with ``scale`` the scan over groups changes the layers."""

    def group(x, ws):
        return scanned(ws if scale is None else scale * ws, x) + (0 if scale is None else ws.mean()), None

    return jax.lax.scan(remat(group), x, w.reshape(2, -1, *w.shape[1:]))[0]


def beside_others(w, x):
    """A scan that reads each layer, and another layer from the whole stack, which it must not overwrite."""
    body = jax.checkpoint(lambda x, wk: (layer(x, wk[0]) @ jax.lax.stop_gradient(w)[(wk[1] + 1) % LAYERS], None))
    return jax.lax.scan(body, x, (w, jnp.arange(LAYERS)))[0]


def read_twice(w, x):
    """Groups of layers, which the scan over groups reads too."""
    group = lambda x, ws: (scanned(ws, x) + ws.mean(), None)  # noqa: E731
    return jax.lax.scan(group, x, w.reshape(2, -1, *w.shape[1:]))[0]


def none_first(params, batch):
    """A stack of no layers, as configurations have it, and then the other one."""
    x = scanned(params["layers"], scanned(params["none"], batch["x"]))
    return ((x @ params["head"] - batch["y"]) ** 2).mean() + (params["bias"] ** 2).sum()


def two_stacks(params, batch):
    pairs = params["layers"], params["more"]
    x = jax.lax.scan(lambda x, p: (layer(layer(x, p[0]), p[1]), None), batch["x"], pairs)[0]
    return ((x @ params["head"] + params["bias"] - batch["y"]) ** 2).mean()


def meeting(tx):
    """A leaf that two gradients meet: one overwrites it; the other, which would read it or be written there, stays."""

    def step(params, state, batch):
        grads = jax.grad(two_stacks)(params, batch)
        return *new_params(tx, "update", grads, state, params), params["layers"] + grads["more"]

    return step


def stacked_in_the_step(dtype):
    """Of bfloat16 the stack alone is, else it has another reader too. Smaller layers are updated in one loop."""

    def loss(params, batch):
        stack = jnp.stack([w.astype(dtype) for w in params])
        seen = 0 * jax.lax.stop_gradient(stack).sum() if dtype == jnp.float32 else 0
        return ((scanned(stack, batch.astype(dtype)).astype(jnp.float32) + seen) ** 2).mean()

    return lambda tx: step_of(tx, loss=loss)


def large():
    """Layers of 4 MiB, each a leaf, and batches."""
    keys = [jax.random.key(k) for k in range(6)]
    return {
        "params": committed(tuple(jax.random.normal(key, (1024, 1024)) / 1024 for key in keys)),
        "batches": [committed(jax.random.normal(key, (8, 1024))) for key in keys[:2]],
    }


GRADIENTS, OF_GROUPS = jax.grad(loss_of), jax.grad(lambda p, batch: (in_groups(p["layers"], batch["x"]) ** 2).mean())
BY_HAND = functools.partial(in_groups, remat=lambda f: f)
TURNED = lambda: {"way": jo.pipelined, "inner": CLIPPED}  # noqa: E731  (where the pending update runs in the forward pass)
LARGE = pytest.mark.long("large layers")
# Whether the update of the stack moves, or why it does not; and arguments of ``assert_as_plain``.
STEPS = {
    # a minimum over all layers begins with the first layer, and not with zero
    "the smallest gradient": (of_gradients(GRADIENTS, lambda grads: jnp.abs(grads["layers"]).min()), True),
    "raveled gradients": (  # in which a layer is many rows
        of_gradients(GRADIENTS, lambda grads: jax.tree.map(jnp.ravel, grads)),
        "merges its layers with other dimensions; scan over",
    ),
    "several steps in one": (in_a_loop, True),
    "a choice around the update": (chosen(lambda value, new: jnp.isfinite(value)), True),
    "a choice around the update, turned": (chosen(lambda value, new: jnp.isfinite(value)), True, TURNED),
    "a choice by the norm of the new parameters": (
        chosen(lambda value, new: optax.tree.norm(new) < 1e3), "choose by a number of the gradients"),
    "a choice by the norm of the new parameters, turned": (
        chosen(lambda value, new: optax.tree.norm(new) < 1e3), "choose by a number of the gradients",
        lambda: {"way": jo.pipelined}),
    "gradients in a Ref": (of_gradients(summed_in_a_ref), True),
    "backwards by their number": (of_network(lambda w, x: by_number(w, x, lambda k: LAYERS - 1 - k)), ""),
    "a backward pass by hand": (of_gradients(by_hand), ""),
    "a backward pass that reads the whole stack": (of_gradients(beside_all), True, lambda: {"params": parameters(1)}),
    "two passes at once": (of_network(lambda w, x: scanned(w, x) * scanned(w, x[::-1])), True),
    "two passes of casts": (of_network(lambda w, x: scanned(w * 1, x) - scanned(w.astype(jnp.bfloat16), x)), True),
    "a stack that its scan reads whole too": (of_network(beside_others), True),
    "groups of layers": (of_network(in_groups), True),
    "groups of layers, by hand": (of_network(BY_HAND), True),
    "groups of layers, scaled": (of_network(functools.partial(in_groups, scale=2.0)), "merges its layers"),
    "groups of layers, gradients returned": (of_gradients(OF_GROUPS, lambda grads: grads["layers"]), True),
    "groups of layers, turned": (of_network(in_groups), True, TURNED),
    "groups of layers by hand, turned": (of_network(BY_HAND), True, TURNED),
    "groups of layers read twice, turned": (
        of_network(read_twice), "reads them outside of the scan inside it", TURNED),
    "no layers": (
        lambda tx: step_of(tx, loss=none_first), True,
        lambda: {"params": parameters() | {"none": committed(jnp.zeros((0, WIDTH, WIDTH)))}}),
    "two gradients that meet": (
        meeting, "two gradients", lambda: {"params": parameters() | {"more": parameters(seed=1)["layers"]}}),
    "layers that the step stacks": (stacked_in_the_step(jnp.float32), None, large),
    "layers that the step stacks, in bfloat16": (
        stacked_in_the_step(jnp.bfloat16), None, lambda: large() | {"rtol": 5e-2}),
}  # fmt: skip


@OLDEST
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[DAILY] * (k < 2) + [LARGE] * ("the step stacks" in name))
        for k, name in enumerate(STEPS)
    ],
)
def test_the_numbers_are_those_of_the_plain_step(name):
    make, expected, given = (*STEPS[name], dict)[:3]
    how = {"inner": ADAMW, "way": jo.jit} | given()
    inner, where = how.pop("inner"), IN_FORWARD if how["way"] is jo.pipelined else IN_BACKWARD
    table = assert_as_plain(make, offloaded(inner), inner, **how)
    if expected is True:
        assert all_moved(table, where), table
    elif expected is None:  # no leaf is a stack
        assert table.stays == ()
    else:
        assert table.stays and expected in " ".join(table.stays)
    if expected == "two gradients":
        assert sum(moved(table).values()) == 2


@OLDEST
@pytest.mark.parametrize("how", ["siamese", "one batch after the other"])
def test_two_passes_are_one_loop_where_both_are_alive_at_once(how):
    """Of two batches whose gradients are added, the second one begins when the first one's activations are gone."""

    def of_both(w, x):
        return (scanned(w, x) * scanned(w, 2 * x)).mean()

    def gradients(w, x):
        if how == "siamese":
            return jax.grad(of_both)(w, x)
        first, second = (jax.grad(lambda w, x: (scanned(w, x) ** 2).mean())(w, x) for x in (x, 2 * x))
        return first + second

    def step(params, state, x):
        return jo.update_params(tx, {"layers": gradients(params["layers"], x["x"])}, state, params)

    tx, params = offloaded(ADAMW), {"layers": parameters()["layers"]}
    assert all_moved(placement(jo.jit(step), tx, params=params))
    text = jo.jit(step).lower(params, tx.init(params), batch(0)).as_text()
    assert text.count("stablehlo.while") == (2 if how == "siamese" else 4)


@OLDEST
@pytest.mark.parametrize("place", [jo.to_device, jo.to_host])
@pytest.mark.parametrize("way", [jo.jit, jo.pipelined])
def test_prints_are_as_many_as_in_the_plain_step(way, place):
    """Before the update, in the layers, after it. The layers load their rows if the parameters are on the host."""

    def printed(tx):
        log = []

        def told(x, w):
            jax.debug.callback(lambda m: log.append(float(m)), x.mean())
            return layer(x, jo.to_device(w))

        def step(params, state, batch):
            value, grads = jax.value_and_grad(functools.partial(loss_of, layer=told))(params, batch)
            jax.debug.callback(lambda value: log.append(float(value)), value)
            params, state = jo.update_params(tx, grads, state, params)
            jax.debug.callback(lambda w: log.append(float(w)), jo.to_device(params["layers"])[0, 0, 0])
            return params, state

        jitted = jax.jit(step) if tx is ADAMW else way(step, donate_argnums=(0, 1))
        given = parameters() if tx is ADAMW else place(parameters()), tx.init(parameters())
        if way is jo.jit or tx is ADAMW:
            jitted(*given, batch(0))
        else:
            jitted.finish(jitted(given, batch(0))[0])
        jax.effects_barrier()
        return np.sort(log)

    want = printed(ADAMW)
    assert len(want) == LAYERS + 2
    np.testing.assert_allclose(printed(offloaded(ADAMW)), want, rtol=1e-5)


@OLDEST
def test_a_mutable_array_among_the_arguments():
    """Reads and writes keep their order, so the step runs as written and says so."""

    def step_with(tx):
        def step(params, state, x, total):
            value, grads = jax.value_and_grad(loss_of)(params, x)
            total[...] += value
            return jo.update_params(tx, grads, state, params)

        return step

    tx, total = offloaded(ADAMW), jax.new_ref(jnp.zeros(()))
    step, args = jo.jit(step_with(tx)), (parameters(), tx.init(parameters()), batch(0))
    assert "effects of mutable arrays" in " ".join(jo.placement(step, *args, total).stays)
    got = step(*args, total)
    assert_close(got, jax.jit(step_with(ADAMW))(parameters(), ADAMW.init(parameters()), batch(0),
                                                jax.new_ref(jnp.zeros(()))), 1e-5)  # fmt: skip
    np.testing.assert_allclose(total[...], loss_of(parameters(), batch(0)), rtol=1e-5)


# ---- which leaves move


@pytest.mark.parametrize("clipped", [True, False])
def test_a_scan_that_reads_parameters_silences_no_other(clipped):
    """The norm is no longer a reason for the tower that is updated where its parameters are read again, and still is
    one for the other tower."""
    clip = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)
    labels = {"read": "clipped", "other": "clipped too" if clipped else "as they are"}
    inner = optax.partition({"clipped": clip, "clipped too": clip, "as they are": ADAMW}, labels)
    params = {name: parameters(seed=k)["layers"] for k, name in enumerate(labels)}

    def tower(w, x):
        return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2).mean()

    def make(tx):
        def step(params, state, batch):
            grads = jax.grad(lambda p: tower(p["read"], batch["x"]) + tower(p["other"], 2 * batch["x"]))(params)
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, tower(params["read"], batch["x"])

        return step

    table = assert_as_plain(make, offloaded(inner), inner, params=params)
    where = {leaf.path: leaf.streams for leaf in table.leaves if leaf.host}
    assert all("in the scan that reads the parameters" in s for p, s in where.items() if "read" in p)
    assert all(("in the scan that makes" in s) != clipped for p, s in where.items() if "other" in p)
    assert any("needs all gradients" in why for why in table.stays) == clipped and len(table.stays) == clipped


# ---- how a step is called


def test_a_step_that_closes_over_all():
    tx, params = offloaded(ADAMW), parameters()
    state = tx.init(params)
    got = jo.jit(lambda: step_of(tx)(params, state, batch(0)))()
    assert_close(got, jax.jit(step_of(ADAMW))(params, ADAMW.init(params), batch(0)), 1e-5)
    assert_placed(got[1], state)


@pytest.mark.long("compiles six programs")
@pytest.mark.parametrize("around", ["vmap", "grad"])
def test_under_vmap_and_differentiated(around):
    """Of several models at once; and of the loss after two steps, by a factor of the batch."""

    def transformed(step, init):
        if around == "vmap":
            many = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), parameters())
            return jax.jit(jax.vmap(step, (0, 0, None)))(many, jax.vmap(init)(many), batch(0))
        state = init(parameters())

        def loss(s):
            given = jax.tree.map(lambda x: s * x, batch(0))
            params, _ = jax.lax.scan(lambda p, _: (step(p, state, given)[0], None), parameters(), None, 2)
            return loss_of(params, batch(0))

        return jax.jit(jax.grad(loss))(2.0)

    inner = optax.sgd(1e-1, 0.9)
    tx = offloaded(inner)
    assert_close(transformed(jo.jit(step_of(tx)), tx.init), transformed(step_of(inner), inner.init), 1e-4)


def test_leaves_are_found_where_jax_has_dropped_results():
    """The derivative of the step needs its new parameters but not its new state."""
    tx = offloaded(ADAMW, min_bytes=0)

    def loss(params, state, batch):
        return loss_of(jo.jit(step_of(tx))(params, state, batch)[0], batch)

    table = jo.placement(jax.jit(jax.grad(loss)), parameters(), tx.init(parameters()), batch(0))
    assert table.elsewhere == () and any("in the scan" in leaf.streams for leaf in table.leaves)


# ---- a shard_map


INSIDE = ["inside", "inside, check_vma", "inside, layers of a device's own"]
OUTSIDE = ["", "check_vma", "two updates", "clip outside", "divided", "divided state"]


@OLDEST
@pytest.mark.parametrize(
    ("how", "way"), [*itertools.product(OUTSIDE, (jo.jit, jo.pipelined)), *itertools.product(INSIDE, [jo.jit])]
)
def test_gradients_from_a_shard_map(how, way):
    """An update outside of it moves inside, if each device has all of the gradients and of the state. The whole step
    may be inside; its loop stays unchanged if each device runs the layers in another order."""
    mesh, outside = Mesh(np.array(jax.devices()[:4]), ("data",)), how == "clip outside"
    plain = CLIPPED if outside or way is jo.pipelined else ADAMW
    tx = optax.chain(CLIP, offloaded(ADAMW)) if outside else offloaded(plain)
    # with check_vma jax sums the gradients of replicated parameters itself
    check_vma, scatter = "check_vma" in how, functools.partial(jax.lax.psum_scatter, scatter_dimension=1, tiled=True)
    wrapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)

    def network(w, x):
        own = lambda k: (k + jax.lax.axis_index("data")) % LAYERS  # noqa: E731
        return by_number(w, x, own) if "own" in how else scanned(w, x)

    def local(params, x):
        value, grads = jax.value_and_grad(lambda w: (network(w, x) ** 2).mean())(params["layers"])
        if not check_vma:
            grads = (scatter if how == "divided" else jax.lax.psum)(grads, "data")
        seen = x[:, :1] * 2  # divided
        return jax.lax.pmean(value, "data"), {"layers": grads / 4}, seen

    def make(tx):
        out_specs = P(), P(None, "data") if how == "divided" else P(), P("data")
        grads_of = wrapped(local, in_specs=(P(), P("data")), out_specs=out_specs)

        def whole(params, state, x):
            value, grads, _ = local(params, x)
            return *new_params(tx, "update", grads, state, params), value

        def step(params, state, x):
            value, grads, seen = grads_of(params, x)
            for _ in range(2 if how == "two updates" else 1):
                params, state = new_params(tx, "update", jax.tree.map(lambda g: 2 * g, grads), state, params)
            return params, state, (value, params["layers"].mean(), seen.sum() + params["layers"].sum())

        return wrapped(whole, in_specs=(P(), P(), P("data")), out_specs=(P(), P(), P())) if how in INSIDE else step

    where = P(None, "data") if how == "divided state" else P()
    params = {"layers": jax.device_put(parameters()["layers"], NamedSharding(mesh, where))}
    batches = [jax.device_put(batch(k)["x"], NamedSharding(mesh, P("data"))) for k in range(3)]
    if "divided" in how and way is jo.jit:
        (why,) = placement(jo.jit(make(tx)), tx, batches[0], params=params).stays
        assert why.startswith("its gradients are made inside a shard_map; call the update inside the same shard_map (")
        return
    table = assert_as_plain(make, tx, plain, way, params=params, batches=batches)
    stays = how == "two updates" or "divided" in how or "own" in how or (outside and way is jo.jit)
    if not stays and not (check_vma and jax.__version_info__ < (0, 11)):
        assert all_moved(table, IN_FORWARD if way is jo.pipelined else IN_BACKWARD), table
