"""``inspect`` and ``verify`` on steps that are right, and on steps that are broken on purpose.

On a CPU they see placement and donation; the rest is compiled for an H200.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_offload as jo
from tests.aot.harness import H200, V5E, mesh_for, require
from tests.aot.model import ADAMW, CLIPPED, loss, parameters
from tests.support.steps import step_of

MIB = 2**20
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def sharding(kind="device"):
    return NamedSharding(Mesh(np.array(jax.devices("cpu")[:1]), ("x",)), PartitionSpec(), memory_kind=kind)


def arguments(tx, n=4, width=512, tokens=256, stacked=False):
    params = parameters(n, width, stacked, sharding())
    return (
        params,
        jo.abstract_state(tx, params),
        jax.ShapeDtypeStruct((tokens, width), jnp.float32, sharding=sharding()),
    )


def moved(tree, kind):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(kind)), tree)


def step(tx, **kwargs):
    return jax.jit(step_of(tx, loss=loss), donate_argnums=(0, 1), **kwargs)


OURS = jo.offload(ADAMW, min_bytes=0)


def usual_recipe(params, state, batch):
    big = jax.tree.map(lambda x: jnp.ndim(x) > 0, state)
    loaded = jax.tree.map(lambda x, b: jax.device_put(x, DEVICE) if b else x, state, big)
    updates, new = ADAMW.update(jax.grad(loss)(params, batch), loaded, params)
    new = jax.tree.map(lambda x, b: jax.device_put(x, HOST) if b else x, new, big)
    return optax.apply_updates(params, updates), new


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("jit", [jax.jit, jo.jit])
def test_a_good_step_on_a_cpu(jit):
    """The same for abstract arguments; XLA's analysis for a CPU counts what is pinned as on the device."""
    params = {"w": jax.device_put(jnp.ones((64, 64)), sharding())}
    given = params, OURS.init(params), jnp.ones((8, 64))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), given)
    step = jit(step_of(OURS, loss=lambda p, x: jnp.mean((x @ p["w"]) ** 2)), donate_argnums=(0, 1))
    report = jo.verify(step, *given)
    assert report.problems == () and report.target == "cpu" and report.timeline is None
    sizes = {"parameters": 64 * 64 * 4, "state on the device": 2 * 64 * 64 * 4 + 4, "other arguments": 8 * 64 * 4}
    assert sizes.items() <= report.parts.items() and sum(report.parts.values()) == report.peak
    assert jo.verify(step, *abstract).peak == report.peak
    printed = str(report)
    assert "pinned host memory: a CPU counts it above" in printed
    assert "0.00" not in printed.split("pinned host memory")[1]


def test_what_a_cpu_cannot_tell():
    """The usual recipe: it passes, and that is said."""
    report = jo.verify(jax.jit(usual_recipe, donate_argnums=(0, 1)), *arguments(OURS))
    assert "not seen  whether the state streams or is on the device all at once" in str(report)
    assert report.to_dict()["unseen"] == report.unseen != ""


@pytest.mark.parametrize(
    "inner", [lambda: optax.apply_every(2), lambda: optax.add_decayed_weights(lambda count: count)]
)
def test_a_state_that_optax_names_otherwise(inner):
    """The name of its class does not end in State."""
    params = {"w": jnp.ones((64, 64))}
    state = inner().init(params)
    report = jo.inspect(jax.jit(lambda p, s: inner().update(p, s, p)), params, state)
    assert report.parts["state on the device"] == sum(x.nbytes for x in jax.tree.leaves(state))


@pytest.mark.parametrize("target", [H200, V5E])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_good_step(target, stacked):
    require(target)
    fun = jo.jit(step_of(OURS, loss=loss), donate_argnums=(0, 1))
    params, state, batch = arguments(OURS, stacked=stacked)
    report = jo.verify(fun, params, state, batch, target=target)
    assert report.problems == () and report.host_temp == 0 and report.compiled_for and not report.unseen
    assert report.host == 2 * 4 * 512**2 * 4 and report.parts["parameters"] == 4 * 512**2 * 4
    leaves = ["w"] if stacked else [f"w{i:03d}" for i in range(4)]
    expected = {(f"state[0].{m}['{leaf}']", way) for m in ("mu", "nu") for leaf in leaves for way in (True, False)}
    assert {(t.leaf, t.loads) for t in report.transfers} == expected
    assert report.loaded >= report.host and report.stored >= report.host
    assert (report.loaded, report.stored) == (report.timeline.loaded, report.timeline.stored)
    hidden = sum(t.hidden * t.nbytes for t in report.transfers) / (report.loaded + report.stored)
    assert hidden < 0.5 and all(0 <= t.hidden <= 1 for t in report.transfers)  # so few tokens hide next to nothing
    assert sum(report.parts.values()) == report.peak and report.parts["temporaries"] >= 512**2 * 4


@pytest.mark.parametrize(("window", "chunks"), [(8 * MIB, 4), (4 * MIB, 8)])
def test_the_parts_of_a_window(window, chunks):
    """8 layers of 1 MiB, two moments: a window holds two chunks of both, one that comes and one that goes."""
    require(H200)
    tx = jo.offload(ADAMW, min_bytes=0, window=window)
    report = jo.inspect(step(tx), *arguments(tx, n=8, stacked=True), target=H200)
    assert report.parts["parameters"] == 8 * MIB and report.parts["temporaries"] >= 8 * MIB
    assert report.parts["other arguments"] == MIB / 2
    assert {(t.nbytes, t.pieces) for t in report.transfers} == {(8 * MIB, chunks)}
    assert report.timeline.window == window / 2  # what comes; what goes takes its buffers


@pytest.mark.long("compiles three steps for an H200")
def test_the_options_of_the_steps_own_jit():
    """It is compiled as the user's ``jit`` would compile it, by which more copies are in flight, or fewer."""
    require(H200)
    args, fun = arguments(OURS, n=8, width=2048, tokens=8192), step_of(OURS, loss=loss)

    def waits(jit, **options):
        return jo.inspect(jit(fun, donate_argnums=(0, 1), **options), *args, target=H200).timeline.exposed

    more = jo.compiler_options("cuda")
    assert waits(jax.jit, compiler_options=more) < 0.9 * waits(jax.jit)
    assert waits(jo.jit) == pytest.approx(waits(jo.jit, compiler_options=more))
    assert waits(jo.jit) < 0.9 * waits(jo.jit, compiler_options={})


# On purpose: by a step, its optimizer, where the state is; and what is said of it.
BROKEN = {
    "usual recipe": (usual_recipe, None, r"state are on the device at once, of 8.00 \(state\[0\].mu.* usual recipe"),
    "state left on the device": (
        step_of(OURS, loss=loss), "device",
        r"state\[0\].mu\['w{first}'\]: belongs in host memory and arrives on the device",
    ),
    "returned on the device": (
        lambda p, s, x: (p, jax.tree.map(lambda s: jax.device_put(s, DEVICE) * 2, s)), None,
        r"{n} of {n} leaves f32\[{shape}\] in host memory are not returned there",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:offload\\(\\)")  # of the state that has been moved
@pytest.mark.parametrize(
    ("name", "target", "jit", "stacked"),
    [
        *((name, target, jax.jit, target == V5E) for name in BROKEN for target in (H200, V5E)),
        *((name, None, jit, jit is jo.jit) for name in BROKEN if name != "usual recipe" for jit in (jax.jit, jo.jit)),
    ],
)
def test_broken_steps(name, target, jit, stacked):
    """A CPU's program says in its head alone what is in host memory."""
    require(target or H200)
    fun, kind, says = BROKEN[name]
    for mark, text in {"{first}": "" if stacked else "000", "{n}": "2" if stacked else "8"}.items():
        says = says.replace(mark, text)
    says = says.replace("{shape}", "4, 512, 512" if stacked else "512, 512")
    params, state, batch = arguments(OURS, stacked=stacked)
    state = state if kind is None else moved(state, kind)
    with pytest.raises(ValueError, match=says):
        jo.verify(jit(fun, donate_argnums=(0, 1)), params, state, batch, target=target)


@pytest.mark.filterwarnings("ignore:offload\\(\\)")  # of the state that has been moved
@pytest.mark.parametrize("target", [H200, V5E])
def test_one_leaf_that_is_left_on_the_device(target):
    """It alone is an error. What XLA for a TPU then copies within host memory is no arithmetic."""
    require(target)
    params, (adam, *rest), batch = arguments(OURS)
    adam = adam._replace(mu={**adam.mu, "w002": moved(adam.mu["w002"], "device")})
    report = jo.inspect(step(OURS), params, (adam, *rest), batch, target=target)
    assert [p.leaf for p in report.errors] == ["state[0].mu['w002']"]
    others = [p.what for p in report.problems if not p.error]
    assert all("is copied within host memory" in what for what in others) and (target == V5E or not others)


@pytest.mark.parametrize("target", [None, H200, V5E])
def test_crossed_donation(target):
    """The batch has no memory kind, and jax pairs parameter and moment with each other's results."""
    require(target or H200)

    def fun(p, m, x):
        return jax.device_put(jax.device_put(m, DEVICE) + x.sum(), HOST), p + 1

    a, b = (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding(kind)) for kind in ("device", "pinned_host"))
    args = a, b, jax.ShapeDtypeStruct((4, 4), jnp.float32)
    report = jo.inspect(jax.jit(fun, donate_argnums=(0, 1)), *args, target=target)
    said = [p for p in report.errors if "in another memory" in p.what]
    assert [(p.leaf, p.what.partition(", in another")[0].split()[-2:]) for p in said] == [
        ("p", ["result", "0"]), ("m", ["result", "1"])
    ]  # fmt: skip
    ours = jo.inspect(jo.jit(fun, donate_argnums=(0, 1)), *args, target=target)
    assert not any("in another memory" in p.what for p in ours.problems)


def test_a_peak_beyond_what_the_chip_has(monkeypatch):
    """Beyond its memory an error; within it, but beyond jax's share, a warning that names the share."""
    require(H200)
    with pytest.raises(ValueError, match=r"this step fails.*h200.*\n- the peak is \d+ GiB, and h200 has "):
        jo.verify(step(OURS), *arguments(OURS, n=16, width=2**15, stacked=True), target=H200)
    given = step(OURS), *arguments(OURS, n=16, width=2**14, stacked=True)
    assert jo.verify(*given, target=H200).problems == ()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    (warning,) = jo.verify(*given, target=H200).problems
    share = warning.what.partition("fits with XLA_PYTHON_CLIENT_MEM_FRACTION=")[2].partition(" ")[0]
    assert not warning.error
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    assert jo.verify(*given, target=H200).problems == ()


@pytest.mark.parametrize("target", [H200, V5E])
def test_arithmetic_on_the_host_is_named(target):
    require(target)

    def fun(p, s, x):
        decayed = jax.tree.map(lambda m: m * 0.5 if m.ndim else m, s)
        return step_of(OURS, loss=loss)(p, decayed, x)

    report = jo.inspect(jax.jit(fun, donate_argnums=(0, 1)), *arguments(OURS, n=2), target=target)
    (found,) = (p for p in report.problems if not p.error)
    assert "jit(fun)/mul is computed by the host's cores" in found.what
    assert found.leaf == "s[0].mu['w000'] and 3 more"


def test_bad_input():
    traced = jax.jit(jnp.sin).trace(1.0)
    for given in {}, traced, traced.lower(), traced.lower().compile():
        name = type(given).__name__
        with pytest.raises(TypeError, match=f"step: expected a training step, jitted or not.*; got a {name}"):
            jo.inspect(given)
        with pytest.raises(TypeError, match=f"tx: expected .* or a step, a function; got a {name}"):
            jo.placement(given)
    with pytest.raises(ValueError, match=r"cannot compile for 'h300'. Known: a100, h100, h200, v5e:2x2"):
        jo.inspect(jnp.sin, jnp.ones(3), target="h300")
    with pytest.raises(TypeError, match=r'target: expected .* "v5e:2x2"; got 5'):
        jo.inspect(jnp.sin, jnp.ones(3), target=5)
    with pytest.raises(ValueError, match=r"what no result needs is left out by the compiler. Give the step a state"):
        jo.verify(lambda p, s: None, jnp.ones(3), OURS.init({"w": jnp.ones(3)}))


@pytest.mark.parametrize("target", [None, H200])
def test_a_pipelined_step(target):
    """Of the arguments that its start takes: the call in between, with the gradients that wait for their update."""
    require(target or H200)
    tx = jo.offload(CLIPPED, min_bytes=0)
    train = jo.pipelined(step_of(tx, loss=loss), donate_argnames=("params", "state"))
    report = jo.verify(train, *arguments(tx, stacked=True), target=target)
    assert report.problems == () and report.parts["gradients"] == 4 * MIB  # they wait for their update
    if target:
        assert (report.parts["parameters"], report.host, report.host_temp) == (4 * MIB, 8 * MIB, 0)
        assert {t.leaf for t in report.transfers} == {f"carry['state/1/0/{m}/w']" for m in ("mu", "nu")}


@pytest.mark.filterwarnings("ignore:offload\\(\\)")  # of the state that has been moved
def test_a_pipelined_step_of_a_carry():
    """Concrete, and on a CPU; a state that is there already is seen by the names of what is carried."""
    tx = jo.offload(CLIPPED, min_bytes=0)
    train = jo.pipelined(step_of(tx, loss=loss), donate_argnames=("params", "state"))
    params = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape), x.sharding), arguments(tx, width=64)[0])
    batch, state = jnp.ones((8, 64)), tx.init(params)
    carry, _ = train((params, state), batch)
    report = jo.verify(train, carry, batch)
    given = params, state
    assert report.peak == jo.inspect(train, *given, batch).peak == jo.inspect(train, given, batch).peak
    params, state = train.finish(train(carry, batch)[0])  # it was not used
    with pytest.raises(ValueError, match=r"mu/w000: .* arrive in device memory"):
        jo.verify(train, params, jo.to_device(state), batch)
    with pytest.raises(TypeError, match="expected the step's arguments, params, state, batch, or a carry"):
        jo.inspect(train, params)


DIVIDED = {"FSDP": (("data",), None), "ZeRO-1": ((), "data")}  # how the parameters are divided, and shard_over


def on_four(*spec):
    return NamedSharding(mesh_for(H200, (4,), ("data",)), PartitionSpec(*spec), memory_kind="device")


@pytest.mark.parametrize("name", DIVIDED)
def test_bytes_are_those_of_one_device(name):
    """Each device holds a quarter of the state, and under FSDP a quarter of the parameters too.

    tests/aot/compiled.py does the same for stacked layers.
    """
    require(H200)
    spec, over = DIVIDED[name]
    params, tx = parameters(6, 1024, False, on_four(*spec)), jo.offload(ADAMW, shard_over=over)
    batch = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=on_four("data"))
    args = params, jo.abstract_state(tx, params), batch
    step = step_of(tx, loss=loss)
    out = *jax.tree.map(lambda a: a.sharding, args[:2]), None
    report = jo.verify(jo.jit(step, donate_argnums=(0, 1), out_shardings=out), *args, target=H200)
    assert report.problems == () and (report.host, report.host_temp) == (12 * MIB, 0)
    assert report.parts["parameters"] == (6 if name == "FSDP" else 24) * MIB
    assert report.loaded == report.stored == 12 * MIB
    assert report.timeline.collectives > 0
    assert report.timeline.link == pytest.approx((report.loaded + report.stored) / 64e9)  # they share the host's memory
    # between the passes a layer's moments are updated while the next layer's moments load
    assert 0 < report.timeline.window <= 4 * MIB
