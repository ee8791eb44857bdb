"""In plain ``jax.jit`` donated buffers are reused only for results of the same memory kind, whatever is donated,
returned, known.

Parameters and moments share shapes and dtypes, so that every wrong pairing is possible. Pairings are read from the
program lowered for cuda and tpu, which takes neither. On CPU a wrong one ends the process.
"""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from tests.support.trees import FAST, shardings_in

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

DEVICE = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
KIND = {jax.memory.Space.Host: "pinned_host", jax.memory.Space.Device: "device"}
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)  # uncommitted, as from a data loader


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["v"]) @ params["w"] - 1) ** 2)


def create(tx, sharding=None):
    keys = zip("vw", jax.random.split(jax.random.key(0)), strict=True)
    params = jax.device_put({n: jax.random.normal(k, (16, 16)) / 4 for n, k in keys}, sharding or DEVICE)
    return params, tx.init(params)


STEP = "params state x"
GRADS = "grads state params"  # optax's order of arguments; more buffers are donated than there are device results
AVERAGE = "params state average x"  # of the parameters, which has their types
# What is donated -> what is returned: arguments, those donated, results; and whether jax by itself pairs buffers of
# different memory kinds (without out_shardings; with them for every result, but an uncommitted argument).
CASES = {
    "params -> params, state": (STEP, 0, "params state loss", (False, False)),
    "params -> state, params": (STEP, 0, "state params loss", (True, True)),
    "state -> params, state": (STEP, 1, "params state loss", (True, True)),
    "state -> state, params": (STEP, 1, "state params loss", (False, False)),
    "params and state -> params, state": (STEP, (0, 1), "params state loss", (False, False)),
    "params and state -> state, params": (STEP, (0, 1), "state params loss", (True, True)),
    "grads, state and params -> params, state": (GRADS, (0, 1, 2), "params state", (False, False)),
    "grads, state and params -> state, params": (GRADS, (0, 1, 2), "state params", (True, False)),
    "grads and params -> params, state": (GRADS, (0, 2), "params state", (True, False)),
    "grads and params -> state, params": (GRADS, (0, 2), "state params", (True, False)),
    "all -> average between": (AVERAGE, (0, 1, 2), "params average state", (True, True)),
    "all -> state first": (AVERAGE, (0, 1, 2), "state average params", (True, True)),
    "state and average -> average between": (AVERAGE, (1, 2), "params average state", (True, True)),
    "update_params: state -> params, state": (STEP, 1, "params state", (True, True)),
    "update_params: all -> state, params": (STEP, (0, 1), "state params", (True, True)),
    "TrainState -> TrainState, grads": ("train x", 0, "train loss grads", (False, False)),
    "TrainState -> grads, TrainState": ("train x", 0, "loss grads train", (True, True)),
}


def make(case, tx):
    """The step of a case, and its arguments."""
    takes, _, returns, _ = CASES[case]
    takes, returns = takes.split(), returns.split()
    params, state = create(tx)
    train = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)
    train = train.replace(step=jax.device_put(jnp.int32(0), DEVICE))
    grads, average = (jax.tree.map(jnp.sin, params) for _ in range(2))
    values = {"params": params, "state": state, "grads": grads, "average": average, "train": train, "x": BATCH}

    def step(*args):
        given = dict(zip(takes, args, strict=True))
        params = given["train"].params if "train" in given else given["params"]
        new = dict(given)
        if "grads" not in given:
            new["loss"], new["grads"] = jax.value_and_grad(loss_fn)(params, given["x"])
        if "train" in given:
            new["train"] = given["train"].apply_gradients(grads=new["grads"])
        elif "update_params" in case:
            new["params"], new["state"] = jo.update_params(tx, new["grads"], given["state"], params)
        else:
            updates, new["state"] = tx.update(new["grads"], given["state"], params)
            new["params"] = optax.apply_updates(params, updates)
        if "average" in given:
            new["average"] = optax.incremental_update(new["params"], given["average"], 0.1)
        return tuple(new[name] for name in returns)

    return step, tuple(values[name] for name in takes)


def buffers(tree):
    leaves = [x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in jax.tree.leaves(tree)]
    return Counter((x.shape, x.dtype, KIND[x.memory_space]) for x in leaves)


@cache
def optimizer(fraction):
    return jo.offload(optax.adam(1e-2), fraction=fraction, min_bytes=0)


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


# jax_offload.jit: no pair is crossed, and every buffer that can be reused is.


@pytest.mark.oldest("aliases between memories, which jax decides")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_donation_crosses_no_memory_kinds(case, platform):
    """Which values the steps give with what is donated: tests/test_random_steps.py."""
    step, args = make(case, optimizer(0.5))
    donate = CASES[case][1]
    committed = jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, DEVICE), args)
    for arguments in args, committed:
        aliases, donors = pairs(jax.jit(step, donate_argnums=donate), *arguments, platform=platform)
        assert not crossed(aliases)
        possible = buffers([args[i] for i in np.atleast_1d(donate)]) & buffers(types(step, args))
        assert Counter(k for _, _, k in possible.elements()) <= Counter([k for k, _ in aliases] + donors)
        assert any(possible.values())


@pytest.mark.oldest("aliases that jax takes for it")
@pytest.mark.parametrize("case", [case for case, (*_, unsafe) in CASES.items() if any(unsafe)])
def test_donation_with_out_shardings(case):
    step, args = make(case, optimizer(1.0))
    place = lambda x: SingleDeviceSharding(jax.devices()[0], memory_kind=KIND[x.memory_space])  # noqa: E731
    out_shardings = jax.tree.map(place, types(step, args))
    donating = jax.jit(step, donate_argnums=CASES[case][1], out_shardings=out_shardings, compiler_options=FAST)
    assert not crossed(pairs(donating, *args)[0])
    out = donating(*args)
    assert shardings_in(out) == out_shardings


# Where an update can stand.


def update(params, state, scale=1.0):
    updates, state = optimizer(1.0).update(jax.tree.map(lambda p: scale * jnp.sin(p), params), state, params)
    return optax.apply_updates(params, updates), state


def total_of_new(params, state):
    return sum(x.sum() for x in jax.tree.leaves(update(params, state)[0]))


def skipped(params, state):
    tx, grads = optimizer(1.0), jax.tree.map(jnp.sin, params)
    return jo.update_params(tx, grads, state, params, skip=params["v"][0, 0] > 10)


PLACES = {
    "scan": lambda p, s: jax.lax.scan(lambda c, scale: (update(*c, scale), None), (p, s), jnp.arange(1.0, 4.0))[0],
    "cond": lambda p, s: jax.lax.cond(p["v"][0, 0] < 10, update, lambda p, s: (p, s), p, s),
    "skip": skipped,
    "grad": lambda p, s: (jax.grad(total_of_new)(p, s), update(p, s)[1]),
    "nothing but a gradient": jax.grad(total_of_new),
    "remat": jax.checkpoint(update),
    "jit": jax.jit(update, donate_argnums=1),
    "state only": lambda p, s: update(p, s)[1],
    "params only": lambda p, s: update(p, s)[0],
    "init after": lambda p, s: (optimizer(1.0).init(update(p, s)[0]), update(p, s)),
}


def begun(sharding=None):
    return create(optimizer(1.0), sharding)


def batched():
    params = jax.device_put(jax.tree.map(lambda p: jnp.stack([p, 2 * p]), begun()[0]), DEVICE)
    return params, jax.jit(jax.vmap(optimizer(1.0).init))(params)


def resident():
    params, state = begun()
    return params, jo.to_device(state)


def exported(params, state):
    """jax sees nothing of ours in it; that ``jo.jit`` crosses no memories is seen by running it."""
    return jax.export.export(jax.jit(update, donate_argnums=1))(*begun()).call(params, state)


def inside_shard_map(params, state):
    specs = P("x"), jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
    return jax.shard_map(update, mesh=over_four().mesh, in_specs=specs, out_specs=specs)(params, state)


def over_four():
    return NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)), P("x"))


CALLS = {place: (step, begun, 1) for place, step in PLACES.items()}  # what it is given, and what is donated
CALLS |= {
    "vmap": (jax.vmap(update), batched, 1),
    "a resident state": (update, resident, 1),  # migration, as docs/state.md shows it
    "a resident state, and parameters": (update, resident, (0, 1)),
    "export": (exported, begun, 1),
    "shard_map": (inside_shard_map, lambda: begun(over_four()), 1),
    "init itself": (lambda p: (optimizer(1.0).init(p), jax.tree.map(jnp.sin, p)), lambda: begun()[:1], 0),
    "to_host": (lambda s: jo.to_host(optimizer(1.0), s), lambda: resident()[1:], 0),
    "to_device": (jo.to_device, lambda: begun()[1:], 0),
    "from_plain": (lambda s: jo.from_plain(optimizer(1.0), s, params=begun()[0]), lambda: resident()[1:], 0),
}


@pytest.mark.daily("each is a place of its own")
@pytest.mark.oldest("a primitive under jax's transformations, what jax forwards, export")
@pytest.mark.parametrize("call", CALLS)
def test_donation_wherever_update_stands(call):
    """No pair is crossed, and the results are those without donation."""
    step, args, donated = CALLS[call]
    jit, platforms = (jo.jit, ["cpu"]) if call == "export" else (jax.jit, ["cuda", "tpu"])
    expected, donating = jax.jit(lambda *args: step(*args))(*args()), jit(step, donate_argnums=donated)
    for platform in platforms:
        assert not crossed(pairs(donating, *args(), platform=platform)[0])
    out = donating(*args())
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    assert shardings_in(out) == shardings_in(expected)
