"""Donated buffers are reused only for results of the same memory kind, whatever is donated, returned, known.

Parameters and moments share shapes and dtypes, so that every wrong pairing is possible. Pairings are read
from the program lowered for cuda, which takes no GPU. On CPU a wrong one ends the process.
"""

import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._jit import _order, jit

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

Space = jax.memory.Space
KIND = {Space.Host: "pinned_host", Space.Device: "device"}
DEVICE = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
FAST = {"xla_backend_optimization_level": 0}  # to compile
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)  # uncommitted, as from a data loader


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["v"]) @ params["w"] - 1) ** 2)


def create(tx, sharding=DEVICE):
    keys = zip("vw", jax.random.split(jax.random.key(0)), strict=True)
    params = jax.device_put({n: jax.random.normal(k, (16, 16)) / 4 for n, k in keys}, sharding)
    return params, tx.init(params)


# Training steps. Each gives (step, arguments, donate_argnums, the next arguments from (arguments, results)).


def train_step(donate, state_first, tx):
    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return ((state, params) if state_first else (params, state)), loss

    return (
        step,
        (*create(tx), BATCH),
        donate,
        lambda args, out: (*out[0][:: -1 if state_first else 1], args[2]),
    )


def apply_gradients(donate, state_first, tx):
    """optax's order of arguments. More device buffers are donated than there are device results."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (state, params) if state_first else (params, state)

    def following(args, out):
        params, state = out[:: -1 if state_first else 1]
        return jax.tree.map(jnp.sin, params), state, params

    params, state = create(tx)
    return step, (jax.tree.map(jnp.sin, params), state, params), donate, following


def train_state(donate, state_first, tx):
    """A step that returns its gradients too."""

    def step(state, x):
        loss, grads = jax.value_and_grad(state.apply_fn)(state.params, x)
        state = state.apply_gradients(grads=grads)
        return (state, (loss, grads)) if state_first else ((loss, grads), state)

    state = TrainState.create(apply_fn=loss_fn, params=create(tx)[0], tx=tx)
    state = state.replace(step=jax.device_put(jnp.int32(0), DEVICE))
    return step, (state, BATCH), donate, lambda args, out: (out[0 if state_first else 1], args[1])


# What is donated -> what is returned: the step, and whether plain jax.jit crosses memory kinds
# (without out_shardings; with them for every result, but an uncommitted argument).
CASES = {
    "params -> params, state": (train_step, 0, False, (False, False)),
    "params -> state, params": (train_step, 0, True, (True, True)),
    "state -> params, state": (train_step, 1, False, (True, True)),
    "state -> state, params": (train_step, 1, True, (False, False)),
    "params and state -> params, state": (train_step, (0, 1), False, (False, False)),
    "params and state -> state, params": (train_step, (0, 1), True, (True, True)),
    "grads, state and params -> params, state": (apply_gradients, (0, 1, 2), False, (False, False)),
    "grads, state and params -> state, params": (apply_gradients, (0, 1, 2), True, (True, False)),
    "grads and params -> params, state": (apply_gradients, (0, 2), False, (True, False)),
    "grads and params -> state, params": (apply_gradients, (0, 2), True, (True, False)),
    "TrainState -> TrainState, grads": (train_state, 0, True, (False, False)),
    "TrainState -> grads, TrainState": (train_state, 0, False, (True, True)),
}
MATRIX = pytest.mark.parametrize(("case", "fraction"), list(itertools.product(CASES, (0.5, 1.0))))


STEPS = 3


@cache
def optimizer(fraction):
    return jo.offload(optax.adam(1e-2), fraction=fraction, min_bytes=0)


def make(case, fraction):
    build, donate, state_first, _ = CASES[case]
    return build(donate, state_first, optimizer(fraction))


@cache
def undonated(build, state_first, fraction):
    """The results of each step without donation, and the number of compilations."""
    step, args, _, following = build(0, state_first, optimizer(fraction))
    step, outs = jax.jit(step, compiler_options=FAST), []
    for _ in range(STEPS):
        outs.append(step(*args))
        args = following(args, outs[-1])
    return outs, step._cache_size()


def kind(attributes):
    return str(attributes["mhlo.memory_kind"]).strip('"') if "mhlo.memory_kind" in attributes else "device"


def pairs(jitted, *args):
    """Memory kinds of (argument, result) for each alias set up by jax, and of the arguments left to XLA."""
    module = jitted.trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
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


def buffers(tree):
    leaves = [x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in jax.tree.leaves(tree)]
    return Counter((x.shape, x.dtype, KIND[x.memory_space]) for x in leaves)


def kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def one_device(tree):
    return jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[0], memory_kind=KIND[x.memory_space]), tree)


def commit(tree):
    return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, DEVICE), tree)


# jax_offload.jit: no pair is crossed, and every buffer that can be reused is.


@MATRIX
def test_donation_pairs_all_buffers_of_equal_kind(case, fraction):
    step, args, donate, _ = make(case, fraction)
    aliases, _ = pairs(jit(step, donate_argnums=donate), *args)
    assert not crossed(aliases)
    donated = [args[i] for i in np.atleast_1d(donate)]
    possible = buffers(donated) & buffers(types(step, args))
    assert Counter(k for _, _, k in possible.elements()) <= Counter(k for k, _ in aliases)
    assert any(possible.values())


@MATRIX
def test_donation_computes_the_same(case, fraction):
    build, _, state_first, _ = CASES[case]
    references, compilations = undonated(build, state_first, fraction)
    step, args, donate, following = make(case, fraction)
    step = jit(step, donate_argnums=donate, compiler_options=FAST)
    for reference in references:
        out = step(*args)
        donated = arrays([args[i] for i in np.atleast_1d(donate)])
        assert sum(x.is_deleted() for x in donated) >= sum((buffers(donated) & buffers(out)).values()) > 0
        jax.tree.map(np.testing.assert_array_equal, out, reference)
        assert shardings(out) == shardings(reference)
        args = following(args, out)
    assert step._cache_size() == compilations


def test_donation_order_pairs_every_class_by_kind():
    """Against jax's pairing by class in order, on random buffers of few classes."""
    choose = random.Random(0)
    for _ in range(2000):
        donated, results = (
            [(choose.choice("ab"), choose.random() < 0.5) for _ in range(choose.randrange(7))] for _ in "12"
        )
        order = _order(donated, results)
        assert sorted(i for i in order if i >= 0) == list(range(len(results)))
        left, kept = list(donated), Counter()
        for cls, on_host in (results[i] if i >= 0 else donated[~i] for i in order):
            taken = next((d for d in left if d[0] == cls), None)
            if taken is not None:
                assert taken == (cls, on_host), (donated, results, order)
                left.remove(taken)
                kept[taken] += 1
        kept -= Counter(donated[~i] for i in order if i < 0)
        assert kept == Counter(donated) & Counter(results)


def test_donation_keeps_unused_arguments_in_their_place():
    """jax drops unused arguments before it pairs: the others would move up."""

    def step(unused, x):
        return jax.device_put(x, Space.Host), x + 1

    args = jax.device_put(jnp.zeros(8), Space.Host), jax.device_put(jnp.ones(8), DEVICE)
    assert pairs(jit(step, donate_argnums=(0, 1)), *args) == ([("pinned_host",) * 2, ("device",) * 2], [])
    assert kinds(jit(step, donate_argnums=(0, 1))(*args)) == ["pinned_host", "device"]


# What people do with jax.jit.


def host_and_device():
    return jax.device_put(jnp.zeros((4, 4)), Space.Host), jax.device_put(jnp.ones((4, 4)), DEVICE)


def swap(h, d):
    return jax.device_put(d, Space.Device) + 1, h


@pytest.mark.parametrize(
    ("options", "by_position", "by_name"),
    [
        ({"donate_argnums": 0}, "h", "h"),
        ({"donate_argnums": -1}, "d", "d"),
        ({"donate_argnums": [1, 0]}, "hd", "hd"),
        ({"donate_argnames": "h"}, "h", "h"),
        ({"donate_argnames": ("d", "h")}, "hd", "hd"),
        ({"donate_argnums": 0, "donate_argnames": "d"}, "h", "d"),
        ({"donate_argnums": (0, 1), "donate_argnames": ()}, "hd", ""),
    ],
)
def test_donation_by_position_and_name(options, by_position, by_name):
    donating = jit(swap, **options)
    h, d = host_and_device()
    assert kinds(donating(h, d)) == ["device", "pinned_host"]
    assert [h.is_deleted(), d.is_deleted()] == ["h" in by_position, "d" in by_position]
    h, d = host_and_device()
    assert kinds(donating(d=d, h=h)) == ["device", "pinned_host"]
    assert [h.is_deleted(), d.is_deleted()] == ["h" in by_name, "d" in by_name]


def test_donation_of_static_arguments_defaults_and_methods():
    @partial(jit, donate_argnums=(1, 2), static_argnums=0, static_argnames="keep")
    def step(n, h, d, keep=True):
        assert isinstance(n, int) and isinstance(keep, bool)
        return (d * n, h) if keep else (h, {"d": d * n})

    assert kinds(step(2, *host_and_device())) == ["device", "pinned_host"]
    assert kinds(step(2, *host_and_device(), keep=False)) == ["pinned_host", "device"]
    assert step._cache_size() == 2
    step.clear_cache()
    assert step._cache_size() == 0

    class Trainer:
        @jit(static_argnums=0, donate_argnums=(1, 2))
        def step(self, h, d):
            """Steps."""
            return d + 1, h

    assert kinds(Trainer().step(*host_and_device())) == ["device", "pinned_host"]
    assert (Trainer.step.__name__, Trainer.step.__doc__) == ("step", "Steps.")


def test_donation_ahead_of_time():
    donating = jit(swap, donate_argnums=(0, 1))
    shapes = donating.eval_shape(*host_and_device())
    for lowered in (donating.lower(*host_and_device()), donating.trace(*host_and_device()).lower()):
        assert [x.shape for x in lowered.out_info] == [x.shape for x in shapes] == [(4, 4)] * 2
        compiled = lowered.compile()
        assert [s.memory_kind for s in compiled.output_shardings] == ["device", "pinned_host"]
        assert compiled.memory_analysis() is not None
        d, h = compiled(*host_and_device())
        assert kinds((d, h)) == ["device", "pinned_host"] and float(d.sum()) == 32 and float(h.sum()) == 0


def test_donation_nested_in_other_transformations():
    donating = jit(swap, donate_argnums=(0, 1))
    h, d = host_and_device()
    assert kinds(jax.jit(donating)(h, d)) == ["device", "pinned_host"]
    grads = jax.grad(lambda h, d: donating(h, d)[0].sum(), argnums=1)(h, d)
    np.testing.assert_array_equal(grads, np.ones((4, 4)))
    assert jax.vmap(jit(lambda x: x + 1, donate_argnums=0))(d + 0).shape == (4, 4)


def test_donation_of_nothing_is_plain_jit():
    assert type(jit(swap)) is type(jit(swap, donate_argnums=())) is type(jax.jit(swap))


# out_shardings, and several devices.


@pytest.mark.parametrize("case", [case for case, (*_, unsafe) in CASES.items() if any(unsafe)])
def test_donation_with_out_shardings(case):
    step, args, donate, _ = make(case, 0.5)
    out_shardings = one_device(types(step, args))
    donating = jit(step, donate_argnums=donate, out_shardings=out_shardings, compiler_options=FAST)
    aliases, _ = pairs(donating, *args)
    assert aliases and not crossed(aliases)
    out = donating(*args)
    assert shardings(out) == out_shardings


def test_donation_with_out_shardings_in_other_memory():
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    donating = jit(swap, donate_argnums=(0, 1), out_shardings=host)
    assert pairs(donating, *host_and_device()) == ([("pinned_host",) * 2, ("device",) * 2], [])
    assert kinds(donating(*host_and_device())) == ["pinned_host", "pinned_host"]
    compiled = donating.lower(*host_and_device()).compile()
    assert [sharding.memory_kind for sharding in compiled.output_shardings] == ["pinned_host", "pinned_host"]


def test_donation_with_out_shardings_of_another_tree():
    with pytest.raises(ValueError, match=r"^out_shardings: .*prefix"):
        jit(swap, donate_argnums=0, out_shardings=(None, None, None))(*host_and_device())


MESH = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def mesh_step(axis_type, spec):
    mesh = jax.make_mesh((4, 1), ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, spec)
    tx = jo.offload(optax.adam(1e-2), fraction=0.5, min_bytes=0)

    def step(state, params, factor):
        updates, state = tx.update(jax.tree.map(lambda p: jnp.sin(p) * factor[0], params), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.tree.norm(params)

    def arguments():
        params, state = create(tx, sharding)
        return state, params, np.ones(3, np.float32)

    return step, arguments


@MESH
@pytest.mark.parametrize("spec", [P("x", None), P("x", "y"), P(None, "x")], ids=str)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_with_out_shardings_on_several_devices(axis_type, spec):
    step, arguments = mesh_step(axis_type, spec)
    args = arguments()
    out_shardings = (shardings(args[1]), shardings(args[0]), None)
    donating = jit(step, donate_argnums=(0, 1), out_shardings=out_shardings, compiler_options=FAST)
    aliases, donors = pairs(donating, *args)
    assert not crossed(aliases) and len(aliases) + len(donors) >= 6
    plain = jax.jit(step, compiler_options=FAST)
    expected = args
    args = arguments()
    for _ in range(3):
        out, reference = donating(*args), plain(*expected)
        assert all(x.is_deleted() for x in arrays(args) if x.ndim)
        jax.tree.map(np.testing.assert_array_equal, out, reference)
        assert shardings(out[:2]) == out_shardings[:2]
        args, expected = (out[1], out[0], args[2]), (reference[1], reference[0], args[2])
    assert donating._cache_size() == 1


@MESH
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_without_out_shardings_on_several_devices(axis_type):
    step, arguments = mesh_step(axis_type, P("x", None))
    aliases, donors = pairs(jit(step, donate_argnums=(0, 1)), *arguments())
    assert not crossed(aliases) and set(donors) == ({"device", "pinned_host"} if axis_type is AxisType.Auto else set())
    out = jit(step, donate_argnums=(0, 1), compiler_options=FAST)(*arguments())
    expected = jax.jit(step, compiler_options=FAST)(*arguments())
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_pairs_by_the_shape_on_one_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    h = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
    d = jax.device_put(jnp.ones((2, 3)), NamedSharding(mesh, P()))

    def step(h, d, factor):
        return d * factor[0], h.sum()

    args = h, d, np.ones(3, np.float32)
    assert crossed(pairs(jax.jit(step, donate_argnums=0), *args)[0])
    assert pairs(jit(step, donate_argnums=0), *args) == ([("pinned_host", "pinned_host")], [])


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_left_to_xla_respects_memory_spaces():
    """jit relies on it, with Auto axes. Here in plain jax, with every result in the wrong order."""
    step, arguments = mesh_step(AxisType.Auto, P("x"))
    text = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments()).compile().as_text()
    aliases, layout = text.splitlines()[0].split("entry_computation_layout=")
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", aliases)
    arguments, results = (re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", part) for part in layout.split("->"))
    memories = [("S(5)" in arguments[int(j)], "S(5)" in results[int(i)]) for i, j in aliases]
    assert Counter(memories) == {(True, True): 2, (False, False): 5}


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_donation_refuses_meshes_it_cannot_see_through():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    d = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("x")))
    h = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("x"), memory_kind="pinned_host"))
    with pytest.raises(NotImplementedError, match="all axes must be Explicit"):
        jit(swap, donate_argnums=(0, 1))(h, d)


# Plain jax.jit: what is unsafe today, so that we notice when it is not any more.


@MATRIX
def test_donation_in_plain_jit_crosses_kinds(case, fraction):
    step, args, donate, _ = make(case, fraction)
    without, uncommitted = CASES[case][-1]
    assert bool(crossed(pairs(jax.jit(step, donate_argnums=donate), *args)[0])) == without
    assert bool(crossed(pairs(jax.jit(step, donate_argnums=donate), *commit(args))[0])) == without
    given = jax.jit(step, donate_argnums=donate, out_shardings=one_device(types(step, args)))
    assert bool(crossed(pairs(given, *args)[0])) == uncommitted
    aliases, _ = pairs(given, *commit(args))
    assert aliases and not crossed(aliases)


RUN = """
import jax
from jax_offload._jit import jit
host, device = jax.device_put(jax.numpy.ones((2, 8, 8)), jax.memory.Space.Host), jax.numpy.ones((2, 8, 8)) + 1
step = {}(lambda h, d: (d + 1, h), donate_argnums=(0, 1))
for _ in range(3):
    device, host = jax.block_until_ready(step(host, device))
print("finished")
"""


def test_donation_in_plain_jit_ends_the_process_on_cpu():
    plain, donating = (
        subprocess.Popen([sys.executable, "-c", RUN.format(name)], stdout=-1, stderr=-1, text=True)
        for name in ("jax.jit", "jit")
    )
    out, err = plain.communicate(timeout=120)
    assert plain.returncode != 0 and "finished" not in out and "memory kind" in err, err
    out, err = donating.communicate(timeout=120)
    assert donating.returncode == 0 and "finished" in out, err
