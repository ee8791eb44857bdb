"""Steps that say the same in other words: their updates move where their gradients are made, with optax's numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo

LAYERS, WIDTH, BATCH = 6, 64, 8
LARGE = 1024  # smaller layers of their own are updated in one loop
ADAMW = optax.adamw(1e-2)


def layer(x, w):
    return x + jnp.tanh(x @ w)


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0]


def by_number(params, x):
    return jax.lax.fori_loop(0, LAYERS, lambda k, x: layer(x, params[k]), x)


def by_number_backwards(params, x):
    """The rows are not in the order of the iterations, so the loop stays as it is."""
    return jax.lax.fori_loop(0, LAYERS, lambda k, x: layer(x, params[LAYERS - 1 - k]), x)


def by_a_given_number(params, x):
    """Which rows the loop reads is known when it runs."""
    first = (x[0, 0] > 1e6).astype(jnp.int32)
    return jax.lax.fori_loop(0, LAYERS, lambda k, x: layer(x, params[jnp.minimum(k + first, LAYERS - 1)]), x)


def by_number_and_seen(params, x):
    """A backward pass by hand, whose sum of gradients is a result of each iteration too."""

    @jax.custom_vjp
    def network(params, x):
        return by_number(params, x)

    def forwards(params, x):
        xs = [x]
        for k in range(LAYERS):
            xs.append(layer(xs[-1], params[k]))
        return xs[-1], (params, jnp.stack(xs[:-1]))

    def backwards(kept, g):
        params, xs = kept

        def one(carry, k):
            total, g = carry
            w, g = jax.vjp(layer, xs[k], params[k])[1](g)[::-1]
            total = total + jax.lax.dynamic_update_index_in_dim(jnp.zeros_like(total), w, k, 0)
            return (total, g), total

        (total, g), seen = jax.lax.scan(one, (jnp.zeros_like(params), g), jnp.arange(LAYERS), reverse=True)
        return total + 0 * seen.sum(0), g

    network.defvjp(forwards, backwards)
    return network(params, x)


def stacked(params, x):
    return scanned(jnp.stack(jax.tree.leaves(params)), x)


def stacked_in_bfloat16(params, x):
    stack = jnp.stack([w.astype(jnp.bfloat16) for w in params])
    return scanned(stack, x.astype(jnp.bfloat16)).astype(jnp.float32)


def stacked_and_logged(params, x):
    """The stack has another reader than the scan."""
    stack = jnp.stack(jax.tree.leaves(params))
    return scanned(stack, x) * (1 + 0 * jax.lax.stop_gradient(stack).sum())


def step_of(network, tx, update):
    def step(params, state, x):
        scale = jax.lax.convert_element_type(1, jnp.float32)  # a literal is an operand as others are
        value, grads = jax.value_and_grad(lambda params: (network(params, x) ** 2).mean() * scale)(params)
        return *update(tx, grads, state, params), value

    return step


def with_references(network, tx, update):
    """Gradients of two microbatches summed in a mutable array."""

    def step(params, state, x):
        total, losses = jax.new_ref(jnp.zeros_like(params)), jax.new_ref(jnp.zeros(()))

        def add(carry, x):
            value, grads = jax.value_and_grad(lambda params: (network(params, x) ** 2).mean())(params)
            total[...] += grads
            losses[...] += value
            return carry, None

        jax.lax.scan(add, None, x.reshape(2, -1, x.shape[-1]))
        return *update(tx, jax.freeze(total) / 2, state, params), jax.freeze(losses)

    return step


def apart(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def one_stack(sharding, width=WIDTH):
    return jax.device_put(jax.random.normal(jax.random.key(0), (LAYERS, width, width)) / width, sharding)


def several(sharding):
    return tuple(jax.device_put(w, sharding) for w in one_stack(sharding, LARGE))


MOVES = {
    "layers by their number": (step_of, by_number, one_stack),
    "layers stacked in the step": (step_of, stacked, several),
    "layers stacked in the step, in bfloat16": (step_of, stacked_in_bfloat16, several),
    "layers stacked in the step, and logged": (step_of, stacked_and_logged, several),
    "gradients in a Ref": (with_references, scanned, one_stack),
    "layers by their number, in a Ref": (with_references, by_number, one_stack),
}
STAYS = {
    "layers by their number, backwards": (step_of, by_number_backwards, one_stack),
    "layers by their number, the sums seen": (step_of, by_number_and_seen, one_stack),
    "layers by a given number": (step_of, by_a_given_number, one_stack),
}


def assert_as_plain(step, plain, args, calls=3, tolerance=1e-5):
    """Both steps run, each with its own state; the offloaded state stays in host memory."""
    params, state, other = args
    width = jax.tree.leaves(params)[0].shape[-1]
    batches = np.random.default_rng(0).normal(size=(calls, BATCH, width))
    mine, theirs = (params, state), (jax.tree.map(jnp.copy, params), other)
    for x in batches.astype(np.float32):
        *mine, value = step(*mine, x)
        *theirs, wanted = plain(*theirs, x)
        np.testing.assert_allclose(value, wanted, rtol=tolerance)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(mine[1]) if leaf.ndim}
        assert kinds == {"pinned_host"}
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(np.subtract(got, want)) <= tolerance * np.linalg.norm(want) + 1e-7


@pytest.mark.parametrize("update", [apart, jo.update_params])
@pytest.mark.parametrize("kind", MOVES | STAYS)
@pytest.mark.oldest("jaxprs as they are written")
def test_the_numbers_are_those_of_the_plain_step(kind, update):
    make, network, new = (MOVES | STAYS)[kind]
    tx, params = jo.offload(ADAMW, min_bytes=0), new(jax.devices()[0])
    step = jo.jit(make(network, tx, update), donate_argnums=(0, 1))
    plain = jax.jit(make(network, ADAMW, apart))
    batch = jnp.ones((BATCH, jax.tree.leaves(params)[0].shape[-1]))
    said = jo.placement(step, params, jo.abstract_state(tx, params), batch)
    assert (said.stays == ()) == (kind in MOVES), said.stays
    tolerance = 5e-2 if "bfloat16" in kind else 1e-5
    assert_as_plain(step, plain, (params, tx.init(params), ADAMW.init(params)), tolerance=tolerance)


def test_microbatches_that_the_step_stacks_stay_a_scan():
    tx, params = jo.offload(ADAMW, min_bytes=0), one_stack(jax.devices()[0])
    batches = tuple(jnp.full((BATCH, WIDTH), k / 4) for k in range(1, 5))

    def step(params, state, batches):
        def add(total, x):
            return total + jax.grad(lambda params: (scanned(params, x) ** 2).mean())(params), None

        grads, _ = jax.lax.scan(add, jnp.zeros_like(params), jnp.stack(batches))
        return jo.update_params(tx, grads, state, params)

    traced = jo.jit(step).trace(params, tx.init(params), batches).jaxpr
    lengths = [eqn.params["length"] for eqn in equations_of(traced.jaxpr) if eqn.primitive.name == "scan"]
    assert 3 in lengths  # the last of four runs apart, and hosts the update


def equations_of(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations_of(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.oldest("shard_map")
def test_a_step_inside_a_shard_map(check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def make(tx):
        def step(params, state, x):
            value, grads = jax.value_and_grad(lambda params: (scanned(params, x) ** 2).mean())(params)
            if not check_vma:  # else jax sums the gradients of replicated parameters itself
                grads = jax.lax.psum(grads, "data")
            updates, state = tx.update(grads / 4, state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P(), P())}
        return jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs)

    tx, params = jo.offload(ADAMW, min_bytes=0), one_stack(NamedSharding(mesh, P()))
    step, plain = jo.jit(make(tx), donate_argnums=(0, 1)), jax.jit(make(ADAMW))
    stays = jo.placement(step, params, jo.abstract_state(tx, params), jnp.ones((BATCH, WIDTH))).stays
    assert bool(stays) == (check_vma and jax.__version_info__ < (0, 11))
    assert_as_plain(step, plain, (params, tx.init(params), ADAMW.init(params)))


def test_layers_of_a_devices_own_in_a_shard_map():
    """The layers run in another order on each device, so the loop stays as it is."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def make(tx):
        def step(params, state, x):
            def loss(params):
                k = lambda i: (i + jax.lax.axis_index("data")) % LAYERS  # noqa: E731
                return (jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, params[k(i)]), x) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(jax.lax.pmean(grads, "data"), state, params)
            return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

        specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P(), P())}
        return jax.shard_map(step, mesh=mesh, check_vma=False, **specs)

    tx, params = jo.offload(ADAMW, min_bytes=0), one_stack(NamedSharding(mesh, P()))
    step, plain = jo.jit(make(tx), donate_argnums=(0, 1)), jax.jit(make(ADAMW))
    assert_as_plain(step, plain, (params, tx.init(params), ADAMW.init(params)))


def test_pipelined_takes_gradients_in_a_reference():
    tx, params = jo.offload(ADAMW, min_bytes=0), one_stack(jax.devices()[0])
    train = jo.pipelined(with_references(scanned, tx, jo.update_params), donate_argnums=(0, 1))
    plain = jax.jit(with_references(scanned, ADAMW, apart))
    theirs = params + 0, ADAMW.init(params)
    batches = np.random.default_rng(0).normal(size=(3, BATCH, WIDTH)).astype(np.float32)
    carry, _ = train.start(params, tx.init(params), batches[0])
    for x in batches[1:]:
        carry, _ = train(carry, x)
    params, state = train.finish(carry)
    for x in batches:
        *theirs, _ = plain(*theirs, x)
    assert np.linalg.norm(params - theirs[0]) <= 1e-5 * np.linalg.norm(theirs[0])
    assert state[0].mu.sharding.memory_kind == "pinned_host"


def test_gradients_from_a_shard_map_say_where_to_update():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    tx, params = jo.offload(ADAMW, min_bytes=0), one_stack(NamedSharding(mesh, P()))

    def local(params, x):
        return jax.lax.pmean(jax.grad(lambda params: (scanned(params, x) ** 2).mean())(params), "data")

    @partial(jo.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        grads = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(params, x)
        return jo.update_params(tx, grads, state, params)

    (why,) = jo.placement(step, params, jo.abstract_state(tx, params), jnp.ones((BATCH, WIDTH))).stays
    assert why.startswith("its gradients are made inside a shard_map; call the update inside the same shard_map (at ")
