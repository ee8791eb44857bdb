"""``jo.plan(make, tx)``: a step by how its optimizer may be offloaded, each way as if it had been given alone."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_offload as jo
from jax_offload._analysis import compiled_ways, each_way
from tests.aot.harness import H200, require

MIB = 2**20
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
LAYERS, WIDTH, TOKENS = 8, 512, 256
STATE = 2 * 4 * LAYERS * WIDTH * WIDTH  # bytes: 16 MiB


def loss(params, x):
    return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2).mean()


def maker(stack=(None, None), batch=(None, None)):
    """Of a transformation a step and its arguments; divided, where there is an axis."""
    sharded = any((*stack, *batch))
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)) if sharded else None

    def abstract(shape, *spec):
        sharding = None if mesh is None else NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def make(tx):
        def step(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            params, state = jo.update_params(tx, grads, state, params)
            return params, state, value

        params = {"w": abstract((LAYERS, WIDTH, WIDTH), None, *stack)}
        return step, params, jo.abstract_state(tx, params), abstract((TOKENS, WIDTH), *batch)

    return make


def names(forecast):
    return [option.name for option in forecast.options]


def test_each_row_is_that_of_its_step_alone():
    make = maker()
    forecast = jo.plan(make, ADAMW, chip="h100")
    assert names(forecast) == ["resident", "jax.jit", "jo.jit", "on the cores", "bfloat16", "int8"]
    for name, options, row in [
        ("jo.jit", {}, "jo.jit"),
        ("bfloat16", {"storage": "bfloat16"}, "jo.jit"),
        ("int8", {"storage": {"mu": "int8", "nu": "uint8"}}, "jo.jit"),
        ("on the cores", {"update_on": "host"}, "as given"),
    ]:
        alone = jo.plan(*make(jo.offload(ADAMW, **options)), chip="h100")[row]
        found = forecast[name]
        for figure in ("peak", "host", "window", "loaded", "stored", "activations", "exposed", "dram"):
            assert getattr(found, figure) == getattr(alone, figure), (name, figure)
    assert [forecast[name].host for name in ("jo.jit", "bfloat16")] == [STATE, STATE // 2]
    assert forecast["int8"].host == STATE // 4 + STATE // 128
    assert [option.same_numbers for option in forecast.options] == [True] * 4 + [False] * 2
    assert forecast["bfloat16"].code.startswith("tx = jo.offload(inner, storage='bfloat16'); step = jo.jit(step, ")
    assert forecast["jo.jit"].code == "tx = jo.offload(inner); step = jo.jit(step, donate_argnums=...)"
    assert any(note.startswith("on the cores: ") for note in forecast.notes)
    assert not any("as given" in note for note in forecast.notes)


def test_the_smallest_fraction_that_fits():
    make = maker()
    unlimited = jo.plan(make, ADAMW, chip="h100")
    memory = (unlimited["jo.jit"].peak_range[1] + unlimited["resident"].peak_range[1]) // 2
    forecast = jo.plan(make, ADAMW, chip="h100", device_memory=memory)
    found = forecast["fraction"]
    assert (found.fits, forecast["resident"].fits) == (True, False)
    assert 0 < found.host < STATE
    share = float(found.code.partition("fraction=")[2].partition(")")[0])
    alone = jo.plan(*make(jo.offload(ADAMW, fraction=share)), chip="h100", device_memory=memory)["jo.jit"]
    assert (found.peak, found.host) == (alone.peak, alone.host)
    assert forecast.recommended is not None
    assert forecast.recommended.fits


@pytest.mark.parametrize(
    ("room", "share", "longer", "code"),
    [
        (12, 0.5, 0.0, "fraction=0.25, window=6291456"),
        (12, 0.5, 1.0, "fraction=0.25)"),  # in larger chunks it takes longer
        (8, 1.0, 0.0, "window=10485760"),  # few leaves, of which that fraction is all
        (8, None, 0.0, "window=10485760"),  # or none
        (-1, 1.0, 0.0, "window=1048576"),
        (-2, 1.0, 0.0, None),
    ],
)
def test_the_smallest_fraction_and_the_largest_window(room, share, longer, code):
    """MiB beside the step, of which 16 are on the host, in chunks of 2; a row takes what its window and leaves do."""
    base = jo.plan(ADAMW, {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)})

    def row(way):
        if share is None and "fraction" in way.code:
            return None
        given = way.code.partition("inner")[2]
        found = 2 * MIB if "window=" not in given else int(given.partition("window=")[2].partition(")")[0])
        host = int(16 * MIB * (share if "fraction" in given else 1))
        peak = 64 * MIB + (16 * MIB - host) + found
        fits, more = peak <= memory, longer * (found > 2 * MIB)
        figures = {"host": host, "window": found, "peak": peak, "peak_range": (peak, peak), "exposed": 1 + more}
        return dataclasses.replace(base.options[1], name=way.name, code=way.code, fits=fits, **figures)

    memory = (66 + room) * MIB
    first = row(each_way.way("jo.jit", ADAMW, "inner", {}))
    resident = dataclasses.replace(first, name="resident", host=0, fits=False)
    given = dataclasses.replace(base, options=(resident, first), device_memory=memory)
    found = each_way._solved(row, ADAMW, {}, given, False, True)
    assert (found is None) if code is None else code in found.code


def test_clipped_the_other_ways_are_turned_round_too():
    forecast = jo.plan(maker(), CLIPPED, chip="h100")
    rows = ["resident", "jax.jit", "jo.jit", "jo.pipelined", "gradients too", "on the cores", "bfloat16", "int8"]
    assert names(forecast) == rows
    assert "jo.pipelined" in forecast["bfloat16"].code
    assert (forecast["bfloat16"].exposed or 0.0) < (forecast["jo.pipelined"].exposed or 0.0)


@pytest.mark.parametrize("name", ["resident", pytest.param("as given", marks=pytest.mark.long("compiles one more"))])
def test_a_driven_step_is_compiled(name, monkeypatch):
    """Its rows with a target are compiled of the arguments that each of them has; here one row alone."""
    require(H200)
    monkeypatch.setattr(compiled_ways.Compiler, "compiles", lambda self, each: each == name)
    estimated = jo.plan(*maker()(jo.offload(ADAMW, update_on="host")))[name]
    row = jo.plan(*maker()(jo.offload(ADAMW, update_on="host")), target=H200)[name]
    assert row.host == estimated.host
    assert row.state == estimated.state
    assert row.peak == pytest.approx(estimated.peak, rel=0.1)


def test_over_a_mesh():
    """Parameters that are the same on all devices may have a state that is divided; divided ones have."""
    replicated = jo.plan(maker(batch=("data", None)), ADAMW)
    assert replicated["ZeRO-1"].host == STATE // 4
    assert "shard_over='data'" in replicated["ZeRO-1"].code
    sharded = jo.plan(maker(stack=("data", None), batch=("data", None)), ADAMW)
    assert "ZeRO-1" not in names(sharded)
    assert sharded["jo.jit"].host == STATE // 4
    assert "on the cores" not in names(sharded)  # these are cut for devices, which an AbstractMesh does not have
    with pytest.raises(ValueError, match=r"AbstractMesh.*Give a Mesh"):
        jo.plan(*maker(batch=("data", None))(jo.offload(ADAMW, update_on="host")))


def test_what_is_given_already_stays():
    masters = jo.with_master_params(ADAMW)
    forecast = jo.plan(maker(), jo.offload(masters, storage="bfloat16", window=2**21))
    assert not {"bfloat16", "int8"} & {*names(forecast)}
    assert "window=2097152" in forecast["jo.jit"].code
    assert forecast["jo.jit"].host == STATE // 2  # of float32 parameters there are no masters


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "got a NoneType"),
        ((1, 2), "begins with a int"),
        ((lambda: None,), "is to return"),
        (
            (lambda p, s: None, (1, 2)),
            r"the 1 argument\(s\) beside it: missing a required argument: 's'. Fix: return step",
        ),
    ],
)
def test_what_makes_no_step(returned, words):
    with pytest.raises(TypeError, match=words):
        jo.plan(lambda tx: returned, ADAMW)
