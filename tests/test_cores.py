"""Steps that are driven from Python: the host's cores update a share of the state, or it is on disk.

The step runs on a CPU device other than the cores' own, as it does beside an accelerator. Values, placement and
donation for every optimizer, wrapper, sharding, branch and kind of layers: tests/test_equivalence.py.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_offload as jo
from tests.support import steps
from tests.support.sizes import set_sizes
from tests.support.steps import ADAMW
from tests.support.trees import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:offload.. leaves the whole optimizer state"),
]
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)))
LAYERS, WIDTH = 4, 256  # a layer is large: its gradient takes its turn, and its rows go down by themselves
X = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def placed(tree, where=None):
    return jax.device_put(tree, where or jax.devices()[1])


def model():
    w = {f"layer_{k}": jax.random.normal(jax.random.key(k), (WIDTH, WIDTH)) / 16 for k in range(LAYERS)}
    return placed({name: {"w": x, "b": jnp.full(WIDTH, 0.1)} for name, x in w.items()})


def plain_layer(x, p):
    return jnp.tanh(x @ p["w"] + p["b"])


def loss(params, x):
    for name in sorted(params):
        x = plain_layer(x, params[name])
    return (x**2).mean()


step_of = functools.partial(steps.step_of, loss=loss)


def offload(inner=CLIPPED, update_on="host", **options):
    return jo.offload(inner, **{"min_bytes": 2048, "update_on": update_on, **options})


# ---- values, placement and donation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2**30])
def test_the_same_to_the_last_bit(group, monkeypatch):
    """Two loops of many steps, their inputs donated."""
    set_sizes(monkeypatch.setattr, group=group)
    step = jo.jit(step_of(tx := offload(ADAMW, 0.6)), donate_argnums=(0, 1))

    def train():
        params = model()
        state = tx.init(params)
        for _ in range(20):
            params, state, _ = step(params, state, X)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, state))]

    assert train() == train()


# ---- the pass in several programs, before a state on disk ------------------------------------------------------------


@pytest.mark.usefixtures("small_groups")
def test_the_last_layer_is_updated_while_the_pass_goes_on(disk):
    """The derivative of the first layer waits until the last one's weights have their new value."""
    updated, log = threading.Event(), []

    def told(x):
        updated.set()
        return x

    def update(grads, state, params):
        new, state = ADAMW.update(grads, state, params)
        w = new["layer_3"]["w"]
        new["layer_3"]["w"] = jax.pure_callback(told, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
        return new, state

    def wait(g):
        log.append(updated.wait(300))
        return g

    first = jax.custom_vjp(lambda x: x)
    first.defvjp(
        lambda x: (x, None), lambda _, g: (jax.pure_callback(wait, jax.ShapeDtypeStruct(g.shape, g.dtype), g),)
    )

    def watched(params, x):
        rest = {name: p for name, p in params.items() if name != "layer_0"}
        return loss(rest, first(plain_layer(x, params["layer_0"])))

    tx = offload(optax.GradientTransformation(ADAMW.init, update), "device", disk=disk)
    step, params = jo.jit(step_of(tx, loss=watched)), model()
    jax.block_until_ready(step(params, tx.init(params), X))
    assert log == [True]


# ---- which leaves, and what is said ---------------------------------------------------------------------------------


def on_cores(update_on):
    table = jo.placement(offload(update_on=update_on), model())
    return {leaf.param for leaf in table.leaves if leaf.on_cores}


def test_which_leaves():
    """The first gradients go to the cores; whole parameters, up to the share; rules by path, where the first one that
    matches counts."""
    assert on_cores(0.3) == {"layer_3/w"} and on_cores(0.5) == {"layer_3/w", "layer_2/w"} and on_cores(0.0) == set()
    by_layer = {"layer_0": "host", "layer_1": {"b": "device", "w": 1.0}, "layer_2": "device", "layer_3": 1.0}
    assert on_cores(by_layer) == {"layer_0/w", "layer_1/w", "layer_3/w"}
    assert on_cores([("layer_2", "device"), ("layer_[23]/w", "host"), ("layer_1", 0.6)]) == {"layer_3/w", "layer_1/w"}
    assert on_cores([("layer_1", 0.0)]) == set()


def test_what_placement_says():
    params, tx = model(), offload()
    table = jo.placement(offload(update_on=0.3), params)
    streams = {leaf.param: leaf.streams for leaf in table.leaves if leaf.host}
    assert streams["layer_3/w"] == "updated on the host's cores, 2 leaves together" in str(table)
    assert "cores" not in streams["layer_1/w"]
    shown = jo.placement(jo.jit(step_of(tx)), params, tx.init(params), X)
    assert {leaf.streams for leaf in shown.leaves if leaf.host} == {"updated on the host's cores, 2 leaves together"}
    (why,) = shown.stays
    assert why.startswith("update_on= cuts the step at this update") and "steps.py" in why


ANYTHING_ELSE = "expected 'device', 'host', the share in"
WRONG = [
    *(({"update_on": value}, ANYTHING_ELSE) for value in ("cpu", True, -0.1, 1.5, None)),
    *(({"update_on": [("layer_1", value), ("layer_2", 1)]}, ANYTHING_ELSE) for value in (None, ("host",), [])),
    ({"update_on": [("layer_9", "host")]}, "no parameter's path matches"),
    ({"update_on": [("layer_(", "host")]}, "is not a regular expression"),
    ({"update_on": [("layer_1", "host"), ("layer_2", 2)]}, "share in"),
    ({"update_on": {"other": "host"}}, "expected a single value or a pytree prefix"),
    ({"update_on": "host", "fraction": 0}, "with fraction=0"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_options_that_are_wrong(options, words):
    with pytest.raises(ValueError, match=f"update_on: .*{words}"):
        offload(**options).init(model())


def test_what_looks_at_a_step_says_which_of_its_programs():
    """The first, with the peak."""
    tx, params = offload(update_on=0.5), model()
    state, step = tx.init(params), jo.jit(step_of(tx), donate_argnums=(0, 1))
    report = jo.verify(step, params, state, X)
    assert report.program == "before" and "drives this step in several programs" in str(report)
    if jax.__version_info__ >= (0, 11):  # before, the profiler crashes in a process that has compiled for a target
        assert jo.profile(step, params, state, X, steps=1).compute > 0


def test_an_abstract_state_on_disk_is_looked_at_like_the_state(disk):
    tx, params = offload(update_on="device", disk=disk), model()
    step, abstract = jo.jit(step_of(tx), donate_argnums=(0, 1)), jo.abstract_state(tx, params)
    ahead = jo.verify(step, params, abstract, X)
    assert ahead.program == "before" and ahead.to_dict() == jo.verify(step, params, tx.init(params), X).to_dict()


def test_a_step_with_numbers_among_its_arguments_is_looked_at():
    """Python's numbers are arguments of the program unless they are static."""
    tx, params = offload(), model()

    def counted(run, x, flag, scale=2.0):
        params, state, value = step_of(tx)(run["params"], run["state"], x * scale if flag else x)
        return {"step": run["step"] + 1, "params": params, "state": state}, value

    run = {"step": 0, "params": params, "state": tx.init(params)}
    step = jo.jit(counted, donate_argnums=0, static_argnames=("flag",))
    assert jo.inspect(step, run, X, 1, scale=3).program == "before"


@pytest.mark.filterwarnings("ignore:.*arrive at update in device memory")
def test_leaves_that_a_wrapper_changes_before_the_update_are_updated_on_the_device():
    def halving(inner):
        def update(updates, state, params=None):
            return inner.update(updates, jax.tree.map(lambda m: m / 2, jo.to_device(state)), params)

        return optax.GradientTransformation(inner.init, update)

    params, inner = model(), optax.trace(0.9)
    got, want = (
        jax.jit(functools.partial(jo.update_params, tx))(params, tx.init(params), params)
        for tx in (halving(offload(inner)), halving(inner))
    )
    assert_close(got, want, 1e-6)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(got[1]) if x.ndim > 1} == {"pinned_host"}


@pytest.mark.parametrize("option", ["update_on", "disk"])
def test_somebody_elses_program(option, disk):
    tx, params = offload(update_on="device", disk=disk) if option == "disk" else offload(), model()
    state, step = tx.init(params), step_of(tx)
    programs = [
        lambda: jax.jit(step)(params, state, X),
        lambda: jax.jit(jo.jit(step))(params, state, X),
        lambda: jo.jit(step).lower(params, state, X),
        lambda: tx.update(params, state, params),
    ]
    if option == "update_on":
        many = jax.tree.map(lambda p: p[None], params)
        programs.append(lambda: jax.jit(jax.vmap(lambda g: tx.update(g, state, params)[0]))(many))
    for program in programs:
        with pytest.raises(ValueError, match=rf"{option}: .* Fix: jo\.jit\(step\)"):
            program()
