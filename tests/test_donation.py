"""In plain ``jax.jit`` donated buffers are reused only for results of the same memory kind, whatever is donated,
returned, known.

Parameters and moments share shapes and dtypes, so that every wrong pairing is possible. Pairings are read from the
program lowered for cuda and tpu, which takes neither. On CPU a wrong one ends the process.
"""

import os
from collections import Counter
from functools import cache, partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.donations import CASES, KIND, buffers, create, on_device
from tests.support.trees import shardings_in

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

Space = jax.memory.Space
DEVICE = on_device()
FAST = {"xla_backend_optimization_level": 0}  # to compile


@cache
def optimizer(fraction):
    return jo.offload(optax.adam(1e-2), fraction=fraction, min_bytes=0)


def make(case, fraction):
    build, donate, state_first, _ = CASES[case]
    return build(donate, state_first, optimizer(fraction))


def kind(attributes):
    return str(attributes["mhlo.memory_kind"]).strip('"') if "mhlo.memory_kind" in attributes else "device"


def pairs(jitted, *args, platform="cuda"):
    """Memory kinds of (argument, result) for each alias set up by jax, and of the arguments left to XLA."""
    module = jitted.trace(*args).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
    results = [kind(attributes) for attributes in main.attributes["res_attrs"]]
    aliases, donors = [], []
    for attributes in main.attributes["arg_attrs"]:
        if "tf.aliasing_output" in attributes:
            result = int(str(attributes["tf.aliasing_output"]).split()[0])
            aliases.append((kind(attributes), results[result]))
        elif "jax.buffer_donor" in attributes:
            donors.append(kind(attributes))
    return aliases, donors


def crossed(aliases):
    return [pair for pair in aliases if len(set(pair)) > 1]


def types(step, args):
    """The tree of abstract results; unlike those of ``eval_shape``, they know their memory."""
    traced = jax.jit(step).trace(*args)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def one_device(tree):
    return jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[0], memory_kind=KIND[x.memory_space]), tree)


def commit(tree):
    return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, DEVICE), tree)


# jax_offload.jit: no pair is crossed, and every buffer that can be reused is.


@pytest.mark.oldest("aliases between memories, of which jax decides")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_donation_crosses_no_memory_kinds(case, platform):
    """Which values the steps give with what is donated: tests/test_random_steps.py."""
    step, args, donate, _ = make(case, 0.5)
    for arguments in args, commit(args):
        aliases, donors = pairs(jax.jit(step, donate_argnums=donate), *arguments, platform=platform)
        assert not crossed(aliases)
        possible = buffers([args[i] for i in np.atleast_1d(donate)]) & buffers(types(step, args))
        assert Counter(k for _, _, k in possible.elements()) <= Counter([k for k, _ in aliases] + donors)
        assert any(possible.values())


@pytest.mark.oldest("aliases that jax takes for it")
@pytest.mark.parametrize("case", [case for case, (*_, unsafe) in CASES.items() if any(unsafe)])
def test_donation_with_out_shardings(case):
    step, args, donate, _ = make(case, 1.0)
    out_shardings = one_device(types(step, args))
    donating = jax.jit(step, donate_argnums=donate, out_shardings=out_shardings, compiler_options=FAST)
    assert not crossed(pairs(donating, *args)[0])
    out = donating(*args)
    assert shardings(out) == out_shardings


# Where an update can stand.


def update(params, state, scale=1.0):
    updates, state = optimizer(1.0).update(jax.tree.map(lambda p: scale * jnp.sin(p), params), state, params)
    return optax.apply_updates(params, updates), state


def scanned(params, state):
    return jax.lax.scan(lambda c, scale: (update(*c, scale), None), (params, state), jnp.arange(1.0, 4.0))[0]


def chosen(params, state):
    return jax.lax.cond(params["v"][0, 0] < 10, update, lambda p, s: (p, s), params, state)


def skipped(params, state):
    tx, grads = optimizer(1.0), jax.tree.map(jnp.sin, params)
    return jo.update_params(tx, grads, state, params, skip=params["v"][0, 0] > 10)


def differentiated(params, state):
    new = jax.grad(lambda p: sum(x.sum() for x in jax.tree.leaves(update(p, state)[0])))(params)
    return new, update(params, state)[1]


def only_a_gradient(params, state):
    return jax.grad(lambda p: sum(x.sum() for x in jax.tree.leaves(update(p, state)[0])))(params)


PLACES = {
    "scan": scanned,
    "cond": chosen,
    "skip": skipped,
    "grad": differentiated,
    "nothing but a gradient": only_a_gradient,
    "remat": jax.checkpoint(update),
    "jit": jax.jit(update, donate_argnums=1),
    "state only": lambda params, state: update(params, state)[1],
    "params only": lambda params, state: update(params, state)[0],
    "init after": lambda params, state: (optimizer(1.0).init(update(params, state)[0]), update(params, state)),
}


def assert_donates(step, args, donated, platforms=("cuda",), jit=jax.jit):
    """No pair is crossed, and the results are those without donation; ``args()`` makes the arguments anew."""
    expected, donating = jax.jit(lambda *args: step(*args))(*args()), jit(step, donate_argnums=donated)
    for platform in platforms:
        assert not crossed(pairs(donating, *args(), platform=platform)[0])
    out = donating(*args())
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    assert shardings(out) == shardings(expected)


def begun(sharding=None):
    return create(optimizer(1.0), sharding)


@pytest.mark.oldest("a primitive under jax's transformations")
@pytest.mark.parametrize("place", PLACES)
def test_donation_wherever_update_stands(place):
    assert_donates(PLACES[place], begun, 1)


@pytest.mark.oldest("what jax forwards, and what is static")
def test_donation_of_batched_updates():
    def batched():
        params = jax.device_put(jax.tree.map(lambda p: jnp.stack([p, 2 * p]), begun()[0]), DEVICE)
        return params, jax.jit(jax.vmap(optimizer(1.0).init))(params)

    assert_donates(jax.vmap(update), batched, 1)


# Other programs that move a state.


def test_donation_to_the_first_step_of_a_resident_state():
    """Migration, as docs/state.md shows it."""

    def resident():
        params, state = begun()
        return params, jo.to_device(state)

    assert "device" in pairs(jax.jit(update, donate_argnums=1), *resident())[1]
    for donated in 1, (0, 1):
        assert_donates(update, resident, donated, ("cuda", "tpu"))


@pytest.mark.parametrize("move", ["init", "to_host", "to_device", "from_plain"])
def test_donation_to_what_moves_a_state(move):
    tx, params = optimizer(1.0), begun()[0]
    fun, of = {
        "init": (lambda p: (tx.init(p), jax.tree.map(jnp.sin, p)), lambda params, state: params),
        "to_host": (partial(jo.to_host, tx), lambda params, state: jo.to_device(state)),
        "to_device": (jo.to_device, lambda params, state: state),
        "from_plain": (partial(jo.from_plain, tx, params=params), lambda params, state: jo.to_device(state)),
    }[move]
    assert_donates(fun, lambda: (of(*begun()),), 0)


@pytest.mark.oldest("export")
def test_donation_through_an_exported_step():
    """Inside of it all is well; whoever calls it sees nothing of ours, and jo.jit helps."""
    exported = jax.export.export(jax.jit(update, donate_argnums=1))(*begun())
    assert_donates(exported.call, begun, 1, ("cpu",), jo.jit)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_inside_shard_map():
    over = NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
    state = jo.abstract_state(optimizer(1.0), begun(over)[0])
    specs = P("x"), jax.tree.map(lambda s: s.spec, shardings_in(state))
    assert_donates(jax.shard_map(update, mesh=over.mesh, in_specs=specs, out_specs=specs), lambda: begun(over), 1)
